//! The loopback interface, and sockets for what was sent to any address.

use std::io;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{check, check_int};

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

/// Addresses of IPv6, and of IPv4 inside them.
const FAMILY: libc::c_int = libc::AF_INET6;

fn socket(kind: libc::c_int) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: plain integers; the new descriptor is ours.
    let fd = unsafe { OwnedFd::from_raw_fd(check_int(libc::socket(FAMILY, kind | flags, 0))?) };
    set_option(&fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0)?;
    // It may be bound to, and answer from, an address that no interface has.
    set_option(&fd, libc::IPPROTO_IPV6, libc::IPV6_FREEBIND, 1)?;
    Ok(fd)
}

fn set_option(fd: &OwnedFd, level: i32, name: i32, value: libc::c_int) -> io::Result<()> {
    let at = std::ptr::from_ref(&value).cast();
    let length = std::mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value lives through the call and its size is passed along.
    check_int(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, at, length) }).map(drop)
}

fn bind(fd: &OwnedFd, address: SocketAddrV6) -> io::Result<()> {
    let raw = raw_address(address);
    let length = std::mem::size_of_val(&raw) as libc::socklen_t;
    // SAFETY: the address lives through the call and its size is passed along.
    check_int(unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&raw).cast(), length) })
        .map(drop)
}

fn raw_address(address: SocketAddrV6) -> libc::sockaddr_in6 {
    libc::sockaddr_in6 {
        sin6_family: FAMILY as libc::sa_family_t,
        sin6_port: address.port().to_be(),
        sin6_flowinfo: 0,
        sin6_addr: libc::in6_addr {
            s6_addr: address.ip().octets(),
        },
        sin6_scope_id: address.scope_id(),
    }
}

/// A listening socket for whatever is steered to it, of both families if it is bound to all addresses. Not blocking.
pub fn listen_steered(address: SocketAddrV6, backlog: i32) -> io::Result<OwnedFd> {
    let fd = socket(libc::SOCK_STREAM)?;
    bind(&fd, address)?;
    // SAFETY: plain integers.
    check_int(unsafe { libc::listen(fd.as_raw_fd(), backlog) })?;
    Ok(fd)
}

/// The same for datagrams, whose destinations are told; [`udp_receive`] and [`udp_send`] are for it.
pub fn udp_steered(address: SocketAddrV6) -> io::Result<OwnedFd> {
    let fd = socket(libc::SOCK_DGRAM)?;
    set_option(&fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
    // Servers that ask for the same can bind the port at all addresses.
    set_option(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    bind(&fd, address)?;
    Ok(fd)
}

/// A datagram that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram {
    pub length: usize,
    pub from: SocketAddrV6,
    /// Where it was sent to.
    pub to: Ipv6Addr,
}

/// Room for one `in6_pktinfo`, aligned as the kernel writes it.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Receives one datagram; WouldBlock when there is none. Longer ones than the buffer are cut.
pub fn udp_receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Datagram> {
    let mut control = Control([0; 64]);
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    // SAFETY: all of it is plain data for which zero is valid; the message's pointers are to what lives through the
    // call, with their lengths. The kernel fills control messages that the macros then walk within msg_controllen.
    unsafe {
        let mut from: libc::sockaddr_in6 = std::mem::zeroed();
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_name = std::ptr::from_mut(&mut from).cast();
        message.msg_namelen = std::mem::size_of_val(&from) as libc::socklen_t;
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = std::ptr::from_mut(&mut control).cast();
        message.msg_controllen = std::mem::size_of::<Control>() as _;
        let length = check(libc::recvmsg(fd.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) as _)?;
        let mut to = None;
        let mut head = libc::CMSG_FIRSTHDR(&message);
        while !head.is_null() {
            let kind = ((*head).cmsg_level, (*head).cmsg_type);
            if kind == (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) {
                let info: libc::in6_pktinfo = libc::CMSG_DATA(head)
                    .cast::<libc::in6_pktinfo>()
                    .read_unaligned();
                to = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr));
            }
            head = libc::CMSG_NXTHDR(&message, head);
        }
        let address = Ipv6Addr::from(from.sin6_addr.s6_addr);
        let port = u16::from_be(from.sin6_port);
        Ok(Datagram {
            length: length as usize,
            from: SocketAddrV6::new(address, port, 0, from.sin6_scope_id),
            to: to.ok_or(io::ErrorKind::InvalidData)?,
        })
    }
}

/// Sends one datagram as if from `from`; never waits.
pub fn udp_send(
    fd: BorrowedFd<'_>,
    data: &[u8],
    to: SocketAddrV6,
    from: Ipv6Addr,
) -> io::Result<()> {
    let mut control = Control([0; 64]);
    let raw = raw_address(to);
    let mut part = libc::iovec {
        iov_base: data.as_ptr().cast_mut().cast(),
        iov_len: data.len(),
    };
    let info = libc::in6_pktinfo {
        ipi6_addr: libc::in6_addr {
            s6_addr: from.octets(),
        },
        ipi6_ifindex: 0,
    };
    let size = std::mem::size_of_val(&info) as u32;
    // SAFETY: as in `udp_receive`; the control buffer has room for the one message that is written into it, and
    // nothing is written through the pointers to constants.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_name = std::ptr::from_ref(&raw).cast_mut().cast();
        message.msg_namelen = std::mem::size_of_val(&raw) as libc::socklen_t;
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = std::ptr::from_mut(&mut control).cast();
        message.msg_controllen = libc::CMSG_SPACE(size) as _;
        let head = libc::CMSG_FIRSTHDR(&message);
        (*head).cmsg_level = libc::IPPROTO_IPV6;
        (*head).cmsg_type = libc::IPV6_PKTINFO;
        (*head).cmsg_len = libc::CMSG_LEN(size) as _;
        libc::CMSG_DATA(head)
            .cast::<libc::in6_pktinfo>()
            .write_unaligned(info);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        check(libc::sendmsg(fd.as_raw_fd(), &message, flags) as _).map(drop)
    }
}
