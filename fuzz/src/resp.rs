//! The Redis protocol: the input is the requests of a client, and the replies of a server.
//!
//! The first bytes decide how the rest arrives, and whether each byte stands for itself or for a
//! part of a message. The limits are small, so that short inputs reach them.

use redis_formats::acl::User;
use redis_formats::command::{keys, lookup, reply};
use redis_formats::reply::{self, BadReply, Protocol, ReplyParser, Writer};
use redis_formats::request::{self, Limits, Parser, ProtocolError};
use redis_formats::{conf, glob, number, words};

use crate::Input;

const REQUESTS: Limits = Limits {
    arguments: 8,
    bulk: 300,
    line: 100,
    unauthenticated_arguments: 3,
    unauthenticated_bulk: 20,
};
const REPLIES: reply::Limits = reply::Limits { bulk: 300, line: 100, values: 50, depth: 4 };

/// Parts of messages.
const PARTS: [&str; 48] = [
    "*1\r\n",
    "*2\r\n",
    "*3\r\n",
    "*2\r\n$3\r\nget\r\n",
    "*3\r\n$6\r\nconfig\r\n",
    "$0\r\n\r\n",
    "$1\r\n",
    "$3\r\n",
    "a\r\n",
    "get\r\n",
    "bitop",
    "object freq ",
    "memory|usage",
    "select 0\n",
    "command info ",
    "command getkeys ",
    "command list filterby pattern ",
    "\r\n",
    "\n",
    " ",
    "\"",
    "'",
    "\\x4f",
    "\\",
    "*-1\r\n",
    "$-1\r\n",
    "+ok\r\n",
    "-ERR\r\n",
    ":-5\r\n",
    "%1\r\n",
    "~2\r\n",
    ">1\r\n",
    "_\r\n",
    ",1.5\r\n",
    "#t\r\n",
    "(123\r\n",
    "=5\r\ntxt:a\r\n",
    "!3\r\nERR\r\n",
    "1e5",
    "-3.25",
    "0.1 ",
    "+@all ",
    "-@read ",
    "~a* ",
    ">p ",
    "+config|get ",
    "[^a-c]",
    "*?",
];

type Command = Vec<Vec<u8>>;

/// Runs the input `bytes`.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (flags, part) = (input.byte(), usize::from(input.byte()) + 1);
    let authenticated = flags & 1 == 0;
    let rest = input.take(usize::MAX);
    let parts: Vec<u8>;
    let rest = match flags & 2 {
        0 => rest,
        _ => {
            let token = |byte: &u8| PARTS[usize::from(*byte) % PARTS.len()].bytes();
            parts = rest.iter().flat_map(token).collect();
            &parts
        }
    };
    let (commands, error) = requests(rest, rest.len().max(1), authenticated);
    assert_eq!((commands.clone(), error), requests(rest, part, authenticated));
    assert_eq!(replies(rest, rest.len().max(1)), replies(rest, part));
    if let Some((argument, len)) = request::single(rest, b"get")
        && argument.len() <= REQUESTS.bulk
    {
        let (commands, error) = requests(&rest[..len], len, true);
        assert_eq!((commands.len(), error), (1, None));
        assert_eq!(commands[0][1..], [rest[argument].to_vec()]);
    }
    let mut user = User::new(b"u");
    commands.iter().for_each(|command| use_command(command, &mut user));
    if let Ok(words) = words::split(rest) {
        let mut line = Vec::new();
        for word in &words {
            words::quote(word, &mut line);
            line.push(b' ');
        }
        assert_eq!(words::split(&line).as_ref(), Ok(&words));
    }
    let _ = conf::parse_line(rest, "file", 1);
}

/// Parses `bytes`, of which `part` arrive at a time, up to the first error.
fn requests(
    bytes: &[u8],
    part: usize,
    authenticated: bool,
) -> (Vec<Command>, Option<ProtocolError>) {
    let (mut parser, mut buffer, mut commands) = (Parser::default(), Vec::new(), Vec::new());
    for part in bytes.chunks(part) {
        buffer.extend(part);
        loop {
            let used = match parser.parse(&mut buffer, &REQUESTS, authenticated) {
                Err(error) => return (commands, Some(error)),
                Ok(None) => break,
                Ok(Some(used)) => used,
            };
            let arguments = parser.arguments(&buffer);
            assert!(arguments.iter().all(|argument| argument.len() <= REQUESTS.bulk));
            commands.push(arguments.iter().map(<[u8]>::to_vec).collect());
            buffer.drain(..used);
        }
    }
    // A line, or a header with its content, is all that the parser may wait for.
    assert!(buffer.len() <= (REQUESTS.arguments + 1) * (REQUESTS.bulk + REQUESTS.line + 4));
    (commands, None)
}

fn replies(bytes: &[u8], part: usize) -> (Vec<String>, Option<BadReply>) {
    let (mut parser, mut buffer, mut replies) = (ReplyParser::default(), Vec::new(), Vec::new());
    for part in bytes.chunks(part) {
        buffer.extend(part);
        loop {
            let used = match parser.parse(&buffer, &REPLIES) {
                Err(error) => return (replies, Some(error)),
                Ok(None) => break,
                Ok(Some(used)) => used,
            };
            let reply = parser.reply(&buffer);
            replies.push(format!("{:?} {reply:?} {:?}", reply.kind(), reply.double()));
            buffer.drain(..used);
        }
    }
    (replies, None)
}

/// Uses the command as a server does: table, keys, rights, replies, numbers, patterns, rules.
fn use_command(command: &Command, user: &mut User) {
    let mut out = Vec::new();
    match lookup(&command[..]) {
        Ok(found) => {
            let keys: Vec<_> = keys(found, &command[..]).collect();
            assert!(keys.iter().flatten().all(|key| key.index < command.len()));
            let _ = user.check(found, &command[..]);
            reply(found, &command[..], &mut Writer::new(&mut out, Protocol::Resp3));
            let mut parser = ReplyParser::default();
            let limits = reply::Limits::default();
            assert_eq!(parser.parse(&out, &limits), Ok(Some(out.len())));
        }
        Err(refusal) => refusal.text(&command[..], &mut out),
    }
    for pair in command.windows(2) {
        glob::matches(&pair[0], &pair[1]);
        let _ = number::add_floats(&pair[0], &pair[1], &mut Vec::new());
    }
    for word in command {
        let _ = user.apply(word);
        conf::parse_memory(word);
    }
    let mut again = User::new(b"u");
    let line = user.line();
    let rules = line.split(|&byte| byte == b' ').skip(2);
    again.apply_all(rules).expect("printed rules are rules");
    assert_eq!(&again, user);
}
