//! Users, transactions, messages, and commands on connections.

mod common;

use common::start;

#[test]
fn hello_selects_the_protocol_and_the_user() {
    let server = start(&[("requirepass", "secret")]);
    let mut client = server.connect();
    assert!(client.ask("hello 3").starts_with("-NOAUTH HELLO must be called"));
    assert!(client.ask("hello 3 auth default wrong").starts_with("-WRONGPASS"));
    assert!(client.ask("hello 4").starts_with("-NOPROTO"));
    let hello = client.ask("hello 3 auth default secret setname me");
    assert!(hello.starts_with("[server redis version 7.0.15 proto 3 id "), "{hello}");
    assert_eq!(client.ask("client getname"), "me");
    client.send("get nothing\r\n");
    assert_eq!(client.line(), "_");
    assert_eq!(client.ask("reset"), "RESET");
    assert_eq!(client.ask("get a"), "-NOAUTH Authentication required.");
}

#[test]
fn rights_of_users_are_checked_and_refusals_logged() {
    let server = start(&[]);
    let (mut admin, mut bob) = (server.connect(), server.connect());
    assert_eq!(
        admin.ask("acl setuser bob on >pw ~b:* +get +set +ping +multi +exec +client|id"),
        "OK"
    );
    assert_eq!(bob.ask("auth bob pw"), "OK");
    assert_eq!(bob.ask("set b:1 x"), "OK");
    let no_key = "-NOPERM this user has no permissions to access one of the keys used as arguments";
    assert_eq!(bob.ask("get a"), no_key);
    assert_eq!(bob.ask("del b:1"), "-NOPERM this user has no permissions to run the 'del' command");
    assert!(bob.ask("client id").parse::<u64>().is_ok());
    assert!(bob.ask("client list").starts_with("-NOPERM"));
    let log = admin.ask("acl log");
    assert!(log.contains("reason key context toplevel object a username bob"), "{log}");
    // A right that is taken away between MULTI and EXEC does not hold in EXEC.
    assert_eq!(bob.ask("multi"), "OK");
    assert_eq!(bob.ask("get b:1"), "QUEUED");
    assert_eq!(admin.ask("acl setuser bob -get"), "OK");
    assert!(bob.ask("exec").starts_with("[-NOPERM"));
    assert_eq!(admin.ask("acl dryrun bob set b:1 x"), "OK");
    assert!(admin.ask("acl dryrun bob get b:1").starts_with("This user has no permissions"));
    assert_eq!(admin.ask("acl deluser bob"), "1");
    assert_eq!(bob.rest(), b"");
    assert_eq!(admin.ask("acl whoami"), "default");
    assert!(admin.ask("acl genpass 5").len() == 2);
}

/// A change of the users renews the login of each connection, and proves no identity.
#[test]
fn change_of_the_users_lets_no_connection_in() {
    let server = start(&[("requirepass", "secret")]);
    let (mut admin, mut other) = (server.connect(), server.connect());
    assert_eq!(admin.ask("auth secret"), "OK");
    let refused = "-NOAUTH Authentication required.";
    assert_eq!(other.ask("get a"), refused);
    for change in ["acl setuser bob on", "acl setuser default +@all", "config set requirepass new"]
    {
        assert_eq!(admin.ask(change), "OK");
        assert_eq!(other.ask("get a"), refused, "{change}");
    }
    assert_eq!(admin.ask("get a"), "nil");
}

#[test]
fn transaction_is_queued_and_executed_or_discarded() {
    let server = start(&[]);
    let (mut client, mut other) = (server.connect(), server.connect());
    assert_eq!(client.ask("exec"), "-ERR EXEC without MULTI");
    assert_eq!(client.ask("discard"), "-ERR DISCARD without MULTI");
    assert_eq!(client.ask("multi"), "OK");
    assert_eq!(client.ask("multi"), "-ERR MULTI calls can not be nested");
    assert_eq!(client.ask("set a 1"), "QUEUED");
    assert_eq!(other.ask("get a"), "nil");
    assert_eq!(client.ask("ping"), "QUEUED");
    assert_eq!(client.ask("exec"), "[OK PONG]");
    client.ask("multi");
    assert!(client.ask("nope").starts_with("-ERR unknown command"));
    assert_eq!(client.ask("set a 2"), "QUEUED");
    assert_eq!(client.ask("exec"), "-EXECABORT Transaction discarded because of previous errors.");
    assert_eq!(client.ask("watch a"), "OK");
    assert_eq!(other.ask("set a 3"), "OK");
    client.ask("multi");
    client.ask("set a 4");
    assert_eq!(client.ask("exec"), "nil");
    client.ask("watch a");
    client.ask("multi");
    assert_eq!(client.ask("discard"), "OK");
    other.ask("set a 5");
    client.ask("multi");
    client.ask("get a");
    assert_eq!(client.ask("exec"), "[5]");
}

