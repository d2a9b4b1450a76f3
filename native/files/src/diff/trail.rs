//! Directories on the way down a tree, of which the last are kept open.

use std::os::fd::OwnedFd;

use rustix::fs::{openat, Mode};
use rustix::io::Errno;

use crate::walk::{id_of, DIRECTORY, OPEN_MAX};

struct Level {
    dir: Option<OwnedFd>,
    /// What `..` must lead to.
    id: (u64, u64),
}

/// As the directories of a `Walk`, for a second tree that is walked beside it.
pub(super) struct Trail(Vec<Level>);

impl Trail {
    pub fn new(root: OwnedFd) -> Result<Self, Errno> {
        let mut trail = Self(Vec::new());
        trail.push(root)?;
        Ok(trail)
    }

    pub fn dir(&self) -> Result<&OwnedFd, Errno> {
        let last = self.0.last().and_then(|level| level.dir.as_ref());
        last.ok_or(Errno::BADF)
    }

    pub fn push(&mut self, dir: OwnedFd) -> Result<(), Errno> {
        let id = id_of(&dir)?;
        self.0.push(Level { dir: Some(dir), id });
        if let Some(above) = self.0.len().checked_sub(OPEN_MAX + 1) {
            self.0[above].dir = None;
        }
        Ok(())
    }

    pub fn pop(&mut self) -> Result<(), Errno> {
        let child = self.0.pop().and_then(|level| level.dir);
        let Some(parent) = self.0.last_mut() else {
            return Ok(());
        };
        if parent.dir.is_none() {
            let child = child.ok_or(Errno::BADF)?;
            let dir = openat(child, "..", DIRECTORY, Mode::empty())?;
            if id_of(&dir)? != parent.id {
                // The tree was taken apart while we were in it.
                return Err(Errno::STALE);
            }
            parent.dir = Some(dir);
        }
        Ok(())
    }
}
