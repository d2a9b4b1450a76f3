//! `list` and `mkdir`.

use std::collections::BinaryHeap;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{chmodat, mkdirat, openat, statat, AtFlags, FileType, Mode, OFlags, CWD};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid};
use serde::Serialize;
use serde_bytes::ByteBuf;

use crate::error::{at, kind_name, Done, Failure};
use crate::meta::{found, found_or, is_gone, target_of};
use crate::path::{absolute, join, make_all, open_dir, split, trimmed};
use crate::walk::for_each_name;
use crate::wire::{Entry, ListArgs, MkdirArgs};
use crate::write::{check_mode, named_full};
use crate::Settings;

const LIST_DEFAULT: usize = 1_000;
const LIST_MAX: usize = 10_000;
/// A page ends before its names, paths and targets are longer together: it must fit a frame.
const LIST_BYTES: usize = 512 << 10;
/// What an entry takes in a frame beside those.
const ENTRY_BYTES: usize = 128;

#[derive(Serialize)]
pub(crate) struct Listed {
    entries: Vec<Entry>,
    /// Give it with the next request; nil: that was all.
    cursor: Option<ByteBuf>,
}

/// Names in byte order, after the cursor. Every page reads the whole directory: no state is kept in between, and a name
/// that is there all the time is listed once, whatever else comes and goes.
pub(crate) fn list(set: &Settings, args: &ListArgs) -> Done<Listed> {
    let limit = args.limit.unwrap_or(LIST_DEFAULT);
    if !(1..=LIST_MAX).contains(&limit) {
        return Err(Failure::field("limit", format!("1 to {LIST_MAX}")).into());
    }
    let path = absolute(set, "path", &args.path)?;
    let fail = at("list", &path);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let dir = openat(CWD, &path, flags, Mode::empty()).map_err(&fail)?;
    let after = args.cursor.as_ref().map(|c| &c[..]);
    let mut smallest: BinaryHeap<Vec<u8>> = BinaryHeap::new();
    let mut more = false;
    for_each_name(&dir, |name| {
        if after.is_some_and(|after| name <= after) {
            return;
        }
        if smallest.len() == limit {
            more = true;
            if smallest.peek().is_some_and(|top| name >= &top[..]) {
                return;
            }
            smallest.pop();
        }
        smallest.push(name.to_vec());
    })
    .map_err(&fail)?;
    let mut entries = Vec::new();
    let mut bytes = 0;
    let mut last = None;
    for name in smallest.into_sorted_vec() {
        let stat = match statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // Gone in the meantime.
            Err(Errno::NOENT) => {
                last = Some(ByteBuf::from(name));
                continue;
            }
            Err(errno) => return Err(at("list", &join(&path, &name))(errno)),
        };
        let target = target_of(&dir, &name, &stat);
        let entry = Entry::new(&join(&path, &name), &stat, target);
        let target_len = entry.target.as_ref().map_or(0, |t| t.len());
        bytes += ENTRY_BYTES + entry.name.len() + entry.path.len() + target_len;
        if bytes > LIST_BYTES && !entries.is_empty() {
            more = true;
            break;
        }
        entries.push(entry);
        last = Some(ByteBuf::from(name));
    }
    let cursor = if more { last } else { None };
    Ok(Listed { entries, cursor })
}

/// Of the helper, as whoever starts it sets it.
const UMASK: u32 = 0o022;

#[derive(Serialize)]
pub(crate) struct Made {
    created: bool,
    entry: Entry,
}

pub(crate) fn mkdir(set: &Settings, args: &MkdirArgs) -> Done<Made> {
    check_mode(args.mode)?;
    let given = absolute(set, "path", &args.path)?;
    let path = trimmed(&given);
    let fail = at("mkdir", path);
    let bits = Mode::from_raw_mode(args.mode.unwrap_or(0o777));
    let made = if args.parents {
        make_all(path, args.mode)
    } else {
        mkdirat(CWD, path, bits).map(|()| true)
    };
    let created = made.map_err(|errno| fail(errno).map(named_full(CWD)))?;
    if !created {
        // `mkdir -p` of something else than a directory.
        if open_dir(path).is_err() {
            return Err(fail(Errno::EXIST));
        }
    } else if args.mode.is_some() {
        // What was asked for, whatever the umask.
        match chmodat(CWD, path, bits, AtFlags::empty()) {
            Err(errno) if !is_gone(errno) => return Err(fail(errno)),
            _ => {}
        }
    }
    let entry = if created {
        found_or(&given, || as_made(&given, args.mode))?
    } else {
        found(&given, true)?
    };
    Ok(Made { created, entry })
}

/// A directory that was gone before it could be looked at.
fn as_made(path: &[u8], mode: Option<u32>) -> Entry {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Entry {
        name: ByteBuf::from(split(trimmed(path)).1),
        path: ByteBuf::from(path),
        kind: kind_name(FileType::Directory),
        size: 0,
        mode: mode.unwrap_or(0o777 & !UMASK),
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
        mtime_ns: now.map_or(0, |now| i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)),
        target: None,
    }
}
