//! Putting entries at paths below a directory, and nowhere else.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    chownat, fchmod, fchown, fstat, futimens, linkat, mkdirat, mknodat, openat, openat2, statat,
    symlinkat, unlinkat, utimensat, AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec,
    Timestamps, Uid,
};
use rustix::io::Errno;

use crate::path::{kind_of, split};
use crate::tar::Time;
use crate::temp::{replace_with, Temp, Temps};

/// Directories whose mode and time are set at the end, since entries in them change the time and the mode may forbid
/// them. Of more, the time is that of the last change.
const LATER_MAX: usize = 65_536;
/// And their paths together.
const LATER_BYTES: usize = 16 << 20;
/// A longer path is resolved in parts of this length: the kernel takes 4,095 bytes.
const PART: usize = 2_048;
/// A rename somewhere makes the kernel unsure whether a path stays below: asked again so often.
const UNSURE_MAX: usize = 32;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Meta {
    pub mode: u32,
    pub owner: Option<(u32, u32)>,
    pub mtime: Time,
}

pub(crate) struct PlaceIn {
    root: OwnedFd,
    /// It was made for this: then it is as the stream says. One that was there stays as it is.
    root_is_new: bool,
    /// The directory of the last entry: the next one is mostly there too.
    last: Option<(Vec<u8>, OwnedFd)>,
    later: Vec<(Vec<u8>, Meta)>,
    later_bytes: usize,
}

/// A file being written.
pub(crate) enum Sink<'a> {
    /// It was not there; removed again when it is dropped.
    New {
        dir: BorrowedFd<'a>,
        name: Vec<u8>,
        file: OwnedFd,
        done: bool,
    },
    Over(Temp<'a>, Vec<u8>),
}

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Path below a directory, without `.` and doubled slashes.
pub(crate) fn clean(path: &[u8]) -> Result<Vec<u8>, &'static str> {
    if path.first() == Some(&b'/') {
        return Err("its path is absolute");
    }
    if path.contains(&0) {
        return Err("its path has a NUL byte");
    }
    let mut parts = Vec::new();
    for part in path.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err("its path has a .."),
            part => parts.push(part),
        }
    }
    Ok(parts.join(&b'/'))
}

