use proptest::prelude::*;

use super::*;
use crate::command::lookup;

fn user(rules: &str) -> User {
    let mut user = User::new(b"u");
    user.apply_all(rules.split(' ').filter(|rule| !rule.is_empty())).unwrap();
    user
}

fn line(rules: &str) -> String {
    String::from_utf8(user(rules).line()).unwrap()
}

fn check(rules: &str, command: &str) -> Result<(), Denied> {
    let words: Vec<_> = command.split(' ').collect();
    user(rules).check(lookup(&words[..]).unwrap(), &words[..])
}

#[test]
fn users_are_printed_as_lines() {
    let hash = "30c952fab122c3f9759f02a6d95c3758b246b4fee239957b2d4fee46e26170c4";
    for (rules, expected) in [
        ("", "off resetchannels -@all"),
        ("on nopass allkeys allchannels allcommands", "on nopass ~* &* +@all"),
        (
            "~a ~b ~a +@all -flushall +config|get -client|kill >pw on",
            &format!("on #{hash} ~a ~b resetchannels +@all -flushall -client|kill"),
        ),
        (
            "+get +@string -set +@all allkeys -@all +config -config|set",
            "off ~* resetchannels -@all +config -config|set",
        ),
        ("+select|0 +SELECT|0", "off resetchannels -@all +select|0"),
        ("+select|0 -select", "off resetchannels -@all"),
        ("+get +get|x", "off resetchannels -@all +get"),
        ("+config|get +config", "off resetchannels -@all +config"),
        ("+@STRING +GET +Config|Get", "off resetchannels -@all +@string +config|get"),
        ("sanitize-payload &foo &foo", "off sanitize-payload resetchannels &foo -@all"),
        ("skip-sanitize-payload clearselectors", "off skip-sanitize-payload resetchannels -@all"),
        ("on >pw ~a &b +get reset", "off sanitize-payload resetchannels -@all"),
        ("+@all -@admin +@all", "off resetchannels +@all"),
        ("+@read -@string +@read", "off resetchannels -@all -@string +@read"),
        ("+get -@read +get", "off resetchannels -@all -@read +get"),
    ] {
        assert_eq!(line(rules), format!("user u {expected}"), "{rules}");
    }
    assert_eq!(User::unrestricted().line(), b"user default on nopass ~* &* +@all");
}

#[test]
fn wrong_rules_are_refused_in_the_words_of_redis() {
    for (rules, cause) in [
        ("+foo", Cause::Unknown),
        ("+@foo", Cause::Unknown),
        ("-get|x", Cause::Unknown),
        ("+config|x", Cause::Unknown),
        ("+nope|x", Cause::Unknown),
        ("+", Cause::Unknown),
        ("+@", Cause::Unknown),
        ("+get|", Cause::Syntax),
        ("+config|", Cause::Syntax),
        ("+config|get|x", Cause::SubcommandArgument),
        ("#zz", Cause::Hash),
        ("!nope", Cause::Hash),
        ("<nope", Cause::NoPassword),
        ("~* ~a", Cause::AfterAllKeys),
        ("&* &a", Cause::AfterAllChannels),
        ("xx", Cause::Syntax),
        ("~a\tb", Cause::Syntax),
        ("%R~a", Cause::Version2),
        ("(~a", Cause::Version2),
    ] {
        let mut user = User::new(b"u");
        let error = user.apply_all(["on"].into_iter().chain(rules.split(' '))).unwrap_err();
        assert_eq!(error.cause, cause, "{rules}");
        assert_eq!(user, User::new(b"u"), "{rules}");
    }
    let upper = format!("#{}", "A".repeat(64));
    assert_eq!(User::new(b"u").apply(upper).unwrap_err().cause, Cause::Hash);
    let text = User::new(b"u").apply("xx").unwrap_err().to_string();
    assert_eq!(text, "Error in ACL SETUSER modifier 'xx': Syntax error");
    let text = User::new(b"u").apply("<secret").unwrap_err().to_string();
    assert!(!text.contains("secret"), "{text}");
}

