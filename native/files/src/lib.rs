//! The file helper: serves the files of one sandbox over one connected Unix stream socket.
//!
//! It is run by a process that is already inside: with the sandbox's user and mount namespaces, the user asked for
//! and the sandbox's root. So every path is resolved by the kernel with that user's rights, and nothing here
//! guards against what that user could do by himself. What it does guard against is what would lie, hang or grow:
//! files that are none, links put in the way of a tree, a disk that is full, streams that end early. One thread,
//! no exec, memory in bounds. The protocol: `docs/reference/files-protocol.md`.

mod conn;
mod copy;
mod diff;
mod dir;
mod error;
mod meta;
mod path;
mod place_in;
mod read;
mod remove;
mod tar;
mod temp;
mod tree_in;
mod tree_out;
mod walk;
mod watch;
mod wire;
mod write;

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use serde::Serialize;

use conn::Conn;
pub use conn::{DATA, MAX_FRAME};
use error::{Done, Failure, Stop};
use temp::Temps;
use wire::{args, Answer, Head, Refusal};
use write::Content;

/// A client that makes no progress within a request for this long is taken for dead.
pub const STALL: Duration = Duration::from_secs(600);

/// What the helper is told by who starts it.
#[derive(Debug)]
pub struct Settings {
    /// Absolute; relative paths begin here.
    pub cwd: Vec<u8>,
    /// No progress of the client for this long within a request ends the connection; between requests it may wait.
    pub stall: Duration,
    /// `/proc/self/fd` of this very process, opened where there still was a `/proc` that knows it. Kernels before
    /// 6.10 need it to give a nameless file its name; without it files are made under a temporary name.
    pub proc_fd: Option<OwnedFd>,
    /// For `diff`; without them it is refused.
    pub views: Option<Views>,
    /// Ways of the kernel to do without, for tests.
    pub without: Without,
    /// For tests of what a helper must not be: it is not inside, and this, before each path, leads there.
    pub outside: Vec<u8>,
}

/// Three views of one tree, as directories.
#[derive(Debug)]
pub struct Views {
    /// As it is now. What is mounted inside is not of it.
    pub now: OwnedFd,
    /// As it was.
    pub before: OwnedFd,
    /// Has at least the names of what differs, and of the directories above. What is there by the name is not looked at
    /// unless it is a directory.
    pub touched: OwnedFd,
}

/// What an older kernel or another file system lacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Without {
    /// Files that have no name while they are written.
    pub tmpfile: bool,
    /// Naming them by their descriptor alone.
    pub link_by_fd: bool,
}

impl Settings {
    pub fn new(cwd: impl Into<Vec<u8>>) -> Self {
        Self {
            cwd: cwd.into(),
            stall: STALL,
            proc_fd: None,
            views: None,
            without: Without::default(),
            outside: Vec::new(),
        }
    }

    fn temps(&self) -> Temps<'_> {
        Temps {
            proc_fd: self.proc_fd.as_ref().map(AsFd::as_fd),
            without: self.without,
        }
    }
}

/// Serves requests, one after the other, until the client is gone.
pub fn serve(socket: OwnedFd, settings: &Settings) {
    let mut conn = Conn::new(socket, settings.stall);
    loop {
        match turn(&mut conn, settings) {
            Ok(()) => {}
            Err(Stop::Protocol(failure) | Stop::Failed(failure)) => {
                let id = conn.id();
                let _ = conn.queue(&Refusal { id, err: &failure });
                let _ = conn.flush();
                return;
            }
            Err(Stop::Gone) => return,
        }
    }
}

/// One request and its answer.
fn turn(conn: &mut Conn, set: &Settings) -> Done<()> {
    let body = conn.request()?;
    conn.begin(0, false);
    let head = wire::head(&body).map_err(Stop::protocol)?;
    conn.begin(head.id, false);
    match operate(conn, set, &head, &body) {
        Ok(()) => {}
        Err(Stop::Failed(failure)) => conn.queue(&Refusal {
            id: head.id,
            err: &failure,
        })?,
        Err(stop) => return Err(stop),
    }
    // The client must see a failure while it is still sending, so that it can stop.
    if conn.owes() {
        conn.flush()?;
    }
    conn.drain()
}

fn answer<T: Serialize>(conn: &mut Conn, ok: T) -> Done<()> {
    let id = conn.id();
    conn.queue(&Answer { id, ok })
}

fn operate(conn: &mut Conn, set: &Settings, head: &Head, body: &[u8]) -> Done<()> {
    match head.op.as_str() {
        "stat" => answer(conn, meta::stat(set, &args(body)?)?),
        "read" => read::read(conn, set, &args(body)?),
        "hash" => read::hash(conn, set, &args(body)?),
        "list" => answer(conn, dir::list(set, &args(body)?)?),
        "mkdir" => answer(conn, dir::mkdir(set, &args(body)?)?),
        "remove" => remove::remove(conn, set, &args(body)?),
        "move" => meta::rename(conn, set, &args(body)?),
        "chmod" => answer(conn, meta::chmod(set, &args(body)?)?),
        "chown" => answer(conn, meta::chown(set, &args(body)?)?),
        "symlink" => answer(conn, meta::symlink(set, &args(body)?)?),
        "readlink" => answer(conn, meta::readlink(set, &args(body)?)?),
        "write" | "append" => upload(conn, set, head, body),
        "tree.out" => tree_out::tree_out(conn, set, &args(body)?),
        "tree.in" => {
            let args = must(args(body))?;
            conn.begin(head.id, true);
            let done = tree_in::tree_in(conn, set, &args)?;
            answer(conn, done)
        }
        "diff" => diff::diff(conn, set, &args(body)?),
        "watch" => watch::watch(conn, set, &args(body)?),
        // It came too late: what it was for has been answered.
        "cancel" => Ok(()),
        other => Err(Failure::field("op", format!("no operation {other:?}")).into()),
    }
}

/// Whether data follows a request that does not decode cannot be known.
fn must<T>(args: Result<T, Box<Failure>>) -> Done<T> {
    args.map_err(Stop::Protocol)
}

fn upload(conn: &mut Conn, set: &Settings, head: &Head, body: &[u8]) -> Done<()> {
    let args: wire::WriteArgs = must(args(body))?;
    let inline = args.data.as_ref().map(|data| &data[..]);
    conn.begin(head.id, inline.is_none());
    let mut content = Content::new(conn, inline);
    if head.op == "write" {
        let written = write::write(set, &args, &mut content)?;
        answer(conn, written)
    } else {
        let appended = write::append(set, &args, &mut content)?;
        answer(conn, appended)
    }
}
