//! Moving between file systems: a copy that appears whole, then the removal of the source.

use std::os::fd::OwnedFd;

use rustix::fs::{
    fstat, mkdirat, readlinkat, renameat_with, seek, statat, unlinkat, AtFlags, FileType, Mode,
    OFlags, RenameFlags, SeekFrom, Stat,
};
use rustix::io::Errno;

use crate::conn::{Conn, CHUNK};
use crate::error::{at, Done, Failure};
use crate::path::{join, kind_of, open_regular, Place};
use crate::place_in::{Meta, PlaceIn};
use crate::read::read_full;
use crate::remove::remove_tree;
use crate::tar::{Piece, Time};
use crate::temp::fresh_name;
use crate::tree_out::pieces_of;
use crate::walk::{open_child, Step, Walk};
use crate::write::{named_full, write_all};
use crate::Settings;

const CHECK_EVERY: u64 = 64;

fn meta_of(stat: &Stat) -> Meta {
    Meta {
        mode: stat.st_mode & 0o7777,
        owner: Some((stat.st_uid, stat.st_gid)),
        mtime: Time {
            secs: stat.st_mtime,
            nanos: u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
        },
    }
}

/// Copies under a temporary name beside the target, gives it its name, and removes the source. What fails before the
/// last leaves source and target as they were.
pub(crate) fn move_over(
    conn: &mut Conn,
    set: &Settings,
    replace: bool,
    (from, source): (&Place, &[u8]),
    (to, target): (&Place, &[u8]),
) -> Done<()> {
    let fail = at("move to", target);
    if !replace && to.stat().is_ok() {
        return Err(fail(Errno::EXIST));
    }
    let kind = kind_of(&from.stat().map_err(at("move", source))?);
    let direct = kind == FileType::Directory && !renames_directories(to).map_err(&fail)?;
    let copied = Place {
        dir: to.dir.try_clone().map_err(|_| fail(Errno::MFILE))?,
        name: if direct {
            to.name.clone()
        } else {
            fresh_name()
        },
        slash: false,
    };
    if direct {
        make_directly(to, replace).map_err(&fail)?;
    }
    let root = to.dir.try_clone().map_err(|_| fail(Errno::MFILE))?;
    let mut copy = Copy {
        conn,
        set,
        into: PlaceIn::new(root, false),
        source,
        buf: vec![0; CHUNK],
    };
    let mut done = copy.all(from, &copied.name);
    if !direct {
        let flags = if replace {
            RenameFlags::empty()
        } else {
            RenameFlags::NOREPLACE
        };
        done = done.and_then(|()| {
            renameat_with(&to.dir, &copied.name, &to.dir, &to.name, flags).map_err(&fail)
        });
    }
    if let Err(stop) = done {
        let stop = stop.map(named_full(&to.dir));
        // The failure that counts is the first one.
        let _ = remove_tree(conn, &copied, target);
        return Err(stop);
    }
    let removed = remove_tree(conn, from, source);
    removed
        .map(|_| ())
        .map_err(|stop| stop.map(Failure::partial))
}

