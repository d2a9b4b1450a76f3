//! Walking a tree by descriptors: a directory that is moved or replaced by a link on the way leads nowhere else.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::{fstat, openat, openat2, seek, Mode, OFlags, RawDir, ResolveFlags, SeekFrom};
use rustix::io::Errno;

/// Directories that are kept open; those above are closed, and found again through `..`.
pub(crate) const OPEN_MAX: usize = 64;
/// A tree is no deeper. What is kept of a level is its name and a position.
const DEPTH_MAX: usize = 100_000;
pub(crate) const DIRENTS: usize = 32 << 10;

pub(crate) const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);

/// Opens a directory for reading: not a link, and not what is mounted there (EXDEV).
pub(crate) fn open_child(dir: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    openat2(dir, name, DIRECTORY, Mode::empty(), ResolveFlags::NO_XDEV)
}

/// Calls `each` for the names read at once. Returns whether there may be more.
pub(crate) fn read_names(
    dir: &OwnedFd,
    buf: &mut [MaybeUninit<u8>],
    mut each: impl FnMut(&[u8]),
) -> Result<bool, Errno> {
    let mut raw = RawDir::new(dir, buf);
    loop {
        match raw.next() {
            None => return Ok(false),
            Some(Err(Errno::INTR)) => {}
            // A directory that was removed while it was open.
            Some(Err(Errno::NOENT)) => return Ok(false),
            Some(Err(errno)) => return Err(errno),
            Some(Ok(entry)) => {
                let name = entry.file_name().to_bytes();
                if name != b"." && name != b".." {
                    each(name);
                }
            }
        }
        if raw.is_buffer_empty() {
            return Ok(true);
        }
    }
}

/// Calls `each` for every name but `.` and `..`.
pub(crate) fn for_each_name(dir: &OwnedFd, mut each: impl FnMut(&[u8])) -> Result<(), Errno> {
    let mut buf = vec![MaybeUninit::uninit(); DIRENTS];
    while read_names(dir, &mut buf, &mut each)? {}
    Ok(())
}

struct Level {
    dir: Option<OwnedFd>,
    /// Device and inode: what `..` must lead to.
    id: (u64, u64),
    /// Where the names at hand were read, and how many of them were taken.
    at: u64,
    taken: usize,
    names: VecDeque<Vec<u8>>,
    ended: bool,
    /// Length of the path of this directory.
    path_len: usize,
}

/// Where a walk is.
#[derive(Debug)]
pub(crate) enum Step {
    /// A name in the current directory.
    Name(Vec<u8>),
    /// All of a directory was seen; the current one is its parent again, in which it has this name.
    Left(Vec<u8>),
}

/// A walk through a tree, depth first; the caller decides which directories are entered.
pub(crate) struct Walk {
    levels: Vec<Level>,
    /// Of the current directory, below the root of the walk.
    path: Vec<u8>,
    buf: Vec<MaybeUninit<u8>>,
}

pub(crate) fn id_of(dir: &OwnedFd) -> Result<(u64, u64), Errno> {
    let stat = fstat(dir)?;
    Ok((stat.st_dev, stat.st_ino))
}

impl Walk {
    pub fn new(root: OwnedFd) -> Result<Self, Errno> {
        let mut walk = Self {
            levels: Vec::new(),
            path: Vec::new(),
            buf: vec![MaybeUninit::uninit(); DIRENTS],
        };
        walk.push(root)?;
        Ok(walk)
    }

    fn push(&mut self, dir: OwnedFd) -> Result<(), Errno> {
        self.levels.push(Level {
            id: id_of(&dir)?,
            dir: Some(dir),
            at: 0,
            taken: 0,
            names: VecDeque::new(),
            ended: false,
            path_len: self.path.len(),
        });
        Ok(())
    }

    /// The current directory; the root's is there as long as the walk.
    pub fn dir(&self) -> Result<&OwnedFd, Errno> {
        self.levels
            .last()
            .and_then(|l| l.dir.as_ref())
            .ok_or(Errno::BADF)
    }

    /// The path of a name in the current directory.
    pub fn path_of(&self, name: &[u8]) -> Vec<u8> {
        crate::path::join(&self.path, name)
    }

    pub fn path(&self) -> &[u8] {
        &self.path
    }

    /// Goes into a directory of the current one.
    pub fn enter(&mut self, name: &[u8]) -> Result<(), Errno> {
        if self.levels.len() >= DEPTH_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let dir = open_child(self.dir()?, name)?;
        let before = self.path.len();
        if before > 0 {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name);
        if let Err(errno) = self.push(dir) {
            self.path.truncate(before);
            return Err(errno);
        }
        if let Some(above) = self.levels.len().checked_sub(OPEN_MAX + 1) {
            let level = &mut self.levels[above];
            level.dir = None;
            level.names = VecDeque::new();
        }
        Ok(())
    }

    pub fn step(&mut self) -> Result<Option<Step>, Errno> {
        loop {
            let Some(level) = self.levels.last_mut() else {
                return Ok(None);
            };
            if let Some(name) = level.names.pop_front() {
                level.taken += 1;
                return Ok(Some(Step::Name(name)));
            }
            if level.ended {
                if self.levels.len() == 1 {
                    return Ok(None);
                }
                return self.leave().map(Some);
            }
            self.refill(0)?;
        }
    }

    /// Reads the next names, without the first `skip`.
    fn refill(&mut self, skip: usize) -> Result<(), Errno> {
        let Some(level) = self.levels.last_mut() else {
            return Ok(());
        };
        let dir = level.dir.as_ref().ok_or(Errno::BADF)?;
        level.at = seek(dir, SeekFrom::Current(0))?;
        let names = &mut level.names;
        level.ended = !read_names(dir, &mut self.buf, |name| names.push_back(name.to_vec()))?;
        level.taken = skip.min(names.len());
        names.drain(..level.taken);
        Ok(())
    }

    fn leave(&mut self) -> Result<Step, Errno> {
        let child = self.levels.pop().ok_or(Errno::BADF)?;
        let (name, reopen) = match self.levels.last() {
            Some(parent) => {
                let name = &self.path[parent.path_len..];
                let name = name.strip_prefix(b"/").unwrap_or(name).to_vec();
                self.path.truncate(parent.path_len);
                (name, parent.dir.is_none())
            }
            None => (Vec::new(), false),
        };
        if reopen {
            let dir = openat(
                child.dir.as_ref().ok_or(Errno::BADF)?,
                "..",
                DIRECTORY,
                Mode::empty(),
            )?;
            self.reopened(dir)?;
        }
        Ok(Step::Left(name))
    }

    fn reopened(&mut self, dir: OwnedFd) -> Result<(), Errno> {
        let id = id_of(&dir)?;
        let Some(level) = self.levels.last_mut() else {
            return Ok(());
        };
        if id != level.id {
            // The tree was taken apart while we were in it.
            return Err(Errno::STALE);
        }
        seek(&dir, SeekFrom::Start(level.at))?;
        level.dir = Some(dir);
        let taken = level.taken;
        self.refill(taken)
    }
}
