//! `diff`: what of a tree is not as it was.
//!
//! Three views: the tree now, the tree before, and the names that were touched. Only touched names are looked at, so
//! a diff costs as much as was written; what they mean is asked of the two trees, where the kernel answers. Marks that
//! overlayfs leaves in what was written (deleted, opaque, copied in part) are never read here.
//!
//! Every path is resolved by single names from open directories, without following a link.

mod compare;
mod trail;

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::{openat, FileType, Mode};
use rustix::io::Errno;
use serde::Serialize;
use serde_bytes::ByteBuf;

use crate::conn::Conn;
use crate::error::{at, errno_name, Done, Failure, Stop};
use crate::path::{absolute, join};
use crate::tree_out::Skipped;
use crate::walk::{open_child, read_names, Step, Walk, DIRECTORY, DIRENTS};
use crate::wire::DiffArgs;
use crate::{answer, Settings, Views};
use compare::{look, Differences, Facts, Pair, Seen};
use trail::Trail;

/// Changes that are told where no limit was asked for, and at most.
const CHANGES_MAX: u64 = 1_000_000;
/// Changes in one frame, and about how many bytes.
const BATCH: usize = 256;
const BATCH_BYTES: usize = 64 << 10;
/// Longer paths are left out, with what is below: two of them and a batch must fit a frame.
const PATH_MAX: usize = 64 << 10;
const CHECK_EVERY: u64 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Added,
    Changed,
    Deleted,
}

#[derive(Serialize)]
struct Change {
    kind: Kind,
    path: ByteBuf,
    before: Option<Facts>,
    now: Option<Facts>,
    what: Vec<&'static str>,
    unsure: Option<String>,
}

#[derive(Serialize)]
struct Changes<'a> {
    id: u64,
    ev: &'static str,
    changes: &'a [Change],
}

#[derive(Default, Serialize)]
struct Told {
    added: u64,
    changed: u64,
    deleted: u64,
    skipped: Skipped,
    /// There are more than were asked for.
    more: bool,
}

/// Why it goes no further.
enum Halt {
    Stop(Stop),
    Full,
}

impl<T: Into<Stop>> From<T> for Halt {
    fn from(stop: T) -> Self {
        Self::Stop(stop.into())
    }
}

type Going<T = ()> = Result<T, Halt>;

struct Diff<'a> {
    conn: &'a mut Conn,
    batch: Vec<Change>,
    batch_bytes: usize,
    left: u64,
    steps: u64,
    told: Told,
}

/// The directory that is looked at, in each view where it is one.
struct Dirs {
    now: Option<OwnedFd>,
    before: Option<OwnedFd>,
    touched: Option<OwnedFd>,
}

pub(crate) fn diff(conn: &mut Conn, set: &Settings, args: &DiffArgs) -> Done<()> {
    let Some(views) = &set.views else {
        let text = "this helper was started without what a diff needs";
        return Err(Failure::field("op", text).into());
    };
    let limit = args.limit.unwrap_or(CHANGES_MAX);
    if !(1..=CHANGES_MAX).contains(&limit) {
        return Err(Failure::field("limit", format!("1 to {CHANGES_MAX}")).into());
    }
    let path = absolute(set, "path", &args.path)?;
    let mut diff = Diff {
        conn,
        batch: Vec::new(),
        batch_bytes: 0,
        left: limit,
        steps: 0,
        told: Told::default(),
    };
    match diff.start(views, &path) {
        Ok(()) => {}
        Err(Halt::Full) => diff.told.more = true,
        Err(Halt::Stop(stop)) => return Err(stop),
    }
    diff.send()?;
    let Diff { conn, told, .. } = diff;
    answer(conn, told)
}

/// The names of a path. `..` would have to be resolved through links, of which there may be others in each view.
fn names(path: &[u8]) -> Done<Vec<&[u8]>> {
    let parts = path.split(|byte| *byte == b'/');
    let names: Vec<&[u8]> = parts.filter(|p| !p.is_empty() && *p != b".").collect();
    if names.iter().any(|name| *name == b"..") {
        return Err(Failure::field("path", "has a part ..").into());
    }
    Ok(names)
}

fn open_here(dir: &OwnedFd) -> Result<OwnedFd, Errno> {
    openat(dir, ".", DIRECTORY, Mode::empty())
}

