//! Requests, replies and limits of a connection.

mod common;

use std::io::{Read, Write};

use common::{Client, start};

#[test]
fn pipeline_is_answered_in_order() {
    let server = start(&[]);
    let mut client = server.connect();
    let mut requests = Vec::new();
    for number in 0..5000 {
        requests
            .extend(format!("SET k{} v{number}\r\nGET k{}\r\n", number % 7, number % 7).bytes());
    }
    let mut writer = client.stream.try_clone().unwrap();
    let writing = std::thread::spawn(move || writer.write_all(&requests).unwrap());
    for number in 0..5000 {
        assert_eq!(client.reply(), "OK");
        assert_eq!(client.reply(), format!("v{number}"));
    }
    writing.join().unwrap();
}

#[test]
fn request_may_arrive_byte_by_byte() {
    let server = start(&[]);
    let mut client = server.connect();
    for byte in
        b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$3\r\nx\r\n\r\n*2\r\n$3\r\nGET\r\n$1\r\na\r\nPING\r\n"
    {
        client.send([*byte]);
    }
    assert_eq!(client.reply(), "OK");
    assert_eq!(client.reply(), "x\r\n"[..1].to_owned() + "\r\n");
    assert_eq!(client.reply(), "PONG");
}

#[test]
fn inline_commands_have_quotes() {
    let server = start(&[]);
    let mut client = server.connect();
    assert_eq!(client.ask("set \"a b\" 'c\\'d'"), "OK");
    assert_eq!(client.ask("get \"a\\x20b\""), "c'd");
    client.send("\r\n\r\n");
    assert_eq!(client.ask("PING"), "PONG");
}

#[test]
fn large_values_are_read_in_any_pieces() {
    let server = start(&[]);
    let mut client = server.connect();
    for len in [16_383, 16_384, 16_385, 100_000, 5_000_000] {
        let value: Vec<u8> = (0..len).map(|at| (at * 31 % 251) as u8).collect();
        client.command(&[b"SET", b"k", &value]);
        client.send("PING\r\n");
        assert_eq!(client.reply(), "OK");
        assert_eq!(client.reply(), "PONG");
        client.command(&[b"GET", b"k"]);
        let header = client.line();
        assert_eq!(header, format!("${len}"));
        assert_eq!(&client.take(len + 2)[..len], &value[..]);
    }
    // The header and the value in two writes, and two large arguments in one command.
    let value = vec![b'x'; 50_000];
    client.send("*3\r\n$3\r\nSET\r\n$50000\r\n");
    assert_eq!(server.connect().ask("PING"), "PONG");
    client.send(&value);
    client.send("\r\n$20000\r\n");
    client.send(&value[..20_000]);
    client.send("\r");
    client.send("\n");
    assert_eq!(client.reply(), "OK");
    client.command(&[b"STRLEN", &value]);
    assert_eq!(client.reply(), "20000");
}

#[test]
fn broken_requests_end_the_connection_with_an_error() {
    let server = start(&[]);
    for (request, text) in [
        (&b"*2\r\n+3\r\n"[..], "-ERR Protocol error: expected '$', got '+'"),
        (b"*x\r\n", "-ERR Protocol error: invalid multibulk length"),
        (b"*1\r\n$999999999999\r\n", "-ERR Protocol error: invalid bulk length"),
        (b"set \"a\r\n", "-ERR Protocol error: unbalanced quotes in request"),
    ] {
        let mut client = server.connect();
        client.send(request);
        assert_eq!(client.reply(), text);
        assert_eq!(client.rest(), b"");
    }
    let mut client = server.connect();
    client.send(vec![b'a'; 70_000]);
    assert_eq!(client.reply(), "-ERR Protocol error: too big inline request");
}

#[test]
fn request_of_http_ends_the_connection_without_a_reply() {
    let server = start(&[]);
    let mut client = server.connect();
    client.send("POST / HTTP/1.1\r\nset a b\r\n");
    assert_eq!(client.rest(), b"");
    assert_eq!(server.connect().ask("get a"), "nil");
}

#[test]
fn unauthenticated_connection_cannot_announce_large_arguments() {
    let server = start(&[("requirepass", "secret")]);
    for (request, text) in [
        ("*2\r\n$4\r\nAUTH\r\n$536870912\r\n", "-ERR Protocol error: unauthenticated bulk length"),
        ("*1000\r\n", "-ERR Protocol error: unauthenticated multibulk length"),
    ] {
        let mut client = server.connect();
        client.send(request);
        assert_eq!(client.reply(), text);
        assert_eq!(client.rest(), b"");
    }
    let mut client = server.connect();
    assert_eq!(client.ask("get a"), "-NOAUTH Authentication required.");
    assert_eq!(client.ask("auth secret"), "OK");
    assert_eq!(client.ask("get a"), "nil");
}

