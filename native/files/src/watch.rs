//! `watch`: changes below a directory, coalesced; what could not be followed is said.

use std::collections::{BTreeMap, HashMap};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags};
use rustix::fs::inotify::{
    add_watch, init, remove_watch, CreateFlags, ReadFlags, Reader, WatchFlags,
};
use rustix::fs::{openat, statat, AtFlags, FileType, Mode, OFlags, CWD};
use rustix::io::Errno;
use serde::Serialize;
use serde_bytes::ByteBuf;

use crate::conn::{timespec, Ahead, Conn};
use crate::error::{at, errno_name, Code, Done, Failure, Stop};
use crate::path::{absolute, join, kind_of, split, trimmed};
use crate::tree_out::Skipped;
use crate::walk::{Step, Walk};
use crate::wire::WatchArgs;
use crate::{answer, Settings};

/// Directories of one watch; the kernel has a limit of its own for each user.
const DIRS_MAX: usize = 65_536;
/// Their paths together.
const DIRS_BYTES: usize = 16 << 20;
/// Changes are sent when they are so many, or their paths so long, or the first so old.
const CHANGES_MAX: usize = 1_024;
const CHANGES_BYTES: usize = 256 << 10;
const SETTLE_MS: u64 = 50;
const SETTLE_MAX_MS: u64 = 10_000;
const EVENTS_BUF: usize = 64 << 10;

const MASK: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::EXCL_UNLINK)
    .union(WatchFlags::ONLYDIR);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Created,
    /// By a move: something else may have had the name before, and nothing says so.
    #[serde(rename = "created")]
    Placed,
    Modified,
    Attributes,
    Deleted,
}

/// What two changes of one path, one after the other, come to. `None`: to nothing.
fn coalesce(before: Option<Kind>, now: Kind) -> Option<Kind> {
    Some(match (before, now) {
        (None, now) => now,
        (Some(Kind::Created), Kind::Deleted) => return None,
        (Some(Kind::Created), _) => Kind::Created,
        // Another file of the same name.
        (Some(Kind::Deleted), Kind::Created | Kind::Placed) => Kind::Modified,
        (Some(_), Kind::Deleted) => Kind::Deleted,
        (Some(Kind::Placed), _) => Kind::Placed,
        (Some(Kind::Attributes), now) => now,
        (Some(before), _) => before,
    })
}

#[derive(Serialize)]
struct Change {
    path: ByteBuf,
    kind: Kind,
}

#[derive(Serialize)]
struct Watching<'a> {
    id: u64,
    ev: &'static str,
    directories: usize,
    skipped: &'a Skipped,
}

#[derive(Serialize)]
struct Changes {
    id: u64,
    ev: &'static str,
    changes: Vec<Change>,
}

#[derive(Serialize)]
struct Overflow {
    id: u64,
    ev: &'static str,
    /// `queue`: changes were lost; `watches`: a directory is not followed.
    reason: &'static str,
}

#[derive(Serialize)]
struct Ended {
    /// `cancelled`, or `gone`: what was watched was removed or moved.
    reason: &'static str,
}

struct Watch {
    events: OwnedFd,
    root: Vec<u8>,
    recursive: bool,
    /// Only this name of the root: a file is watched through its directory, so that its replacement is seen.
    only: Option<Vec<u8>>,
    dirs: HashMap<i32, Vec<u8>>,
    by_path: BTreeMap<Vec<u8>, i32>,
    dirs_bytes: usize,
    root_wd: i32,
    skipped: Skipped,
    changes: BTreeMap<Vec<u8>, Kind>,
    changes_bytes: usize,
    since: Option<Instant>,
    settle: Duration,
    overflow: Option<&'static str>,
    gone: bool,
}

/// Watches of a user namespace, and instances, are counted: that is no full disk.
fn limit(errno: Errno, path: &[u8]) -> Stop {
    match errno {
        Errno::NOSPC | Errno::MFILE | Errno::NFILE => {
            let mut failure = Failure::errno("watch", path, errno);
            failure.code = Code::Limit;
            failure.detail.resource = Some("watches");
            failure.into()
        }
        errno => at("watch", path)(errno),
    }
}