#[test]
fn messages_reach_subscribers_before_the_reply() {
    let server = start(&[("io-threads", "2")]);
    let (mut one, mut two) = (server.connect(), server.connect());
    assert_eq!(one.ask("subscribe a"), "[subscribe a 1]");
    one.send("psubscribe n* x*\r\n");
    assert_eq!(one.reply(), "[psubscribe n* 2]");
    assert_eq!(one.reply(), "[psubscribe x* 3]");
    assert!(one.ask("get a").starts_with("-ERR Can't execute 'get'"));
    assert_eq!(one.ask("ping"), "[pong ]");
    assert_eq!(two.ask("publish a hi"), "1");
    assert_eq!(one.reply(), "[message a hi]");
    assert_eq!(two.ask("publish news hi"), "1");
    assert_eq!(one.reply(), "[pmessage n* news hi]");
    assert_eq!(two.ask("pubsub numsub a b"), "[a 1 b 0]");
    assert_eq!(two.ask("pubsub numpat"), "2");
    // A subscriber of RESP3 may execute commands, and sees its own message first.
    two.ask("hello 3");
    assert_eq!(two.ask("subscribe own"), "[subscribe own 1]");
    two.send("publish own x\r\nget k\r\n");
    assert_eq!(two.reply(), "[message own x]");
    assert_eq!(two.reply(), "1");
    assert_eq!(two.reply(), "nil");
    one.send("unsubscribe\r\npunsubscribe\r\nget a\r\n");
    assert_eq!(one.reply(), "[unsubscribe a 2]");
    assert_eq!(one.reply(), "[punsubscribe n* 1]");
    assert_eq!(one.reply(), "[punsubscribe x* 0]");
    assert_eq!(one.reply(), "nil");
    drop(two);
    while one.ask("pubsub channels") != "[]" {}
}

/// Shard channels are a second set of channels, with counts of their own.
#[test]
fn shard_channels_are_apart_from_channels() {
    let server = start(&[("io-threads", "2")]);
    let (mut one, mut two) = (server.connect(), server.connect());
    assert_eq!(one.ask("subscribe a"), "[subscribe a 1]");
    one.send("ssubscribe a b\r\n");
    assert_eq!(one.reply(), "[ssubscribe a 1]");
    assert_eq!(one.reply(), "[ssubscribe b 2]");
    assert_eq!(two.ask("spublish a hi"), "1");
    assert_eq!(one.reply(), "[smessage a hi]");
    assert_eq!(two.ask("publish a ho"), "1");
    assert_eq!(one.reply(), "[message a ho]");
    assert_eq!(two.ask("publish b hi"), "0");
    assert_eq!(two.ask("pubsub shardchannels a*"), "[a]");
    assert_eq!(two.ask("pubsub shardnumsub a b c"), "[a 1 b 1 c 0]");
    assert!(two.ask("info stats").contains("pubsubshard_channels:2\r\n"));
    assert!(two.ask("client list").contains(" sub=1 psub=0 ssub=2 "));
    assert_eq!(one.ask("unsubscribe"), "[unsubscribe a 0]");
    assert!(one.ask("get a").starts_with("-ERR Can't execute 'get'"));
    one.send("sunsubscribe\r\nsunsubscribe\r\nget a\r\n");
    assert_eq!(one.reply(), "[sunsubscribe a 1]");
    assert_eq!(one.reply(), "[sunsubscribe b 0]");
    assert_eq!(one.reply(), "[sunsubscribe nil 0]");
    assert_eq!(one.reply(), "nil");
    one.ask("ssubscribe c");
    assert_eq!(one.ask("reset"), "RESET");
    assert_eq!(two.ask("pubsub shardchannels"), "[]");
    one.ask("ssubscribe c");
    drop(one);
    while two.ask("pubsub shardchannels") != "[]" {}
    // A user without the right to the channel.
    two.ask("acl setuser bob on nopass +@all &n*");
    let mut bob = server.connect();
    assert_eq!(bob.ask("auth bob x"), "OK");
    assert!(bob.ask("spublish c x").starts_with("-NOPERM"));
    assert!(bob.ask("ssubscribe c").starts_with("-NOPERM"));
    assert_eq!(bob.ask("ssubscribe n1"), "[ssubscribe n1 1]");
    two.ask("acl setuser bob resetchannels");
    assert_eq!(bob.rest(), b"");
}

