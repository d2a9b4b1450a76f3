//! `watch`: changes below a directory, coalesced; what could not be followed is said.

use std::collections::{BTreeMap, HashMap};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags};
use rustix::fs::inotify::{
    add_watch, init, remove_watch, CreateFlags, ReadFlags, Reader, WatchFlags,
};
use rustix::fs::{
    fstat, openat, openat2, statat, AtFlags, FileType, Mode, OFlags, ResolveFlags, CWD,
};
use rustix::io::{ioctl_fionread, Errno};
use serde_bytes::ByteBuf;

use crate::conn::{timespec, Ahead, Conn};
use crate::error::{at, errno_name, Code, Done, Failure, Stop};
use crate::path::{absolute, join, kind_of, split, trimmed};
use crate::tree_out::Skipped;
use crate::walk::{Step, Walk};
use crate::wire::WatchArgs;
use crate::{answer, Settings};

mod changes;
mod told;
use changes::{below, Changes, Kind};
use told::{Change, Ended, Overflow, Told, Watching};

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

struct Watch {
    events: OwnedFd,
    root: Vec<u8>,
    /// The root's device and number: its path may lead elsewhere once a directory above it was moved.
    root_is: (u64, u64),
    recursive: bool,
    /// Only this name of the root: a file is watched through its directory, so that its replacement is seen.
    only: Option<Vec<u8>>,
    dirs: HashMap<i32, Vec<u8>>,
    by_path: BTreeMap<Vec<u8>, i32>,
    dirs_bytes: usize,
    root_wd: i32,
    skipped: Skipped,
    changes: Changes,
    /// Names were found by looking; what the kernel tells of them may still be unread.
    looked: bool,
    /// Such names were sent: the client may know already that one was made or is gone, and made and gone is no nothing.
    ahead: bool,
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

fn identity(root: &[u8]) -> Result<(u64, u64), Errno> {
    let stat = statat(CWD, root, AtFlags::empty())?;
    Ok((stat.st_dev, stat.st_ino))
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
    let mut watch = Watch::new(root, args.recursive && only.is_none(), only)?;
    watch.settle = Duration::from_millis(settle);
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
    fn new(root: &[u8], recursive: bool, only: Option<Vec<u8>>) -> Done<Self> {
        Ok(Self {
            events: new_events(root)?,
            root: root.to_vec(),
            root_is: identity(root).map_err(at("watch", root))?,
            recursive,
            only,
            dirs: HashMap::new(),
            by_path: BTreeMap::new(),
            dirs_bytes: 0,
            root_wd: -1,
            skipped: Skipped::default(),
            changes: Changes::default(),
            looked: false,
            ahead: false,
            since: None,
            settle: Duration::from_millis(SETTLE_MS),
            overflow: None,
            gone: false,
        })
    }

    fn begin(&mut self) -> Done<()> {
        self.add(b"")
            .map_err(|errno| limit(errno, &self.root.clone()))?;
        if self.recursive {
            self.add_below(b"", None)?
                .map_err(|errno| limit(errno, &self.root))?;
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
                if self.gone {
                    return Ok("gone");
                }
                self.caught_up();
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
            (self.looked, self.ahead) = (false, false);
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
        let mut changes = std::mem::take(&mut self.changes);
        if self.elsewhere() {
            return Ok(());
        }
        let told = changes.settle(|path| {
            self.looked = true;
            self.there(path)
        });
        self.ahead |= self.looked;
        if told.is_empty() {
            return Ok(());
        }
        let id = conn.id();
        conn.queue(&Told {
            id,
            ev: "changes",
            changes: told
                .into_iter()
                .map(|(path, kind)| Change {
                    path: ByteBuf::from(join(&self.root, &path)),
                    kind,
                })
                .collect(),
        })
    }

    /// Whether the root's path leads to something else, under which nothing may be told. The kernel tells of the root's
    /// own moves, and not of those above it.
    fn elsewhere(&mut self) -> bool {
        let found = identity(&self.root);
        self.gone |= match found {
            Ok(found) => found != self.root_is,
            // It was removed, which may be unread; or it is somewhere else, and what happened before is told.
            Err(_) => ioctl_fionread(&self.events) == Ok(0),
        };
        found.is_ok_and(|found| found != self.root_is)
    }

    /// When nothing is unread after a look, nothing of what it found will be told again.
    fn caught_up(&mut self) {
        if self.looked && ioctl_fionread(&self.events) == Ok(0) {
            (self.looked, self.ahead) = (false, false);
        }
    }

    fn full(&self) -> bool {
        let bytes = self.changes.bytes() + self.changes.len() * self.root.len();
        self.changes.len() >= CHANGES_MAX || bytes >= CHANGES_BYTES
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
        self.follow(wd, path);
        Ok(())
    }

    /// A watch has one path, and a path one watch: that of what was found there last.
    fn follow(&mut self, wd: i32, path: &[u8]) {
        if wd == self.root_wd && !path.is_empty() {
            return;
        }
        self.forget(wd);
        self.unfollow(path);
        self.dirs_bytes += path.len();
        self.dirs.insert(wd, path.to_vec());
        self.by_path.insert(path.to_vec(), wd);
    }

    fn unfollow(&mut self, path: &[u8]) {
        if let Some(wd) = self.by_path.get(path).copied() {
            self.forget(wd);
            // It may be gone by itself.
            let _ = remove_watch(&self.events, wd);
        }
    }

    /// The watch is gone, or leads elsewhere.
    fn forget(&mut self, wd: i32) {
        if let Some(path) = self.dirs.remove(&wd) {
            self.dirs_bytes -= path.len();
            self.by_path.remove(&path);
        }
    }

    /// Follows what is below a directory that is followed already. With `report`, it is new to the client too.
    fn add_below(&mut self, path: &[u8], mut report: Option<&mut Conn>) -> Done<Result<(), Errno>> {
        let mut walk = match self.walk(path) {
            Ok(walk) => walk,
            Err(errno) => return Ok(Err(errno)),
        };
        loop {
            match walk.step() {
                Ok(None) => return Ok(Ok(())),
                Ok(Some(Step::Left(_))) => continue,
                Ok(Some(Step::Name(name))) => {
                    let below = join(path, &walk.path_of(&name));
                    if let Some(conn) = &mut report {
                        self.looked = true;
                        self.changes.note(below.clone(), Kind::Created, false);
                        self.noted();
                        if self.full() {
                            self.send(conn)?;
                        }
                    }
                    if let Err(errno) = self.enter(&mut walk, &name, &below) {
                        return Ok(Err(errno));
                    }
                }
                Err(errno) => return Ok(Err(errno)),
            }
        }
    }

    fn walk(&self, path: &[u8]) -> Result<Walk, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let flags = if path.is_empty() {
            flags
        } else {
            flags | OFlags::NOFOLLOW
        };
        Walk::new(openat(CWD, join(&self.root, path), flags, Mode::empty())?)
    }

    /// Follows what a walk has come to, if it is a directory.
    fn enter(&mut self, walk: &mut Walk, name: &[u8], path: &[u8]) -> Result<(), Errno> {
        match walk.enter(name) {
            Ok(()) => {}
            // No directory, or not any more.
            Err(Errno::NOTDIR | Errno::LOOP | Errno::NOENT) => return Ok(()),
            Err(Errno::XDEV) => {
                self.skipped.add(path, "mount");
                return Ok(());
            }
            Err(errno) => {
                self.skipped.add(path, &errno_name(errno));
                return Ok(());
            }
        }
        match self.add(path) {
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
            Err(errno @ (Errno::ACCESS | Errno::NAMETOOLONG)) => {
                self.skipped.add(path, &errno_name(errno));
                Ok(())
            }
            Err(errno) => Err(errno),
        }
    }

    /// Another directory may have this path now: what is there is followed, all of it anew, and told.
    ///
    /// A watch is found by a path, which may change on the way. Then the kernel tells of it later, and this is done
    /// again.
    fn refresh(&mut self, conn: &mut Conn, path: &[u8]) -> Done<()> {
        self.changes.replaced(path);
        self.disappeared(path);
        let added = match self.add(path) {
            Ok(()) => self.add_below(path, Some(conn))?,
            Err(errno) => Err(errno),
        };
        match added {
            // Gone again already.
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
            // Taken apart while we were in it: what was left out is not known.
            Err(Errno::STALE) => self.overflow = Some("queue"),
            Err(_) => self.overflow = self.overflow.or(Some("watches")),
        }
        Ok(())
    }

    /// A directory is not there any more: it and what is below have another path now, or none.
    fn disappeared(&mut self, path: &[u8]) {
        for below in below(&self.by_path, path) {
            self.unfollow(&below);
        }
        self.unfollow(path);
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
                (self.looked, self.ahead) = (false, false);
                return Ok(());
            }
            for (wd, events, name) in batch {
                self.event(conn, wd, events, name)?;
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

    fn event(
        &mut self,
        conn: &mut Conn,
        wd: i32,
        events: ReadFlags,
        name: Option<Vec<u8>>,
    ) -> Done<()> {
        if events.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.overflow = Some("queue");
            return Ok(());
        }
        let own =
            ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::IGNORED | ReadFlags::UNMOUNT;
        if wd == self.root_wd && events.intersects(own) {
            self.gone = true;
            return Ok(());
        }
        if events.contains(ReadFlags::IGNORED) {
            self.forget(wd);
            return Ok(());
        }
        let (Some(dir), Some(name)) = (self.dirs.get(&wd), name) else {
            return Ok(());
        };
        if self.only.as_ref().is_some_and(|only| *only != name) {
            return Ok(());
        }
        let path = join(dir, &name);
        self.named(conn, path, events)
    }

    /// Something happened to a name in a directory that is followed.
    fn named(&mut self, conn: &mut Conn, path: Vec<u8>, events: ReadFlags) -> Done<()> {
        let directory = events.contains(ReadFlags::ISDIR);
        let followed = directory || self.by_path.contains_key(&path);
        let mut anew = self.recursive && followed;
        let unsure = directory || self.ahead;
        if events.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
            self.changes.note(path.clone(), Kind::Created, unsure);
        } else if events.contains(ReadFlags::MOVED_FROM) {
            self.changes.moved_away(path.clone(), unsure);
        } else {
            anew = false;
            if events.contains(ReadFlags::DELETE) {
                if directory {
                    self.disappeared(&path);
                }
                self.changes.note(path.clone(), Kind::Deleted, unsure);
            } else if events.contains(ReadFlags::MODIFY) {
                self.changes.note(path.clone(), Kind::Modified, false);
            } else if events.contains(ReadFlags::ATTRIB) && self.there(&path).is_some() {
                self.changes.note(path.clone(), Kind::Attributes, false);
            } else {
                return Ok(());
            }
        }
        self.noted();
        if anew {
            self.refresh(conn, &path)?;
        }
        Ok(())
    }

