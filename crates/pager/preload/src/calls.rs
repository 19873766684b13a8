//! Interposes `syscall`, on x86-64: to detect a seccomp filter for all threads, and for the system
//! calls of [`crate::unpinned`], [`crate::credentials`], [`crate::exec`] and [`crate::clones`].
//!
//! A program's filter with `SECCOMP_FILTER_FLAG_TSYNC` also applies to the pager's threads, which
//! need system calls that no program's filter expects (`ioctl` on a userfaultfd). The kernel would
//! kill these threads, and the program would wait for its pages forever. So the process ends before
//! the filter is installed, with the reason. The C library has no function for this system call;
//! programs and libseccomp use `syscall`. A filter for one thread (`prctl`) does not harm.

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::ffi::c_long;

    use pager::config::EXIT_PAGER;
    use pager::sys::{self, system_call};

    use crate::reentrancy::ReentrancyGuard;
    use crate::{clones, credentials, early, exec, unpinned};

    /// syscall(2). Calls no other function unless the system call is interposed or fails. So this
    /// function also works before the library is relocated, and where the system call returns on
    /// another stack.
    ///
    /// # Safety
    /// As in C.
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn syscall(number: c_long) -> c_long {
        core::arch::naked_asm!(
            "mov rax, rdi",
            "mov rdi, rsi",
            "mov rsi, rdx",
            "mov rdx, rcx",
            "mov rcx, r8",
            "mov r8, r9",
            // The arguments are now those of a function for this system call.
            "cmp rax, {seccomp}",
            "je {filter}",
            "cmp rax, {vmsplice}",
            "je {copy}",
            "cmp rax, {setsockopt}",
            "je {option}",
            "cmp rax, {execve}",
            "je {program}",
            "cmp rax, {execveat}",
            "je {program_at}",
            "cmp rax, {capset}",
            "je 3f",
            "cmp rax, {prctl}",
            "je 3f",
            "cmp rax, {setuid}",
            "je 3f",
            "cmp rax, {setgid}",
            "je 3f",
            "cmp rax, {setreuid}",
            "je 3f",
            "cmp rax, {setregid}",
            "je 3f",
            "cmp rax, {setresuid}",
            "je 3f",
            "cmp rax, {setresgid}",
            "je 3f",
            "cmp rax, {setgroups}",
            "je 3f",
            "cmp rax, {fork}",
            "je {forks}",
            "cmp rax, {clone}",
            "je 4f",
            "cmp rax, {clone3}",
            "je 5f",
            "6:",
            "mov r10, rcx",
            "mov r9, [rsp + 8]",
            "syscall",
            "cmp rax, -4095",
            "jae 2f",
            "ret",
            "2:",
            "mov rdi, rax",
            "jmp {failed}",
            "3:",
            "mov r9, rax",
            "jmp {credentials}",
            // A child that shares its parent's memory, or begins on another stack, returns from
            // this function itself.
            "4:",
            "test edi, {shares}",
            "jnz 6b",
            "test rsi, rsi",
            "jnz 6b",
            "jmp {clones}",
            "5:",
            "test rdi, rdi",
            "jz 6b",
            "cmp rsi, {arguments}",
            "jb 6b",
            "test dword ptr [rdi], {shares}",
            "jnz 6b",
            "cmp qword ptr [rdi + {stack}], 0",
            "jne 6b",
            "jmp {clones3}",
            seccomp = const libc::SYS_seccomp,
            vmsplice = const libc::SYS_vmsplice,
            setsockopt = const libc::SYS_setsockopt,
            execve = const libc::SYS_execve,
            execveat = const libc::SYS_execveat,
            capset = const libc::SYS_capset,
            prctl = const libc::SYS_prctl,
            setuid = const libc::SYS_setuid,
            setgid = const libc::SYS_setgid,
            setreuid = const libc::SYS_setreuid,
            setregid = const libc::SYS_setregid,
            setresuid = const libc::SYS_setresuid,
            setresgid = const libc::SYS_setresgid,
            setgroups = const libc::SYS_setgroups,
            fork = const libc::SYS_fork,
            clone = const libc::SYS_clone,
            clone3 = const libc::SYS_clone3,
            shares = const libc::CLONE_VM,
            arguments = const clones::ARGUMENTS_BYTES,
            stack = const clones::STACK_OFFSET,
            failed = sym failed,
            filter = sym seccomp,
            copy = sym unpinned::vmsplice_by_number,
            option = sym unpinned::setsockopt_by_number,
            program = sym exec::execve_by_number,
            program_at = sym exec::execveat_by_number,
            credentials = sym credentials::by_number,
            forks = sym clones::fork_by_number,
            clones = sym clones::clone_by_number,
            clones3 = sym clones::clone3_by_number,
        )
    }

    /// Sets `errno` to a negated error number.
    extern "C" fn failed(result: c_long) -> c_long {
        early::set_errno(-result as i32);
        -1
    }

    /// seccomp(2).
    ///
    /// # Safety
    /// As for the system call.
    unsafe extern "C" fn seccomp(operation: usize, flags: usize, filter: usize) -> c_long {
        const TSYNC: usize = 1;
        let for_all = operation == libc::SECCOMP_SET_MODE_FILTER as usize && flags & TSYNC != 0;
        // Without a filter, the call only asks whether the kernel knows the flag (libseccomp).
        if for_all
            && filter != 0
            && let Some(pager) = crate::pager()
        {
            let _guard = ReentrancyGuard::new();
            refuse(pager.allows_unpaged());
        }
        // SAFETY: by the caller.
        match unsafe { system_call(libc::SYS_seccomp, [operation, flags, filter, 0, 0, 0]) } {
            Ok(result) => result as c_long,
            Err(errno) => failed(-c_long::from(errno)),
        }
    }

    /// Ends the process, or only prints a warning if the user wants it to go on.
    fn refuse(allowed: bool) {
        let id = std::process::id();
        let why = "installs a seccomp filter for all of its threads (TSYNC), which would also \
                   apply to the pager's threads and kill them";
        if allowed {
            return sys::say(&format!(
                "process {id} {why} unless the filter allows their system calls; it goes on, as \
                 --allow-unpaged says. If it hangs now, run it without Granary"
            ));
        }
        sys::die(
            EXIT_PAGER,
            &format!(
                "process {id} {why}, so the process ends now (status {EXIT_PAGER}). Start the \
                 program without its sandbox (browsers: --no-sandbox), or with --allow-unpaged if \
                 the filter allows read, ioctl, futex, madvise, mprotect, mmap and munmap"
            ),
        );
    }
}
