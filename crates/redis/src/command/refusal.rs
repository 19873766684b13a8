//! Refused commands: unknown names and wrong numbers of arguments, in Redis's words.

use super::{Arguments, Command, Id, by_name};

/// Maximum bytes of a name, and of all arguments, within an error text.
const SHOWN: usize = 128;

/// Cause for refusing a command before its execution.
#[derive(Clone, Copy, Debug)]
pub enum Refusal {
    /// No command has the name.
    Command,
    /// The container has no such subcommand.
    Subcommand(&'static Command),
    /// The number of arguments is wrong.
    Arity {
        /// The command or subcommand.
        command: &'static Command,
        /// The container of a subcommand.
        container: Option<&'static Command>,
    },
}

/// Returns the command or subcommand that `arguments` name, and checks their number.
///
/// # Errors
///
/// [`Refusal::text`] writes the reply. `arguments` without a name are an unknown command.
pub fn lookup<A: Arguments + ?Sized>(arguments: &A) -> Result<&'static Command, Refusal> {
    if arguments.is_empty() {
        return Err(Refusal::Command);
    }
    let named = by_name(arguments.at(0)).ok_or(Refusal::Command)?;
    let (mut command, mut container) = (named, None);
    if !named.subcommands.is_empty() && arguments.len() > 1 {
        command = match named.subcommand(arguments.at(1)) {
            Some(command) => command,
            None => return Err(Refusal::Subcommand(named)),
        };
        container = Some(named);
    }
    match command.takes(arguments.len()) {
        true => Ok(command),
        false => Err(Refusal::Arity { command, container }),
    }
}

/// Returns whether the first word of a request is one of HTTP. The connection must be closed.
///
/// A web page can make a browser send such a request, with commands in its body.
pub fn is_http(name: &[u8]) -> bool {
    name.eq_ignore_ascii_case(b"host:") || name.eq_ignore_ascii_case(b"post")
}

impl Refusal {
    /// Appends the text of the error reply to `out`, without the leading `-` and the line end.
    pub fn text<A: Arguments + ?Sized>(&self, arguments: &A, out: &mut Vec<u8>) {
        let begin = out.len();
        match self {
            Self::Command => unknown_command(arguments, out),
            Self::Subcommand(container) => {
                out.extend(b"ERR unknown subcommand '");
                out.extend(head(arguments.at(1), SHOWN));
                out.extend(b"'. Try ");
                out.extend(container.name.bytes().map(|byte| byte.to_ascii_uppercase()));
                out.extend(b" HELP.");
            }
            Self::Arity { command, container } => {
                // A refused EXEC ends the transaction.
                out.extend(match command.id {
                    Id::Exec => &b"EXECABORT Transaction discarded because of: "[..],
                    _ => b"ERR ",
                });
                out.extend(b"wrong number of arguments for '");
                if let Some(container) = container {
                    out.extend(container.name.bytes());
                    out.push(b'|');
                }
                out.extend(command.name.bytes());
                out.extend(b"' command");
            }
        }
        sanitize(&mut out[begin..]);
    }
}

fn unknown_command<A: Arguments + ?Sized>(arguments: &A, out: &mut Vec<u8>) {
    out.extend(b"ERR unknown command '");
    if !arguments.is_empty() {
        out.extend(head(arguments.at(0), SHOWN));
    }
    out.extend(b"', with args beginning with: ");
    let begin = out.len();
    for index in 1..arguments.len() {
        let Some(space) = SHOWN.checked_sub(out.len() - begin).filter(|&space| space > 0) else {
            break;
        };
        out.push(b'\'');
        out.extend(head(arguments.at(index), space));
        out.extend(b"' ");
    }
}

fn head(bytes: &[u8], most: usize) -> &[u8] {
    &bytes[..bytes.len().min(most)]
}

/// Replaces line ends by spaces. Otherwise an error text would end its reply too early.
pub fn sanitize(text: &mut [u8]) {
    text.iter_mut().filter(|byte| matches!(byte, b'\r' | b'\n')).for_each(|byte| *byte = b' ');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(words: &[&str]) -> String {
        let mut out = Vec::new();
        lookup(words).unwrap_err().text(words, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn unknown_commands_are_refused_with_their_arguments() {
        assert_eq!(
            refused(&["foo", "bar", "x y"]),
            "ERR unknown command 'foo', with args beginning with: 'bar' 'x y' "
        );
        assert_eq!(refused(&["FOO"]), "ERR unknown command 'FOO', with args beginning with: ");
        assert_eq!(refused(&[]), "ERR unknown command '', with args beginning with: ");
        assert_eq!(
            refused(&["fo\r\no"]),
            "ERR unknown command 'fo  o', with args beginning with: "
        );
        let long = "a".repeat(300);
        let text = refused(&["foo", &long, "b"]);
        assert!(text.ends_with(&format!(": '{}' ", "a".repeat(128))), "{text}");
        assert!(refused(&[&long]).contains(&format!("'{}',", "a".repeat(128))));
    }

    #[test]
    fn unknown_subcommands_are_refused() {
        assert_eq!(refused(&["client", "foo"]), "ERR unknown subcommand 'foo'. Try CLIENT HELP.");
    }

    #[test]
    fn wrong_numbers_of_arguments_are_refused() {
        let text = |name| format!("ERR wrong number of arguments for '{name}' command");
        assert_eq!(refused(&["GET"]), text("get"));
        assert_eq!(refused(&["get", "a", "b"]), text("get"));
        assert_eq!(refused(&["client", "kill"]), text("client|kill"));
        assert_eq!(refused(&["object"]), text("object"));
    }

    #[test]
    fn command_itself_needs_no_subcommand() {
        assert_eq!(lookup(&["command"][..]).unwrap().id, Id::Command);
        assert_eq!(refused(&["command", "x"]), "ERR unknown subcommand 'x'. Try COMMAND HELP.");
        assert_eq!(lookup(&["COMMAND", "Count"][..]).unwrap().id, Id::CommandCount);
    }

    #[test]
    fn requests_of_http_are_recognized() {
        assert!(is_http(b"POST") && is_http(b"host:") && !is_http(b"get"));
    }
}
