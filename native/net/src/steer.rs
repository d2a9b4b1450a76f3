//! Makes every connection out of a loopback-only namespace arrive at sockets of ours.
//!
//! All addresses are local to the namespace, so nothing can leave it, whatever is asked for and by which system call;
//! a program at the kernel's socket lookup hands connections to any address but the loopback ones to one listening
//! socket, whose connections tell where they were meant to go (`getsockname`). There is no table to get out of step:
//! without the sockets or the program a connection is refused.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;

use dsec_sys::bpf::{
    attach, Assembler, Helper, SocketMap, When, FRAME, R0, R1, R2, R3, R4, R6, R7, R8, SK_LOOKUP,
};
use dsec_sys::{net, process, route};

/// Where the sockets for questions are bound: in the range for what is thrown away (RFC 6666), and in one for
/// documentation. Whoever binds port 53 of a loopback address does not meet them.
const OWN_6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1);
const OWN_4: Ipv6Addr = Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped();
/// Answers come from this port, so their sockets are bound to it.
pub const DNS_PORT: u16 = 53;
/// Of the listening socket, which is bound to every address: at one of IPv6 it would be for IPv6 alone.
const LISTEN_PORT: u16 = 1;
/// Connections that wait to be taken.
const BACKLOG: i32 = 1024;

/// What is in the map of the program.
const TCP: u32 = 0;
const DNS_4: u32 = 1;
const DNS_6: u32 = 2;
const SOCKETS: u32 = 3;

/// What serves a namespace. Steering ends with the last descriptor of `link`.
#[derive(Debug)]
pub struct Steering {
    pub tcp: OwnedFd,
    /// For IPv4 and for IPv6, both with the addresses of IPv6.
    pub dns: [OwnedFd; 2],
    pub link: OwnedFd,
}

/// Steers a namespace, which is given by itself or by a process in it (a pidfd). Needs CAP_SYS_ADMIN over it and over
/// the machine's programs (CAP_BPF, CAP_NET_ADMIN).
pub fn steer(place: BorrowedFd<'_>) -> io::Result<Steering> {
    // Only a thread of its own can be in another namespace.
    let (netns, tcp, dns) = thread::scope(|scope| {
        let inside = scope.spawn(|| {
            process::setns(place, process::NEW_NET)?;
            let netns = File::open("/proc/thread-self/ns/net")?;
            route::everything_local()?;
            let tcp = net::listen_steered(at(Ipv6Addr::UNSPECIFIED, LISTEN_PORT), BACKLOG)?;
            let four = net::udp_steered(at(OWN_4, DNS_PORT))?;
            let six = net::udp_steered(at(OWN_6, DNS_PORT))?;
            Ok((netns, tcp, [four, six]))
        });
        inside
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("steering ended")))
    })?;
    let sockets = SocketMap::new(SOCKETS, "dsec_steer")?;
    sockets.put(TCP, tcp.as_fd())?;
    sockets.put(DNS_4, dns[0].as_fd())?;
    sockets.put(DNS_6, dns[1].as_fd())?;
    let program = program(&sockets).load_program(&SK_LOOKUP, "dsec_steer")?;
    let link = attach(program.as_fd(), &SK_LOOKUP, netns.as_fd())?;
    Ok(Steering { tcp, dns, link })
}

fn at(address: Ipv6Addr, port: u16) -> SocketAddrV6 {
    SocketAddrV6::new(address, port, 0, 0)
}

/// Why this machine cannot steer, if it cannot. Loads the program, attaches nothing.
pub fn missing() -> Option<String> {
    let loaded = SocketMap::new(SOCKETS, "dsec_probe")
        .and_then(|sockets| program(&sockets).load_program(&SK_LOOKUP, "dsec_probe"));
    let steered = loaded.err().map(|error| format!("BPF sk_lookup: {error}"));
    steered.or_else(|| {
        let bound = net::listen_steered(at(Ipv6Addr::LOCALHOST, 0), 1).err();
        bound.map(|error| format!("sockets of IPv6: {error}"))
    })
}

/// Places in `bpf_sk_lookup` (linux/bpf.h).
const FAMILY_AT: i16 = 8;
const PROTOCOL_AT: i16 = 12;
const LOCAL_IP4_AT: i16 = 40;
const LOCAL_IP6_AT: i16 = 44;
/// In the host's order.
const LOCAL_PORT_AT: i16 = 60;
/// The map's key, below the frame.
const KEY_AT: i16 = -4;

const PASS: i32 = 1;
const DROP: i32 = 0;

fn program(sockets: &SocketMap) -> Assembler<'_> {
    let first_octet = i32::from_ne_bytes([0xff, 0, 0, 0]);
    let loopback = i32::from_ne_bytes([127, 0, 0, 0]);
    let last_word = i32::from_ne_bytes([0, 0, 0, 1]);
    let mut code = Assembler::new();
    // Which of the sockets, should it be a question.
    code.copy(R6, R1)
        .store(FRAME, KEY_AT, DNS_4 as i32)
        .load(R2, R6, FAMILY_AT)
        .go_if(R2, When::Equal, libc::AF_INET6, "ipv6")
        .load(R2, R6, LOCAL_IP4_AT)
        .and(R2, first_octet)
        .go_if(R2, When::Equal, loopback, "own")
        .go("steer");
    code.place("ipv6")
        .store(FRAME, KEY_AT, DNS_6 as i32)
        .load(R2, R6, LOCAL_IP6_AT)
        .load(R3, R6, LOCAL_IP6_AT + 4)
        .load(R4, R6, LOCAL_IP6_AT + 8)
        .or(R2, R3)
        .or(R2, R4)
        .go_if(R2, When::Differs, 0, "steer")
        .load(R2, R6, LOCAL_IP6_AT + 12)
        .go_if(R2, When::Differs, last_word, "steer");
    // Everything there is the sandbox's, but not our socket.
    code.place("own")
        .load(R2, R6, PROTOCOL_AT)
        .go_if(R2, When::Differs, libc::IPPROTO_TCP, "pass")
        .load(R2, R6, LOCAL_PORT_AT)
        .go_if(R2, When::Equal, LISTEN_PORT.into(), "drop")
        .go("pass");
    code.place("steer")
        .load(R2, R6, PROTOCOL_AT)
        .go_if(R2, When::Equal, libc::IPPROTO_TCP, "tcp")
        // Other datagrams find sockets of the sandbox itself, or none.
        .load(R2, R6, LOCAL_PORT_AT)
        .go_if(R2, When::Differs, DNS_PORT.into(), "pass")
        .go("choose");
    code.place("tcp").store(FRAME, KEY_AT, TCP as i32);
    code.place("choose")
        .map(R1, sockets.as_fd())
        .copy(R2, FRAME)
        .add(R2, KEY_AT.into())
        .call(Helper::MapLookup)
        .go_if(R0, When::Equal, 0, "drop")
        .copy(R7, R0)
        .copy(R1, R6)
        .copy(R2, R7)
        .set(R3, 0)
        .call(Helper::SkAssign)
        .copy(R8, R0)
        .copy(R1, R7)
        .call(Helper::SkRelease)
        .go_if(R8, When::Differs, 0, "drop");
    code.place("pass").set(R0, PASS).exit();
    code.place("drop").set(R0, DROP).exit();
    code
}
