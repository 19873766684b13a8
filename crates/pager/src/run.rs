//! `granary run`: checks, starts the program with the preload library, waits for it, and reports.
//!
//! All preconditions are checked before the program starts: the program exists, its memory can be
//! paged ([`crate::executable`]), SIZE is large enough, userfaultfd is permitted, and the preload
//! library exists.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use crate::Error;
use crate::awake::AwakeThread;
use crate::config::Config;
use crate::execs::{Execs, Reason, WithoutPool};
use crate::executable::{Kind, kind_of};
use crate::node_sockets;
use crate::reaper;
pub use crate::run_directory::RunDirectory;
use crate::stats::Summary;
use crate::strangers::Strangers;
use crate::sys;
use crate::trace_recorder;
use crate::uffd::{Features, Uffd};

/// File name of the preload library.
pub const LIBRARY: &str = "libgranary_preload.so";

/// Variable with which man-db installs no seccomp filter.
const MAN_FILTER: &str = "MAN_DISABLE_SECCOMP";

/// Result of a paged program.
#[derive(Debug)]
pub struct Ended {
    /// Exit status of the program.
    pub status: ExitStatus,
    /// Counters of the program and of all processes that it started.
    pub summary: Summary,
    /// Processes that ran without the pool.
    pub without_pool: WithoutPool,
    /// Fault traces of the processes, if `config.trace` asked for them.
    pub traces: Vec<PathBuf>,
}

impl Ended {
    /// Returns the status in a shell's form: 128 plus the signal number if a signal ended the
    /// program.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| 128 + self.status.signal().unwrap_or(0))
    }
}

/// Runs `program` with `arguments`, paged according to `config`, and waits for it. The program
/// inherits standard input and output.
///
/// # Errors
/// Failures to start the program. A failure of the program itself is reported in [`Ended::status`].
pub fn run(config: &Config, program: &OsStr, arguments: &[OsString]) -> Result<Ended, Error> {
    let directory = RunDirectory::create()?;
    if config.shares_bound {
        directory.create_ledger(config.local_bytes);
    }
    run_in(&directory, config, program, arguments)
}

/// As [`run`], with a directory of the caller for the counters. If the processes share the bound,
/// the directory has a ledger.
pub fn run_in(
    directory: &RunDirectory,
    config: &Config,
    program: &OsStr,
    arguments: &[OsString],
) -> Result<Ended, Error> {
    config.check()?;
    let library = find_library()?;
    let mut with_library = true;
    match check_program(program) {
        Err(Error::Unpaged { program: named, why }) if config.allow_unpaged => {
            sys::say(&format!("{named} runs with unpaged memory (--allow-unpaged): {why}"));
            let kind = kind_of(&resolve(program)?.1).ok().flatten();
            with_library = kind.is_none_or(Kind::runs_with_library);
        }
        checked => checked?,
    }
    drop(Uffd::open(Features::default())?);
    // A core that goes idle only slows faults down.
    let awake = AwakeThread::start().ok().flatten();
    let config = Config {
        run_directory: Some(directory.path().to_owned()),
        run_memory: Some(directory.memory_path()),
        fault_times: awake.as_ref().map(AwakeThread::path),
        ..config.clone()
    };
    let words: Vec<_> = std::iter::once(program)
        .chain(arguments.iter().map(OsString::as_os_str))
        .map(OsStr::to_string_lossy)
        .collect();
    directory.memory().set_program(&words.join(" "));
    let mut command = Command::new(program);
    command.args(arguments).envs(config.to_environment());
    command.env_remove("GRANARY_UNPAGED");
    // Those of an outer run.
    command.env_remove(node_sockets::VARIABLE);
    // The filters of `man` refuse sockets, without which its processes cannot be paged nor fork.
    if std::env::var_os(MAN_FILTER).is_none() {
        command.env(MAN_FILTER, "1");
    }
    if with_library {
        command.env("LD_PRELOAD", preload(&library, std::env::var_os("LD_PRELOAD")));
    }
    let strangers = Some(Strangers::of(directory.memory()));
    let status = reaper::run_to_end(&mut command, config.ends_daemons, config.wait_s, strangers)
        .map_err(|source| Error::System { what: format!("run {}", program.display()), source })?;
    let summary = Summary::read(directory.memory());
    let without_pool = Execs::of(directory.memory()).without_pool();
    let traces = match &config.trace {
        Some(prefix) => trace_recorder::finish(prefix, &directory.processes())?,
        None => Vec::new(),
    };
    Ok(Ended { status, summary, without_pool, traces })
}

