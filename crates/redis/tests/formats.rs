//! Compares numbers, patterns, words and rights of users with a Redis server.

mod server;

use redis_formats::acl::{User, Users};
use redis_formats::command::lookup;
use redis_formats::{glob, number};
use server::{Client, Server};

/// Small random numbers by a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    fn text(&mut self, characters: &str, most: usize) -> String {
        let len = self.below(most + 1);
        let characters: Vec<_> = characters.chars().collect();
        (0..len).map(|_| characters[self.below(characters.len())]).collect()
    }
}

#[test]
fn sums_of_floats_equal_those_of_redis() {
    let Some(server) = Server::start() else { return };
    let mut client = server.connect();
    let mut random = Random(1);
    let number = |random: &mut Random| match random.below(12) {
        0 => ["inf", "-inf", "nan", "1e4932", "-1e4932", "1e-4940", "1e5000", "3.0e3", "1e40", "0"]
            [random.below(10)]
        .to_owned(),
        1 => random.text("0123456789.e-+", 12),
        2 => format!("{}e{}", random.text("123456789", 20), random.below(60) as i64 - 30),
        3 => format!("0.{}", random.text("0123456789", 40)),
        4 => random.text("0123456789", 30),
        5 => format!("-{}.{}", random.below(1000), random.below(100)),
        _ => format!("{}.{}", random.text("0123456789", 18), random.text("0123456789", 18)),
    };
    for _ in 0..3000 {
        let (old, increment) = (number(&mut random), number(&mut random));
        client.call(&["set", "f", &old]);
        let theirs = client.call(&["incrbyfloat", "f", &increment]);
        let mut out = Vec::new();
        let ours = match number::add_floats(old.as_bytes(), increment.as_bytes(), &mut out) {
            Ok(()) => String::from_utf8(out).unwrap(),
            Err(error) => error.to_string(),
        };
        assert_eq!(ours, theirs.str(), "{old:?} + {increment:?}");
    }
}

#[test]
fn integers_are_read_as_by_redis() {
    let Some(server) = Server::start() else { return };
    let mut client = server.connect();
    let mut random = Random(2);
    for _ in 0..2000 {
        let text = match random.below(3) {
            0 => random.text("0123456789-+ ", 6),
            1 => format!("-{}", random.text("9876543210", 20)),
            _ => format!("92233720368547758{}", random.text("0123456789", 3)),
        };
        client.call(&["set", "i", &text]);
        let reply = client.line("incrby i 0");
        let theirs = (reply.kind == "Integer").then(|| reply.str());
        let ours = number::parse_i64(text.as_bytes()).map(|value| value.to_string());
        assert_eq!(ours, theirs, "{text:?}");
    }
}

#[test]
fn patterns_match_as_in_redis() {
    let Some(server) = Server::start() else { return };
    let mut client = server.connect();
    let mut random = Random(3);
    let mut keys: Vec<_> = (0..200).map(|_| random.text(r"abc[]^-\*?", 5)).collect();
    keys.sort();
    keys.dedup();
    // In Redis, no star matches the empty text.
    keys.retain(|key| !key.is_empty());
    for key in &keys {
        client.call(&["set", key, ""]);
    }
    for _ in 0..1500 {
        let pattern = random.text(r"abc[]^-\*?", 8);
        let mut theirs: Vec<_> =
            client.call(&["keys", &pattern]).children.iter().map(|key| key.str()).collect();
        theirs.sort();
        let matches = |key: &&String| glob::matches(pattern.as_bytes(), key.as_bytes());
        let ours: Vec<_> = keys.iter().filter(matches).cloned().collect();
        assert_eq!(ours, theirs, "{pattern:?}");
    }
}

fn user(rules: &str) -> User {
    let mut users = Users::default();
    users.set(b"u", rules.split(' ')).expect("rules");
    users.get(b"u").expect("a user").clone()
}

fn line(client: &mut Client) -> String {
    let list = client.line("acl list");
    let is_user = |line: &String| line.starts_with("user u ");
    list.children.iter().map(|line| line.str()).find(is_user).expect("a line")
}

