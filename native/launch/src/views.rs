//! What a file helper compares: the layers of its sandbox as one tree, and what was written, by themselves.
//!
//! Both are mounts without a name anywhere, read-only, mapped to the sandbox's ids. The child takes their
//! descriptors along; nothing else inside can see them.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::slice;

use dsec_sys::mount::{self, NODEV, NOEXEC, NOSUID, RDONLY};
use dsec_sys::process;
use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::create::{copies, no_idmap, overlay_by_fd, overlay_by_path};
use crate::failpoint;
use crate::mounting::{self, Value};
use crate::plan::{Code, LaunchError, Result, Step};
use crate::server::Server;
use crate::switch;
use crate::wire::Lower;

/// Nothing of it is executed, and no link in it is followed: it is looked at.
const ATTRIBUTES: u64 = RDONLY | NOSUID | NODEV | NOEXEC | NOSYMFOLLOW;
/// `MOUNT_ATTR_NOSYMFOLLOW` of linux/mount.h (5.14).
const NOSYMFOLLOW: u64 = 0x0020_0000;

#[derive(Debug)]
pub(crate) struct Views {
    /// The layers, merged.
    pub before: OwnedFd,
    /// The writable part alone: what of the tree was touched.
    pub touched: OwnedFd,
}

impl Views {
    pub(crate) fn fds(&self) -> [i32; 2] {
        [self.before.as_raw_fd(), self.touched.as_raw_fd()]
    }
}

pub(crate) fn make(server: &Server, of: &Lower, init: BorrowedFd<'_>) -> Result<Views> {
    // Without the directory beside it, in which overlayfs works.
    let (mut lowers, touched) = copies(server, &of.layers, &format!("{}/upper", of.upper))?;
    failpoint::at("views.copies")?;
    let users = user_namespace(init)?;
    for (copies, what) in [
        (&lowers[..], "idmap.erofs"),
        (slice::from_ref(&touched), "idmap.upper"),
    ] {
        for copy in copies {
            mount::idmap(copy.as_fd(), users.as_fd()).map_err(|error| no_idmap(what, &error))?;
        }
    }
    mount::restrict(touched.as_fd(), ATTRIBUTES).step("views.restrict")?;
    if lowers.len() == 1 {
        // overlayfs wants two where nothing is written. One alone could hold marks of deleted files, which only
        // overlayfs reads.
        lowers.insert(0, nothing()?);
    }
    let before = merged(&lowers)?;
    failpoint::at("views.made")?;
    Ok(Views { before, touched })
}

fn merged(lowers: &[OwnedFd]) -> Result<OwnedFd> {
    let by_fd = if switch::off(switch::OVERLAY_FD) {
        None
    } else {
        overlay_by_fd(lowers, None, None)?
    };
    let made = match by_fd {
        Some(made) => made,
        None => overlay_by_path(lowers, None)?,
    };
    mount::restrict(made.as_fd(), ATTRIBUTES).step("views.restrict")?;
    Ok(made)
}

fn nothing() -> Result<OwnedFd> {
    let options = [("size", Value::Text("4k")), ("mode", Value::Text("0755"))];
    mounting::make("views.nothing", c"tmpfs", &options, RDONLY)
}

/// Of the sandbox. Where the kernel does not tell it (before 6.11) by its number in /proc, which it had for itself if
/// it is alive after that was looked at.
fn user_namespace(init: BorrowedFd<'_>) -> Result<OwnedFd> {
    if let Ok(found) = process::user_namespace(init) {
        return Ok(found);
    }
    let step = "views.user_ns";
    let gone = || LaunchError::new(Code::Gone, "the sandbox has ended");
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", init.as_raw_fd())).step(step)?;
    let line = about.lines().find_map(|line| line.strip_prefix("Pid:"));
    let pid: i32 = line
        .and_then(|text| text.trim().parse().ok())
        .filter(|pid| *pid > 0)
        .ok_or_else(gone)?;
    let found = match File::open(format!("/proc/{pid}/ns/user")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(gone()),
        other => other.step(step)?,
    };
    let mut ended = [PollFd::from_borrowed_fd(init, PollFlags::IN)];
    if poll(&mut ended, Some(&Timespec::default())).step(step)? > 0 {
        return Err(gone());
    }
    Ok(found.into())
}
