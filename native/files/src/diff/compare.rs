//! Two files by one name, before and now.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{
    fgetxattr, flistxattr, fstat, openat, readlinkat, statx, AtFlags, FileType, Mode, OFlags,
    Statx, StatxAttributes, StatxFlags,
};
use rustix::io::Errno;
use serde::Serialize;
use serde_bytes::ByteBuf;

use crate::conn::{Conn, CHUNK};
use crate::error::{errno_name, kind_name, Done};
use crate::path::kind_of;
use crate::read::read_full;
use crate::walk::DIRECTORY;

/// Files larger than this are not compared by their content.
const COMPARE_MAX: u64 = 4 << 30;
/// Of a sandbox's root directory when it is made: a directory, 0755.
const ROOT_MODE: u16 = 0o040_755;
/// The kernel's limit for the list of attributes and for one of them.
const XATTR_MAX: usize = 64 << 10;

/// What is known of a file without opening it.
#[derive(Debug)]
pub(super) struct Seen {
    stat: Statx,
    target: Option<Vec<u8>>,
}

/// As the client is told.
#[derive(Debug, Serialize)]
pub(super) struct Facts {
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    mtime_ns: i64,
    target: Option<ByteBuf>,
}

/// In what two files of one kind differ.
#[derive(Debug, Default)]
pub(super) struct Differences {
    pub what: Vec<&'static str>,
    /// Why their content or attributes could not be compared.
    pub unsure: Option<String>,
}

/// A name in a directory, itself; nothing is opened.
pub(super) fn look<Fd: AsFd>(dir: Fd, name: &[u8]) -> Result<Option<Seen>, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let stat = match statx(&dir, name, flags, StatxFlags::BASIC_STATS) {
        Err(Errno::NOENT) => return Ok(None),
        other => other?,
    };
    let mut seen = Seen { stat, target: None };
    if seen.kind() == FileType::Symlink {
        // Gone or another by now: then it has none.
        let target = readlinkat(&dir, name, Vec::new());
        seen.target = target.ok().map(std::ffi::CString::into_bytes);
    }
    Ok(Some(seen))
}

impl Seen {
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.stx_mode.into())
    }

    pub fn is_directory(&self) -> bool {
        self.kind() == FileType::Directory
    }

    /// Something is mounted here.
    pub fn is_mount(&self) -> bool {
        let known = self.stat.stx_attributes_mask & self.stat.stx_attributes;
        known.contains(StatxAttributes::MOUNT_ROOT)
    }

    pub fn facts(&self) -> Facts {
        let time = &self.stat.stx_mtime;
        Facts {
            kind: kind_name(self.kind()),
            size: self.stat.stx_size,
            mode: u32::from(self.stat.stx_mode) & 0o7777,
            uid: self.stat.stx_uid,
            gid: self.stat.stx_gid,
            mtime_ns: time
                .tv_sec
                .saturating_mul(1_000_000_000)
                .saturating_add(time.tv_nsec.into()),
            target: self.target.clone().map(ByteBuf::from),
        }
    }

    /// The root directory is no layer's: each sandbox is made with one of its own.
    pub fn at_first(mut self) -> Self {
        self.stat.stx_mode = ROOT_MODE;
        (self.stat.stx_uid, self.stat.stx_gid) = (0, 0);
        self
    }

    /// In which of mode and owner two differ.
    pub fn attributes(&self, other: &Self) -> Differences {
        let (a, b) = (&self.stat, &other.stat);
        let mut found = Differences::default();
        if a.stx_mode != b.stx_mode {
            found.what.push("mode");
        }
        if (a.stx_uid, a.stx_gid) != (b.stx_uid, b.stx_gid) {
            found.what.push("owner");
        }
        found
    }

    pub fn target_len(&self) -> usize {
        self.target.as_ref().map_or(0, Vec::len)
    }

    fn same_time(&self, other: &Self) -> bool {
        let time = |seen: &Self| (seen.stat.stx_mtime.tv_sec, seen.stat.stx_mtime.tv_nsec);
        time(self) == time(other)
    }

    fn device(&self) -> (u32, u32) {
        (self.stat.stx_rdev_major, self.stat.stx_rdev_minor)
    }
}

/// The same name in two directories.
pub(super) struct Pair<'a> {
    pub name: &'a [u8],
    pub before: (&'a OwnedFd, &'a Seen),
    pub now: (&'a OwnedFd, &'a Seen),
}

