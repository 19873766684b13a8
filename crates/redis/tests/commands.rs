//! Compares the table of commands, refusals and protocol errors with a Redis server.

mod server;

use redis_formats::command::{Command, all, by_name, lookup, reply};
use redis_formats::reply::{Limits, Protocol, ReplyParser, Writer};
use redis_formats::request::{self, Parser};
use server::{Client, Server, Tree};

fn ours(words: &[String], protocol: Protocol) -> Tree {
    let mut out = Vec::new();
    let mut writer = Writer::new(&mut out, protocol);
    match lookup(words) {
        Ok(command) => reply(command, words, &mut writer),
        Err(refusal) => writer.error_with(|out| refusal.text(words, out)),
    }
    let mut parser = ReplyParser::default();
    assert_eq!(parser.parse(&out, &Limits::default()), Ok(Some(out.len())));
    Tree::of(parser.reply(&out))
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// Subcommands of Redis 7.2, which the server of the test need not have.
const NEWER: [&str; 2] = ["client|no-touch", "client|setinfo"];

/// Removes what may differ: the order of subcommands, those that only one side has, notes.
fn normal(mut info: Tree) -> Tree {
    let Some(specs) = info.children.get_mut(8) else { return info };
    for spec in &mut specs.children {
        if spec.children[0].text == b"notes" {
            spec.children.drain(..2);
        }
    }
    let subcommands = &mut info.children[9].children;
    let is_ours = |tree: &Tree| {
        let name = tree.children[0].str();
        let (container, sub) = name.split_once('|').expect("a subcommand");
        let own = by_name(container.as_bytes()).and_then(|own| own.subcommand(sub.as_bytes()));
        own.is_some() && !NEWER.contains(&&*name)
    };
    *subcommands = std::mem::take(subcommands).into_iter().filter(is_ours).map(normal).collect();
    subcommands.sort_by_key(|tree| tree.children[0].text.clone());
    info
}

#[test]
fn facts_of_all_commands_equal_those_of_redis() {
    let Some(server) = Server::start() else { return };
    for (number, protocol) in [("2", Protocol::Resp2), ("3", Protocol::Resp3)] {
        let mut client = server.connect();
        client.call(&["hello", number]);
        let mut request = words("command info");
        request.extend(all().map(|command| command.name.to_owned()));
        request.push("nope".to_owned());
        let (theirs, ours) = (client.call(&request), ours(&request, protocol));
        assert_eq!(theirs.children.len(), ours.children.len());
        for (theirs, ours) in theirs.children.into_iter().zip(ours.children) {
            assert_eq!(normal(ours), normal(theirs));
        }
    }
}

/// Looks up values of a map by their names.
fn value<'a>(map: &'a Tree, name: &str) -> Option<&'a Tree> {
    map.children.chunks(2).find(|pair| pair[0].text == name.as_bytes()).map(|pair| &pair[1])
}

fn assert_docs(theirs: &Tree, ours: &Tree) {
    assert_eq!(theirs.kind, ours.kind);
    for field in ["since", "group"] {
        assert_eq!(value(theirs, field), value(ours, field));
    }
    assert!(
        value(ours, "summary")
            .is_some_and(|own| own.kind == value(theirs, "summary").unwrap().kind)
    );
    let Some(subcommands) = value(ours, "subcommands") else { return };
    let is_older = |pair: &&[Tree]| !NEWER.contains(&&*pair[0].str());
    for pair in subcommands.children.chunks(2).filter(is_older) {
        let theirs = value(theirs, "subcommands").expect("a container");
        assert_docs(value(theirs, &pair[0].str()).expect("a subcommand"), &pair[1]);
    }
}

#[test]
fn descriptions_have_the_versions_and_groups_of_redis() {
    let Some(server) = Server::start() else { return };
    for (number, protocol) in [("2", Protocol::Resp2), ("3", Protocol::Resp3)] {
        let mut client = server.connect();
        client.call(&["hello", number]);
        let mut request = words("command docs");
        request.extend(all().map(|command| command.name.to_owned()));
        let (theirs, ours) = (client.call(&request), ours(&request, protocol));
        assert_eq!(theirs.kind, ours.kind);
        for pair in ours.children.chunks(2) {
            assert_docs(value(&theirs, &pair[0].str()).expect("a command"), &pair[1]);
        }
    }
}