#[test]
fn subscriber_that_does_not_read_is_ended() {
    let server = start(&[("client-output-buffer-limit", "pubsub 1mb 0 0")]);
    let (mut slow, mut other) = (server.connect(), server.connect());
    assert_eq!(slow.ask("subscribe c"), "[subscribe c 1]");
    let message = vec![b'x'; 100_000];
    let mut deliveries = 0;
    loop {
        other.command(&[b"PUBLISH", b"c", &message]);
        match other.reply().as_str() {
            "0" => break,
            _ => deliveries += 1,
        }
        assert!(deliveries < 1000, "the subscriber is never ended");
    }
}

#[test]
fn keyspace_events_are_messages() {
    let server = start(&[]);
    let (mut one, mut two) = (server.connect(), server.connect());
    assert_eq!(one.ask("config set notify-keyspace-events KEA"), "OK");
    one.send("psubscribe __key*\r\n");
    assert_eq!(one.reply(), "[psubscribe __key* 1]");
    two.ask("select 3");
    two.ask("set k v");
    assert_eq!(one.reply(), "[pmessage __key* __keyspace@3__:k set]");
    assert_eq!(one.reply(), "[pmessage __key* __keyevent@3__:set k]");
}

#[test]
fn monitor_sees_commands_without_secrets() {
    let server = start(&[("io-threads", "2"), ("requirepass", "secret")]);
    let (mut one, mut two) = (server.connect(), server.connect());
    one.ask("auth secret");
    assert_eq!(one.ask("monitor"), "OK");
    two.ask("auth secret");
    two.ask("set k \"a\\nb\"");
    two.ask("config get maxmemory");
    two.ask("get k");
    let auth = one.reply();
    assert!(auth.ends_with("] \"auth\" \"(redacted)\""), "{auth}");
    let set = one.reply();
    assert!(set.contains(" [0 127.0.0.1:") && set.ends_with("\"set\" \"k\" \"a\\nb\""), "{set}");
    assert!(one.reply().ends_with("\"get\" \"k\""), "CONFIG is not shown");
    for command in ["multi", "set k 1", "exec"] {
        two.ask(command);
    }
    for word in ["multi", "set", "exec"] {
        let line = one.reply();
        assert!(line.contains(&format!("] \"{word}\"")), "{line}");
    }
    assert_eq!(one.ask("reset"), "RESET");
}

#[test]
fn connections_are_listed_and_killed() {
    let server = start(&[("io-threads", "2")]);
    let (mut one, mut two, mut three) = (server.connect(), server.connect(), server.connect());
    two.ask("client setname second");
    two.ask("select 4");
    three.ask("subscribe a");
    let list = one.ask("client list");
    let line = list.lines().find(|line| line.contains("name=second")).unwrap().to_owned();
    assert!(line.contains(" db=4 sub=0 psub=0 ssub=0 multi=-1 "), "{line}");
    assert!(line.contains(" cmd=select user=default redir=-1 resp=2 "), "{line}");
    assert!(list.lines().any(|line| line.contains("flags=P") && line.contains("sub=1")), "{list}");
    assert_eq!(one.ask("client list type pubsub").lines().count(), 1);
    assert_eq!(one.ask("client kill 1.2.3.4:5"), "-ERR No such client");
    assert_eq!(one.ask("client kill type pubsub"), "1");
    assert_eq!(three.rest(), b"");
    let id = two.ask("client id");
    assert_eq!(one.ask(&format!("client kill id {id}")), "1");
    assert_eq!(two.rest(), b"");
    assert_eq!(one.ask("client kill user default"), "0", "the own connection is spared");
    assert_eq!(one.ask("client kill user default skipme no"), "1");
    assert_eq!(one.rest(), b"");
}