/// Whether a new directory can be renamed here: an overlay whose upper has no attributes to mark it with cannot.
fn renames_directories(to: &Place) -> Result<bool, Errno> {
    let (one, two) = (fresh_name(), fresh_name());
    mkdirat(&to.dir, &one, Mode::from_raw_mode(0o700))?;
    let renamed = renameat_with(&to.dir, &one, &to.dir, &two, RenameFlags::NOREPLACE);
    let left = if renamed.is_ok() { &two } else { &one };
    unlinkat(&to.dir, left, AtFlags::REMOVEDIR)?;
    match renamed {
        Ok(()) => Ok(true),
        Err(Errno::XDEV) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Makes the target itself, as a rename would: over nothing, or over an empty directory.
fn make_directly(to: &Place, replace: bool) -> Result<(), Errno> {
    if replace {
        match unlinkat(&to.dir, &to.name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    mkdirat(&to.dir, &to.name, Mode::from_raw_mode(0o700))
}

struct Copy<'a> {
    conn: &'a mut Conn,
    set: &'a Settings,
    into: PlaceIn,
    source: &'a [u8],
    buf: Vec<u8>,
}

impl Copy<'_> {
    fn all(&mut self, from: &Place, name: &[u8]) -> Done<()> {
        let fail = at("move", self.source);
        let stat = from.stat().map_err(&fail)?;
        if kind_of(&stat) != FileType::Directory {
            return self.one(&from.dir, &from.name, &stat, name, self.source);
        }
        let root = open_child(&from.dir, &from.name).map_err(|errno| match errno {
            Errno::XDEV => fail(Errno::BUSY),
            errno => fail(errno),
        })?;
        self.into.directory(name, meta_of(&stat)).map_err(&fail)?;
        let mut walk = Walk::new(root).map_err(&fail)?;
        let mut steps = 0u64;
        while let Some(step) = walk.step().map_err(&fail)? {
            steps += 1;
            if steps % CHECK_EVERY == 0 {
                self.conn.check()?;
            }
            let Step::Name(child) = step else { continue };
            let below = walk.path_of(&child);
            let path = join(self.source, &below);
            let target = join(name, &below);
            let fail = at("move", &path);
            let dir = walk.dir().map_err(&fail)?;
            let stat = statat(dir, &child, AtFlags::SYMLINK_NOFOLLOW).map_err(&fail)?;
            if kind_of(&stat) == FileType::Directory {
                self.into
                    .directory(&target, meta_of(&stat))
                    .map_err(&fail)?;
                walk.enter(&child).map_err(|errno| match errno {
                    Errno::XDEV => fail(Errno::BUSY),
                    errno => fail(errno),
                })?;
            } else {
                self.one(dir, &child, &stat, &target, &path)?;
            }
        }
        let finished = self.into.finish();
        finished.map_err(|(errno, _)| at("move", self.source)(errno))
    }

    /// What is no directory. Names of one file become files of their own.
    fn one(
        &mut self,
        dir: &OwnedFd,
        name: &[u8],
        stat: &Stat,
        target: &[u8],
        path: &[u8],
    ) -> Done<()> {
        let fail = at("move", path);
        match kind_of(stat) {
            FileType::RegularFile => self.file(dir, name, target, path),
            FileType::Symlink => {
                let link = readlinkat(dir, name, Vec::new()).map_err(&fail)?;
                self.into
                    .symlink(target, link.as_bytes(), meta_of(stat))
                    .map_err(&fail)
            }
            FileType::Fifo => self.into.fifo(target, meta_of(stat)).map_err(&fail),
            kind => Err(Failure::kind("move between file systems:", path, kind).into()),
        }
    }

    fn file(&mut self, dir: &OwnedFd, name: &[u8], target: &[u8], path: &[u8]) -> Done<()> {
        let fail = at("move", path);
        let (file, stat) =
            open_regular(dir, name, OFlags::RDONLY | OFlags::NOFOLLOW, "move", path)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let whole = vec![Piece {
            offset: 0,
            len: size,
        }];
        let pieces = pieces_of(&file, &stat).map_err(&fail)?.unwrap_or(whole);
        let sink = self.into.file(target, self.set.temps()).map_err(&fail)?;
        for piece in pieces {
            seek(sink.file(), SeekFrom::Start(piece.offset)).map_err(&fail)?;
            let mut done = 0;
            while done < piece.len {
                let want = usize::try_from(piece.len - done)
                    .unwrap_or(CHUNK)
                    .min(CHUNK);
                let n =
                    read_full(&file, &mut self.buf[..want], piece.offset + done).map_err(&fail)?;
                if n == 0 {
                    // It shrank: then so much is what it is.
                    break;
                }
                write_all(sink.file(), &self.buf[..n]).map_err(&fail)?;
                done += n as u64;
                self.conn.check()?;
            }
        }
        let end = fstat(&file).map_err(&fail)?.st_size;
        rustix::fs::ftruncate(sink.file(), u64::try_from(end).unwrap_or(0).min(size))
            .map_err(&fail)?;
        sink.put(meta_of(&stat)).map_err(&fail)
    }
}