    fn noted(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    /// What is at a path; of what kind may be unknown.
    ///
    /// Of a file that has no name yet, or none any more, the kernel tells under one that it makes up or had. What is
    /// behind a link that has taken a directory's place is not what was watched.
    fn there(&self, path: &[u8]) -> Option<FileType> {
        let looked = openat(
            CWD,
            &self.root,
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .and_then(|root| {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            openat2(root, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
        })
        .and_then(fstat);
        match looked {
            Ok(stat) => Some(kind_of(&stat)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => None,
            Err(_) => Some(FileType::Unknown),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_was_found_and_sent_is_told_to_be_gone_though_it_was_made_within_the_window() {
        let dir = std::env::temp_dir().join(format!("dsec-watch-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (one, _other) = UnixStream::pair().unwrap();
        let mut conn = Conn::new(one.into(), Duration::from_secs(10));
        let mut watch = Watch::new(dir.as_os_str().as_bytes(), true, None).unwrap();
        watch.begin().unwrap();
        std::fs::create_dir(dir.join("d")).unwrap();
        // Also what looks like a copy of ours: it was told to be there.
        for name in ["d/x", "d/.dsec-x"] {
            std::fs::write(dir.join(name), b"").unwrap();
        }
        let made = ReadFlags::CREATE | ReadFlags::ISDIR;
        watch.named(&mut conn, b"d".to_vec(), made).unwrap();
        watch.send(&mut conn).unwrap();
        for events in [ReadFlags::CREATE, ReadFlags::DELETE] {
            for path in [&b"d/x"[..], b"d/.dsec-x"] {
                watch.named(&mut conn, path.to_vec(), events).unwrap();
            }
        }
        let told = watch.changes.settle(|_| None);
        std::fs::remove_dir_all(&dir).unwrap();
        let gone = |path: &[u8]| (path.to_vec(), Kind::Gone);
        assert_eq!(told, [gone(b"d/.dsec-x"), gone(b"d/x")]);
    }
}