impl Pair<'_> {
    /// Of two of one kind. Of a directory the time is left out: it says that something in it changed, which is told.
    pub fn differences(&self, conn: &mut Conn) -> Done<Differences> {
        let (before, now) = (self.before.1, self.now.1);
        let mut found = now.attributes(before);
        let kind = now.kind();
        let content = match kind {
            FileType::RegularFile => self.files(conn, &mut found)?,
            FileType::Symlink => before.target == now.target,
            FileType::CharacterDevice | FileType::BlockDevice => before.device() == now.device(),
            _ => true,
        };
        if !content {
            found.what.insert(0, "content");
        }
        if kind == FileType::Directory {
            self.xattrs(DIRECTORY, &mut found);
        } else if !before.same_time(now) {
            found.what.push("mtime");
        }
        Ok(found)
    }

    fn open(&self, flags: OFlags) -> Result<[OwnedFd; 2], Errno> {
        // As in `open_regular`: what it is was looked at, and nothing waits.
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let open = |dir: &OwnedFd| openat(dir, self.name, flags, Mode::empty());
        Ok([open(self.before.0)?, open(self.now.0)?])
    }

    fn xattrs(&self, flags: OFlags, found: &mut Differences) {
        let same = self
            .open(flags)
            .and_then(|[before, now]| same_xattrs(&before, &now));
        note(same, "xattrs", found);
    }

    /// Whether two regular files hold the same, as far as that is known.
    fn files(&self, conn: &mut Conn, found: &mut Differences) -> Done<bool> {
        let sizes = [self.before.1.stat.stx_size, self.now.1.stat.stx_size];
        let [before, now] = match self.open(OFlags::RDONLY) {
            Ok(both) => both,
            Err(errno) => {
                found.unsure = Some(errno_name(errno));
                return Ok(sizes[0] == sizes[1]);
            }
        };
        note(same_xattrs(&before, &now), "xattrs", found);
        if sizes[0] != sizes[1] {
            return Ok(false);
        }
        if sizes[0] > COMPARE_MAX {
            found.unsure = Some("size".to_owned());
            return Ok(true);
        }
        match same_content(conn, &before, &now, sizes[0])? {
            Ok(same) => Ok(same),
            Err(errno) => {
                found.unsure = Some(errno_name(errno));
                Ok(true)
            }
        }
    }
}

fn note(same: Result<bool, Errno>, what: &'static str, found: &mut Differences) {
    match same {
        Ok(true) => {}
        Ok(false) => found.what.push(what),
        Err(errno) => found.unsure = Some(errno_name(errno)),
    }
}

/// The inner error is of these files alone.
fn same_content(
    conn: &mut Conn,
    before: &OwnedFd,
    now: &OwnedFd,
    size: u64,
) -> Done<Result<bool, Errno>> {
    // It may have been replaced since it was looked at.
    match fstat(now) {
        Ok(stat) if kind_of(&stat) != FileType::RegularFile => return Ok(Err(Errno::STALE)),
        Ok(_) => {}
        Err(errno) => return Ok(Err(errno)),
    }
    let room = usize::try_from(size).unwrap_or(CHUNK).min(CHUNK);
    let (mut a, mut b) = (vec![0; room], vec![0; room]);
    let mut offset = 0;
    while offset < size {
        conn.check()?;
        let want = usize::try_from(size - offset).unwrap_or(CHUNK).min(room);
        let both = read_full(before, &mut a[..want], offset)
            .and_then(|had| Ok((had, read_full(now, &mut b[..want], offset)?)));
        match both {
            Err(errno) => return Ok(Err(errno)),
            Ok((had, has)) if a[..had] != b[..has] => return Ok(Ok(false)),
            // Both are shorter by now.
            Ok((had, _)) if had < want => break,
            Ok(_) => offset += want as u64,
        }
    }
    Ok(Ok(true))
}

/// Those that are a sandbox's to set: labels of the host's are none.
fn counts(name: &[u8]) -> bool {
    name.starts_with(b"user.")
        || name.starts_with(b"system.posix_acl_")
        || name == b"security.capability"
}

fn names(file: &OwnedFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut list = vec![0; XATTR_MAX];
    let length = match flistxattr(file, &mut list[..]) {
        Err(Errno::OPNOTSUPP) => 0,
        other => other?,
    };
    let all = list[..length].split(|byte| *byte == 0);
    let mut names: Vec<Vec<u8>> = all.filter(|n| counts(n)).map(<[u8]>::to_vec).collect();
    names.sort_unstable();
    Ok(names)
}

fn same_xattrs(before: &OwnedFd, now: &OwnedFd) -> Result<bool, Errno> {
    let names = match (names(before)?, names(now)?) {
        (a, b) if a == b => a,
        _ => return Ok(false),
    };
    if names.is_empty() {
        return Ok(true);
    }
    let (mut a, mut b) = (vec![0; XATTR_MAX], vec![0; XATTR_MAX]);
    for name in names {
        let had = fgetxattr(before, &name[..], &mut a[..])?;
        let has = fgetxattr(now, &name[..], &mut b[..])?;
        if a[..had] != b[..has] {
            return Ok(false);
        }
    }
    Ok(true)
}
