//! What is known about files, and changes of that.

use std::os::fd::OwnedFd;

use rustix::fs::{
    chmodat, chownat, fstat, openat, readlinkat, renameat_with, statat, symlinkat, AtFlags,
    FileType, Gid, Mode, OFlags, RenameFlags, Stat, Uid, CWD,
};
use rustix::io::Errno;
use serde::Serialize;
use serde_bytes::ByteBuf;

use crate::conn::Conn;
use crate::error::{at, Done, Failure};
use crate::path::{absolute, kind_of, place, Place};
use crate::wire::{
    ChmodArgs, ChownArgs, Entry, MoveArgs, Nothing, OfEntry, PathArgs, StatArgs, SymlinkArgs,
};
use crate::write::check_mode;
use crate::{answer, Settings};

fn flags(follow: bool) -> AtFlags {
    if follow {
        AtFlags::empty()
    } else {
        AtFlags::SYMLINK_NOFOLLOW
    }
}

/// Where a link points; nothing for anything else, or if it is gone by now.
pub(crate) fn target_of<Fd: std::os::fd::AsFd>(
    dir: Fd,
    name: &[u8],
    stat: &Stat,
) -> Option<Vec<u8>> {
    if kind_of(stat) != FileType::Symlink {
        return None;
    }
    readlinkat(dir, name, Vec::new())
        .ok()
        .map(|t| t.into_bytes())
}

pub(crate) fn stat(set: &Settings, args: &StatArgs) -> Done<OfEntry<Entry>> {
    let path = absolute(set, "path", &args.path)?;
    Ok(OfEntry {
        entry: found(&path, args.follow)?,
    })
}

/// What is there.
pub(crate) fn found(path: &[u8], follow: bool) -> Done<Entry> {
    let stat = statat(CWD, path, flags(follow)).map_err(at("stat", path))?;
    let target = target_of(CWD, path, &stat);
    Ok(Entry::new(path, &stat, target))
}

pub(crate) fn chmod(set: &Settings, args: &ChmodArgs) -> Done<OfEntry<Entry>> {
    check_mode(Some(args.mode))?;
    let path = absolute(set, "path", &args.path)?;
    let mode = Mode::from_raw_mode(args.mode);
    let before = statat(CWD, &path, AtFlags::empty()).map_err(at("chmod", &path))?;
    chmodat(CWD, &path, mode, AtFlags::empty()).map_err(at("chmod", &path))?;
    let changed = || Entry {
        mode: args.mode,
        ..Entry::new(&path, &before, None)
    };
    Ok(OfEntry {
        entry: found_or(&path, changed)?,
    })
}

/// What is there; what was, when somebody has taken it away since: what was asked for is done.
pub(crate) fn found_or(path: &[u8], was: impl FnOnce() -> Entry) -> Done<Entry> {
    match statat(CWD, path, AtFlags::empty()) {
        Ok(stat) => Ok(Entry::new(path, &stat, None)),
        Err(errno) if is_gone(errno) => Ok(was()),
        Err(errno) => Err(at("stat", path)(errno)),
    }
}

pub(crate) fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::LOOP)
}

/// -1 means "leave it" to the kernel, so it is no id.
fn id(field: &'static str, id: Option<u32>) -> Done<Option<u32>> {
    match id {
        Some(u32::MAX) => Err(Failure::field(field, "is no id").into()),
        id => Ok(id),
    }
}

pub(crate) fn chown(set: &Settings, args: &ChownArgs) -> Done<Nothing> {
    let uid = id("uid", args.uid)?.map(Uid::from_raw);
    let gid = id("gid", args.gid)?.map(Gid::from_raw);
    let path = absolute(set, "path", &args.path)?;
    chownat(CWD, &path, uid, gid, flags(args.follow)).map_err(at("chown", &path))?;
    Ok(Nothing {})
}

pub(crate) fn symlink(set: &Settings, args: &SymlinkArgs) -> Done<Nothing> {
    if args.target.is_empty() || args.target.contains(&0) {
        return Err(Failure::field("target", "is empty or has a NUL byte").into());
    }
    let path = absolute(set, "path", &args.path)?;
    symlinkat(&args.target[..], CWD, &path).map_err(at("symlink", &path))?;
    Ok(Nothing {})
}

#[derive(Serialize)]
pub(crate) struct Target {
    target: ByteBuf,
}

pub(crate) fn readlink(set: &Settings, args: &PathArgs) -> Done<Target> {
    let path = absolute(set, "path", &args.path)?;
    let target = readlinkat(CWD, &path, Vec::new()).map_err(at("readlink", &path))?;
    Ok(Target {
        target: ByteBuf::from(target.into_bytes()),
    })
}

#[derive(Serialize)]
struct Moved {
    /// `false`: between file systems, by copying and removing.
    atomic: bool,
    entry: Entry,
}

pub(crate) fn rename(conn: &mut Conn, set: &Settings, args: &MoveArgs) -> Done<()> {
    let source = absolute(set, "source", &args.source)?;
    let target = absolute(set, "target", &args.target)?;
    let from = place("move", &source)?;
    let to = place("move to", &target)?;
    let flags = if args.replace {
        RenameFlags::empty()
    } else {
        RenameFlags::NOREPLACE
    };
    let held = open_place(&from);
    let atomic = match renameat_with(&from.dir, from.given(), &to.dir, to.given(), flags) {
        Ok(()) => true,
        Err(Errno::XDEV) => {
            // Said before the kernel has looked at any of the two.
            if (from.slash || to.slash) && !from.is_directory().map_err(at("move", &source))? {
                return Err(at("move to", &target)(Errno::NOTDIR));
            }
            crate::copy::move_over(conn, set, args.replace, (&from, &source), (&to, &target))?;
            false
        }
        // Which of the two paths it is about.
        Err(Errno::NOENT) if from.stat().is_err() => return Err(at("move", &source)(Errno::NOENT)),
        Err(errno) => return Err(at("move to", &target)(errno)),
    };
    // Whoever waited for it may have taken it away, and a link that the target's path went through may be what was moved:
    // it was moved all the same. Of a copy that is gone the source's last state is the same but for its times.
    let moved = open_place(&to).or(held).map_err(at("stat", &target))?;
    let stat = fstat(&moved).map_err(at("stat", &target))?;
    let link = target_of(&moved, b"", &stat);
    answer(
        conn,
        Moved {
            atomic,
            entry: Entry::new(&target, &stat, link),
        },
    )
}

/// Holds what is there now, whatever it is.
fn open_place(at: &Place) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(&at.dir, &at.name, flags, Mode::empty())
}
