//! Routes, by rtnetlink.

use std::io;

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::check_int;

/// Every address is this namespace's own, so a connection to any of them arrives here and none leaves.
///
/// Adds a route `local default` through the loopback interface for IPv4 and, where the kernel has it, IPv6, in the
/// network namespace of this thread; what is there already stays. Needs CAP_NET_ADMIN over it.
pub fn everything_local() -> io::Result<()> {
    let socket = netlink()?;
    for family in [libc::AF_INET, libc::AF_INET6] {
        match local_default(&socket, family as u8) {
            Ok(()) => {}
            Err(error) => match error.raw_os_error() {
                Some(libc::EEXIST) => {}
                // Without IPv6 there are no sockets of it either.
                Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT) if family == libc::AF_INET6 => {}
                _ => return Err(error),
            },
        }
    }
    Ok(())
}

/// Takes those routes away again; whether there were any.
pub fn nothing_local() -> io::Result<bool> {
    let socket = netlink()?;
    let mut any = false;
    for family in [libc::AF_INET, libc::AF_INET6] {
        match change(&socket, family as u8, libc::RTM_DELROUTE, 0) {
            Ok(()) => any = true,
            Err(error) => match error.raw_os_error() {
                Some(libc::ESRCH) => {}
                Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT) if family == libc::AF_INET6 => {}
                _ => return Err(error),
            },
        }
    }
    Ok(any)
}

fn netlink() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: plain integers; the new descriptor is ours.
    unsafe {
        let fd = check_int(libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

#[repr(C)]
struct Request {
    head: libc::nlmsghdr,
    family: u8,
    dst_len: u8,
    src_len: u8,
    tos: u8,
    table: u8,
    protocol: u8,
    scope: u8,
    kind: u8,
    flags: u32,
    oif_len: u16,
    oif_type: u16,
    oif: u32,
}

fn local_default(socket: &OwnedFd, family: u8) -> io::Result<()> {
    let new = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
    change(socket, family, libc::RTM_NEWROUTE, new)
}

fn change(socket: &OwnedFd, family: u8, what: u16, flags: i32) -> io::Result<()> {
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags;
    let request = Request {
        head: libc::nlmsghdr {
            nlmsg_len: std::mem::size_of::<Request>() as u32,
            nlmsg_type: what,
            nlmsg_flags: flags as u16,
            nlmsg_seq: 1,
            nlmsg_pid: 0,
        },
        family,
        dst_len: 0,
        src_len: 0,
        tos: 0,
        table: libc::RT_TABLE_LOCAL,
        protocol: libc::RTPROT_STATIC,
        scope: libc::RT_SCOPE_HOST,
        kind: libc::RTN_LOCAL,
        flags: 0,
        oif_len: 8,
        oif_type: libc::RTA_OIF,
        // The loopback interface is the first one of every namespace.
        oif: 1,
    };
    // SAFETY: Request is plain data without padding, read during the call only.
    let sent = unsafe {
        let at = std::ptr::from_ref(&request).cast::<libc::c_void>();
        libc::send(socket.as_raw_fd(), at, std::mem::size_of::<Request>(), 0)
    };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut answer = [0u8; 512];
    let length = rustix::io::retry_on_intr(|| rustix::io::read(socket.as_fd(), &mut answer))?;
    // nlmsghdr (16 bytes, type at 4), then nlmsgerr with the error first.
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    let kind = answer.get(4..6).filter(|_| length >= 20).ok_or_else(bad)?;
    if u16::from_ne_bytes([kind[0], kind[1]]) != libc::NLMSG_ERROR as u16 {
        return Err(bad());
    }
    match i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]) {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}
