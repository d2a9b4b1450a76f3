//! `write` and `append`: a write that was answered is there, whole; one that failed changed nothing.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{
    accessat, fallocate, fchmod, fchown, fcntl_setfl, fstat, fstatfs, ftruncate, unlinkat, Access,
    AtFlags, FallocateFlags, Gid, Mode, OFlags, Stat, Uid,
};
use rustix::io::Errno;
use serde::Serialize;

use crate::conn::{Conn, CHUNK};
use crate::error::{at, Code, Done, Failure};
use crate::path::{absolute, open_regular, place_of_file, regular, Place};
use crate::temp::Temp;
use crate::wire::{Entry, WriteArgs};
use crate::Settings;

const MODE_MAX: u32 = 0o7777;
/// What one `append` gathers before it writes: up to here it is one system call, which other writers do not split.
const APPEND_GATHER: usize = 1 << 20;

#[derive(Serialize)]
pub(crate) struct Written {
    pub entry: Entry,
    pub bytes: u64,
    pub created: bool,
    /// `false`: the file could only be overwritten in its place.
    pub atomic: bool,
}

pub(crate) fn check_mode(mode: Option<u32>) -> Done<()> {
    match mode {
        Some(mode) if mode > MODE_MAX => {
            Err(Failure::field("mode", format!("at most {MODE_MAX:o} (octal)")).into())
        }
        _ => Ok(()),
    }
}

/// Content: given with the request, or data frames.
pub(crate) struct Content<'a> {
    conn: &'a mut Conn,
    inline: Option<&'a [u8]>,
    streamed: bool,
}

impl<'a> Content<'a> {
    pub fn new(conn: &'a mut Conn, inline: Option<&'a [u8]>) -> Self {
        let streamed = inline.is_none();
        Self {
            conn,
            inline,
            streamed,
        }
    }

    pub fn piece(&mut self) -> Done<Option<&[u8]>> {
        if self.streamed {
            return self.conn.piece();
        }
        Ok(self.inline.take().filter(|bytes| !bytes.is_empty()))
    }
}

