//! Commands on the server: INFO, CONFIG, SLOWLOG, LATENCY, DEBUG, SHUTDOWN.

mod common;

use std::sync::atomic::Ordering;

use common::start;
use kv_server::config::Config;
use kv_server::{Error, Setup};

#[test]
fn info_has_the_sections_of_redis_and_the_pool() {
    let server = start(&[]);
    let mut client = server.connect();
    client.ask("set a 1");
    client.ask("get");
    let info = client.ask("info");
    for text in [
        "# Server\r\nredis_version:7.0.15\r\n",
        "# Clients\r\nconnected_clients:1\r\n",
        "\r\nused_memory:1\r\n",
        "\r\nrdb_saves:7\r\n",
        "\r\n\r\n# Errorstats\r\nerrorstat_ERR:count=1\r\n",
        "# Keyspace\r\ndb0:keys=1,expires=0,avg_ttl=0\r\n",
        "# Pool\r\npool_chunks:3\r\n",
    ] {
        assert!(info.contains(text), "{text:?} is not in\n{info}");
    }
    assert!(!info.contains("# Commandstats"));
    let commands = client.ask("info commandstats");
    assert!(commands.starts_with("# Commandstats\r\n"), "{commands}");
    assert!(commands.contains("cmdstat_set:calls=1,usec="), "{commands}");
    assert!(commands.contains("cmdstat_get:calls=0,usec=0,usec_per_call=0.00,rejected_calls=1"));
    assert!(client.ask("info everything").contains("latency_percentiles_usec_set:p50="));
    assert_eq!(client.ask("config resetstat"), "OK");
    assert!(!client.ask("info errorstats").contains("ERR"));
}

#[test]
fn parameters_are_read_and_changed() {
    let server = start(&[]);
    let mut client = server.connect();
    assert_eq!(client.ask("config get maxmemory-p*y"), "[maxmemory-policy noeviction]");
    assert_eq!(client.ask("config set maxmemory-policy allkeys-lru timeout 5"), "OK");
    assert_eq!(
        client.ask("config get maxmemory-policy timeout"),
        "[timeout 5 maxmemory-policy allkeys-lru]"
    );
    assert_eq!(
        client.ask("config set maxmemory abc"),
        "-ERR CONFIG SET failed (possibly related to argument 'maxmemory') - argument must be a \
         memory value"
    );
    assert_eq!(client.ask("config get key-load-*"), "[]");
    assert_eq!(client.ask("config get key-load-delay"), "[key-load-delay 0]");
    assert_eq!(
        client.ask("config set foo bar"),
        "-ERR Unknown option or number of arguments for CONFIG SET - 'foo'"
    );
    assert_eq!(client.ask("config set requirepass pw"), "OK");
    assert_eq!(server.connect().ask("ping"), "-NOAUTH Authentication required.");
    assert_eq!(client.ask("config set requirepass ''"), "OK");
    assert_eq!(server.connect().ask("ping"), "PONG");
}

#[test]
fn slow_commands_are_logged() {
    let server = start(&[("slowlog-log-slower-than", "10000"), ("enable-debug-command", "yes")]);
    let mut client = server.connect();
    client.ask("debug sleep 0.03");
    client.ask("ping");
    assert_eq!(client.ask("slowlog len"), "1");
    let log = client.ask("slowlog get");
    assert!(log.contains(" [debug sleep 0.03] 127.0.0.1:"), "{log}");
    assert_eq!(client.ask("slowlog reset"), "OK");
    client.ask("config set slowlog-log-slower-than 0 slowlog-max-len 2");
    client.ask("set a 1");
    client.ask("acl setuser x >secret");
    let log = client.ask("slowlog get -1");
    assert!(
        log.contains("[acl setuser (redacted) (redacted)]") && log.contains("[set a 1]"),
        "{log}"
    );
    assert_eq!(client.ask("slowlog get -2"), "-ERR count should be greater than or equal to -1");
}

#[test]
fn latencies_are_distributions_and_events() {
    let server = start(&[("latency-monitor-threshold", "20"), ("enable-debug-command", "local")]);
    let mut client = server.connect();
    client.ask("debug sleep 0.03");
    client.ask("set a 1");
    let latest = client.ask("latency latest");
    assert!(latest.starts_with("[[command "), "{latest}");
    assert!(client.ask("latency history command").starts_with("[["));
    let histogram = client.ask("latency histogram set");
    assert!(histogram.starts_with("[set [calls 1 histogram_usec ["), "{histogram}");
    assert_eq!(client.ask("latency reset command"), "1");
    assert_eq!(client.ask("latency latest"), "[]");
    assert!(client.ask("latency graph command").starts_with("-ERR No samples"));
}