/// Builds the value of `LD_PRELOAD`: the preload library first, then the libraries of `before`.
fn preload(library: &Path, before: Option<OsString>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    if let Some(before) = before.filter(|before| !before.is_empty()) {
        value.push(":");
        value.push(before);
    }
    value
}

/// Finds the preload library: at `GRANARY_PRELOAD`, next to this executable, or in the directory's
/// `../lib`.
pub fn find_library() -> Result<PathBuf, Error> {
    let mut looked = Vec::new();
    if let Some(path) = std::env::var_os("GRANARY_PRELOAD") {
        looked.push(PathBuf::from(path));
    } else if let Ok(executable) = std::env::current_exe()
        && let Some(directory) = executable.parent()
    {
        looked.push(directory.join(LIBRARY));
        looked.push(directory.join("../lib").join(LIBRARY));
        // Test executables are one directory further down.
        looked.push(directory.join("..").join(LIBRARY));
    }
    match looked.iter().find(|path| path.is_file()) {
        Some(path) => std::fs::canonicalize(path)
            .map_err(|source| Error::System { what: format!("use {}", path.display()), source }),
        None => {
            let looked: Vec<_> = looked.iter().map(|path| path.display().to_string()).collect();
            Err(Error::NoPreload { looked: looked.join(", ") })
        }
    }
}

/// Resolves `program` to a path as `execvp` does.
fn find_program(program: &OsStr) -> Result<PathBuf, Error> {
    let fail =
        |why: &str| Error::Program { program: program.display().to_string(), why: why.into() };
    let path = Path::new(program);
    if program.as_encoded_bytes().contains(&b'/') {
        return if path.is_file() { Ok(path.into()) } else { Err(fail("no such file")) };
    }
    let search = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    std::env::split_paths(&search)
        .map(|directory| directory.join(path))
        .find(|candidate| {
            let executable = |meta: std::fs::Metadata| meta.permissions().mode() & 0o111 != 0;
            candidate.is_file() && candidate.metadata().is_ok_and(executable)
        })
        .ok_or_else(|| fail("not found in PATH"))
}

/// Finds the executable that runs a program: the program, or the interpreter of its `#!` line.
///
/// # Errors
/// [`Error::Program`] if the program is missing or unreadable.
fn resolve(program: &OsStr) -> Result<(PathBuf, File), Error> {
    let mut path = find_program(program)?;
    let fail = |why: String| Error::Program { program: program.display().to_string(), why };
    for _ in 0..5 {
        let unreadable =
            |error: io::Error| fail(format!("{} cannot be read: {error}", path.display()));
        let file = units::files::open(&path).map_err(unreadable)?;
        let mut head = Vec::new();
        (&file).take(4096).read_to_end(&mut head).map_err(unreadable)?;
        let Some(line) = head.strip_prefix(b"#!") else { return Ok((path, file)) };
        let line = line.split(|&byte| byte == b'\n').next().unwrap_or(line);
        let line = String::from_utf8_lossy(line);
        let mut words = line.split_whitespace();
        let interpreter = words.next().unwrap_or_default().to_string();
        // `#!/usr/bin/env NAME` runs NAME.
        let named = words.find(|word| !word.starts_with('-') && !word.contains('='));
        path = match named {
            Some(name) if interpreter.ends_with("/env") => find_program(OsStr::new(name))?,
            _ => find_program(OsStr::new(&interpreter))?,
        };
    }
    Err(fail("its #! lines lead through more than five interpreters".into()))
}

/// Returns true if the file has more rights than the process that executes it. Then the dynamic
/// linker ignores `LD_PRELOAD`.
fn has_more_rights(file: &File) -> bool {
    const SET_USER: u32 = 0o4000;
    const SET_GROUP: u32 = 0o2010;
    // SAFETY: reads the process's credentials.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let Ok(found) = file.metadata() else { return false };
    let mode = found.mode();
    // SAFETY: a query with a C string, and without a buffer.
    let capabilities = unsafe {
        let name = c"security.capability".as_ptr();
        libc::fgetxattr(std::os::fd::AsRawFd::as_raw_fd(file), name, std::ptr::null_mut(), 0)
    };
    mode & SET_USER != 0 && found.uid() != user
        || mode & SET_GROUP == SET_GROUP && found.gid() != group
        || capabilities > 0 && user != 0
}

