use super::*;

fn set(config: &Config, pairs: &[(&str, &str)]) -> Result<Vec<&'static str>, Refused> {
    let pairs: Vec<_> = pairs.iter().map(|(a, b)| (a.as_bytes(), b.as_bytes())).collect();
    config.set(&pairs)
}

fn why(config: &Config, name: &str, value: &str) -> String {
    match set(config, &[(name, value)]) {
        Err(Refused::Value { why, .. }) => why,
        other => panic!("{name} {value}: {other:?}"),
    }
}

#[test]
fn names_and_defaults_of_the_table_are_valid() {
    let mut names = std::collections::BTreeSet::new();
    for row in PARAMETERS {
        assert!(names.insert(row.name), "{} is there twice", row.name);
        assert!(row.alias.is_none_or(|alias| names.insert(alias)), "{}", row.name);
        let words: Vec<&[u8]> = match row.name {
            "dir" => continue,
            "save" | "notify-keyspace-events" => Vec::new(),
            _ => vec![row.default.as_bytes()],
        };
        let value = check::check(row, &words, row.default);
        assert_eq!(value.as_deref(), Ok(row.default), "{}", row.name);
    }
}

#[test]
fn values_are_brought_to_one_form() {
    let config = Config::default();
    let pairs =
        [("maxmemory", "1gb"), ("SAVE", "10 20 30 40"), ("Maxmemory-Policy", "ALLKEYS-LRU")];
    assert_eq!(set(&config, &pairs), Ok(vec!["maxmemory", "save", "maxmemory-policy"]));
    assert_eq!(config.get("maxmemory"), "1073741824");
    assert_eq!(config.live.max_memory(), 1 << 30);
    assert_eq!(config.get("save"), "10 20 30 40");
    assert_eq!(config.get("maxmemory-policy"), "allkeys-lru");
    set(&config, &[("client-output-buffer-limit", "pubsub 1mb 2 3 normal 5 6 7")]).unwrap();
    let text = "normal 5 6 7 slave 268435456 67108864 60 pubsub 1048576 2 3";
    assert_eq!(config.get("client-output-buffer-limit"), text);
    let limit = OutputLimit { hard: 1 << 20, soft: 2, soft_s: 3 };
    assert_eq!(config.live.output_limit("pubsub"), limit);
    set(&config, &[("notify-keyspace-events", "KEA")]).unwrap();
    assert_eq!(config.get("notify-keyspace-events"), "AKE");
}

#[test]
fn impossible_values_are_refused_in_the_words_of_redis() {
    let config = Config::default();
    for (name, value, text) in [
        ("maxmemory", "abc", "argument must be a memory value"),
        ("maxclients", "0", "argument must be between 1 and 4294967295 inclusive"),
        ("timeout", "-1", "argument must be between 0 and 2147483647 inclusive"),
        ("timeout", "x", "argument couldn't be parsed into an integer"),
        ("protected-mode", "maybe", "argument must be 'yes' or 'no'"),
        ("save", "1", "Invalid save parameters"),
        ("port", "1", "can't set immutable config"),
        ("daemonize", "yes", "can't set immutable config"),
        ("dir", "/", "can't set protected config"),
        ("maxmemory-clients", "101%", "percentage argument must be less or equal to 100"),
        ("maxmemory-clients", "x%", "argument must be a memory or percent value"),
        (
            "client-output-buffer-limit",
            "x",
            "Wrong number of arguments in buffer limit configuration.",
        ),
        ("notify-keyspace-events", "Q", "Invalid event class character. Use 'Ag$lshzxeKEtmdn'."),
    ] {
        assert_eq!(why(&config, name, value), text);
    }
    assert!(why(&config, "maxmemory-policy", "x").starts_with("argument(s) must be one of the"));
    assert!(why(&config, "appendonly", "yes").contains("no append-only file"));
}

#[test]
fn several_parameters_are_set_all_or_none() {
    let config = Config::default();
    let pairs = [("maxmemory", "5"), ("timeout", "x")];
    assert!(set(&config, &pairs).is_err());
    assert_eq!(config.get("maxmemory"), "0");
    assert_eq!(set(&config, &[("nope", "1")]), Err(Refused::Unknown(b"nope".to_vec())));
    let twice = set(&config, &[("timeout", "1"), ("timeout", "2")]);
    assert!(matches!(twice, Err(Refused::Value { why, .. }) if why == "duplicate parameter"));
}

#[test]
fn lines_without_effect_are_named() {
    let text = "port 7000\nfoo bar\nhz 20\nsave 5 6\nsave 7 8\nuser a on\nbind 127.0.0.1 ::1";
    let directives = redis_formats::conf::read("f", &mut |_| Ok(text.into())).unwrap();
    let config = Config::default();
    let ignored = config.load(&directives).unwrap();
    assert_eq!(ignored.unknown, ["f:2 foo"]);
    assert_eq!(ignored.unused, ["f:3 hz"]);
    assert_eq!(ignored.users.len(), 1);
    assert_eq!(config.get("port"), "7000");
    assert_eq!(config.get("save"), "5 6 7 8");
    assert_eq!(config.get("bind"), "127.0.0.1 ::1");
    let wrong = redis_formats::conf::read("f", &mut |_| Ok("\ntimeout -5".into())).unwrap();
    let error = config.load(&wrong).unwrap_err().to_string();
    assert!(error.contains("f:2 timeout") && error.contains("between 0"), "{error}");
}
