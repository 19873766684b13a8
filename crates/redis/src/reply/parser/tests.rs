use super::*;
use crate::reply::{Protocol, Writer};

/// Parses all replies of `bytes`, of which `part` arrive at a time.
fn parse(bytes: &[u8], part: usize) -> Result<Vec<String>, BadReply> {
    let mut parser = ReplyParser::default();
    let (mut buffer, mut replies) = (Vec::new(), Vec::new());
    for part in bytes.chunks(part) {
        buffer.extend(part);
        while let Some(used) = parser.parse(&buffer, &Limits::default())? {
            let reply = parser.reply(&buffer);
            replies.push(format!("{:?}:{reply:?}", reply.kind()));
            buffer.drain(..used);
        }
    }
    assert!(buffer.is_empty());
    Ok(replies)
}

#[test]
fn replies_are_parsed_in_any_split() {
    let mut bytes = b"*3\r\n$1\r\na\r\n*2\r\n:1\r\n*0\r\n$-1\r\n!5\r\nERR x\r\n*-1\r\n".to_vec();
    for protocol in [Protocol::Resp2, Protocol::Resp3] {
        let mut w = Writer::new(&mut bytes, protocol);
        w.map(2);
        w.bulk("k\r\n");
        w.set(1);
        w.double(1.5);
        w.bulk("l");
        w.boolean(true);
        w.verbatim(b"txt", "verbatim");
        w.null();
        w.big_number("-123");
        w.error("ERR no");
        w.push(1);
        w.ok();
    }
    let expected = [
        r#"Array:["a", ["1", []], null]"#,
        r#"Error:"ERR x""#,
        "Null:null",
        r#"Array:["k\r\n", ["1.5"], "l", "1"]"#,
        r#"Bulk:"verbatim""#,
        "Null:null",
        r#"Bulk:"-123""#,
        r#"Error:"ERR no""#,
        r#"Array:["OK"]"#,
        r#"Map:["k\r\n", ["1.5"], "l", "t"]"#,
        r#"Verbatim:"verbatim""#,
        "Null:null",
        r#"BigNumber:"-123""#,
        r#"Error:"ERR no""#,
        r#"Push:["OK"]"#,
    ];
    for part in 1..bytes.len() {
        assert_eq!(parse(&bytes, part).unwrap(), expected, "{part}");
    }
}

#[test]
fn numbers_have_values() {
    let mut parser = ReplyParser::default();
    parser.parse(b":-5\r\n", &Limits::default()).unwrap();
    assert_eq!(parser.reply(b":-5\r\n").integer(), Some(-5));
    parser.parse(b",inf\r\n", &Limits::default()).unwrap();
    assert_eq!(parser.reply(b",inf\r\n").double(), Some(f64::INFINITY));
}

#[test]
fn malformed_replies_are_refused() {
    for (text, error) in [
        ("x\r\n", BadReply::Kind(b'x')),
        (":a\r\n", BadReply::Line(b':')),
        ("\r\n", BadReply::Line(b'\r')),
        ("+a\rb", BadReply::Line(b'+')),
        ("$-2\r\n", BadReply::Line(b'$')),
        ("%-1\r\n", BadReply::Line(b'%')),
        ("#x\r\n", BadReply::Line(b'#')),
        ("_1\r\n", BadReply::Line(b'_')),
        ("$999999999999\r\n", BadReply::Limit("bytes in a bulk string")),
        ("*9223372036854775807\r\n", BadReply::Limit("values")),
    ] {
        assert_eq!(parse(text.as_bytes(), 1), Err(error), "{text:?}");
        assert_eq!(parse(text.as_bytes(), 100), Err(error), "{text:?}");
    }
    assert_eq!(parse("*1\r\n".repeat(40).as_bytes(), 9), Err(BadReply::Limit("levels")));
    assert_eq!(parse(&[b'+'; 70_000], 999), Err(BadReply::Limit("bytes in a line")));
}

#[test]
fn large_content_is_not_read_again() {
    let mut parser = ReplyParser::default();
    let mut buffer = b"*2\r\n$5\r\n".to_vec();
    assert_eq!(parser.parse(&buffer, &Limits::default()), Ok(None));
    buffer[..8].fill(b'!');
    buffer.extend(b"value\r\n:1\r\n");
    assert_eq!(parser.parse(&buffer, &Limits::default()), Ok(Some(19)));
    assert_eq!(format!("{:?}", parser.reply(&buffer)), r#"["value", "1"]"#);
}
