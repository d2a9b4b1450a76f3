//! The loopback interface.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::check_int;

/// Brings `lo` up in the network namespace of this thread.
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: the socket is ours; ifreq is plain data, zero is valid, and lives through the call.
    unsafe {
        let socket = OwnedFd::from_raw_fd(check_int(libc::socket(
            libc::AF_INET,
            libc::SOCK_DGRAM | libc::SOCK_CLOEXEC,
            0,
        ))?);
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        check_int(libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS as _,
            &request,
        ))
        .map(drop)
    }
}
