//! Output on the disk: a file without a name, which is gone with the last who holds it. The head has a place of its
//! own, the rest goes round in a ring: what is old is written over. A hole that moves along, as in memory, would
//! make ext4 (up to 6.13) write out first whatever is given back.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::stream::PAGE;
use crate::util;

/// Moved out of memory at once. The ring has room for one more of these than is kept: what is being written over is
/// nothing that anybody may still have.
pub const STEP: u64 = 256 << 10;
/// With no more than this in memory nothing is moved: most programs say less, and need no file.
pub const MOVE_FROM: u64 = 32 << 10;
/// With so much in memory the pipe is left to fill until some of it was moved.
pub const WINDOW: u64 = 512 << 10;
/// Of a stream whose disk fails so much of the newest stays in memory.
pub const WITHOUT_DISK: u64 = 256 << 10;

/// Where the offsets of a stream lie in its file.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    head: u64,
    ring: u64,
}

impl Layout {
    /// `head` from the beginning on, and at least the newest `kept` bytes.
    pub fn new(head: u64, kept: u64) -> Self {
        Self {
            head: head.next_multiple_of(PAGE),
            ring: kept.next_multiple_of(PAGE) + STEP,
        }
    }

    /// The place of an offset, and how many bytes are in one piece there.
    fn place(self, offset: u64) -> (u64, u64) {
        if offset < self.head {
            return (offset, self.head - offset);
        }
        let at = (offset - self.head) % self.ring;
        (self.head + at, self.ring - at)
    }

    /// The first offset after the head that is there when everything up to `end` was written; 0: all of it is.
    pub fn begin(self, end: u64) -> u64 {
        let begin = end.saturating_sub(self.ring);
        if begin > self.head {
            begin
        } else {
            0
        }
    }

    /// As `begin`, when someone who died may have written a step more.
    pub fn begin_safe(self, end: u64) -> u64 {
        self.begin(end + STEP)
    }

    /// Up to where may be written while what is from `needed` on must stay.
    pub fn end_before(self, needed: u64) -> u64 {
        needed.max(self.head) + self.ring
    }
}

/// What of a stream is not in memory.
#[derive(Debug, Default)]
pub struct OnDisk {
    pub file: Option<Arc<OwnedFd>>,
    pub kept_file: bool,
    /// Everything before this was moved, and is where the layout says, or was written over.
    pub moved: u64,
    /// What is in memory begins here: with what was not moved, unless the disk has failed.
    pub memory: u64,
    /// A step is being moved.
    pub busy: bool,
    /// Nothing is moved any more.
    pub failed: bool,
}

impl OnDisk {
    /// Something between what was moved and what is in memory is nowhere.
    pub fn short(&self) -> bool {
        self.memory > self.moved
    }
}

/// Why a step was not moved.
pub enum Trouble {
    /// It was not taken; what was taken before is there.
    Refused(io::Error),
    /// What was taken before may not be there.
    Lost(io::Error),
}

/// Moves `len` bytes from an offset on, into the file, which is made if there is none.
pub fn write(
    dir: &Path,
    file: Option<&OwnedFd>,
    layout: Layout,
    segment: BorrowedFd<'_>,
    (mut offset, mut len): (u64, u64),
) -> Result<Option<OwnedFd>, Trouble> {
    let new = match file {
        Some(_) => None,
        None => Some(open(dir).map_err(Trouble::Refused)?),
    };
    let Some(file) = file.or(new.as_ref()) else {
        return Ok(None);
    };
    while len > 0 {
        let (at, room) = layout.place(offset);
        let n = copy(segment, offset, file.as_fd(), at, len.min(room)).map_err(Trouble::Refused)?;
        offset += n;
        len -= n;
    }
    dsec_sys::io::written_back(file.as_fd(), 0, 1).map_err(Trouble::Lost)?;
    Ok(new)
}

