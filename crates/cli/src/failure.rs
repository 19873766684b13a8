//! The text of an error that ends a command.

use std::io;

use units::Size;

/// Returns an error with its causes, each once, and with the next step where only the system's
/// limits tell it.
pub fn text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        // Many errors name their cause themselves, because programs print them without causes.
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    let is_too_large = |cause: &(dyn std::error::Error + 'static)| {
        let number = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        number == Some(libc::EFBIG)
    };
    if error.chain().any(is_too_large)
        && let Some(limit) = file_size_limit()
    {
        text += &format!(
            "; this process may make files of at most {} (ulimit -f), and shared memory counts as \
             a file: raise the limit, for example by ulimit -f unlimited",
            Size(limit)
        );
    }
    text
}

/// The limit of a file's size, if there is one.
fn file_size_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(number: i32) -> pool::Error {
        let source = io::Error::from_raw_os_error(number);
        pool::Error::System { attempt: "mapping memory".into(), source }
    }

    #[test]
    fn each_cause_is_named_once() {
        let error = anyhow::Error::from(refused(libc::ENOMEM)).context("start a memory node");
        assert_eq!(
            text(&error),
            "start a memory node: mapping memory: Cannot allocate memory (os error 12)"
        );
    }
}
