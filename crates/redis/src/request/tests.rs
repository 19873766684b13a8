use proptest::collection::vec;
use proptest::num::u8::ANY;
use proptest::{prop_assert_eq, proptest};

use super::*;

/// Parses all of `bytes`, of which `parts` arrive at a time.
fn parse(bytes: &[u8], part: usize) -> (Vec<Vec<Vec<u8>>>, Option<ProtocolError>) {
    parse_as(bytes, part, true)
}

fn parse_as(
    bytes: &[u8],
    part: usize,
    authenticated: bool,
) -> (Vec<Vec<Vec<u8>>>, Option<ProtocolError>) {
    let (mut parser, limits) = (Parser::default(), Limits::default());
    let (mut buffer, mut commands) = (Vec::new(), Vec::new());
    for part in bytes.chunks(part) {
        buffer.extend(part);
        loop {
            match parser.parse(&mut buffer, &limits, authenticated) {
                Err(error) => return (commands, Some(error)),
                Ok(None) => break,
                Ok(Some(used)) => {
                    let arguments = parser.arguments(&buffer);
                    if !arguments.is_empty() {
                        commands.push(arguments.iter().map(<[u8]>::to_vec).collect());
                    }
                    buffer.drain(..used);
                }
            }
        }
    }
    (commands, None)
}

fn error(bytes: &[u8]) -> String {
    let (_, whole) = parse(bytes, bytes.len());
    let (_, single) = parse(bytes, 1);
    assert_eq!(whole, single);
    let mut out = Vec::new();
    whole.expect("an error").text(&mut out);
    String::from_utf8(out).unwrap()
}

#[test]
fn requests_of_a_pipeline_are_parsed_in_any_split() {
    let bytes = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n\r\n*0\r\n*-1\r\nset k \"x y\"\r\n\
          *3\r\n$3\r\nSET\r\n$0\r\n\r\n$2\r\n\r\n\r\nPING\n";
    let expected: [&[&[u8]]; 4] =
        [&[b"GET", b"a"], &[b"set", b"k", b"x y"], &[b"SET", b"", b"\r\n"], &[b"PING"]];
    for part in 1..=bytes.len() {
        assert_eq!(
            parse(bytes, part),
            (expected.map(|c| c.iter().map(|a| a.to_vec()).collect()).into(), None),
            "{part}"
        );
    }
}

#[test]
fn errors_are_worded_as_redis_words_them() {
    let multibulk = "ERR Protocol error: invalid multibulk length";
    for bytes in ["*3000000000\r\n", "*a\r\n", "*01\r\n", "*+1\r\n", "*\r\n", "*1048577\r\n"] {
        assert_eq!(error(bytes.as_bytes()), multibulk, "{bytes}");
    }
    let bulk = "ERR Protocol error: invalid bulk length";
    for len in ["-1", "a", "", "600000000", "536870913", "99999999999999999999"] {
        assert_eq!(error(format!("*1\r\n${len}\r\n").as_bytes()), bulk, "{len}");
    }
    assert_eq!(error(b"*1\r\n+1\r\n"), "ERR Protocol error: expected '$', got '+'");
    assert_eq!(error(b"*1\r\n\r\n"), "ERR Protocol error: expected '$', got ' '");
    assert_eq!(error(b"get \"a\r\n"), "ERR Protocol error: unbalanced quotes in request");
    let long = |head: &str| [head.as_bytes(), &[b'1'; 70_000]].concat();
    for (head, name) in
        [("", "inline request"), ("*", "mbulk count string"), ("*1\r\n$", "bulk count string")]
    {
        assert_eq!(error(&long(head)), format!("ERR Protocol error: too big {name}"));
    }
}

#[test]
fn line_end_behind_the_limit_is_refused_in_any_split() {
    let mut bytes = vec![b'x'; 64 << 10];
    bytes.push(b'\n');
    assert_eq!(parse(&bytes, bytes.len()).1, None);
    assert_eq!(parse(&bytes, 1000).0.len(), 1);
    // The limit counts the bytes before the line end, which may still arrive.
    assert_eq!(parse(&bytes[..64 << 10], 64 << 10).1, None);
    bytes.insert(0, b'x');
    assert_eq!(parse(&bytes, bytes.len()).1, Some(ProtocolError::InlineTooLong));
    assert_eq!(parse(&bytes, 1000).1, Some(ProtocolError::InlineTooLong));
}

#[test]
fn largest_count_and_length_are_accepted() {
    let parse = |bytes: &[u8]| parse(bytes, 7).1;
    assert_eq!(parse(b"*1048576\r\n"), None);
    assert_eq!(parse(b"*1048577\r\n"), Some(ProtocolError::Count));
    assert_eq!(parse(b"*1\r\n$536870912\r\n"), None);
    assert_eq!(parse(b"*1\r\n$536870913\r\n"), Some(ProtocolError::Length));
}

#[test]
fn limits_are_lower_before_authentication() {
    let parse = |bytes: &[u8]| parse_as(bytes, 7, false).1;
    assert_eq!(parse(b"*10\r\n"), None);
    assert_eq!(parse(b"*11\r\n"), Some(ProtocolError::UnauthenticatedCount));
    assert_eq!(parse(b"*1\r\n$16384\r\n"), None);
    assert_eq!(parse(b"*1\r\n$16385\r\n"), Some(ProtocolError::UnauthenticatedLength));
}