fn new_events(root: &[u8]) -> Done<OwnedFd> {
    init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(|errno| limit(errno, root))
}

pub(crate) fn watch(conn: &mut Conn, set: &Settings, args: &WatchArgs) -> Done<()> {
    let settle = args.settle_ms.unwrap_or(SETTLE_MS);
    if settle > SETTLE_MAX_MS {
        return Err(Failure::field("settle_ms", format!("at most {SETTLE_MAX_MS}")).into());
    }
    let path = absolute(set, "path", &args.path)?;
    let stat = statat(CWD, &path, AtFlags::empty()).map_err(at("watch", &path))?;
    let path = trimmed(&path);
    let (root, only) = if kind_of(&stat) == FileType::Directory {
        (path, None)
    } else {
        let (dir, name) = split(path);
        (dir, Some(name.to_vec()))
    };
    let mut watch = Watch {
        events: new_events(path)?,
        root: root.to_vec(),
        recursive: args.recursive && only.is_none(),
        only,
        dirs: HashMap::new(),
        by_path: BTreeMap::new(),
        dirs_bytes: 0,
        root_wd: -1,
        skipped: Skipped::default(),
        changes: BTreeMap::new(),
        changes_bytes: 0,
        since: None,
        settle: Duration::from_millis(settle),
        overflow: None,
        gone: false,
    };
    watch.begin()?;
    let id = conn.id();
    conn.queue(&Watching {
        id,
        ev: "watching",
        directories: watch.dirs.len(),
        skipped: &watch.skipped,
    })?;
    let reason = watch.run(conn)?;
    answer(conn, Ended { reason })
}

impl Watch {
    fn begin(&mut self) -> Done<()> {
        self.add(b"")
            .map_err(|errno| limit(errno, &self.root.clone()))?;
        if self.recursive {
            let root = self.root.clone();
            self.add_below(b"", false)
                .map_err(|errno| limit(errno, &root))?;
        }
        Ok(())
    }

