//! Classes of keyspace events, as the letters of `notify-keyspace-events`.

/// Bit of events in the channels of keys.
pub const KEYSPACE: u32 = 1 << 0;
/// Bit of events in the channels of events.
pub const KEYEVENT: u32 = 1 << 1;

/// Letters of classes, in the order of CONFIG GET, with their bits from bit 2 on.
const CLASSES: [u8; 12] = *b"g$lshzxetdmn";
/// The classes that `A` stands for: all but `m` and `n`.
const ALL: u32 = 0x3ff << 2;

fn bit(class: u8) -> Option<u32> {
    let at = CLASSES.iter().position(|own| *own == class)?;
    Some(1 << (at + 2))
}

/// Reads letters.
pub fn parse(text: &[u8]) -> Option<u32> {
    text.iter().try_fold(0, |bits, letter| match letter {
        b'A' => Some(bits | ALL),
        b'K' => Some(bits | KEYSPACE),
        b'E' => Some(bits | KEYEVENT),
        class => Some(bits | bit(*class)?),
    })
}

/// Prints letters as CONFIG GET does.
pub fn print(bits: u32) -> String {
    let is_all = bits & ALL == ALL;
    let mut text = String::from(if is_all { "A" } else { "" });
    for class in CLASSES {
        let own = bit(class).unwrap_or(0);
        let is_shown = own & ALL == 0 || !is_all;
        if bits & own != 0 && is_shown && class != b'm' && class != b'n' {
            text.push(class.into());
        }
    }
    for (own, letter) in
        [(KEYSPACE, 'K'), (KEYEVENT, 'E'), (bits_of(b'm'), 'm'), (bits_of(b'n'), 'n')]
    {
        if bits & own != 0 {
            text.push(letter);
        }
    }
    text
}

fn bits_of(class: u8) -> u32 {
    bit(class).unwrap_or(0)
}

/// Returns whether `bits` ask for events of `class` in any channel.
pub fn wants(bits: u32, class: u8) -> bool {
    bits & (KEYSPACE | KEYEVENT) != 0 && bits & bits_of(class) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_printed_as_redis_prints_them() {
        for (given, shown) in
            [("", ""), ("KEA", "AKE"), ("Kg$xmn", "g$xKmn"), ("g$lshzxetd", "A"), ("KE", "KE")]
        {
            assert_eq!(print(parse(given.as_bytes()).unwrap()), shown);
        }
        assert_eq!(parse(b"Q"), None);
    }

    #[test]
    fn events_need_a_class_and_a_channel() {
        let bits = |text: &str| parse(text.as_bytes()).unwrap();
        assert!(wants(bits("Kx"), b'x') && wants(bits("EA"), b'$'));
        assert!(!wants(bits("x"), b'x') && !wants(bits("KE"), b'x') && !wants(bits("KA"), b'm'));
    }
}