/// Opens a directory that must lie below `root`: links on the way may not lead out of it.
fn open_below(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..UNSURE_MAX {
        match openat2(root, path, DIRECTORY, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => {}
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

/// The first components, as many as fit a part, and the rest.
fn cut(path: &[u8]) -> (&[u8], &[u8]) {
    if path.len() <= PART {
        return (path, b"");
    }
    let before = path[..PART].iter().rposition(|b| *b == b'/');
    let after = || path.iter().position(|b| *b == b'/');
    match before.or_else(after) {
        Some(i) => (&path[..i], &path[i + 1..]),
        None => (path, b""),
    }
}

/// Makes the components that are missing, and opens the last.
fn make_below(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    let mut at: Option<OwnedFd> = None;
    for name in path.split(|b| *b == b'/') {
        let here = at.as_ref().map_or(root, AsFd::as_fd);
        let next = match open_below(here, name) {
            Err(Errno::NOENT) => {
                match mkdirat(here, name, Mode::from_raw_mode(0o777)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno),
                }
                open_below(here, name)?
            }
            other => other?,
        };
        at = Some(next);
    }
    at.ok_or(Errno::NOENT)
}

/// Of a directory in which there are still files to be made.
fn first_mode(meta: Meta) -> Mode {
    Mode::from_raw_mode(meta.mode & 0o777 | 0o700)
}

fn set_all(file: &OwnedFd, meta: Meta) -> Result<(), Errno> {
    if let Some(owner) = meta.owner {
        let (uid, gid) = ids(owner);
        fchown(file, uid, gid)?;
    }
    fchmod(file, Mode::from_raw_mode(meta.mode))?;
    futimens(file, &timestamps(meta.mtime))
}

fn timestamps(mtime: Time) -> Timestamps {
    let time = Timespec {
        tv_sec: mtime.secs,
        tv_nsec: i64::from(mtime.nanos),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

fn ids((uid, gid): (u32, u32)) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
}

impl PlaceIn {
    pub fn new(root: OwnedFd, root_is_new: bool) -> Self {
        Self {
            root,
            root_is_new,
            last: None,
            later: Vec::new(),
            later_bytes: 0,
        }
    }

    /// The directory of an entry, with what is missing on the way.
    fn parent(&mut self, dir: &[u8]) -> Result<BorrowedFd<'_>, Errno> {
        if dir.is_empty() || dir == b"." {
            return Ok(self.root.as_fd());
        }
        let known = self.last.as_ref().is_some_and(|(path, _)| path == dir);
        if !known {
            let opened = self.open(dir, true)?;
            self.last = Some((dir.to_vec(), opened));
        }
        Ok(self
            .last
            .as_ref()
            .map_or(self.root.as_fd(), |(_, fd)| fd.as_fd()))
    }

    fn open(&self, dir: &[u8], make: bool) -> Result<OwnedFd, Errno> {
        let mut at: Option<OwnedFd> = None;
        let mut rest = dir;
        while !rest.is_empty() {
            let part;
            (part, rest) = cut(rest);
            let here = at.as_ref().map_or(self.root.as_fd(), AsFd::as_fd);
            let next = match open_below(here, part) {
                Err(Errno::NOENT) if make => make_below(here, part)?,
                other => other?,
            };
            at = Some(next);
        }
        at.ok_or(Errno::NOENT)
    }

    pub fn directory(&mut self, path: &[u8], meta: Meta) -> Result<(), Errno> {
        if path.is_empty() {
            if self.root_is_new {
                // At once, too: nobody looks in meanwhile who may not later.
                fchmod(&self.root, first_mode(meta))?;
                self.later.push((Vec::new(), meta));
            }
            return Ok(());
        }
        let (dir, name) = split(path);
        let parent = self.parent(dir)?;
        match mkdirat(parent, name, first_mode(meta)) {
            Ok(()) => {}
            // A link to a directory below stays; anything else in the way is an error.
            Err(Errno::EXIST) => drop(open_below(parent, name)?),
            Err(errno) => return Err(errno),
        }
        if self.later.len() < LATER_MAX && self.later_bytes + path.len() <= LATER_BYTES {
            self.later_bytes += path.len();
            self.later.push((path.to_vec(), meta));
            return Ok(());
        }
        self.set_directory(path, meta)
    }

    /// A file that may be written to; `put` finishes it.
    pub fn file<'a>(&'a mut self, path: &[u8], temps: Temps<'a>) -> Result<Sink<'a>, Errno> {
        let (dir, name) = split(path);
        let dir = self.parent(dir)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(dir, name, flags, Mode::from_raw_mode(0o600)) {
            Ok(file) => Ok(Sink::New {
                dir,
                name: name.to_vec(),
                file,
                done: false,
            }),
            Err(Errno::EXIST) => {
                let there = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
                if there.is_ok_and(|stat| kind_of(&stat) == FileType::Directory) {
                    return Err(Errno::ISDIR);
                }
                Ok(Sink::Over(Temp::new(dir, temps, 0o600)?, name.to_vec()))
            }
            Err(errno) => Err(errno),
        }
    }

    pub fn symlink(&mut self, path: &[u8], target: &[u8], meta: Meta) -> Result<(), Errno> {
        let (dir, name) = split(path);
        let dir = self.parent(dir)?;
        replace_with(dir, name, |name| symlinkat(target, dir, name))?;
        if let Some(owner) = meta.owner {
            let (uid, gid) = ids(owner);
            chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        utimensat(
            dir,
            name,
            &timestamps(meta.mtime),
            AtFlags::SYMLINK_NOFOLLOW,
        )
    }

    pub fn fifo(&mut self, path: &[u8], meta: Meta) -> Result<(), Errno> {
        let (dir, name) = split(path);
        let dir = self.parent(dir)?;
        replace_with(dir, name, |name| {
            mknodat(dir, name, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
        })?;
        // Nobody has it open yet for whom it would be a reader.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fifo = openat(dir, name, flags, Mode::empty())?;
        if kind_of(&fstat(&fifo)?) != FileType::Fifo {
            return Err(Errno::STALE); // another has taken its place
        }
        set_all(&fifo, meta)
    }

    /// Another name for a file that is there already, below the same directory.
    pub fn hard_link(&mut self, path: &[u8], target: &[u8]) -> Result<(), Errno> {
        let (dir, old) = split(target);
        let source = match dir {
            b"." => self.root.try_clone().map_err(|_| Errno::MFILE)?,
            dir => open_below(self.root.as_fd(), dir)?,
        };
        let stat = statat(&source, old, AtFlags::SYMLINK_NOFOLLOW)?;
        if kind_of(&stat) == FileType::Directory {
            return Err(Errno::ISDIR);
        }
        let (dir, name) = split(path);
        let dir = self.parent(dir)?;
        replace_with(dir, name, |name| {
            linkat(&source, old, dir, name, AtFlags::empty())
        })
    }

    fn set_directory(&self, path: &[u8], meta: Meta) -> Result<(), Errno> {
        let dir = match self.open_readable(path) {
            // Renamed or replaced since: not ours any more.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => return Ok(()),
            other => other?,
        };
        set_all(&dir, meta)
    }

    fn open_readable(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        if path.is_empty() {
            return self.root.try_clone().map_err(|_| Errno::MFILE);
        }
        let dir = self.open(path, false)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        openat(&dir, ".", flags, Mode::empty())
    }

    /// Sets what had to wait. The deepest first: a mode may forbid going on.
    pub fn finish(&mut self) -> Result<(), (Errno, Vec<u8>)> {
        let later = std::mem::take(&mut self.later);
        for (path, meta) in later.into_iter().rev() {
            self.set_directory(&path, meta)
                .map_err(|errno| (errno, path))?;
        }
        Ok(())
    }
}

impl Sink<'_> {
    pub fn file(&self) -> &OwnedFd {
        match self {
            Self::New { file, .. } => file,
            Self::Over(temp, _) => temp.file(),
        }
    }

    /// Gives the file its owner, mode and time, and its place.
    pub fn put(mut self, meta: Meta) -> Result<(), Errno> {
        set_all(self.file(), meta)?;
        match &mut self {
            Self::New { done, .. } => *done = true,
            Self::Over(temp, name) => temp.put(name)?,
        }
        Ok(())
    }
}

impl Drop for Sink<'_> {
    fn drop(&mut self) {
        if let Self::New {
            dir, name, done, ..
        } = self
        {
            if !*done {
                // Half a file must not look like one.
                let _ = unlinkat(*dir, &**name, AtFlags::empty());
            }
        }
    }
}
