//! `remove`: never through a link, whatever is renamed meanwhile.

use rustix::fs::{unlinkat, AtFlags};
use rustix::io::Errno;
use serde::Serialize;

use crate::conn::Conn;
use crate::error::{at, Done, Failure};
use crate::path::{absolute, join, place, Place};
use crate::walk::{open_child, Step, Walk};
use crate::wire::RemoveArgs;
use crate::{answer, Settings};

/// Somebody makes files, or swaps links and directories, as fast as they are removed: given up after so many
/// surprises.
const SURPRISES_MAX: usize = 1_000;
/// Steps between two looks for `cancel`.
const CHECK_EVERY: u64 = 256;

#[derive(Serialize)]
struct Removed {
    removed: u64,
}

pub(crate) fn remove(conn: &mut Conn, set: &Settings, args: &RemoveArgs) -> Done<()> {
    let path = absolute(set, "path", &args.path)?;
    let place = place("remove", &path)?;
    let removed = if args.recursive {
        remove_tree(conn, &place, &path)?
    } else {
        remove_one(&place, &path)?;
        1
    };
    answer(conn, Removed { removed })
}

fn remove_one(place: &Place, path: &[u8]) -> Done<()> {
    let fail = at("remove", path);
    match unlinkat(&place.dir, place.given(), AtFlags::empty()) {
        Err(Errno::ISDIR) => {}
        other => return other.map_err(fail),
    }
    unlinkat(&place.dir, &place.name, AtFlags::REMOVEDIR).map_err(|errno| match errno {
        Errno::NOTEMPTY => fail(errno).map(|mut failure: Failure| {
            failure
                .message
                .push_str(" (the directory is not empty; ask for `recursive`)");
            failure
        }),
        _ => fail(errno),
    })
}

/// Removes whatever is at a place.
pub(crate) fn remove_tree(conn: &mut Conn, place: &Place, path: &[u8]) -> Done<u64> {
    let fail = at("remove", path);
    let mut surprises = 0;
    loop {
        match unlinkat(&place.dir, place.given(), AtFlags::empty()) {
            Ok(()) => return Ok(1),
            Err(Errno::ISDIR) => {}
            Err(errno) => return Err(fail(errno)),
        }
        match open_child(&place.dir, &place.name) {
            Ok(dir) => {
                let mut removal = Removal {
                    walk: Walk::new(dir).map_err(&fail)?,
                    root: path,
                    removed: 0,
                    steps: 0,
                    surprises: &mut surprises,
                };
                removal.run(conn)?;
                let removed = removal.removed;
                match unlinkat(&place.dir, &place.name, AtFlags::REMOVEDIR) {
                    Ok(()) => return Ok(removed + 1),
                    Err(Errno::NOTEMPTY | Errno::NOTDIR) => {}
                    Err(errno) => return Err(fail(errno)),
                }
            }
            Err(errno) => surprise(errno).map_err(&fail)?,
        }
        surprises += 1;
        if surprises > SURPRISES_MAX {
            return Err(fail(Errno::NOTEMPTY));
        }
    }
}

/// What was a directory a moment ago may be something else: then it is looked at again.
fn surprise(errno: Errno) -> Result<(), Errno> {
    match errno {
        Errno::NOTDIR | Errno::LOOP | Errno::NOENT | Errno::AGAIN => Ok(()),
        // A mount point: what is mounted is not the tree's.
        Errno::XDEV => Err(Errno::BUSY),
        errno => Err(errno),
    }
}

struct Removal<'a> {
    walk: Walk,
    root: &'a [u8],
    removed: u64,
    steps: u64,
    surprises: &'a mut usize,
}

impl Removal<'_> {
    fn run(&mut self, conn: &mut Conn) -> Done<()> {
        loop {
            self.steps += 1;
            if self.steps % CHECK_EVERY == 0 {
                conn.check()?;
            }
            let step = match self.walk.step() {
                Ok(Some(step)) => step,
                Ok(None) => return Ok(()),
                Err(errno) => return self.fail(b"", errno),
            };
            match step {
                Step::Name(name) => self.name(&name),
                Step::Left(name) => self.left(&name),
            }?;
        }
    }

    fn fail<T>(&self, name: &[u8], errno: Errno) -> Done<T> {
        Err(at("remove", &join(self.root, &self.walk.path_of(name)))(
            errno,
        ))
    }

    fn surprised(&mut self, name: &[u8], errno: Errno) -> Done<()> {
        *self.surprises += 1;
        if *self.surprises > SURPRISES_MAX {
            return self.fail(name, errno);
        }
        Ok(())
    }

    fn unlink(&self, name: &[u8], flags: AtFlags) -> Result<(), Errno> {
        unlinkat(self.walk.dir()?, name, flags)
    }

    fn name(&mut self, name: &[u8]) -> Done<()> {
        loop {
            match self.unlink(name, AtFlags::empty()) {
                Ok(()) => {
                    self.removed += 1;
                    return Ok(());
                }
                Err(Errno::NOENT) => return Ok(()),
                Err(Errno::ISDIR) => {}
                Err(errno) => return self.fail(name, errno),
            }
            match self.walk.enter(name) {
                Ok(()) => return Ok(()),
                Err(errno) => match surprise(errno) {
                    Ok(()) => self.surprised(name, errno)?,
                    Err(errno) => return self.fail(name, errno),
                },
            }
        }
    }

    fn left(&mut self, name: &[u8]) -> Done<()> {
        match self.unlink(name, AtFlags::REMOVEDIR) {
            Ok(()) => self.removed += 1,
            Err(Errno::NOENT) => {}
            Err(errno @ (Errno::NOTEMPTY | Errno::NOTDIR)) => {
                self.surprised(name, errno)?;
                return self.name(name);
            }
            Err(errno) => return self.fail(name, errno),
        }
        Ok(())
    }
}