#[test]
fn passwords_authenticate() {
    let mut user = user("on >one >two");
    assert!(user.authenticate(b"one") && user.authenticate(b"two") && !user.authenticate(b"on"));
    let hash = PasswordHash::of(b"three");
    let mut text = Vec::new();
    hash.write(&mut text);
    user.apply([&b"#"[..], &text].concat()).unwrap();
    user.apply("<one").unwrap();
    assert!(user.authenticate(b"three") && !user.authenticate(b"one"));
    user.apply("off").unwrap();
    assert!(!user.authenticate(b"three"));
    user.apply_all(["on", "nopass"]).unwrap();
    assert!(user.authenticate(b"any") && user.passwords().is_empty());
    user.apply(">x").unwrap();
    assert!(!user.authenticate(b"any"));
    user.apply("resetpass").unwrap();
    assert!(!user.authenticate(b"x"));
}

#[test]
fn hash_is_sha_256() {
    let mut text = Vec::new();
    PasswordHash::of(b"p").write(&mut text);
    assert_eq!(text, b"148de9c5a7a44d19e56cd9ae1a554bf67847afb0c58f6e12fa29ac7ddfca9940");
    assert_eq!(PasswordHash::parse(&text), Some(PasswordHash::of(b"p")));
}

#[test]
fn commands_are_checked() {
    let denied = Err(Denied::Command);
    assert_eq!(check("+get ~*", "get a"), Ok(()));
    assert_eq!(check("+get ~*", "set a b"), denied);
    assert_eq!(check("+@all -set ~*", "SET a b"), denied);
    assert_eq!(check("+@string -set ~*", "getset a b"), Ok(()));
    assert_eq!(check("+config|get", "config get a"), Ok(()));
    assert_eq!(check("+config|get", "config set a b"), denied);
    assert_eq!(check("+config -config|set", "config set a b"), denied);
    assert_eq!(check("+config -config|set", "config resetstat"), Ok(()));
    assert_eq!(check("+select|0", "select 0"), Ok(()));
    assert_eq!(check("+select|0", "select 1"), denied);
    assert_eq!(check("+select|0 -@all", "select 0"), denied);
    assert_eq!(check("+select|0 -@fast", "select 0"), denied);
    // Commands that a connection needs for its login are always allowed.
    assert_eq!(check("", "auth a b"), Ok(()));
    assert_eq!(check("", "ping"), denied);
}

#[test]
fn keys_are_checked() {
    assert_eq!(check("+@all ~a*", "get abc"), Ok(()));
    assert_eq!(check("+@all ~a*", "get b"), Err(Denied::Key(1)));
    assert_eq!(check("+@all ~a* ~b", "mget a b"), Ok(()));
    assert_eq!(check("+@all ~a*", "mset a 1 b 2"), Err(Denied::Key(3)));
    assert_eq!(check("+@all ~a*", "mset a b"), Ok(()));
    assert_eq!(check("+@all", "get a"), Err(Denied::Key(1)));
    assert_eq!(check("+@all ~a", "object freq b"), Err(Denied::Key(2)));
    assert_eq!(check("+@all", "ping"), Ok(()));
    assert_eq!(check("+@all", "keys *"), Ok(()));
}

#[test]
fn channels_are_checked() {
    assert_eq!(check("+@all &c*", "publish chat x"), Ok(()));
    assert_eq!(check("+@all &c*", "publish x chat"), Err(Denied::Channel(1)));
    assert_eq!(check("+@all &c*", "subscribe c1 d"), Err(Denied::Channel(2)));
    assert_eq!(check("+@all &c*", "ssubscribe c1 d"), Err(Denied::Channel(2)));
    assert_eq!(check("+@all &c*", "spublish d c"), Err(Denied::Channel(1)));
    assert_eq!(check("+@all &c*", "psubscribe c*"), Ok(()));
    assert_eq!(check("+@all &c*", "psubscribe c1*"), Err(Denied::Channel(1)));
    assert_eq!(check("+@all", "unsubscribe d"), Ok(()));
    assert_eq!(check("+@all &*", "psubscribe *"), Ok(()));
}

