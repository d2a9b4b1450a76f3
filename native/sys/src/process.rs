//! Cloning, namespaces, exec and the like.

use std::ffi::{CStr, CString};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use crate::{check, check_int};

pub const NEW_USER: u64 = libc::CLONE_NEWUSER as u64;
pub const NEW_PID: u64 = libc::CLONE_NEWPID as u64;
pub const NEW_NS: u64 = libc::CLONE_NEWNS as u64;
pub const NEW_UTS: u64 = libc::CLONE_NEWUTS as u64;
pub const NEW_IPC: u64 = libc::CLONE_NEWIPC as u64;
pub const NEW_NET: u64 = libc::CLONE_NEWNET as u64;
pub const NEW_CGROUP: u64 = libc::CLONE_NEWCGROUP as u64;
/// Only for `unshare`: root and working directory of this thread become its own.
pub const OWN_FS: u64 = libc::CLONE_FS as u64;

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Proof that the process has one thread, so that a clone without exec may run any code.
#[derive(Debug)]
pub struct SingleThreaded(PhantomData<*const ()>);

impl SingleThreaded {
    /// Counts the threads. Whoever holds the proof starts no thread afterwards.
    pub fn prove() -> io::Result<Self> {
        let tasks = std::fs::read_dir("/proc/self/task")?.count();
        if tasks == 1 {
            Ok(Self(PhantomData))
        } else {
            Err(io::Error::from_raw_os_error(libc::EBUSY))
        }
    }
}

/// What to clone.
#[derive(Debug, Clone, Copy, Default)]
pub struct CloneSpec<'a> {
    /// `NEW_*`.
    pub namespaces: u64,
    /// The child's parent is ours: it outlives us as a child of whoever started us.
    pub sibling: bool,
    /// A cgroup v2 directory the child is born in.
    pub cgroup: Option<BorrowedFd<'a>>,
}

/// The two returns of a clone.
#[derive(Debug)]
pub enum Cloned {
    Parent { pid: i32, pidfd: OwnedFd },
    Child,
}

/// `clone3` with the semantics of fork (memory is copied on write, nothing shared).
pub fn clone(_proof: &SingleThreaded, spec: &CloneSpec<'_>) -> io::Result<Cloned> {
    let mut pidfd: RawFd = -1;
    // SAFETY: clone_args is plain integers, for which zero is valid.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = spec.namespaces | libc::CLONE_PIDFD as u64;
    args.pidfd = ptr::from_mut(&mut pidfd) as u64;
    if spec.sibling {
        // With CLONE_PARENT the exit signal is the caller's own; naming one is EINVAL.
        args.flags |= libc::CLONE_PARENT as u64;
    } else {
        args.exit_signal = libc::SIGCHLD as u64;
    }
    if let Some(cgroup) = spec.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: no stack and no CLONE_VM: the child gets a copy of everything, as with fork; the
    // proof says no other thread could hold a lock.
    let pid = check(unsafe {
        libc::syscall(
            libc::SYS_clone3,
            ptr::from_mut(&mut args),
            std::mem::size_of::<libc::clone_args>(),
        )
    })?;
    if pid == 0 {
        return Ok(Cloned::Child);
    }
    // SAFETY: the kernel just gave us this descriptor.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Cloned::Parent {
        pid: pid as i32,
        pidfd,
    })
}

/// Joins the namespaces `which` of a process (pidfd) or of a namespace file.
pub fn setns(fd: BorrowedFd<'_>, which: u64) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check_int(unsafe { libc::setns(fd.as_raw_fd(), which as libc::c_int) }).map(drop)
}

/// `PIDFD_GET_NET_NAMESPACE` of linux/pidfd.h (6.11).
const PIDFD_GET_NET_NAMESPACE: u64 = 0xff04;

