//! The two requests of a terminal's master that rustix has not got without paths.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::check_int;

/// Its slave may be opened from now on.
pub fn unlock(master: BorrowedFd<'_>) -> io::Result<()> {
    let zero: libc::c_int = 0;
    // SAFETY: the request reads one int, which lives until it returns.
    check_int(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &zero) })?;
    Ok(())
}

/// Opens the slave without a path; it does not become the controlling terminal by that.
pub fn slave(master: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the argument is a number, no memory is touched.
    let fd = check_int(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) })?;
    // SAFETY: the descriptor was just made, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Those that can be sent through a master.
pub const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGQUIT, libc::SIGTSTP];

/// Sends one to the processes in front, as a key would.
pub fn signal(master: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: the argument is a number, no memory is touched.
    check_int(unsafe { libc::ioctl(master.as_raw_fd(), TIOCSIG, signal) })?;
    Ok(())
}

/// Of the kernel's asm-generic/ioctls.h: libc has no name for it.
const TIOCSIG: libc::c_ulong = 0x4004_5436;