#[test]
fn replies_of_command_equal_those_of_redis() {
    let Some(server) = Server::start() else { return };
    let mut client = server.connect();
    for protocol in [Protocol::Resp2, Protocol::Resp3] {
        client.call(&["hello", if protocol == Protocol::Resp2 { "2" } else { "3" }]);
        for line in [
            "command getkeys get a",
            "command getkeys GET a",
            "command getkeys mset a 1 b 2",
            "command getkeys mset a 1 b",
            "command getkeys bitop and to a b",
            "command getkeys object encoding a",
            "command getkeys memory usage a samples 1",
            "command getkeys ping x",
            "command getkeys ping",
            "command getkeys nope x",
            "command getkeys config get a",
            "command getkeys object nope a",
            "command getkeys get a b",
            "command getkeys bitop and a",
            "command getkeys client id",
            "command getkeysandflags set a b",
            "command getkeysandflags set a b get",
            "command getkeysandflags set a b GET ex 1",
            "command getkeysandflags set a get",
            "command getkeysandflags bitfield a",
            "command getkeysandflags bitfield a get u8 1",
            "command getkeysandflags bitfield a set u8 1 1",
            "command getkeysandflags bitfield a overflow wrap get u8 1",
            "command getkeysandflags bitfield a overflow wrap incrby u8 1 1",
            "command getkeysandflags copy a b",
            "command getkeysandflags rename a b",
            "command getkeysandflags del a b",
            "command list filterby aclcat nope",
            "command list filterby module x",
            "command list filterby x y",
            "command list filterby pattern config|g*",
            "command list filterby PATTERN CONFIG|G*",
            "command list filterby pattern",
            "command list x",
            "command docs nope config|nope",
            "command info nope config|resetstat config|nope",
            "command nope",
            "command count 1",
            "command getkeys",
        ] {
            let (theirs, ours) = (client.line(line), ours(&words(line), protocol));
            assert_eq!(ours, theirs, "{line}");
        }
        let listed = client.line("command list filterby aclcat transaction");
        let mut names: Vec<_> = listed.children.iter().map(Tree::str).collect();
        names.sort();
        assert_eq!(names, ["discard", "exec", "multi", "unwatch", "watch"]);
        let own = ours(&words("command list filterby aclcat transaction"), protocol);
        assert_eq!((own.kind, own.children.len()), (listed.kind, names.len()));
        // Nothing but subcommands distinguishes the two lists.
        let kind = client.line("command list").kind;
        assert_eq!(ours(&words("command list"), protocol).kind, kind);
    }
}

#[track_caller]
fn assert_refused(client: &mut Client, line: &[String]) {
    let refusal = lookup(line).expect_err("a refusal");
    let mut text = Vec::new();
    refusal.text(line, &mut text);
    let theirs = client.call(line);
    assert_eq!(String::from_utf8_lossy(&text), theirs.str());
    assert_eq!(theirs.kind, "Error");
}

#[test]
fn refusals_equal_those_of_redis() {
    let Some(server) = Server::start() else { return };
    let mut client = server.connect();
    for line in ["foo", "FOO bar x", "foo|bar a", "client nope", "CLIENT Nope x", "object", "get"] {
        assert_refused(&mut client, &words(line));
    }
    let long = "a".repeat(300);
    for line in [vec![long.clone()], vec!["foo".to_owned(), long.clone(), long.clone()]] {
        assert_refused(&mut client, &line);
    }
    assert_refused(&mut client, &["foo", "a\r\nb", &"b".repeat(124), "c"].map(str::to_owned));
    assert_refused(&mut client, &["client".to_owned(), long]);
    let with_names = |command: &'static Command| {
        let own = std::iter::once(vec![command.name.to_owned()]);
        let subs = command.subcommands.iter();
        own.chain(subs.map(|sub| vec![command.name.to_owned(), sub.name.to_owned()]))
    };
    let mut refused = 0;
    let is_older = |line: &Vec<String>| !NEWER.contains(&&*line.join("|"));
    for mut line in all().flat_map(with_names).filter(is_older) {
        for _ in 0..8 {
            if lookup(&line[..]).is_err() {
                assert_refused(&mut client, &line);
                refused += 1;
            }
            line.push("x".to_owned());
        }
    }
    assert!(refused > 300, "{refused}");
}

#[test]
fn protocol_errors_equal_those_of_redis() {
    let Some(server) = Server::start() else { return };
    let long = |head: &str| [head.as_bytes(), &[b'1'; 70_000]].concat();
    let mut requests = [
        "*3000000000\r\n",
        "*a\r\n",
        "*01\r\n",
        "*+1\r\n",
        "*1\r\n+1\r\n",
        "*1\r\n\r\n",
        "*1\r\n$-1\r\n",
        "*1\r\n$a\r\n",
        "*1\r\n$\r\n",
        "*1\r\n$600000000\r\n",
        "get \"a\r\n",
        "get 'a'b\r\n",
        "*1\r\n$4\r\nPINGxx*1\r\nx\r\n",
        "*1\r\r$4\r\nPING\r\n*a\r\n",
        "echo \"\\x41\\n\" \r\necho 'a\\'b'\n*a\r\n",
        "*-1\r\n*0\r\n\r\n*a\r\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec();
    requests.extend([long(""), long("*"), long("*1\r\n$"), b"*1\r\n\xff1\r\n".to_vec()]);
    for bytes in requests {
        let mut client = server.connect();
        client.send(&bytes);
        let theirs = client.rest();
        let mut out = Vec::new();
        answer(&mut bytes.clone(), &mut Writer::new(&mut out, Protocol::Resp2));
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(60)]).into_owned();
        assert_eq!(String::from_utf8_lossy(&out), String::from_utf8_lossy(&theirs), "{shown:?}");
    }
}

/// Answers PING, ECHO and refusals up to a protocol error.
fn answer(bytes: &mut [u8], writer: &mut Writer<'_>) {
    let (mut parser, mut begin) = (Parser::default(), 0);
    loop {
        match parser.parse(&mut bytes[begin..], &request::Limits::default(), true) {
            Ok(None) => panic!("the request has no error"),
            Err(error) => return writer.error_with(|out| error.text(out)),
            Ok(Some(used)) => {
                let arguments = parser.arguments(&bytes[begin..]);
                let words: Vec<_> = arguments.iter().collect();
                match (words.len(), lookup(&words[..])) {
                    (0, _) => {}
                    (_, Err(refusal)) => writer.error_with(|out| refusal.text(&words[..], out)),
                    (1, Ok(_)) => writer.simple("PONG"),
                    (_, Ok(_)) => writer.bulk(words[1]),
                }
                begin += used;
            }
        }
    }
}