/// The network namespace of a live process.
pub fn net_namespace(pidfd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: the request takes no argument and returns a new descriptor, which is ours.
    unsafe {
        let fd = check_int(libc::ioctl(
            pidfd.as_raw_fd(),
            PIDFD_GET_NET_NAMESPACE as _,
            0,
        ))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// `PIDFD_GET_USER_NAMESPACE` of linux/pidfd.h (6.11).
const PIDFD_GET_USER_NAMESPACE: u64 = 0xff09;

/// The user namespace of a live process.
pub fn user_namespace(pidfd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: the request takes no argument and returns a new descriptor, which is ours.
    unsafe {
        let fd = check_int(libc::ioctl(
            pidfd.as_raw_fd(),
            PIDFD_GET_USER_NAMESPACE as _,
            0,
        ))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Moves this thread into new namespaces. With `NEW_USER` only for single-threaded processes.
pub fn unshare(which: u64) -> io::Result<()> {
    // SAFETY: no memory is passed; CLONE_FILES, which could surprise other code, is not offered.
    check_int(unsafe { libc::unshare((which & !(libc::CLONE_FILES as u64)) as libc::c_int) })
        .map(drop)
}

/// Ends at once: no destructors, no exit handlers.
pub fn exit(code: i32) -> ! {
    // SAFETY: never returns.
    unsafe { libc::_exit(code) }
}

/// Makes `fd` the descriptor `target`, open across exec; what was there is closed.
pub fn dup_to(fd: BorrowedFd<'_>, target: RawFd) -> io::Result<()> {
    if fd.as_raw_fd() == target {
        // dup2 to itself would leave close-on-exec as it is.
        // SAFETY: plain integers.
        return check_int(unsafe { libc::fcntl(target, libc::F_SETFD, 0) }).map(drop);
    }
    // SAFETY: plain integers. The caller owns the number `target`.
    check_int(unsafe { libc::dup3(fd.as_raw_fd(), target, 0) }).map(drop)
}

/// Copies `fd` to the lowest free number that is at least `min`, close-on-exec.
pub fn dup_above(fd: BorrowedFd<'_>, min: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: plain integers; the result is a new descriptor.
    unsafe {
        let new = check_int(libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, min))?;
        Ok(OwnedFd::from_raw_fd(new))
    }
}

/// Closes every descriptor that is not in `keep` (sorted or not). Only for a process that uses none
/// of the others again, an init or a run.
pub fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<u32> = keep.iter().map(|fd| *fd as u32).collect();
    keep.sort_unstable();
    let mut first = 0u32;
    for fd in keep {
        if fd > first {
            close_range(first, fd - 1)?;
        }
        first = fd + 1;
    }
    close_range(first, u32::MAX)
}

fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: plain integers.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).map(drop)
}

/// `execve`; returns only the error.
pub fn exec(path: &CStr, argv: &[CString], env: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
        let mut all: Vec<_> = list.iter().map(|s| s.as_ptr()).collect();
        all.push(ptr::null());
        all
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: both arrays end with a null pointer and outlive the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Every signal back to its default action, none blocked: what a program expects at its start.
pub fn reset_signals() {
    // The kernel's own call: the library's refuses the two signals it keeps for itself (32 and 33), and
    // ignored ones would stay ignored in the program. A structure of zeros is SIG_DFL without flags.
    let default = [0u64; 4];
    let mask_bytes = std::mem::size_of::<u64>();
    // SAFETY: the kernel's structure is a pointer, flags, a pointer and a mask of 64 bits.
    unsafe {
        for signal in 1..=libc::SIGRTMAX() {
            // Refused for SIGKILL and SIGSTOP, which cannot be ignored.
            let old = ptr::null_mut::<u64>();
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                old,
                mask_bytes,
            );
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
    }
}

/// Ignores a signal: what it would have told is told by the call that failed.
pub fn ignore_signal(signal: i32) {
    // SAFETY: a constant, no handler.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

/// Blocks every signal; for an init, which takes SIGCHLD by `reap_forever`.
pub fn block_signals() {
    // SAFETY: valid structures.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &all, ptr::null_mut());
    }
}

/// The life of an init: reap, sleep until the next child ended.
pub fn reap_forever() -> ! {
    // SAFETY: valid structures; waitpid without a status pointer.
    unsafe {
        let mut child: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut child);
        libc::sigaddset(&mut child, libc::SIGCHLD);
        loop {
            while libc::waitpid(-1, ptr::null_mut(), libc::WNOHANG) > 0 {}
            libc::sigwaitinfo(&child, ptr::null_mut());
        }
    }
}