/// Returns the reason why a program that has run was not paged.
pub fn why_without_pool(program: &Path, reason: Reason) -> String {
    match reason {
        Reason::Asked => return "GRANARY_UNPAGED=1".into(),
        Reason::Filter => return "its seccomp filter refuses sockets".into(),
        Reason::Tool => return "--allow-unpaged".into(),
        Reason::NotLoaded => {}
    }
    // A path without a directory is not looked up in PATH.
    let asked = Path::new(".").join(program);
    let Ok((path, file)) = resolve(asked.as_os_str()) else { return "its file is gone".into() };
    let obstacle = match kind_of(&file) {
        Ok(Some(kind)) if kind.obstacle().is_some() => kind.obstacle().unwrap_or_default(),
        _ if has_more_rights(&file) => "set-user-ID, or with capabilities",
        _ => "its dynamic linker did not load the preload library",
    };
    if path != asked { format!("{}: {obstacle}", path.display()) } else { obstacle.into() }
}

/// Checks that the program's memory can be paged. Follows `#!` to the interpreter.
///
/// # Errors
/// [`Error::Program`] if the program is missing, unreadable, or built for another kind of machine;
/// [`Error::Unpaged`] if the preload library cannot be loaded into it, or it bypasses libc.
pub fn check_program(program: &OsStr) -> Result<(), Error> {
    let (path, file) = resolve(program)?;
    let named = || program.display().to_string();
    let fail = |why: String| Error::Program { program: named(), why };
    let kind = kind_of(&file)
        .map_err(|error| fail(format!("{} cannot be read: {error}", path.display())))?;
    let path = path.display();
    let Some(kind) = kind else {
        return Err(fail(format!("{path} is neither a program nor a script")));
    };
    let why = match kind {
        Kind::Dynamic if has_more_rights(&file) => {
            "is set-user-ID or has capabilities, so the dynamic linker does not load the preload \
             library; run granary run as the user whose rights it needs"
        }
        Kind::Dynamic => return Ok(()),
        Kind::Static => {
            "is linked statically, so the preload library cannot be loaded into it; use a \
             dynamically linked build"
        }
        Kind::GoWithoutLibc => {
            "is a Go program without cgo, whose runtime maps its memory by raw system calls; build \
             it with CGO_ENABLED=1 and a package that uses cgo, such as net"
        }
        Kind::Musl => {
            "is linked to musl, and the preload library needs glibc; use a build for glibc"
        }
        Kind::Sanitizer => {
            "is built with AddressSanitizer or ThreadSanitizer, which serves malloc itself; use a \
             build without it"
        }
        Kind::Foreign => return Err(fail(format!("{path} is built for another kind of machine"))),
    };
    Err(Error::Unpaged { program: named(), why: format!("{path} {why}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_scripts_are_recognised() {
        check_program(OsStr::new("sh")).unwrap();
        let path = std::env::temp_dir().join(format!("granary-script-{}", std::process::id()));
        std::fs::write(&path, "#!/usr/bin/env sh\necho\n").unwrap();
        check_program(path.as_os_str()).unwrap();
        std::fs::write(&path, "#!/no/such/interpreter\n").unwrap();
        assert!(check_program(path.as_os_str()).is_err());
        std::fs::write(&path, "just text").unwrap();
        let error = check_program(path.as_os_str()).unwrap_err();
        assert!(error.to_string().contains("neither a program nor a script"), "{error}");
        std::fs::remove_file(&path).unwrap();
        let error = check_program(OsStr::new("no-such-program-here")).unwrap_err();
        assert!(error.to_string().contains("PATH"), "{error}");
    }

    #[test]
    fn a_static_program_is_refused() {
        // A minimal ELF header with no program headers.
        let mut elf = vec![0u8; 64];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[18] = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
        elf[54] = 56;
        let path = std::env::temp_dir().join(format!("granary-static-{}", std::process::id()));
        std::fs::write(&path, &elf).unwrap();
        let error = check_program(path.as_os_str()).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        assert!(error.to_string().contains("statically"), "{error}");
    }

    #[test]
    fn existing_ld_preload_is_kept() {
        let library = Path::new("/x/lib.so");
        assert_eq!(preload(library, None), "/x/lib.so");
        assert_eq!(preload(library, Some("/y.so".into())), "/x/lib.so:/y.so");
    }
}