#[test]
fn announced_length_takes_no_memory() {
    let server = start(&[]);
    let before = resident();
    let mut clients: Vec<Client<_>> = (0..50).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.send("*3\r\n$3\r\nSET\r\n$1\r\na\r\n$536870912\r\nxxx");
        client.send("yyy");
    }
    assert_eq!(server.connect().ask("PING"), "PONG");
    assert!(resident() < before + (200 << 20), "50 announcements of 512 MiB took memory");
}

fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn replies_that_are_not_read_wait_within_the_limits() {
    let server = start(&[]);
    let mut client = server.connect();
    let value = vec![b'x'; 1 << 20];
    client.command(&[b"SET", b"k", &value]);
    assert_eq!(client.reply(), "OK");
    // All requests are sent before a reply is read, as pipelines of many clients do.
    for _ in 0..200 {
        client.command(&[b"GET", b"k"]);
    }
    let mut other = server.connect();
    let waiting = |other: &mut Client<_>| {
        let list = other.ask("client list");
        let line = list.lines().next().unwrap().to_owned();
        let field = line.split(' ').find_map(|word| word.strip_prefix("omem=")).unwrap();
        field.parse::<usize>().unwrap()
    };
    while waiting(&mut other) < 150 << 20 {}
    let memory = other.ask("info memory");
    let clients = memory.lines().find_map(|line| line.strip_prefix("mem_clients_normal:"));
    assert!(clients.unwrap().parse::<usize>().unwrap() > 150 << 20);
    for _ in 0..200 {
        assert_eq!(client.line(), "$1048576");
        client.take(value.len() + 2);
    }
    while waiting(&mut other) > 0 {}
    // With a limit for each connection, and with one for all of them, this connection ends.
    for limit in ["client-output-buffer-limit 'normal 8mb 0 0'", "maxmemory-clients 8mb"] {
        let mut client = server.connect();
        assert_eq!(other.ask(&format!("config set {limit}")), "OK");
        for _ in 0..200 {
            let request = b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n";
            if client.stream.write_all(request).is_err() {
                break;
            }
        }
        while other.ask("client list").lines().count() > 2 {}
        other.ask("config set client-output-buffer-limit 'normal 0 0 0' maxmemory-clients 0");
    }
    assert!(other.ask("info stats").contains("evicted_clients:1\r\n"));
}

/// `timeout` is about connections without bytes, not about those without commands.
#[test]
fn slow_writer_and_slow_reader_are_not_idle() {
    let server = start(&[("timeout", "1")]);
    let (mut writer, mut reader) = (server.connect(), server.connect());
    let value = vec![b'x'; 24 << 20];
    reader.command(&[b"SET", b"r", &value]);
    assert_eq!(reader.reply(), "OK");
    reader.command(&[b"GET", b"r"]);
    writer.send("*3\r\n$3\r\nSET\r\n$1\r\nw\r\n$180\r\n");
    for _ in 0..18 {
        writer.send([b'y'; 10]);
        // Faster than the timeout, and longer in sum.
        std::thread::sleep(std::time::Duration::from_millis(130));
        reader.take(1 << 20);
    }
    writer.send("\r\n");
    assert_eq!(writer.reply(), "OK");
    reader.take((6 << 20) + 13);
    assert_eq!(reader.ask("PING"), "PONG");
}

#[test]
fn connection_that_reaches_the_query_limit_ends() {
    let server = start(&[("client-query-buffer-limit", "1mb")]);
    let mut client = server.connect();
    client.send("*2\r\n$3\r\nGET\r\n$2000000\r\n");
    let sent = client.stream.write_all(&vec![b'x'; 2_000_000]);
    assert!(sent.is_err() || client.rest().is_empty());
    assert_eq!(server.connect().ask("PING"), "PONG");
}

#[test]
fn connections_beyond_the_limit_are_refused() {
    let server = start(&[("maxclients", "3")]);
    let mut clients: Vec<Client<_>> = (0..3).map(|_| server.connect()).collect();
    clients.iter_mut().for_each(|client| assert_eq!(client.ask("PING"), "PONG"));
    assert_eq!(server.connect().reply(), "-ERR max number of clients reached");
    assert_eq!(clients[0].ask("config set maxclients 4"), "OK");
    assert_eq!(server.connect().ask("PING"), "PONG");
    assert_eq!(clients[0].ask("quit"), "OK");
    assert_eq!(clients[0].rest(), b"");
}

