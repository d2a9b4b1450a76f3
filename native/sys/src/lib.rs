//! Every system call of the project that needs `unsafe`, behind safe functions.
//!
//! What rustix offers safely is called from the other crates directly; here is the rest.
#![allow(unsafe_code)] // the one crate that may: see the workspace lints

pub mod block;
pub mod bpf;
pub mod btrfs;
pub mod cred;
pub mod io;
pub mod mount;
pub mod net;
pub mod packet;
pub mod process;
pub mod quota;
pub mod route;
pub mod seccomp;
pub mod terminal;

/// Turns the -1/errno convention into a `Result`.
pub(crate) fn check(result: libc::c_long) -> std::io::Result<libc::c_long> {
    if result < 0 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

pub(crate) fn check_int(result: libc::c_int) -> std::io::Result<libc::c_int> {
    if result < 0 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
