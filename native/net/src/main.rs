//! `dsec-net`: serves the connections of a node's sandboxes, see the library.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use dsec_net::confine::confine;
use dsec_net::server::{Server, Switches};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

const USAGE: &str = "\
usage: dsec-net serve --socket PATH [--uid N]
       dsec-net probe                        why connections cannot be steered here, if they cannot
OPTIONS
  --socket PATH  where it is told what to do; made, a dead one replaced
  --uid N        what it runs as (65534)
";
/// Control connections that wait.
const BACKLOG: i32 = 16;
/// Nobody.
const UID: u32 = 65534;
/// What is off, for tests.
const DISABLE: &str = "DSEC_NATIVE_DISABLE";

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let words: Vec<&str> = args.iter().filter_map(|arg| arg.to_str()).collect();
    let result = match words[..] {
        ["serve", ref rest @ ..] => match options(rest) {
            Some((socket, uid)) => serve(&socket, uid),
            None => return usage(),
        },
        ["probe"] => match dsec_net::steer::missing() {
            Some(why) => Err(io::Error::other(why)),
            None => Ok(()),
        },
        _ => return usage(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dsec-net: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprint!("{USAGE}");
    ExitCode::from(2)
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