#[test]
fn refusals_are_worded_as_redis_words_them() {
    let words = ["config", "set", "a", "b"];
    let command = lookup(&words[..]).unwrap();
    let text = |denied: Denied| {
        let (mut real, mut dry) = (Vec::new(), Vec::new());
        denied.text(command, &mut real);
        denied.dry_run_text(command, &words[..], &mut dry);
        [real, dry].map(|text| String::from_utf8(text).unwrap())
    };
    assert_eq!(
        text(Denied::Command),
        [
            "NOPERM this user has no permissions to run the 'config|set' command",
            "This user has no permissions to run the 'config|set' command"
        ]
    );
    assert_eq!(
        text(Denied::Key(2)),
        [
            "NOPERM this user has no permissions to access one of the keys used as arguments",
            "This user has no permissions to access the 'a' key"
        ]
    );
    assert!(text(Denied::Channel(3))[1].ends_with("access the 'b' channel"));
}

#[test]
fn files_of_users_are_read() {
    let text = b"# comment\n\nuser alice on >pw ~a +get\r\nuser default off\n";
    let users = Users::parse(text).unwrap();
    assert!(users.get(b"alice").unwrap().authenticate(b"pw"));
    assert!(!users.get(b"default").unwrap().is_on());
    assert_eq!(Users::parse(&users.text()).unwrap(), users);
    let only = Users::parse(b"user a on").unwrap();
    assert!(only.get(b"default").unwrap().is_unrestricted());
    for (text, error) in [
        ("usr a", FileError::Line(1)),
        ("\nuser", FileError::Line(2)),
        ("user a\nuser a", FileError::Twice(2, "a".to_owned())),
    ] {
        assert_eq!(Users::parse(text.as_bytes()).unwrap_err(), error);
    }
    let error = Users::parse(b"user a +foo").unwrap_err().to_string();
    assert!(error.contains("line 1") && error.contains("\"+foo\""), "{error}");
}

#[test]
fn users_are_set_and_removed() {
    let mut users = Users::default();
    users.set(b"a", ["on", "+get"]).unwrap();
    users.set(b"a", ["+set"]).unwrap();
    assert!(users.set(b"a", ["off", "xx"]).is_err());
    assert_eq!(users.get(b"a").unwrap().line(), b"user a on resetchannels -@all +get +set");
    assert!(users.set(b"a b", ["on"]).is_err() && !Users::is_name(b"a b"));
    assert!(users.remove(b"a") && !users.remove(b"a") && !users.remove(b"default"));
}

proptest! {
    /// The printed rules make the same user, whatever rules came before.
    #[test]
    fn printed_user_is_read_again(
        rules in proptest::collection::vec(
            prop::sample::select(vec![
                "on", "off", "nopass", ">a", ">b", "resetpass", "~a*", "~b", "allkeys", "resetkeys",
                "&c", "allchannels", "resetchannels", "+@all", "-@all", "+@string", "-@string",
                "+@read", "-@write", "+@dangerous", "-@dangerous", "+get", "-get", "+config",
                "-config", "+config|get", "-config|get", "-config|set", "+select|0", "-select",
                "+@fast", "-@slow", "reset", "sanitize-payload",
            ]),
            0..25,
        )
    ) {
        let mut user = User::new(b"u");
        for rule in rules {
            // A pattern behind all keys is refused.
            let _ = user.apply(rule);
        }
        let line = user.line();
        let again = Users::parse(&line).unwrap();
        prop_assert_eq!(again.get(b"u"), Some(&user));
    }
}