/// As in Redis 7.2, where these commands are new.
#[test]
fn library_and_switches_of_a_connection_are_listed() {
    let server = start(&[]);
    let (mut one, mut two) = (server.connect(), server.connect());
    let own = |two: &mut common::Client<_>| two.ask("client info");
    assert!(own(&mut two).ends_with(" resp=2 lib-name= lib-ver=\n"));
    assert_eq!(two.ask("client setinfo LIB-NAME redis-py(x_v1.0)"), "OK");
    assert_eq!(two.ask("client setinfo lib-ver 1.2.3"), "OK");
    let name = " cannot contain spaces, newlines or special characters.";
    for value in ["'a b'", "\"a\\n\"", "\"\\xff\"", "\"\\x7f\""] {
        let reply = two.ask(&format!("client setinfo Lib-Name {value}"));
        assert_eq!(reply, format!("-ERR Lib-Name{name}"), "{value}");
        let reply = two.ask(&format!("client setinfo lib-ver {value}"));
        assert_eq!(reply, format!("-ERR lib-ver{name}"), "{value}");
    }
    assert_eq!(two.ask("client setinfo libname x"), "-ERR Unrecognized option 'libname'");
    assert!(two.ask("client setinfo lib-name").starts_with("-ERR wrong number of arguments"));
    assert_eq!(two.ask("client no-touch on"), "OK");
    assert_eq!(two.ask("client no-touch maybe"), "-ERR syntax error");
    assert_eq!(two.ask("client no-evict ON"), "OK");
    let list = one.ask("client list");
    let line = list.lines().nth(1).unwrap();
    assert!(line.ends_with(" lib-name=redis-py(x_v1.0) lib-ver=1.2.3"), "{line}");
    assert!(line.contains(" flags=eT "), "{line}");
    assert_eq!(two.ask("client no-touch OFF"), "OK");
    assert!(own(&mut two).contains(" flags=e "));
    // The library stays the one behind the connection.
    two.ask("client no-touch on");
    assert_eq!(two.ask("reset"), "RESET");
    let line = own(&mut two);
    assert!(line.contains(" flags=N ") && line.contains(" lib-ver=1.2.3"), "{line}");
    assert_eq!(two.ask("client setinfo lib-ver ''"), "OK");
    assert!(own(&mut two).ends_with(" lib-name=redis-py(x_v1.0) lib-ver=\n"));
}

#[test]
fn pause_holds_commands_back_until_its_end() {
    let server = start(&[("io-threads", "2")]);
    let (mut one, mut two) = (server.connect(), server.connect());
    assert_eq!(one.ask("client pause 1000000 write"), "OK");
    assert_eq!(two.ask("get a"), "nil");
    two.send("set a 1\r\nget a\r\n");
    while !one.ask("client list").contains("flags=b") {}
    assert_eq!(one.ask("get a"), "nil");
    assert_eq!(one.ask("client unpause"), "OK");
    assert_eq!(two.reply(), "OK");
    assert_eq!(two.reply(), "1");
    // A pause ends by itself, and a paused connection can be killed.
    assert_eq!(one.ask("client pause 50 all"), "OK");
    assert_eq!(two.ask("get a"), "1");
    assert_eq!(one.ask("client pause 1000000 write"), "OK");
    two.send("set a 2\r\n");
    while !one.ask("client list").contains("flags=b") {}
    assert_eq!(one.ask("client kill type normal"), "1");
    assert_eq!(two.rest(), b"");
    assert_eq!(one.ask("client unpause"), "OK");
    assert_eq!(one.ask("get a"), "1");
}

#[test]
fn replies_are_suppressed_on_demand() {
    let server = start(&[]);
    let mut client = server.connect();
    client.send("client reply off\r\nset a 1\r\nnope\r\nclient reply on\r\nget a\r\n");
    assert_eq!(client.reply(), "OK");
    assert_eq!(client.reply(), "1");
    client.send("client reply skip\r\nset a 2\r\nget a\r\n");
    assert_eq!(client.reply(), "2");
}

#[test]
fn messages_are_not_suppressed() {
    let server = start(&[]);
    let (mut one, mut two) = (server.connect(), server.connect());
    one.ask("hello 3");
    one.send("client reply off\r\nsubscribe a\r\npsubscribe a*\r\nset k 1\r\n");
    assert_eq!(one.reply(), "[subscribe a 1]");
    assert_eq!(one.reply(), "[psubscribe a* 2]");
    assert_eq!(two.ask("publish a x"), "2");
    assert_eq!(one.reply(), "[message a x]");
    assert_eq!(one.reply(), "[pmessage a* a x]");
    one.send("client reply skip\r\nunsubscribe a\r\nclient reply on\r\nget k\r\n");
    assert_eq!(one.reply(), "[unsubscribe a 1]");
    assert_eq!(one.reply(), "OK");
    assert_eq!(one.reply(), "1");
}