#[test]
fn users_have_the_lines_and_rights_that_they_have_in_redis() {
    let Some(server) = Server::start() else { return };
    let mut client = server.connect();
    let rights = [
        "+@all",
        "+get +set +config|get",
        "+@string",
        "+@read -@string",
        "+@all -@dangerous +keys",
        "+@all -@write +set",
        "+select|0 +ping",
        "+config -config|set +@pubsub",
        "-@all +@keyspace",
        "+@all -client|kill -flushall",
        "+@connection -select +select|1",
    ];
    let places = ["~* &*", "~a* ~b", "&c*", "~[ab]? &news &x*"];
    let commands = [
        "get a",
        "get b",
        "set ab 1",
        "mget a b",
        "mset a1 1 z 2",
        "config get x",
        "config set a b",
        "select 0",
        "select 1",
        "ping",
        "keys *",
        "flushall",
        "client kill x",
        "client id",
        "auth x",
        "publish c1 x",
        "subscribe news c",
        "psubscribe x*",
        "psubscribe news",
        "object freq a",
        "unsubscribe z",
        "rename a z",
        "bitop and a b z",
        "multi",
        "info",
        "command",
        "del ab bc",
    ];
    for rights in rights {
        for places in places {
            let rules = format!("{rights} {places}");
            client.line("acl deluser u");
            assert_eq!(client.line(&format!("acl setuser u {rules}")).str(), "OK");
            let user = user(&rules);
            // Our line is a rule for Redis too, and makes a user with the same rights.
            let own = String::from_utf8(user.line()).unwrap();
            let theirs = line(&mut client);
            client.line("acl deluser u");
            assert_eq!(client.line(&format!("acl setuser {}", &own["user ".len()..])).str(), "OK");
            assert_eq!(line(&mut client), theirs, "{rules}");
            for command in commands {
                let words: Vec<_> = command.split(' ').collect();
                let found = lookup(&words[..]).unwrap();
                let mut ours = b"OK".to_vec();
                if let Err(denied) = user.check(found, &words[..]) {
                    ours.clear();
                    denied.dry_run_text(found, &words[..], &mut ours);
                }
                let theirs = client.line(&format!("acl dryrun u {command}"));
                assert_eq!(String::from_utf8(ours).unwrap(), theirs.str(), "{rules}: {command}");
            }
        }
    }
}

#[test]
fn simple_users_are_printed_as_by_redis() {
    let Some(server) = Server::start() else { return };
    let mut client = server.connect();
    for rules in [
        "on",
        "on nopass ~* &* +@all",
        "~a ~b ~a +@all -flushall +config|get -client|kill >pw on",
        "+get +@string -set +@all allkeys -@all +config -config|set",
        "+select|0 +SELECT|0",
        "+get +get|x",
        "+@STRING +Config|Get",
        "sanitize-payload &foo &foo",
        "+select|0 -select",
        "skip-sanitize-payload clearselectors",
        "on >pw ~a &b +get reset",
        "+@all -@admin +@all",
        ">a >b <a #148de9c5a7a44d19e56cd9ae1a554bf67847afb0c58f6e12fa29ac7ddfca9940",
    ] {
        client.line("acl deluser u");
        client.line(&format!("acl setuser u {rules}"));
        // Redis prints single commands in the order of a table with a random seed.
        let sorted = |line: String| {
            let mut words: Vec<_> = line.split(' ').map(str::to_owned).collect();
            words.sort();
            words
        };
        let ours = String::from_utf8(user(rules).line()).unwrap();
        assert_eq!(sorted(ours), sorted(line(&mut client)), "{rules}");
    }
    for rules in [
        "+foo",
        "+@foo",
        "-get|x",
        "+config|x",
        "+nope|x",
        "+",
        "+@",
        "+get|",
        "+config|",
        "+config|get|x",
        "#zz",
        "!nope",
        "~* ~a",
        "&* &a",
        "xx",
        "!%",
    ] {
        client.line("acl deluser u");
        let theirs = client.line(&format!("acl setuser u {rules}")).str();
        let ours = Users::default().set(b"u", rules.split(' ')).unwrap_err();
        assert_eq!(format!("ERR {ours}"), theirs, "{rules}");
    }
}
