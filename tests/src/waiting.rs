//! A paged program that has filled its memory, waits, and then checks it.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::pager::{Scratch, library};

/// A waiting program. Its lines of text contain [`SECRET`].
pub struct Waiting(Child);

/// Text on each line of the program's memory.
pub const SECRET: &[u8] = b"a secret of the program's";

/// Compiles the program.
pub fn compile(scratch: &Scratch) -> PathBuf {
    scratch.compile("fsize", include_str!("../tests/pager_programs/fsize.c"))
}

impl Waiting {
    /// Starts the program with these settings, and waits until its memory is filled.
    pub fn start(program: PathBuf, config: &pager::Config) -> Self {
        let mut child = Command::new(program)
            .arg("waits")
            .envs(config.to_environment())
            .env("LD_PRELOAD", library())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut line = String::new();
        let stdout = child.stdout.as_mut().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        assert_eq!(line, "filled\n");
        Self(child)
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Lets the program check its memory. Returns its exit code, standard output and standard
    /// error.
    pub fn check_memory(mut self) -> (Option<i32>, String, String) {
        self.0.stdin.take().expect("piped").write_all(b"\n").expect("the program waits");
        let output = self.0.wait_with_output().expect("the program is a child");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    }
}
