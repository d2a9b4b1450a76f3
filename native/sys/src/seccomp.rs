//! Installing a seccomp program.

use std::io;

use crate::check;

/// One instruction of classic BPF.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    pub code: u16,
    pub jt: u8,
    pub jf: u8,
    pub k: u32,
}

#[repr(C)]
struct Program {
    len: u16,
    filter: *const Instruction,
}

/// The longest program the kernel takes.
pub const MAX_INSTRUCTIONS: usize = 4096;

/// Filters this process from now on. Needs CAP_SYS_ADMIN in its user namespace or no_new_privs.
pub fn install(program: &[Instruction]) -> io::Result<()> {
    if program.is_empty() || program.len() > MAX_INSTRUCTIONS {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let program = Program {
        len: program.len() as u16,
        filter: program.as_ptr(),
    };
    // SAFETY: the kernel copies the program during the call. Instruction has sock_filter's layout.
    check(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
            &program,
        )
    })
    .map(drop)
}