#[test]
fn large_argument_is_not_read_again() {
    let (mut parser, limits) = (Parser::default(), Limits::default());
    let len = 1 << 20;
    let mut buffer = format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${len}\r\n").into_bytes();
    let start = buffer.len();
    assert_eq!(parser.parse(&mut buffer, &limits, true), Ok(None));
    assert_eq!(parser.pending(), Some(Pending { index: 2, start, len }));
    // Changed bytes before the argument would be an error if the parser read them again.
    buffer[..4].fill(b'!');
    buffer.extend(vec![b'v'; len]);
    assert_eq!(parser.parse(&mut buffer, &limits, true), Ok(None));
    buffer.extend(b"\r\n");
    assert_eq!(parser.parse(&mut buffer, &limits, true), Ok(Some(start + len + 2)));
    assert_eq!(parser.arguments(&buffer).at(2), &buffer[start..start + len]);
}

#[test]
fn searched_line_is_not_searched_again() {
    let (mut parser, limits) = (Parser::default(), Limits::default());
    let mut buffer = b"get aaaa".to_vec();
    assert_eq!(parser.parse(&mut buffer, &limits, true), Ok(None));
    buffer[4] = b'\n';
    buffer.extend(b"b\n");
    assert_eq!(parser.parse(&mut buffer, &limits, true), Ok(Some(10)));
}

#[test]
fn argument_is_diverted_to_the_caller() {
    let (mut parser, limits) = (Parser::default(), Limits::default());
    assert!(!parser.divert());
    let mut buffer = b"*3\r\n$3\r\nSET\r\n$5\r\nvalue".to_vec();
    assert_eq!(parser.parse(&mut buffer, &limits, true), Ok(None));
    let pending = parser.pending().unwrap();
    assert_eq!(&buffer[pending.start..], b"value");
    assert!(parser.divert());
    buffer.truncate(pending.start);
    assert_eq!(parser.parse(&mut buffer, &limits, true), Ok(None));
    buffer.extend(b"\r\n$1\r\nx\r\nPING\r\n");
    let used = parser.parse(&mut buffer, &limits, true).unwrap().unwrap();
    let arguments = parser.arguments(&buffer);
    assert_eq!((arguments.diverted(1), arguments.diverted(2)), (Some(5), None));
    assert_eq!(
        (arguments.at(0), arguments.at(1), arguments.at(2)),
        (&b"SET"[..], &b""[..], &b"x"[..])
    );
    assert_eq!(parser.parse(&mut buffer[used..], &limits, true), Ok(Some(6)));
}

#[test]
fn parser_keeps_its_vector() {
    let (mut parser, limits) = (Parser::default(), Limits::default());
    let mut buffer = b"*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n".to_vec();
    parser.parse(&mut buffer, &limits, true).unwrap();
    let (place, capacity) = (parser.spans.as_ptr(), parser.spans.capacity());
    for _ in 0..100 {
        parser.parse(&mut buffer, &limits, true).unwrap();
    }
    assert_eq!((parser.spans.as_ptr(), parser.spans.capacity()), (place, capacity));
}

proptest::proptest! {
    #[test]
    fn encoded_requests_are_parsed(
        commands in vec(
            vec(vec(ANY, 0..9), 1..5),
            0..5,
        ),
        part in 1..40_usize,
    ) {
        let mut bytes = Vec::new();
        commands.iter().for_each(|command| encode(command, &mut bytes));
        assert_eq!(parse(&bytes, part), (commands, None));
    }
}

/// `single` is right about every begin of a pipeline, or leaves it to the parser.
#[test]
fn single_argument_is_that_of_the_parser() {
    let get = |key: &[u8]| {
        [b"*2\r\n$3\r\ngEt\r\n$", key.len().to_string().as_bytes(), b"\r\n", key, b"\r\n"].concat()
    };
    for key in [&b""[..], b"a", b"\r\n*2\r\n", &[b'k'; 1000]] {
        let pipeline = [get(key), get(b"next")].concat();
        let (range, len) = single(&pipeline, b"GET").expect("a request");
        assert_eq!((&pipeline[range], len), (key, get(key).len()));
        for end in 0..len {
            assert_eq!(single(&pipeline[..end], b"GET"), None, "{end} of {len} bytes");
        }
        assert_eq!(single(&pipeline, b"SET"), None);
    }
    for other in [
        &b"*1\r\n$3\r\nGET\r\n"[..],
        b"*3\r\n$3\r\nGET\r\n$1\r\na\r\n$1\r\nb\r\n",
        b"get a\r\n",
        b"*2\r\n$3\r\nGET\r\n$-1\r\n\r\n",
        b"*2\r\n$3\r\nGET\r\n$+1\r\na\r\n",
        b"*2\r\n$3\r\nGET\r\n$01\r\na\r\n",
        b"*2\r\n$3\r\nGET\r\n$9999999\r\na\r\n",
        b"*2\r\n$3\r\nGET\r\n:1\r\na\r\n",
    ] {
        assert_eq!(single(other, b"GET"), None, "{}", String::from_utf8_lossy(other));
    }
}

proptest! {
    #[test]
    fn single_never_differs_from_the_parser(
        key in vec(ANY, 0..40),
        more in vec(ANY, 0..20),
        changed in vec((0..60_usize, ANY), 0..3),
    ) {
        let len = key.len().to_string();
        let request = [b"*2\r\n$3\r\nGET\r\n$", len.as_bytes(), b"\r\n", &key, b"\r\n", &more];
        let mut bytes = request.concat();
        for (at, byte) in changed {
            if let Some(old) = bytes.get_mut(at) {
                *old = byte;
            }
        }
        if let Some((range, len)) = single(&bytes, b"GET") {
            let mut parser = Parser::default();
            let mut parsed = bytes.clone();
            prop_assert_eq!(parser.parse(&mut parsed, &Limits::default(), true), Ok(Some(len)));
            prop_assert_eq!(parser.arguments(&parsed).get(1), Some(&bytes[range]));
        }
    }
}