#[test]
fn debug_needs_the_option() {
    let server = start(&[]);
    let mut client = server.connect();
    assert!(client.ask("debug sleep 0").starts_with("-ERR DEBUG command not allowed."));
    let server = start(&[("enable-debug-command", "local")]);
    let mut client = server.connect();
    assert_eq!(client.ask("debug set-active-expire 0"), "OK");
    assert_eq!(client.ask("debug error 'X y'"), "-X y");
    assert_eq!(client.ask("debug protocol double"), "3.141");
    client.ask("hello 3");
    assert_eq!(client.ask("debug protocol map"), "[0 f 1 t 2 f]");
}

#[test]
fn facts_of_commands_and_absent_parts_are_answered() {
    let server = start(&[]);
    let mut client = server.connect();
    assert!(client.ask("command count").parse::<usize>().unwrap() > 90);
    assert_eq!(client.ask("command getkeys mset a 1 b 2"), "[a b]");
    assert_eq!(client.ask("function flush"), "OK");
    assert_eq!(client.ask("function list"), "[]");
    assert_eq!(client.ask("cluster info"), "-ERR This instance has cluster support disabled");
    assert_eq!(client.ask("role"), "[master 0 []]");
    assert_eq!(client.ask("wait 0 100"), "0");
    assert_eq!(client.ask("replicaof no one"), "OK");
    assert_eq!(client.ask("slaveof NO ONE"), "OK");
    assert!(client.ask("replicaof host 6379").starts_with("-ERR Replication is not supported"));
    assert_eq!(client.ask("module list"), "[]");
    assert_eq!(client.ask("client getredir"), "-1");
    assert_eq!(client.ask("client trackinginfo"), "[flags [off] redirect -1 prefixes []]");
    let refusal = "-ERR CLIENT TRACKING is not supported by this server";
    assert_eq!(client.ask("client tracking on bcast"), refusal);
    assert_eq!(client.ask("client tracking off"), "OK");
    assert!(client.ask("client caching yes").starts_with("-ERR CLIENT CACHING can be called"));
    assert_eq!(client.ask("client unblock 1 error"), "0");
    assert!(client.ask("client unblock 1 x").starts_with("-ERR CLIENT UNBLOCK reason should"));
    assert!(client.ask("memory malloc-stats").starts_with("Stats not supported"));
    assert!(client.ask("lolwut").ends_with("Redis ver. 7.0.15\n"));
    assert!(client.ask("client help").starts_with("[CLIENT <subcommand>"));
    assert!(client.ask("memory stats").contains("keys.count 0"));
    assert_eq!(client.ask("select 16"), "-ERR DB index is out of range");
    assert_eq!(client.ask("config foo"), "-ERR unknown subcommand 'foo'. Try CONFIG HELP.");
}

#[test]
fn shutdown_ends_the_server_unless_saving_fails() {
    let server = start(&[("io-threads", "2")]);
    let (mut one, mut two) = (server.connect(), server.connect());
    server.store.refuses_to_end.store(true, Ordering::Relaxed);
    assert_eq!(one.ask("shutdown"), "-ERR Errors trying to SHUTDOWN. Check logs.");
    assert_eq!(one.ask("shutdown abort"), "-ERR No shutdown in progress.");
    assert_eq!(one.ask("shutdown what"), "-ERR syntax error");
    server.store.refuses_to_end.store(false, Ordering::Relaxed);
    one.send("shutdown nosave\r\n");
    assert_eq!(one.rest(), b"");
    assert_eq!(two.rest(), b"");
    server.wait().unwrap();
}

#[test]
fn signal_whose_save_fails_leaves_the_server_running() {
    let server = start(&[]);
    let mut client = server.connect();
    server.store.refuses_to_end.store(true, Ordering::Relaxed);
    for times in 1..3 {
        server.ask_to_stop();
        while server.store.ends.load(Ordering::Relaxed) < times {}
        // The next signal asks again once the server has gone on.
        assert_eq!(client.ask("ping"), "PONG");
    }
    server.store.refuses_to_end.store(false, Ordering::Relaxed);
    server.stop().unwrap();
}

#[test]
fn limit_of_connections_is_within_the_descriptors() {
    let server = start(&[]);
    let text = server.connect().ask("config set maxclients 4000000000");
    let why = "possibly related to argument 'maxclients') - The operating system is not able to \
               handle the specified number of clients, try with ";
    assert!(text.contains(why), "{text}");
}

