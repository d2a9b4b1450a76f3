//! Paths: checked, and taken apart into a directory's descriptor and a last name.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{
    fstat, mkdirat, openat, readlinkat, statat, AtFlags, FileType, Mode, OFlags, Stat, CWD,
};
use rustix::io::Errno;

use crate::error::{at, Done, Failure};
use crate::Settings;

/// As the kernel: links followed on the way to one file.
const MAX_LINKS: usize = 40;
/// Longer than any path the kernel takes (4,095); those get its own answer, ENAMETOOLONG.
const MAX_PATH: usize = 64 << 10;

/// An absolute path: what was asked for, below the working directory unless absolute itself.
pub(crate) fn absolute(set: &Settings, field: &'static str, path: &[u8]) -> Done<Vec<u8>> {
    if path.is_empty() {
        return Err(Failure::field(field, "is empty").into());
    }
    if path.contains(&0) {
        return Err(Failure::field(field, "has a NUL byte").into());
    }
    if path.len() > MAX_PATH {
        return Err(Failure::field(field, format!("is longer than {MAX_PATH} bytes")).into());
    }
    let path = if path[0] == b'/' {
        path.to_vec()
    } else {
        join(&set.cwd, path)
    };
    Ok([set.outside.as_slice(), &path].concat())
}

pub(crate) fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut joined = Vec::with_capacity(dir.len() + 1 + name.len());
    joined.extend_from_slice(dir);
    if !dir.is_empty() && dir.last() != Some(&b'/') {
        joined.push(b'/');
    }
    joined.extend_from_slice(name);
    joined
}

/// Directory part and last name; the name is empty after a final slash.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(0) => (b"/", &path[1..]),
        Some(i) => (&path[..i], &path[i + 1..]),
        None => (b".", path),
    }
}

pub(crate) fn trimmed(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|b| *b != b'/').map_or(1, |i| i + 1);
    &path[..end.min(path.len())]
}

pub(crate) fn kind_of(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

pub(crate) fn open_dir(path: &[u8]) -> Result<OwnedFd, Errno> {
    openat(CWD, path, DIRECTORY, Mode::empty())
}

/// A last name in an open directory.
#[derive(Debug)]
pub(crate) struct Place {
    pub dir: OwnedFd,
    pub name: Vec<u8>,
    /// A slash came after the name: only a directory is meant, and no link to one.
    pub slash: bool,
}

impl Place {
    pub fn stat(&self) -> Result<Stat, Errno> {
        statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW)
    }

    pub fn is_directory(&self) -> Result<bool, Errno> {
        Ok(kind_of(&self.stat()?) == FileType::Directory)
    }

    /// The name as it was given: the kernel refuses what is no directory if a slash comes after it.
    pub fn given(&self) -> Vec<u8> {
        let mut name = self.name.clone();
        if self.slash {
            name.push(b'/');
        }
        name
    }
}

/// Where a path's last name lies; a link there is not followed. `.`, `..` and `/` have no place of their own.
pub(crate) fn place(doing: &str, path: &[u8]) -> Done<Place> {
    let (parent, name) = split(trimmed(path));
    if no_file(name) {
        return Err(Failure::errno(doing, path, Errno::BUSY).into());
    }
    Ok(Place {
        dir: open_dir(parent).map_err(at(doing, path))?,
        name: name.to_vec(),
        slash: path.last() == Some(&b'/'),
    })
}

/// Where a file is, or would be made: links at the last name are followed, as `open` does.
pub(crate) fn place_of_file(
    doing: &str,
    path: &[u8],
    parents: bool,
) -> Done<(Place, Option<Stat>)> {
    let fail = at(doing, path);
    let (parent, name) = split(trimmed(path));
    let slash = path.last() == Some(&b'/');
    let dir = match open_dir(parent) {
        // For what will not be a file no directory is made.
        Err(Errno::NOENT) if parents && !slash && !no_file(name) => {
            make_all(parent, None).map_err(&fail)?;
            open_dir(parent)
        }
        other => other,
    };
    let mut place = Place {
        dir: dir.map_err(&fail)?,
        name: name.to_vec(),
        slash,
    };
    for _ in 0..MAX_LINKS {
        // As `open` with O_CREAT, whatever is there.
        if place.slash || no_file(&place.name) {
            return Err(fail(Errno::ISDIR));
        }
        let stat = match place.stat() {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok((place, None)),
            Err(errno) => return Err(fail(errno)),
        };
        if kind_of(&stat) != FileType::Symlink {
            return Ok((place, Some(stat)));
        }
        let target = match readlinkat(&place.dir, &place.name, Vec::new()) {
            Ok(target) => target.into_bytes(),
            // It was replaced in between: look again.
            Err(Errno::INVAL | Errno::NOENT) => continue,
            Err(errno) => return Err(fail(errno)),
        };
        let (parent, name) = split(trimmed(&target));
        let dir = openat(&place.dir, parent, DIRECTORY, Mode::empty()).map_err(&fail)?;
        place = Place {
            dir,
            name: name.to_vec(),
            slash: target.last() == Some(&b'/'),
        };
    }
    Err(fail(Errno::LOOP))
}

/// Whether a last name can only be a directory's.
fn no_file(name: &[u8]) -> bool {
    name.is_empty() || name == b"." || name == b".."
}

/// `mkdir -p`: makes what is missing. Returns whether the last one is new.
pub(crate) fn make_all(path: &[u8], mode: Option<u32>) -> Result<bool, Errno> {
    let path = trimmed(path);
    let mut made = false;
    for end in 1..=path.len() {
        if end < path.len() && path[end] != b'/' {
            continue;
        }
        let last = end == path.len();
        let bits = if last { mode } else { None };
        made = match mkdirat(
            CWD,
            &path[..end],
            Mode::from_raw_mode(bits.unwrap_or(0o777)),
        ) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(errno),
        };
    }
    Ok(made)
}

/// Opens a regular file, and nothing else: what it is is looked at before (opening a FIFO lets its writer go on, a
/// terminal's master makes a terminal) and, as it may be another by then, after. Without blocking: also a lease that
/// somebody holds on the file is EAGAIN instead of a wait.
pub(crate) fn open_regular<Fd: AsFd>(
    dir: Fd,
    name: &[u8],
    flags: OFlags,
    doing: &str,
    path: &[u8],
) -> Done<(OwnedFd, Stat)> {
    let fail = at(doing, path);
    let look = if flags.contains(OFlags::NOFOLLOW) {
        AtFlags::SYMLINK_NOFOLLOW
    } else {
        AtFlags::empty()
    };
    regular(&statat(&dir, name, look).map_err(&fail)?, doing, path)?;
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = openat(&dir, name, flags, Mode::empty()).map_err(&fail)?;
    let stat = fstat(&file).map_err(&fail)?;
    regular(&stat, doing, path)?;
    Ok((file, stat))
}

pub(crate) fn regular(stat: &Stat, doing: &str, path: &[u8]) -> Done<()> {
    match kind_of(stat) {
        FileType::RegularFile => Ok(()),
        kind => Err(Failure::kind(doing, path, kind).into()),
    }
}
