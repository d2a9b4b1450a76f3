//! Ports of a sandbox: a client gets a connection to one as a descriptor, and reads and writes it itself.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dsec_launch::plan::{Code, Step};
use dsec_launch::LaunchError;
use dsec_sys::io::send_msg;
use dsec_sys::process;
use serde::Deserialize;

use super::Server;
use crate::proto::{self, Id, Nothing, Reply};
use crate::warning;

/// A listener whose queue is full lets us wait; one that is there answers at once.
const DEADLINE: Duration = Duration::from_secs(5);
/// Connections under way at once, each a thread: more only where listeners do not accept.
const UNDER_WAY_MAX: usize = 256;
/// A program listens on either.
const ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug, Deserialize)]
pub struct DialArgs {
    sandbox: String,
    port: u16,
}

/// One of those under way.
struct Place;

impl Place {
    fn take() -> Result<Self, LaunchError> {
        if UNDER_WAY.fetch_add(1, Ordering::Relaxed) < UNDER_WAY_MAX {
            return Ok(Self);
        }
        drop(Self);
        let text =
            "too many connections to sandboxes are under way, whose listeners do not take them";
        Err(LaunchError::new(Code::Limit, text).with("limit", UNDER_WAY_MAX as i64))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Server {
    /// `dial`. An error is answered to a client; from the handing over on the connection is not one any more.
    pub(super) fn dial(&mut self, client: u64, id: Id, args: &DialArgs) -> Result<(), LaunchError> {
        proto::check_sandbox_id(&args.sandbox)?;
        if args.port == 0 {
            return Err(LaunchError::field("port", "1 to 65535"));
        }
        let sandbox = self.sandbox_index(&args.sandbox)?;
        self.running_place(sandbox)?;
        let init = self.init_fd(sandbox)?;
        let place = Place::take()?;
        let socket = self.hand_over(client)?;
        let port = args.port;
        let work = move || {
            let connected = connected(&init, port);
            drop(init);
            if let Err(error) = answer(&socket, id, connected) {
                warning!("dial.answer", error = error);
            }
            drop(place);
        };
        // A thread of its own: it joins the sandbox's network, and does not come back.
        let made = thread::Builder::new().name("dial".to_owned()).spawn(work);
        made.map(drop).step("dial.thread")
    }
}

/// A connection to what listens on the loopback of a sandbox. Joins its network.
fn connected(init: &Arc<OwnedFd>, port: u16) -> Result<TcpStream, LaunchError> {
    process::setns(init.as_fd(), process::NEW_NET).map_err(|error| {
        // Its init has ended since.
        LaunchError::new(Code::Gone, format!("the sandbox's network: {error}"))
    })?;
    let mut refused = None;
    for address in ADDRESSES {
        match TcpStream::connect_timeout(&SocketAddr::new(address, port), DEADLINE) {
            Ok(stream) => return Ok(stream),
            Err(error) if refused.is_none() => refused = Some(error),
            Err(_) => {}
        }
    }
    Err(refusal(refused.as_ref(), port))
}

fn refusal(error: Option<&io::Error>, port: u16) -> LaunchError {
    let (code, text) = match error.map(io::Error::kind) {
        Some(io::ErrorKind::ConnectionRefused) => {
            (Code::Conflict, "nothing listens on it".to_owned())
        }
        Some(io::ErrorKind::TimedOut) => (
            Code::Deadline,
            "what listens on it accepts nothing".to_owned(),
        ),
        _ => (
            Code::Internal,
            error.map_or_else(String::new, io::Error::to_string),
        ),
    };
    LaunchError::new(code, format!("port {port} of the sandbox: {text}"))
        .with("port", i64::from(port))
}

fn answer(
    socket: &OwnedFd,
    id: Id,
    connected: Result<TcpStream, LaunchError>,
) -> Result<(), LaunchError> {
    let (reply, stream) = match &connected {
        Ok(stream) => (Reply::Ok { id, ok: Nothing {} }, Some(stream)),
        Err(err) => (Reply::Err { id, err }, None),
    };
    let frame = proto::frame(&reply)?;
    let fds: Vec<BorrowedFd<'_>> = stream.iter().map(AsFd::as_fd).collect();
    send_msg(socket.as_fd(), &frame, &fds, true).step("dial.send")
}