/// Copies up to `len` bytes from one file into the other, without bringing them here. Nobody else uses the position of
/// the other one.
fn copy(
    from: BorrowedFd<'_>,
    mut offset: u64,
    to: BorrowedFd<'_>,
    at: u64,
    len: u64,
) -> io::Result<u64> {
    rustix::fs::seek(to, SeekFrom::Start(at))?;
    let len = usize::try_from(len).map_err(io::Error::other)?;
    let sent = || rustix::fs::sendfile(to, from, Some(&mut offset), len);
    match rustix::io::retry_on_intr(sent)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        n => Ok(n as u64),
    }
}

/// `len` bytes from an offset on, if they are there as they were written.
pub fn read(
    file: BorrowedFd<'_>,
    layout: Layout,
    mut offset: u64,
    len: u64,
) -> io::Result<Vec<u8>> {
    let len = usize::try_from(len).map_err(io::Error::other)?;
    let mut out = vec![0u8; len];
    let mut done = 0;
    while done < len {
        let (at, room) = layout.place(offset);
        let n = usize::try_from(room).unwrap_or(usize::MAX).min(len - done);
        util::read_exact_at(file, &mut out[done..done + n], at)?;
        // A page that could not be written counts as clean afterwards: once it has left memory it is read as what
        // was there before.
        dsec_sys::io::written_back(file, at, n as u64)?;
        done += n;
        offset += n as u64;
    }
    Ok(out)
}

fn open(dir: &Path) -> io::Result<OwnedFd> {
    match open_in(dir) {
        Err(Errno::NOENT) => {
            make_dir(dir)?;
            Ok(open_in(dir)?)
        }
        result => Ok(result?),
    }
}

fn open_in(dir: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::open(dir, flags | OFlags::TMPFILE, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
        result => return result,
    }
    // Not every file system has files without a name. Whoever dies here leaves one behind that `sweep` finds.
    let path = dir.join(format!("{}-{}", std::process::id(), util::monotonic_ns()));
    let file = rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    rustix::fs::unlink(&path)?;
    Ok(file)
}

fn make_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
}

/// Where the files are. Whatever has a name there belongs to nobody.
pub fn directory(state_dir: &Path) -> PathBuf {
    state_dir.join("output")
}

/// Removes what somebody who died has left between two steps of making a file.
pub fn sweep(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    for entry in entries {
        fs::remove_file(entry?.path())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::io::Write;

    fn segment(data: &[u8]) -> OwnedFd {
        let file = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
        std::fs::File::from(file.try_clone().unwrap())
            .write_all(data)
            .unwrap();
        file
    }

    #[test]
    fn what_is_kept_is_found_at_its_offset() {
        let dir = std::env::temp_dir().join(format!("dsec-spool-{}", std::process::id()));
        let data: Vec<u8> = (0..3 << 20).map(|n: u32| (n / 7 % 251) as u8).collect();
        let (from, kept) = (segment(&data), 1 << 20);
        let layout = Layout::new(5000, kept);
        let mut file = None;
        let mut moved = 0;
        while moved < data.len() as u64 {
            let n = STEP.min(data.len() as u64 - moved);
            let new = write(&dir, file.as_ref(), layout, from.as_fd(), (moved, n));
            file = new.ok().unwrap().or(file);
            moved += n;
            let file = file.as_ref().unwrap().as_fd();
            for begin in [0, layout.begin(moved).max(5000).min(moved)] {
                let end = if begin == 0 { 5000 } else { moved };
                let found = read(file, layout, begin, end - begin).unwrap();
                assert_eq!(
                    found,
                    data[begin as usize..end as usize],
                    "{begin} of {moved}"
                );
            }
            assert!(layout.begin_safe(moved) <= moved.saturating_sub(kept));
        }
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "it has no name");
        let size = rustix::fs::fstat(file.as_ref().unwrap()).unwrap().st_size;
        assert!(size as u64 <= 8192 + kept + STEP);
        fs::write(dir.join("left"), b"x").unwrap();
        sweep(&dir).unwrap();
        fs::remove_dir(&dir).unwrap();
    }
}