    fn run(&mut self, conn: &mut Conn) -> Done<&'static str> {
        loop {
            match conn.ahead()? {
                Ahead::Nothing => {}
                Ahead::Cancel => {
                    self.send(conn)?;
                    return Ok("cancelled");
                }
                Ahead::Other => return Err(Stop::protocol("a request within a watch")),
            }
            self.take_events(conn)?;
            if let Some(reason) = self.overflow.take() {
                self.overflowed(conn, reason)?;
            }
            if self.gone {
                self.send(conn)?;
                return Ok("gone");
            }
            if self
                .since
                .is_some_and(|since| since.elapsed() >= self.settle)
            {
                self.send(conn)?;
            }
            conn.flush()?;
            self.wait(conn)?;
        }
    }

    fn wait(&self, conn: &Conn) -> Done<()> {
        let left = self
            .since
            .map(|since| self.settle.saturating_sub(since.elapsed()));
        let timeout = left.map(timespec);
        let mut fds = [
            PollFd::new(conn.socket(), PollFlags::IN),
            PollFd::new(&self.events, PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(limit(errno, &self.root)),
        }
    }

    fn overflowed(&mut self, conn: &mut Conn, reason: &'static str) -> Done<()> {
        self.send(conn)?;
        let id = conn.id();
        conn.queue(&Overflow {
            id,
            ev: "overflow",
            reason,
        })?;
        if reason == "queue" {
            // New directories may be among what was lost: follow everything anew.
            self.events = new_events(&self.root)?;
            self.dirs.clear();
            self.by_path.clear();
            self.dirs_bytes = 0;
            match self.begin() {
                Err(Stop::Failed(failure)) if failure.code == Code::FileNotFound => {
                    self.gone = true
                }
                other => other?,
            }
        }
        Ok(())
    }

    fn send(&mut self, conn: &mut Conn) -> Done<()> {
        self.since = None;
        self.changes_bytes = 0;
        let changes = std::mem::take(&mut self.changes);
        if changes.is_empty() {
            return Ok(());
        }
        let id = conn.id();
        conn.queue(&Changes {
            id,
            ev: "changes",
            changes: changes
                .into_iter()
                .map(|(path, kind)| Change {
                    path: ByteBuf::from(join(&self.root, &path)),
                    kind,
                })
                .collect(),
        })
    }

    fn note(&mut self, path: Vec<u8>, kind: Kind) {
        let before = self.changes.get(&path).copied();
        if before.is_none() {
            self.changes_bytes += path.len() + self.root.len();
        }
        match coalesce(before, kind) {
            Some(kind) => {
                self.changes.insert(path, kind);
            }
            None => {
                self.changes_bytes -= path.len() + self.root.len();
                self.changes.remove(&path);
            }
        }
        self.since.get_or_insert_with(Instant::now);
    }

    fn full(&self) -> bool {
        self.changes.len() >= CHANGES_MAX || self.changes_bytes >= CHANGES_BYTES
    }

    /// Follows a directory, by its path below the root.
    fn add(&mut self, path: &[u8]) -> Result<(), Errno> {
        if self.dirs.len() >= DIRS_MAX || self.dirs_bytes + path.len() > DIRS_BYTES {
            return Err(Errno::NOSPC);
        }
        // Below the root no link is followed.
        let mask = if path.is_empty() {
            MASK
        } else {
            MASK | WatchFlags::DONT_FOLLOW
        };
        let wd = add_watch(&self.events, join(&self.root, path), mask)?;
        if path.is_empty() {
            self.root_wd = wd;
        }
        if let Some(old) = self.dirs.insert(wd, path.to_vec()) {
            self.by_path.remove(&old);
        } else {
            self.dirs_bytes += path.len();
        }
        self.by_path.insert(path.to_vec(), wd);
        Ok(())
    }

    /// Follows what is below a directory that is followed already. With `report`, it is new to the client too.
    fn add_below(&mut self, path: &[u8], report: bool) -> Result<(), Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let flags = if path.is_empty() {
            flags
        } else {
            flags | OFlags::NOFOLLOW
        };
        let dir = openat(CWD, join(&self.root, path), flags, Mode::empty())?;
        let mut walk = Walk::new(dir)?;
        while let Some(step) = walk.step()? {
            let Step::Name(name) = step else { continue };
            let below = join(path, &walk.path_of(&name));
            if report && !self.full() {
                self.note(below.clone(), Kind::Created);
            }
            if !self.recursive {
                continue;
            }
            match walk.enter(&name) {
                Ok(()) => {}
                // No directory, or not any more.
                Err(Errno::NOTDIR | Errno::LOOP | Errno::NOENT) => continue,
                Err(Errno::XDEV) => {
                    self.skipped.add(&below, "mount");
                    continue;
                }
                Err(errno) => {
                    self.skipped.add(&below, &errno_name(errno));
                    continue;
                }
            }
            match self.add(&below) {
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(errno @ (Errno::ACCESS | Errno::NAMETOOLONG)) => {
                    self.skipped.add(&below, &errno_name(errno));
                }
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// A directory has appeared.
    fn appeared(&mut self, path: &[u8]) {
        let added = self.add(path).and_then(|()| self.add_below(path, true));
        match added {
            // Gone again already.
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE) => {}
            Err(_) => self.overflow = self.overflow.or(Some("watches")),
        }
    }

    /// A directory was moved away: it and what is below have another path now, or none.
    fn disappeared(&mut self, path: &[u8]) {
        let below = [path, b"/"].concat();
        let mut left: Vec<Vec<u8>> = self
            .by_path
            .range(below.clone()..)
            .map(|(path, _)| path.clone())
            .take_while(|path| path.starts_with(&below))
            .collect();
        left.push(path.to_vec());
        for path in left {
            if let Some(wd) = self.by_path.remove(&path) {
                self.forget(wd);
                // It may be gone by itself.
                let _ = remove_watch(&self.events, wd);
            }
        }
    }

    fn forget(&mut self, wd: i32) {
        if let Some(path) = self.dirs.remove(&wd) {
            self.dirs_bytes -= path.len();
            if self.by_path.get(&path) == Some(&wd) {
                self.by_path.remove(&path);
            }
        }
    }

    fn take_events(&mut self, conn: &mut Conn) -> Done<()> {
        let mut buf = [MaybeUninit::uninit(); EVENTS_BUF];
        loop {
            let mut batch = Vec::new();
            {
                let mut reader = Reader::new(&self.events, &mut buf);
                loop {
                    match reader.next() {
                        Ok(event) => {
                            let name = event.file_name().map(|n| n.to_bytes().to_vec());
                            batch.push((event.wd(), event.events(), name));
                        }
                        Err(Errno::AGAIN | Errno::INTR) => break,
                        Err(errno) => return Err(limit(errno, &self.root)),
                    }
                    if reader.is_buffer_empty() {
                        break;
                    }
                }
            }
            if batch.is_empty() {
                return Ok(());
            }
            for (wd, events, name) in batch {
                self.event(wd, events, name);
                if self.full() {
                    self.send(conn)?;
                }
            }
            if self.overflow.is_some() || self.gone || self.due() {
                return Ok(());
            }
        }
    }

    fn due(&self) -> bool {
        self.since
            .is_some_and(|since| since.elapsed() >= self.settle)
    }

    fn event(&mut self, wd: i32, events: ReadFlags, name: Option<Vec<u8>>) {
        if events.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.overflow = Some("queue");
            return;
        }
        let own =
            ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::IGNORED | ReadFlags::UNMOUNT;
        if wd == self.root_wd && events.intersects(own) {
            self.gone = true;
            return;
        }
        if events.contains(ReadFlags::IGNORED) {
            self.forget(wd);
            return;
        }
        let (Some(dir), Some(name)) = (self.dirs.get(&wd), name) else {
            return;
        };
        if self.only.as_ref().is_some_and(|only| *only != name) {
            return;
        }
        let path = join(dir, &name);
        let directory = events.contains(ReadFlags::ISDIR);
        if events.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
            let moved = events.contains(ReadFlags::MOVED_TO);
            self.note(
                path.clone(),
                if moved { Kind::Placed } else { Kind::Created },
            );
            if directory && self.recursive {
                self.appeared(&path);
            }
        } else if events.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM) {
            if directory {
                self.disappeared(&path);
            }
            self.note(path, Kind::Deleted);
        } else if events.contains(ReadFlags::MODIFY) {
            self.note(path, Kind::Modified);
        } else if events.contains(ReadFlags::ATTRIB) && self.is_there(&path) {
            self.note(path, Kind::Attributes);
        }
    }

    /// Of a file that has no name yet, or none any more, the kernel tells under one that it makes up or had.
    fn is_there(&self, path: &[u8]) -> bool {
        let path = join(&self.root, path);
        statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).err() != Some(Errno::NOENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_one_path_are_one() {
        use Kind::{Attributes, Created, Deleted, Modified, Placed};
        for (all, one) in [
            (&[Created, Modified, Attributes][..], Some(Created)),
            (&[Created, Deleted], None),
            (&[Deleted, Created], Some(Modified)),
            (&[Deleted, Created, Deleted], Some(Deleted)),
            (&[Attributes, Modified], Some(Modified)),
            (&[Modified, Attributes], Some(Modified)),
            (&[Modified, Deleted], Some(Deleted)),
            (&[Placed, Modified, Attributes], Some(Placed)),
            (&[Placed, Deleted], Some(Deleted)),
            (&[Created, Placed, Deleted], None),
            (&[Deleted, Placed], Some(Modified)),
        ] {
            let found = all.iter().fold(None, |before, now| coalesce(before, *now));
            assert_eq!(found, one, "{all:?}");
        }
    }
}
