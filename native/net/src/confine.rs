//! What the process gives up before it hears anything of a sandbox.

use std::io;

use dsec_sys::cred;
use dsec_sys::seccomp::{install, Instruction};
use rustix::process::{getppid, set_parent_process_death_signal, Pid, Signal};

const LOAD: u16 = 0x20;
const IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
const NUMBER_AT: u32 = 0;
const ARCH_AT: u32 = 4;
const ALLOW: u32 = 0x7fff_0000;
const KILL: u32 = 0x8000_0000;
const NOT_PERMITTED: u32 = 0x0005_0000 | libc::EPERM as u32;

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// All that the loop calls, and what Rust's memory and its end need. No file is opened, nothing is started.
const CALLS: &[libc::c_long] = &[
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_close,
    libc::SYS_connect,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_ioctl,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_memfd_create,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_socket,
    libc::SYS_statx,
    libc::SYS_write,
    libc::SYS_writev,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
];

/// Becomes a user without any right, for good: no capability, no other program, no file. With a parent it ends when that
/// one does.
pub fn confine(uid: u32, parent: Option<Pid>) -> io::Result<()> {
    cred::bound_caps(0)?;
    cred::set_groups(&[])?;
    cred::set_ids(uid, uid)?;
    cred::set_caps(0, 0)?;
    cred::no_new_privs()?;
    if parent.is_some() {
        // Not before: the kernel forgets it with each change of rights.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != parent {
            return Err(io::Error::other("whoever started it has ended"));
        }
    }
    install(&filter())
}

fn filter() -> Vec<Instruction> {
    let op = |code, jt, jf, k| Instruction { code, jt, jf, k };
    let mut program = vec![
        op(LOAD, 0, 0, ARCH_AT),
        op(IF_EQUAL, 1, 0, ARCH),
        op(RETURN, 0, 0, KILL),
        op(LOAD, 0, 0, NUMBER_AT),
    ];
    for number in CALLS {
        program.push(op(IF_EQUAL, 0, 1, *number as u32));
        program.push(op(RETURN, 0, 0, ALLOW));
    }
    program.push(op(RETURN, 0, 0, NOT_PERMITTED));
    program
}