/// Writes all of it at the file's position.
pub(crate) fn write_all(file: &OwnedFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Says of a full disk what is used up.
pub(crate) fn named_full<Fd: AsFd>(fd: Fd) -> impl Fn(Failure) -> Failure {
    let inodes = fstatfs(fd).is_ok_and(|fs| fs.f_files > 0 && fs.f_ffree == 0);
    move |mut failure| {
        if failure.code == Code::NoSpace && inodes {
            failure.detail.resource = Some("inodes");
        }
        failure
    }
}

pub(crate) fn write(set: &Settings, args: &WriteArgs, content: &mut Content<'_>) -> Done<Written> {
    check_mode(args.mode)?;
    let path = absolute(set, "path", &args.path)?;
    let (place, old) = place_of_file("write", &path, args.parents)?;
    let fail = at("write", &path);
    if let Some(old) = &old {
        regular(old, "write", &path)?;
        if args.exclusive {
            return Err(fail(Errno::EXIST));
        }
        // Renaming over a file needs no right to write to it; writing to it does.
        accessat(&place.dir, &place.name, Access::WRITE_OK, AtFlags::EACCESS).map_err(&fail)?;
    }
    let first = if old.is_some() {
        0o600
    } else {
        first_mode(args.mode)
    };
    let temp = Temp::new(place.dir.as_fd(), set.temps(), first);
    let written = match (temp, &old) {
        (Ok(temp), _) => whole(args, &place, old.as_ref(), temp, content, &path),
        // The file may be written to, its directory not: another user's, or read-only around a mounted file.
        (Err(Errno::ACCESS | Errno::PERM | Errno::ROFS), Some(_)) => {
            let file = open_in_place(&place, &path)?;
            let bytes = overwrite(&file, content, &path)?;
            set_mode(&file, args.mode).map_err(&fail)?;
            in_place(&file, bytes, &path)
        }
        (Err(errno), _) => Err(fail(errno)),
    };
    written.map_err(|stop| stop.map(named_full(&place.dir)))
}

fn in_place(file: &OwnedFd, bytes: u64, path: &[u8]) -> Done<Written> {
    Ok(Written {
        entry: entry(file, path).map_err(at("write", path))?,
        bytes,
        created: false,
        atomic: false,
    })
}

/// What it is now, whatever has got its name since.
fn entry(file: &OwnedFd, path: &[u8]) -> Result<Entry, Errno> {
    Ok(Entry::new(path, &fstat(file)?, None))
}

/// Of a new file until it has its own: nobody may open it meanwhile who may not later.
fn first_mode(mode: Option<u32>) -> u32 {
    mode.map_or(0o666, |_| 0o600)
}

fn set_mode(file: &OwnedFd, mode: Option<u32>) -> Result<(), Errno> {
    mode.map_or(Ok(()), |mode| fchmod(file, Mode::from_raw_mode(mode)))
}

fn whole(
    args: &WriteArgs,
    place: &Place,
    old: Option<&Stat>,
    mut temp: Temp<'_>,
    content: &mut Content<'_>,
    path: &[u8],
) -> Done<Written> {
    let fail = at("write", path);
    let mut bytes = 0;
    while let Some(piece) = content.piece()? {
        bytes += piece.len() as u64;
        write_all(temp.file(), piece).map_err(&fail)?;
    }
    let mut owner_kept = true;
    if let Some(old) = old {
        owner_kept = keep_owner(temp.file(), old).map_err(&fail)?;
        fchmod(temp.file(), Mode::from_raw_mode(old.st_mode & MODE_MAX)).map_err(&fail)?;
    }
    set_mode(temp.file(), args.mode).map_err(&fail)?;
    let put = match (old, args.exclusive) {
        (None, true) => temp.put_new(&place.name),
        // It was not there: if it still is not, no other name is needed on the way.
        (None, false) => match temp.put_new(&place.name) {
            Err(Errno::EXIST) => temp.put(&place.name),
            other => other,
        },
        // The new file would belong to somebody else than the old one.
        (Some(_), _) if !owner_kept => Err(Errno::BUSY),
        (Some(_), _) => temp.put(&place.name),
    };
    match put {
        Ok(()) => Ok(Written {
            entry: entry(temp.file(), path).map_err(&fail)?,
            bytes,
            created: old.is_none(),
            atomic: true,
        }),
        // Something is mounted on the file: it cannot be replaced, only its content can.
        Err(Errno::BUSY) if old.is_some() => {
            copy_in_place(&temp, place, bytes, path)?;
            let file = open_in_place(place, path)?;
            set_mode(&file, args.mode).map_err(&fail)?;
            in_place(&file, bytes, path)
        }
        Err(errno) => Err(fail(errno)),
    }
}

/// Gives a new file the owner of the one it replaces. `false`: that is not ours to give.
fn keep_owner(file: &OwnedFd, old: &Stat) -> Result<bool, Errno> {
    let new = fstat(file)?;
    if (new.st_uid, new.st_gid) == (old.st_uid, old.st_gid) {
        return Ok(true);
    }
    let uid = Some(Uid::from_raw(old.st_uid));
    match fchown(file, uid, Some(Gid::from_raw(old.st_gid))) {
        Ok(()) => Ok(true),
        // INVAL: an owner without a number in this user namespace.
        Err(Errno::PERM | Errno::INVAL) => Ok(false),
        Err(errno) => Err(errno),
    }
}

fn open_in_place(place: &Place, path: &[u8]) -> Done<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW;
    Ok(open_regular(&place.dir, &place.name, flags, "write", path)?.0)
}

/// Copies a whole file over another one. Its room is taken before, so a full disk leaves the old content.
fn copy_in_place(temp: &Temp<'_>, place: &Place, bytes: u64, path: &[u8]) -> Done<()> {
    let fail = at("write", path);
    let file = open_in_place(place, path)?;
    match fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes) {
        // INVAL: nothing to take; OPNOTSUPP: not every file system can.
        Ok(()) | Err(Errno::INVAL | Errno::OPNOTSUPP) => {}
        Err(errno) => return Err(fail(errno)),
    }
    let broken = |errno| fail(errno).map(Failure::partial);
    let mut offset = 0;
    let mut buf = vec![0; CHUNK];
    loop {
        let n = rustix::io::pread(temp.file(), &mut buf, offset).map_err(broken)?;
        if n == 0 {
            break;
        }
        write_all(&file, &buf[..n]).map_err(broken)?;
        offset += n as u64;
    }
    ftruncate(&file, bytes).map_err(broken)
}

/// Writes a stream over a file, in its place.
fn overwrite(file: &OwnedFd, content: &mut Content<'_>, path: &[u8]) -> Done<u64> {
    let fail = at("write", path);
    let mut bytes = 0;
    let mut copy = || -> Done<()> {
        while let Some(piece) = content.piece()? {
            write_all(file, piece).map_err(&fail)?;
            bytes += piece.len() as u64;
        }
        ftruncate(file, bytes).map_err(&fail)
    };
    copy().map_err(|stop| stop.map(Failure::partial))?;
    Ok(bytes)
}

