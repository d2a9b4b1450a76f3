//! The process of a node that serves its sandboxes, as a program.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

use crate::confine::confine;
use crate::server::{Server, Switches};
use crate::steer;

/// Control connections that wait.
const BACKLOG: i32 = 16;
/// Nobody.
const UID: u32 = 65534;
/// What is off, for tests.
const DISABLE: &str = "DSEC_NATIVE_DISABLE";

pub const USAGE: &str = "\
serve --socket PATH [--uid N]   serves the connections of sandboxes
probe                           why connections cannot be steered here, if they cannot
";

/// Does what the words say, for ever if they say `serve`; `None`: they say nothing.
pub fn run(words: &[&str]) -> Option<io::Result<()>> {
    match words {
        ["serve", rest @ ..] => options(rest).map(|(socket, uid)| serve(&socket, uid)),
        ["probe"] => Some(steer::missing().map_or(Ok(()), |why| Err(io::Error::other(why)))),
        _ => None,
    }
}

fn options(mut words: &[&str]) -> Option<(PathBuf, u32)> {
    let mut socket = None;
    let mut uid = UID;
    while let [name, value, rest @ ..] = words {
        match *name {
            "--socket" => socket = Some(PathBuf::from(value)),
            "--uid" => uid = value.parse().ok()?,
            _ => return None,
        }
        words = rest;
    }
    socket
        .filter(|_| words.is_empty())
        .map(|socket| (socket, uid))
}

fn serve(path: &Path, uid: u32) -> io::Result<()> {
    // Before it has a name anybody else could open.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    let limit = getrlimit(Resource::Nofile).maximum;
    let both = Rlimit {
        current: limit,
        maximum: limit,
    };
    setrlimit(Resource::Nofile, both)?;
    let off = std::env::var(DISABLE).unwrap_or_default();
    let mut server = Server::new(socket, Switches::without(&off))?;
    // After everything that needs a right, before anything of a sandbox.
    confine(uid)?;
    println!("ready");
    io::stdout().flush()?;
    server.run()
}
