//! A file that is not there until it is whole.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{
    linkat, openat, renameat, renameat_with, unlinkat, AtFlags, Mode, OFlags, RenameFlags,
};
use rustix::io::Errno;

use crate::Without;

/// What the names of copies that are not finished begin with.
pub(crate) const TEMP_PREFIX: &[u8] = b".dsec-";
/// Names that are taken are tried again so often.
const TRIES: usize = 16;

/// How the kernel lets a file without a name have one.
#[derive(Debug, Clone, Copy)]
enum Naming<'a> {
    /// `AT_EMPTY_PATH`: needs CAP_DAC_READ_SEARCH in the initial namespace, or kernel 6.10 and one's own file.
    Empty,
    /// Through this `/proc/self/fd`.
    Proc(BorrowedFd<'a>),
    /// It has one: the file was made under a temporary name.
    Named,
}

/// How temporary files are made here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Temps<'a> {
    /// A `/proc/self/fd` of this process.
    pub proc_fd: Option<BorrowedFd<'a>>,
    pub without: Without,
}

/// Removed when dropped, unless it was put in its place.
#[derive(Debug)]
pub(crate) struct Temp<'a> {
    dir: BorrowedFd<'a>,
    file: OwnedFd,
    naming: Naming<'a>,
    /// The name to remove.
    name: Option<Vec<u8>>,
}

/// A name nobody else takes: the process ids of sandboxes repeat, the time with a count does not.
pub(crate) fn fresh_name() -> Vec<u8> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let time = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos() as u64);
    let pid = std::process::id();
    [
        TEMP_PREFIX,
        format!("{time:x}-{pid:x}-{count:x}").as_bytes(),
    ]
    .concat()
}

fn with_fresh_name<T>(
    mut make: impl FnMut(&[u8]) -> Result<T, Errno>,
) -> Result<(T, Vec<u8>), Errno> {
    for _ in 0..TRIES {
        let name = fresh_name();
        match make(&name) {
            Err(Errno::EXIST) => {}
            other => return other.map(|made| (made, name)),
        }
    }
    Err(Errno::EXIST)
}

impl<'a> Temp<'a> {
    /// A new file for a place in `dir`.
    pub fn new(dir: BorrowedFd<'a>, temps: Temps<'a>, mode: u32) -> Result<Self, Errno> {
        let mode = Mode::from_raw_mode(mode);
        if let Some((file, naming)) = nameless(dir, temps, mode) {
            return Ok(Self {
                dir,
                file,
                naming,
                name: None,
            });
        }
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let (file, name) = with_fresh_name(|name| openat(dir, name, flags, mode))?;
        Ok(Self {
            dir,
            file,
            naming: Naming::Named,
            name: Some(name),
        })
    }

    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Puts the file in its place if nothing is there (EEXIST else).
    pub fn put_new(&mut self, name: &[u8]) -> Result<(), Errno> {
        match self.naming {
            Naming::Named => {
                let own = self.name.as_deref().unwrap_or_default();
                renameat_with(self.dir, own, self.dir, name, RenameFlags::NOREPLACE)?;
                self.name = None;
                Ok(())
            }
            naming => link(naming, &self.file, self.dir, name),
        }
    }

    /// Puts the file in its place, whatever file is there.
    pub fn put(&mut self, name: &[u8]) -> Result<(), Errno> {
        if self.name.is_none() {
            let naming = self.naming;
            let (file, dir) = (&self.file, self.dir);
            let ((), own) = with_fresh_name(|own| link(naming, file, dir, own))?;
            self.name = Some(own);
        }
        let own = self.name.as_deref().unwrap_or_default();
        renameat(self.dir, own, self.dir, name)?;
        self.name = None;
        Ok(())
    }
}

/// A file without a name, if it can be given one.
fn nameless<'a>(
    dir: BorrowedFd<'_>,
    temps: Temps<'a>,
    mode: Mode,
) -> Option<(OwnedFd, Naming<'a>)> {
    if temps.without.tmpfile {
        return None;
    }
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    // A file system without O_TMPFILE says so in one of several ways; whatever else is wrong, the next try finds too.
    let file = openat(dir, ".", flags, mode).ok()?;
    let by_fd = (!temps.without.link_by_fd).then_some(Naming::Empty);
    let naming = [by_fd, temps.proc_fd.map(Naming::Proc)]
        .into_iter()
        .flatten()
        .find(|naming| link(*naming, &file, dir, b".") == Err(Errno::EXIST))?;
    Some((file, naming))
}

impl Drop for Temp<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // Nobody is left to tell, and the name says whose it was.
            let _ = unlinkat(self.dir, name, AtFlags::empty());
        }
    }
}

fn link(naming: Naming<'_>, file: &OwnedFd, dir: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    match naming {
        Naming::Empty => linkat(file, "", dir, name, AtFlags::EMPTY_PATH),
        Naming::Proc(proc_fd) => {
            use std::os::fd::AsRawFd;
            let number = file.as_fd().as_raw_fd().to_string();
            linkat(proc_fd, number, dir, name, AtFlags::SYMLINK_FOLLOW)
        }
        Naming::Named => Err(Errno::INVAL),
    }
}

/// Puts something new (a link) in a place in which a file may be already.
pub(crate) fn replace_with(
    dir: BorrowedFd<'_>,
    name: &[u8],
    mut make: impl FnMut(&[u8]) -> Result<(), Errno>,
) -> Result<(), Errno> {
    match make(name) {
        Err(Errno::EXIST) => {}
        other => return other,
    }
    let ((), own) = with_fresh_name(&mut make)?;
    let moved = renameat(dir, &own, dir, name);
    // Renaming one of two names of the same file over the other does nothing, and leaves both.
    let left = unlinkat(dir, &own, AtFlags::empty());
    match (moved, left) {
        (Err(errno), _) => Err(errno),
        (Ok(()), Ok(()) | Err(Errno::NOENT)) => Ok(()),
        (Ok(()), Err(errno)) => Err(errno),
    }
}