fn is_link(doing_at: &[u8]) -> Stop {
    let mut failure = Failure::errno("diff", doing_at, Errno::LOOP);
    failure
        .message
        .push_str(": a symbolic link, which is not followed");
    failure.into()
}

fn is_mount(path: &[u8]) -> Stop {
    let mut failure = Failure::errno("diff", path, Errno::XDEV);
    failure
        .message
        .push_str(": mounted there; only the sandbox's own tree is compared");
    failure.into()
}

impl Dirs {
    fn root(views: &Views) -> Result<Self, Errno> {
        Ok(Self {
            now: Some(open_here(&views.now)?),
            before: Some(open_here(&views.before)?),
            touched: Some(open_here(&views.touched)?),
        })
    }

    /// One name down. `path` is the new directory's.
    fn down(self, name: &[u8], path: &[u8]) -> Done<Self> {
        let fail = at("diff", path);
        let now = match self.now {
            None => None,
            Some(dir) => match look(&dir, name).map_err(&fail)? {
                Some(seen) if seen.kind() == FileType::Symlink => return Err(is_link(path)),
                Some(seen) if seen.is_mount() => return Err(is_mount(path)),
                Some(seen) if seen.is_directory() => Some(open_child(&dir, name).map_err(&fail)?),
                _ => None,
            },
        };
        let open = |dir: Option<OwnedFd>| dir.and_then(|dir| open_child(&dir, name).ok());
        Ok(Self {
            now,
            before: open(self.before),
            touched: open(self.touched),
        })
    }
}