#[derive(Serialize)]
pub(crate) struct Appended {
    pub entry: Entry,
    pub bytes: u64,
    pub created: bool,
    /// Of the file, after it.
    pub size: u64,
}

pub(crate) fn append(
    set: &Settings,
    args: &WriteArgs,
    content: &mut Content<'_>,
) -> Done<Appended> {
    check_mode(args.mode)?;
    let path = absolute(set, "path", &args.path)?;
    let (place, old) = place_of_file("append to", &path, args.parents)?;
    let fail = at("append to", &path);
    if old.is_some() && args.exclusive {
        return Err(fail(Errno::EXIST));
    }
    let mut pending = Vec::new();
    let more = gather(content, &mut pending)?;
    let new = match old {
        Some(_) => None,
        None => begin_with(set, args.mode, &place, &pending)
            .map_err(|errno| fail(errno).map(named_full(&place.dir)))?,
    };
    let created = new.is_some();
    let (file, mut bytes) = match new {
        Some(file) => (file, std::mem::take(&mut pending).len() as u64),
        None => (open_to_append(&place, &path)?, 0),
    };
    let before = if created {
        0
    } else {
        size(&file).map_err(&fail)?
    };
    match append_pieces(&file, content, &path, (pending, more), &mut bytes) {
        Ok(()) => Ok(Appended {
            entry: entry(&file, &path).map_err(&fail)?,
            bytes,
            created,
            size: size(&file).map_err(&fail)?,
        }),
        Err(stop) => {
            let stop = stop.map(named_full(&place.dir));
            // Only what is ours is taken back: others may have appended in between.
            let ours = size(&file) == Ok(before + bytes);
            let undone = bytes == 0 || ours && ftruncate(&file, before).is_ok();
            if created && undone && size(&file) == Ok(0) {
                let _ = unlinkat(&place.dir, &place.name, AtFlags::empty());
            }
            Err(if undone {
                stop
            } else {
                stop.map(Failure::partial)
            })
        }
    }
}

/// A new file appears with its mode and with what is appended first. `None`: another writer was faster.
fn begin_with(
    set: &Settings,
    mode: Option<u32>,
    place: &Place,
    content: &[u8],
) -> Result<Option<OwnedFd>, Errno> {
    let mut temp = Temp::new(place.dir.as_fd(), set.temps(), first_mode(mode))?;
    write_all(temp.file(), content)?;
    set_mode(temp.file(), mode)?;
    match temp.put_new(&place.name) {
        Ok(()) => {}
        Err(Errno::EXIST) => return Ok(None),
        Err(errno) => return Err(errno),
    }
    fcntl_setfl(temp.file(), OFlags::APPEND)?;
    Ok(Some(rustix::io::fcntl_dupfd_cloexec(temp.file(), 0)?))
}

fn size(file: &OwnedFd) -> Result<u64, Errno> {
    Ok(u64::try_from(fstat(file)?.st_size).unwrap_or(0))
}

fn open_to_append(place: &Place, path: &[u8]) -> Done<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW;
    Ok(open_regular(&place.dir, &place.name, flags, "append to", path)?.0)
}

/// Takes pieces until there is enough for one system call. `false`: these were the last.
fn gather(content: &mut Content<'_>, pending: &mut Vec<u8>) -> Done<bool> {
    while pending.len() < APPEND_GATHER {
        match content.piece()? {
            Some(piece) => pending.extend_from_slice(piece),
            None => return Ok(false),
        }
    }
    Ok(true)
}

/// Appends what was gathered and all pieces behind it; counts what was written, also when it fails.
fn append_pieces(
    file: &OwnedFd,
    content: &mut Content<'_>,
    path: &[u8],
    (mut pending, mut more): (Vec<u8>, bool),
    bytes: &mut u64,
) -> Done<()> {
    loop {
        let mut rest = &pending[..];
        while !rest.is_empty() {
            match rustix::io::write(file, rest) {
                Ok(n) if n > 0 => {
                    *bytes += n as u64;
                    rest = &rest[n..];
                }
                Err(Errno::INTR) => {}
                other => return Err(at("append to", path)(other.err().unwrap_or(Errno::IO))),
            }
        }
        pending.clear();
        if !more {
            return Ok(());
        }
        more = gather(content, &mut pending)?;
    }
}
