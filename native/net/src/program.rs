//! The process of a node that serves its sandboxes, as a program.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

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
      [--with-parent]           and ends with whoever started it
probe                           why connections cannot be steered here, if they cannot
";

/// Does what the words say, for ever if they say `serve`; `None`: they say nothing.
pub fn run(words: &[&str]) -> Option<io::Result<()>> {
    match words {
        ["serve", rest @ ..] => options(rest).map(|options| serve(&options)),
        ["probe"] => Some(steer::missing().map_or(Ok(()), |why| Err(io::Error::other(why)))),
        _ => None,
    }
}

struct Options {
    socket: PathBuf,
    uid: u32,
    with_parent: bool,
}

fn options(mut words: &[&str]) -> Option<Options> {
    let (mut socket, mut uid, mut with_parent) = (None, UID, false);
    loop {
        match words {
            ["--socket", path, ..] => socket = Some(PathBuf::from(path)),
            ["--uid", number, ..] => uid = number.parse().ok()?,
            ["--with-parent", rest @ ..] => {
                with_parent = true;
                words = rest;
                continue;
            }
            [] => break,
            _ => return None,
        }
        words = words.get(2..)?;
    }
    Some(Options {
        socket: socket?,
        uid,
        with_parent,
    })
}

fn serve(options: &Options) -> io::Result<()> {
    let path = options.socket.as_path();
    let parent = options.with_parent.then(rustix::process::getppid).flatten();
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
    confine(options.uid, parent)?;
    println!("ready");
    io::stdout().flush()?;
    server.run()
}