#[test]
fn stop_saves_and_closes_connections() {
    let server = start(&[("io-threads", "3")]);
    let mut clients: Vec<_> = (0..20).map(|_| server.connect()).collect();
    clients.iter_mut().for_each(|client| assert_eq!(client.ask("ping"), "PONG"));
    let store = server.store.clone();
    server.stop().unwrap();
    assert_eq!(store.ends.load(Ordering::Relaxed), 1);
    clients.iter_mut().for_each(|client| assert_eq!(client.rest(), b""));
}

#[test]
fn impossible_addresses_and_users_are_refused_at_the_start() {
    let start = |parameters: &[(&str, &str)]| {
        let config = Config::default();
        for (name, value) in parameters {
            config.set_at_start(name, &[value.as_bytes()]).unwrap();
        }
        let setup = Setup { config, ..Setup::default() };
        setup.start(std::sync::Arc::new(common::map::Map::default())).unwrap_err()
    };
    assert!(matches!(start(&[("port", "0")]), Error::NoAddress));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let error = start(&[("port", &port), ("bind", "127.0.0.1")]);
    assert!(error.to_string().starts_with("listening at 127.0.0.1 port"), "{error}");
    let error = start(&[("aclfile", "/nonexistent/users"), ("port", &port)]);
    assert!(matches!(error, Error::Users(_)), "{error}");
    let error = start(&[("aclfile", "/dev/zero"), ("port", &port)]).to_string();
    assert!(error.contains("/dev/zero: a socket or a device, and not a regular file"), "{error}");
    let error = start(&[("port", "0"), ("tls-port", &port), ("tls-cert-file", "/nonexistent")]);
    assert!(matches!(error, Error::Tls(_)), "{error}");
}

fn make_fifo(path: &std::path::Path) {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

#[test]
fn users_are_read_from_files_and_saved() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("users.acl");
    std::fs::write(&file, "user bob on >pw +@read ~*\n").unwrap();
    let path = file.display().to_string();
    let server = start(&[("aclfile", &path)]);
    let (mut admin, mut bob) = (server.connect(), server.connect());
    assert_eq!(bob.ask("auth bob pw"), "OK");
    assert!(bob.ask("set a 1").starts_with("-NOPERM"));
    assert_eq!(admin.ask("acl setuser eve on nopass +ping"), "OK");
    assert_eq!(admin.ask("acl save"), "OK");
    assert!(std::fs::read_to_string(&file).unwrap().contains("user eve on nopass"));
    std::fs::write(&file, "user bob on >pw +@all ~*\n").unwrap();
    assert_eq!(admin.ask("acl load"), "OK");
    assert_eq!(bob.ask("set a 1"), "OK");
    assert_eq!(admin.ask("acl users"), "[bob default]");
    std::fs::write(&file, "nonsense\n").unwrap();
    assert!(admin.ask("acl load").starts_with("-ERR"));
    std::fs::remove_file(&file).unwrap();
    make_fifo(&file);
    assert!(admin.ask("acl load").contains("users.acl: a FIFO, and not a regular file"));
    // A save replaces the FIFO, and follows no link at the name of its draft.
    let other = dir.path().join("other");
    std::fs::write(&other, "content").unwrap();
    std::os::unix::fs::symlink(&other, dir.path().join("users.acl.new")).unwrap();
    assert_eq!(admin.ask("acl save"), "OK");
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "content");
    assert_eq!(admin.ask("acl load"), "OK");
    assert_eq!(admin.ask("acl users"), "[bob default]");
    let server = start(&[]);
    let text = server.connect().ask("acl save");
    assert!(text.starts_with("-ERR This Redis instance is not configured to use an ACL file."));
}

#[test]
fn users_of_the_configuration_exist_from_the_start() {
    let text = b"user bob on >pw ~* +get\nuser default on >secret ~* &* +@all\n";
    let directives = redis_formats::conf::read("f", &mut |_| Ok(text.to_vec())).unwrap();
    let config = Config::default();
    config.set_at_start("bind", &[b"127.0.0.1"]).unwrap();
    config.set_at_start("port", &[common::free_port().to_string().as_bytes()]).unwrap();
    let ignored = config.load(&directives).unwrap();
    let server = common::start_with(Setup { config, ignored, file: String::new() });
    let mut client = server.connect();
    assert_eq!(client.ask("get a"), "-NOAUTH Authentication required.");
    assert_eq!(client.ask("auth bob pw"), "OK");
    assert_eq!(client.ask("get a"), "nil");
    assert_eq!(client.ask("auth secret"), "OK");
    assert_eq!(client.ask("acl whoami"), "default");
}