#[test]
fn own_request_is_in_the_query_buffer() {
    let server = start(&[]);
    let mut one = server.connect();
    for (subcommand, bytes) in [("LIST", 26), ("INFO", 26)] {
        one.command(&[b"CLIENT", subcommand.as_bytes()]);
        let line = one.reply();
        assert!(line.contains(&format!(" qbuf={bytes} ")), "{line}");
    }
}

#[test]
fn parameters_of_the_start_accept_their_own_values() {
    let server = start(&[]);
    let mut one = server.connect();
    assert_eq!(one.ask("config set bind 127.0.0.1"), "OK");
    let refused = "possibly related to argument 'bind') - can't set immutable config";
    assert!(one.ask("config set bind 127.0.0.2").contains(refused));
    assert!(one.ask("config set databases 16").contains("can't set immutable config"));
}

#[test]
fn memory_limit_refuses_commands_that_need_memory() {
    let server = start(&[("maxmemory", "100")]);
    let mut client = server.connect();
    let value = "x".repeat(200);
    assert_eq!(client.ask(&format!("set a {value}")), "OK");
    let refused = "-OOM command not allowed when used memory > 'maxmemory'.";
    assert_eq!(client.ask("set b 1"), refused);
    assert_eq!(client.ask("get a"), value);
    client.ask("multi");
    assert_eq!(client.ask("get b"), refused);
    assert!(client.ask("exec").starts_with("-EXECABORT"));
    assert_eq!(client.ask("del a"), "1");
    assert_eq!(client.ask("set b 1"), "OK");
}

#[test]
fn monitor_that_does_not_read_is_ended() {
    let server = start(&[("client-output-buffer-limit", "pubsub 100kb 0 0")]);
    let (mut slow, mut other) = (server.connect(), server.connect());
    assert_eq!(slow.ask("monitor"), "OK");
    let value = vec![b'x'; 10_000];
    for _ in 0..10_000 {
        other.command(&[b"SET", b"k", &value]);
        assert_eq!(other.reply(), "OK");
        if other.ask("client list").lines().count() == 1 {
            return;
        }
    }
    panic!("the connection is never ended");
}

/// A subscriber and MONITOR read nothing of the socket, so no command looks up their user.
#[test]
fn listener_ends_with_its_user_or_its_channel() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("users.acl");
    let both = "user bob on nopass +@all &news &n*\nuser eve on nopass +@all\n";
    std::fs::write(&file, both).unwrap();
    let server = start(&[("aclfile", file.to_str().unwrap())]);
    let mut admin = server.connect();
    let listen = |user: &str, line: &str| {
        let mut client = server.connect();
        assert_eq!(client.ask(&format!("auth {user} x")), "OK");
        client.ask(line);
        client
    };
    let mut one = listen("bob", "subscribe news");
    let mut two = listen("bob", "psubscribe n*");
    let mut kept = listen("default", "subscribe news");
    let mut monitor = listen("eve", "monitor");
    // Redis ends those whose channel is gone, and leaves the others.
    assert_eq!(admin.ask("acl setuser bob resetchannels &news"), "OK");
    admin.ask("publish news 1");
    assert_eq!(two.rest(), b"");
    assert_eq!(one.reply(), "[message news 1]");
    std::fs::write(&file, "user carl on nopass\n").unwrap();
    assert_eq!(admin.ask("acl load"), "OK");
    admin.ask("publish news 2");
    assert_eq!(one.rest(), b"");
    let seen = String::from_utf8(monitor.rest()).unwrap();
    assert!(seen.contains("\"publish\" \"news\" \"1\"") && !seen.contains("\"2\""), "{seen}");
    assert_eq!(kept.reply(), "[message news 1]");
    assert_eq!(kept.reply(), "[message news 2]");
}

#[test]
fn panic_in_a_command_costs_its_connection_only() {
    let server = start(&[("enable-debug-command", "yes")]);
    let (mut one, mut other) = (server.connect(), server.connect());
    assert_eq!(other.ask("set a 1"), "OK");
    one.send("debug panic\r\nset a 2\r\n");
    assert_eq!(one.rest(), b"");
    assert_eq!(other.ask("get a"), "1");
    while other.ask("client list").lines().count() > 1 {}
    assert_eq!(server.connect().ask("ping"), "PONG");
}