/// Waits for a child by its pidfd and reaps it; `Ok(None)` after `timeout_ms`.
pub fn reap(pidfd: BorrowedFd<'_>, timeout_ms: i32) -> io::Result<Option<(i32, i32)>> {
    let mut poll = libc::pollfd {
        fd: pidfd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd; siginfo is written by the kernel before it is read.
    unsafe {
        if check_int(libc::poll(&mut poll, 1, timeout_ms))? == 0 {
            return Ok(None);
        }
        let mut info: libc::siginfo_t = std::mem::zeroed();
        check_int(libc::waitid(
            libc::P_PIDFD,
            pidfd.as_raw_fd() as libc::id_t,
            &mut info,
            libc::WEXITED,
        ))?;
        Ok(Some((info.si_code, info.si_status())))
    }
}

/// A signal to a process that cannot be mistaken for another.
pub fn signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: a null siginfo is allowed.
    check(unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal,
            ptr::null::<libc::siginfo_t>(),
            0,
        )
    })
    .map(drop)
}

/// SIGKILL to ourselves, for failpoints.
pub fn kill_self() -> ! {
    // SAFETY: plain integers.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    exit(137)
}

/// Sets a resource limit, both values.
pub fn set_limit(resource: u32, value: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: value,
        rlim_max: value,
    };
    // SAFETY: a valid structure.
    check_int(unsafe { libc::setrlimit(resource as _, &limit) }).map(drop)
}

/// Soft and hard value of a resource limit.
pub fn get_limit(resource: u32) -> io::Result<(u64, u64)> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a valid structure.
    check_int(unsafe { libc::getrlimit(resource as _, &mut limit) })?;
    Ok((limit.rlim_cur, limit.rlim_max))
}

pub const LIMIT_NOFILE: u32 = libc::RLIMIT_NOFILE;
pub const LIMIT_CORE: u32 = libc::RLIMIT_CORE;
pub const LIMIT_STACK: u32 = libc::RLIMIT_STACK;

/// Restricts this thread to some CPUs.
pub fn set_affinity(cpus: &[u32]) -> io::Result<()> {
    // SAFETY: a zeroed set is empty; CPU_SET bounds the index.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for cpu in cpus {
            if *cpu as usize >= 8 * std::mem::size_of::<libc::cpu_set_t>() {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            libc::CPU_SET(*cpu as usize, &mut set);
        }
        check_int(libc::sched_setaffinity(
            0,
            std::mem::size_of::<libc::cpu_set_t>(),
            &set,
        ))
        .map(drop)
    }
}

/// Sets the nice value of this process.
pub fn set_nice(nice: i32) -> io::Result<()> {
    // SAFETY: plain integers.
    check_int(unsafe { libc::setpriority(libc::PRIO_PROCESS as _, 0, nice) }).map(drop)
}

/// Sets the name shown by `ps`; at most 15 bytes.
pub fn set_name(name: &CStr) -> io::Result<()> {
    // SAFETY: a valid string.
    check_int(unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr(), 0, 0, 0) }).map(drop)
}

/// Nobody below CAP_SYS_PTRACE in the initial user namespace may look into this process.
pub fn set_undumpable() -> io::Result<()> {
    // SAFETY: plain integers.
    check_int(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }).map(drop)
}

/// As the C library learnt it at the start. rustix would ask the kernel, which tells it only since 6.4, or
/// read /proc/self/auxv, which an init may not: it would panic there.
pub fn page_size() -> u64 {
    // SAFETY: a plain integer. It cannot fail: the value is always known.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

/// Gives freed heap back: an init lives as long as its sandbox and copies every page it dirties.
pub fn trim_heap() {
    // SAFETY: no memory of ours is involved.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_signal_is_reset() {
        // As a program inherits them from whoever ignored them with the kernel's own call.
        let ignore = [libc::SIG_IGN as u64, 0, 0, 0];
        for signal in [libc::SIGUSR1, 32, 33, libc::SIGRTMAX()] {
            let old = ptr::null_mut::<u64>();
            // SAFETY: as in `reset_signals`.
            let done = unsafe {
                libc::syscall(libc::SYS_rt_sigaction, signal, ignore.as_ptr(), old, 8usize)
            };
            assert_eq!(done, 0, "{signal}");
        }
        reset_signals();
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("status");
        let of = |name: &str| {
            let mut lines = status.lines().filter_map(|line| line.strip_prefix(name));
            lines.next().map(|value| value.trim().to_owned())
        };
        let none = Some("0".repeat(16));
        assert_eq!((of("SigIgn:"), of("SigBlk:")), (none.clone(), none));
    }
}