impl Diff<'_> {
    fn start(&mut self, views: &Views, path: &[u8]) -> Going {
        let names = names(path)?;
        let mut dirs = Dirs::root(views).map_err(at("diff", b"/"))?;
        let Some((last, above)) = names.split_last() else {
            return self.root(dirs);
        };
        let mut here = b"/".to_vec();
        for name in above {
            here = join(&here, name);
            dirs = dirs.down(name, &here)?;
        }
        here = join(&here, last);
        let find = |dir: &Option<OwnedFd>| match dir {
            Some(dir) => look(dir, last).map_err(at("diff", &here)),
            None => Ok(None),
        };
        let (now, before) = (find(&dirs.now)?, find(&dirs.before)?);
        match &now {
            None if before.is_none() => return Err(at("diff", &here)(Errno::NOENT).into()),
            Some(now) if now.is_mount() => return Err(is_mount(&here).into()),
            _ => {}
        }
        let sides = (dirs.now.as_ref(), dirs.before.as_ref());
        let Some((now, before)) = self.name(sides, last, &here, (now, before))? else {
            return Ok(());
        };
        // Nobody has written in it.
        let Some(touched) = dirs.touched.and_then(|dir| open_child(&dir, last).ok()) else {
            return Ok(());
        };
        self.both(now, before, touched, &here)
    }

    fn root(&mut self, dirs: Dirs) -> Going {
        let Dirs {
            now: Some(now),
            before: Some(before),
            touched: Some(touched),
        } = dirs
        else {
            return Ok(());
        };
        let seen = look(&now, b".").and_then(|has| Ok((has, look(&before, b".")?)));
        if let (Some(has), Some(had)) = seen.map_err(at("diff", b"/"))? {
            let had = had.at_first();
            let found = has.attributes(&had);
            if !found.what.is_empty() {
                self.tell(Kind::Changed, b"/", (Some(&has), Some(&had)), found)?;
            }
        }
        self.both(now, before, touched, b"/")
    }

    /// Below a directory that there was and is.
    fn both(&mut self, now: OwnedFd, before: OwnedFd, touched: OwnedFd, path: &[u8]) -> Going {
        let fail = at("diff", path);
        let mut walk = Walk::new(touched).map_err(&fail)?;
        let mut now = Trail::new(now).map_err(&fail)?;
        let mut before = Trail::new(before).map_err(&fail)?;
        self.hidden(&walk, &now, &before, path)?;
        loop {
            self.turn()?;
            let here = join(path, walk.path());
            let fail = at("diff", &here);
            match walk.step().map_err(&fail)? {
                None => return Ok(()),
                Some(Step::Left(_)) => {
                    now.pop().map_err(&fail)?;
                    before.pop().map_err(&fail)?;
                }
                Some(Step::Name(name)) => {
                    let below = join(path, &walk.path_of(&name));
                    let dirs = (now.dir().map_err(&fail)?, before.dir().map_err(&fail)?);
                    let Some(children) = self.touched(dirs, &name, &below)? else {
                        continue;
                    };
                    if let Err(errno) = walk.enter(&name) {
                        self.skip(&below, errno);
                        continue;
                    }
                    now.push(children.0).map_err(&fail)?;
                    before.push(children.1).map_err(&fail)?;
                    self.hidden(&walk, &now, &before, &below)?;
                }
            }
        }
    }

    /// A name that was touched.
    fn touched(
        &mut self,
        dirs: (&OwnedFd, &OwnedFd),
        name: &[u8],
        path: &[u8],
    ) -> Going<Option<(OwnedFd, OwnedFd)>> {
        let both = look(dirs.0, name).and_then(|now| Ok((now, look(dirs.1, name)?)));
        match both {
            Ok((Some(now), _)) if now.is_mount() => self.skip(path, Errno::XDEV),
            Ok(seen) => return self.name((Some(dirs.0), Some(dirs.1)), name, path, seen),
            Err(errno) => self.skip(path, errno),
        }
        Ok(None)
    }

    /// Names that there were and that nobody touched: a directory that was removed and made again hides all it had.
    /// One that is still there shows that this one was not; then it hides none.
    fn hidden(&mut self, touched: &Walk, now: &Trail, before: &Trail, path: &[u8]) -> Going {
        let fail = at("diff", path);
        let (now, before) = (now.dir().map_err(&fail)?, before.dir().map_err(&fail)?);
        let touched = touched.dir().map_err(&fail)?;
        let mut buf = vec![MaybeUninit::uninit(); DIRENTS];
        let mut more = true;
        while more {
            let mut names = Vec::new();
            more = read_names(before, &mut buf, |name| names.push(name.to_vec())).map_err(&fail)?;
            for name in names {
                self.turn()?;
                match look(touched, &name) {
                    Ok(None) => {}
                    Ok(Some(_)) => continue,
                    Err(errno) => return Err(fail(errno).into()),
                }
                let below = join(path, &name);
                if look(now, &name).map_err(&fail)?.is_some() {
                    return Ok(());
                }
                if let Some(had) = look(before, &name).map_err(&fail)? {
                    self.name((Some(now), Some(before)), &name, &below, (None, Some(had)))?;
                }
            }
        }
        Ok(())
    }

    /// One name: what it is now, and was before. Two directories are returned, to go on in them.
    fn name(
        &mut self,
        dirs: (Option<&OwnedFd>, Option<&OwnedFd>),
        name: &[u8],
        path: &[u8],
        seen: (Option<Seen>, Option<Seen>),
    ) -> Going<Option<(OwnedFd, OwnedFd)>> {
        if path.len() > PATH_MAX {
            self.skip(path, Errno::NAMETOOLONG);
            return Ok(None);
        }
        match seen {
            (Some(now), Some(before)) if now.kind() == before.kind() => {
                let (Some(in_now), Some(in_before)) = dirs else {
                    return Ok(None);
                };
                self.same_kind((in_now, in_before), name, path, (&now, &before))?;
                if !now.is_directory() {
                    return Ok(None);
                }
                let open = |dir| open_child(dir, name);
                match open(in_now).and_then(|now| Ok((now, open(in_before)?))) {
                    Ok(both) => return Ok(Some(both)),
                    Err(errno) => self.skip(path, errno),
                }
            }
            (None, None) => {}
            (now, before) => {
                let kind = match (&now, &before) {
                    (Some(_), Some(_)) => Kind::Changed,
                    (Some(_), None) => Kind::Added,
                    _ => Kind::Deleted,
                };
                let what = Differences {
                    what: Vec::from(if kind == Kind::Changed {
                        &["type"][..]
                    } else {
                        &[]
                    }),
                    unsure: None,
                };
                self.tell(kind, path, (now.as_ref(), before.as_ref()), what)?;
                if before.is_some_and(|seen| seen.is_directory()) {
                    self.below(Kind::Deleted, dirs.1, name, path)?;
                }
                if now.is_some_and(|seen| seen.is_directory()) {
                    self.below(Kind::Added, dirs.0, name, path)?;
                }
            }
        }
        Ok(None)
    }

    fn same_kind(
        &mut self,
        dirs: (&OwnedFd, &OwnedFd),
        name: &[u8],
        path: &[u8],
        (now, before): (&Seen, &Seen),
    ) -> Going {
        let pair = Pair {
            name,
            now: (dirs.0, now),
            before: (dirs.1, before),
        };
        let found = pair.differences(self.conn)?;
        if found.what.is_empty() && found.unsure.is_none() {
            return Ok(());
        }
        self.tell(Kind::Changed, path, (Some(now), Some(before)), found)
    }

    /// All of a directory that is in one of the trees only.
    fn below(&mut self, kind: Kind, dir: Option<&OwnedFd>, name: &[u8], path: &[u8]) -> Going {
        let opened = dir
            .ok_or(Errno::NOENT)
            .and_then(|dir| open_child(dir, name));
        let mut walk = match opened.and_then(Walk::new) {
            Ok(walk) => walk,
            Err(errno) => {
                self.skip(path, errno);
                return Ok(());
            }
        };
        loop {
            self.turn()?;
            let step = walk.step();
            match step.map_err(|errno| at("diff", &join(path, walk.path()))(errno))? {
                None => return Ok(()),
                Some(Step::Left(_)) => {}
                Some(Step::Name(name)) => {
                    let below = join(path, &walk.path_of(&name));
                    if let Err(errno) = self.one_side(kind, &mut walk, &name, &below)? {
                        self.skip(&below, errno);
                    }
                }
            }
        }
    }

    /// The inner error is of that file alone.
    fn one_side(
        &mut self,
        kind: Kind,
        walk: &mut Walk,
        name: &[u8],
        path: &[u8],
    ) -> Going<Result<(), Errno>> {
        let seen = match walk.dir().and_then(|dir| look(dir, name)) {
            Ok(Some(seen)) => seen,
            Ok(None) => return Ok(Ok(())),
            Err(errno) => return Ok(Err(errno)),
        };
        if path.len() > PATH_MAX {
            return Ok(Err(Errno::NAMETOOLONG));
        }
        if seen.is_mount() {
            return Ok(Err(Errno::XDEV));
        }
        let sides = match kind {
            Kind::Deleted => (None, Some(&seen)),
            _ => (Some(&seen), None),
        };
        self.tell(kind, path, sides, Differences::default())?;
        Ok(if seen.is_directory() {
            walk.enter(name)
        } else {
            Ok(())
        })
    }

    fn turn(&mut self) -> Going {
        self.steps += 1;
        if self.steps % CHECK_EVERY == 0 {
            self.conn.check()?;
        }
        Ok(())
    }

    fn skip(&mut self, path: &[u8], errno: Errno) {
        match errno {
            // It went or became something else while we looked.
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP => {}
            Errno::XDEV => self.told.skipped.add(path, "mount"),
            errno => self.told.skipped.add(path, &errno_name(errno)),
        }
    }

    fn tell(
        &mut self,
        kind: Kind,
        path: &[u8],
        (now, before): (Option<&Seen>, Option<&Seen>),
        found: Differences,
    ) -> Going {
        let Some(left) = self.left.checked_sub(1) else {
            return Err(Halt::Full);
        };
        self.left = left;
        match kind {
            Kind::Added => self.told.added += 1,
            Kind::Changed => self.told.changed += 1,
            Kind::Deleted => self.told.deleted += 1,
        }
        let targets = [now, before].into_iter().flatten().map(Seen::target_len);
        self.batch_bytes += path.len() + targets.sum::<usize>();
        self.batch.push(Change {
            kind,
            path: ByteBuf::from(path),
            before: before.map(Seen::facts),
            now: now.map(Seen::facts),
            what: found.what,
            unsure: found.unsure,
        });
        if self.batch.len() >= BATCH || self.batch_bytes >= BATCH_BYTES {
            self.send()?;
        }
        Ok(())
    }

    fn send(&mut self) -> Done<()> {
        let batch = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        if batch.is_empty() {
            return Ok(());
        }
        let id = self.conn.id();
        self.conn.queue(&Changes {
            id,
            ev: "changes",
            changes: &batch,
        })
    }
}