#[test]
fn half_closed_connection_gets_its_replies() {
    let server = start(&[]);
    let mut client = server.connect();
    client.send("PING\r\nECHO a\r\nPING");
    client.finish_sending();
    assert_eq!(client.rest(), b"+PONG\r\n$1\r\na\r\n");
}

#[test]
fn thousand_connections_are_served_by_several_threads() {
    let server = start(&[("io-threads", "3")]);
    let mut clients: Vec<Client<_>> = (0..1000).map(|_| server.connect()).collect();
    for round in 0..3 {
        for (number, client) in clients.iter_mut().enumerate() {
            client.send(format!("SET k{number} {round}\r\nGET k{number}\r\n"));
        }
        for client in &mut clients {
            assert_eq!(client.reply(), "OK");
            assert_eq!(client.reply(), round.to_string());
        }
    }
    let info = clients[7].ask("info clients");
    assert!(info.contains("connected_clients:1000"), "{info}");
    drop(clients);
    // Each connection is gone from the list when its end was noticed.
    let mut client = server.connect();
    while client.ask("client list").lines().count() > 1 {}
}

/// The peer of a connection that CLIENT KILL ends sees the end of the stream once the reply is
/// there, whichever thread of the server has the connection.
#[test]
fn killed_connection_has_ended_before_the_reply() {
    let server = start(&[("io-threads", "2")]);
    let mut client = server.connect();
    for _ in 0..200 {
        let mut other = server.connect();
        let id = other.ask("client id");
        assert_eq!(client.ask(&format!("client kill id {id}")), "1");
        other.stream.set_nonblocking(true).unwrap();
        assert_eq!(other.stream.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn idle_connection_ends_after_the_timeout() {
    let server = start(&[("timeout", "1")]);
    let mut idle = server.connect();
    assert_eq!(idle.ask("PING"), "PONG");
    assert_eq!(idle.rest(), b"");
}

#[test]
fn protected_server_refuses_other_hosts_without_a_password() {
    let server = start(&[("bind", "0.0.0.0")]);
    let port = server.addresses[0].rsplit(':').next().unwrap().to_owned();
    // The address of this host in a network; no packet is sent.
    let probe = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let own = match probe.connect("192.0.2.1:9").and_then(|()| probe.local_addr()) {
        Ok(own) if !own.ip().is_loopback() => own.ip(),
        _ => return eprintln!("skipped: this host has no address besides the loopback one"),
    };
    let far = || Client::new(std::net::TcpStream::connect(format!("{own}:{port}")).unwrap());
    let denied = far().reply();
    assert!(denied.starts_with("-DENIED Redis is running in protected mode"), "{denied}");
    let mut near = Client::new(std::net::TcpStream::connect(format!("127.0.0.1:{port}")).unwrap());
    assert_eq!(near.ask("config set requirepass pw"), "OK");
    assert_eq!(far().ask("auth pw"), "OK");
    assert_eq!(near.ask("config set requirepass '' protected-mode no"), "OK");
    assert_eq!(far().ask("ping"), "PONG");
}

#[test]
fn commands_with_many_large_arguments_are_bounded() {
    let server = start(&[("client-query-buffer-limit", "1mb")]);
    let mut client = server.connect();
    client.ask("multi");
    // Queued commands count as input.
    let value = vec![b'x'; 100_000];
    for _ in 0..20 {
        let mut request = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$100000\r\n".to_vec();
        request.extend(&value);
        request.extend(b"\r\n");
        if client.stream.write_all(&request).is_err() {
            break;
        }
    }
    let rest = client.rest();
    assert!(rest.windows(6).filter(|part| part == b"QUEUED").count() < 20);
    assert_eq!(server.connect().ask("get a"), "nil");
}

/// A client whose connection ends with unanswered commands sends them again: they must not have
/// been executed. ioredis does so (`autoResendUnfulfilledCommands`).
#[test]
fn commands_that_wait_end_with_their_connection() {
    let server = start(&[("io-threads", "2")]);
    let (mut admin, mut other) = (server.connect(), server.connect());
    let id = other.ask("client id");
    assert_eq!(admin.ask("client pause 60000 write"), "OK");
    other.send("set a 1\r\nset b 1\r\n");
    let is_held = |list: String| {
        let own = format!("id={id} ");
        list.lines().any(|line| line.starts_with(&own) && line.contains(" cmd=set "))
    };
    while !is_held(admin.ask("client list")) {}
    assert_eq!(admin.ask(&format!("client kill id {id}")), "1");
    assert_eq!(other.rest(), b"");
    assert_eq!(admin.ask("client unpause"), "OK");
    assert_eq!(admin.ask("get a"), "nil");
    assert_eq!(admin.ask("get b"), "nil");
}
