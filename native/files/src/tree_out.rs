//! `tree.out`: a tree as a tar stream, and what of it could not be told.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use rustix::fs::{
    openat, readlinkat, seek, statat, AtFlags, FileType, Mode, OFlags, SeekFrom, Stat, CWD,
};
use rustix::io::Errno;
use serde::Serialize;
use serde_bytes::ByteBuf;

use crate::conn::{Conn, CHUNK};
use crate::error::{at, kind_name, Done};
use crate::path::{absolute, kind_of, open_regular, split, trimmed};
use crate::read::read_full;
use crate::tar::write::{end, header, Header};
use crate::tar::{padding, Piece, Time};
use crate::walk::{Step, Walk};
use crate::wire::{Entry, Opened, PathArgs};
use crate::{answer, Settings};

/// What was left out is counted; so many, and paths of so many bytes, are named.
const NAMED_MAX: usize = 100;
const NAMED_BYTES: usize = 64 << 10;
/// Paths of files with several names that are remembered, to tell them as links. Beyond, they are told as files.
const LINKS_BYTES: usize = 16 << 20;
/// Pieces a sparse file is told in; the last takes the rest, holes and all.
const PIECES_MAX: usize = 4_096;
/// A file without a size is told with what it holds, up to here (`/proc`).
const SIZELESS_MAX: usize = CHUNK;
/// Of a directory that is told: who reads the stream takes no extended header of more than 1 MiB.
const PATH_MAX: usize = 512 << 10;
const CHECK_EVERY: u64 = 64;

#[derive(Default, Serialize)]
pub(crate) struct Skipped {
    pub count: u64,
    /// The first ones.
    pub named: Vec<SkippedEntry>,
    #[serde(skip)]
    bytes: usize,
}

#[derive(Serialize)]
pub(crate) struct SkippedEntry {
    pub path: ByteBuf,
    /// A type, `mount`, or the name of an error.
    pub why: String,
}

impl Skipped {
    pub fn add(&mut self, path: &[u8], why: &str) {
        self.count += 1;
        if self.named.len() < NAMED_MAX && self.bytes + path.len() <= NAMED_BYTES {
            self.bytes += path.len();
            self.named.push(SkippedEntry {
                path: ByteBuf::from(path),
                why: why.to_owned(),
            });
        }
    }
}

#[derive(Serialize)]
struct Packed {
    entries: u64,
    bytes: u64,
    skipped: Skipped,
    /// Files that changed while they were read: of the size they had, padded with zeros or cut.
    changed: Skipped,
}

struct Packing<'a> {
    conn: &'a mut Conn,
    /// The stream, gathered to full frames.
    out: Vec<u8>,
    buf: Vec<u8>,
    links: HashMap<(u64, u64), Vec<u8>>,
    links_bytes: usize,
    done: Packed,
}

pub(crate) fn tree_out(conn: &mut Conn, set: &Settings, args: &PathArgs) -> Done<()> {
    let path = absolute(set, "path", &args.path)?;
    let fail = at("pack", &path);
    let stat = statat(CWD, &path, AtFlags::empty()).map_err(&fail)?;
    let id = conn.id();
    conn.queue(&Opened {
        id,
        ev: "tree",
        entry: &Entry::new(&path, &stat, None),
    })?;
    let mut packing = Packing {
        conn,
        out: Vec::with_capacity(CHUNK),
        buf: vec![0; CHUNK],
        links: HashMap::new(),
        links_bytes: 0,
        done: Packed {
            entries: 0,
            bytes: 0,
            skipped: Skipped::default(),
            changed: Skipped::default(),
        },
    };
    if kind_of(&stat) == FileType::Directory {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let root = openat(CWD, &path, flags, Mode::empty()).map_err(&fail)?;
        packing.tree(root, &stat, &path)?;
    } else {
        let (file, stat) = open_regular(CWD, &path, OFlags::RDONLY, "pack", &path)?;
        let name = split(trimmed(&path)).1;
        packing.file(&file, &stat, name)?;
    }
    end(&mut packing.out);
    packing.flush()?;
    let Packing { conn, done, .. } = packing;
    conn.data(&[])?;
    answer(conn, done)
}

fn time_of(stat: &Stat) -> Time {
    Time {
        secs: stat.st_mtime,
        nanos: u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
    }
}

fn head<'a>(path: &'a [u8], kind: u8, stat: &Stat) -> Header<'a> {
    Header {
        path,
        kind,
        link: b"",
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        size: 0,
        mtime: time_of(stat),
        sparse: None,
    }
}

/// The pieces of a file that hold data, if it has holes.
pub(crate) fn pieces_of(file: &OwnedFd, stat: &Stat) -> Result<Option<Vec<Piece>>, Errno> {
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if u64::try_from(stat.st_blocks)
        .unwrap_or(0)
        .saturating_mul(512)
        >= size
    {
        return Ok(None);
    }
    let mut pieces = Vec::new();
    let mut from = 0;
    while from < size {
        let start = match seek(file, SeekFrom::Data(from)) {
            Ok(start) if start < size => start,
            // No data behind this.
            Ok(_) | Err(Errno::NXIO) => break,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        let full = pieces.len() + 1 == PIECES_MAX;
        let end = if full {
            size
        } else {
            seek(file, SeekFrom::Hole(start))?.min(size)
        };
        if end <= start {
            break;
        }
        pieces.push(Piece {
            offset: start,
            len: end - start,
        });
        from = end;
    }
    let whole = pieces.len() == 1 && pieces[0].len == size;
    let end = pieces
        .last()
        .map_or(0, |last: &Piece| last.offset + last.len);
    if end < size {
        // GNU tar takes the end of the last piece for the size.
        pieces.push(Piece {
            offset: size,
            len: 0,
        });
    }
    Ok((!whole).then_some(pieces))
}

impl Packing<'_> {
    fn flush(&mut self) -> Done<()> {
        if !self.out.is_empty() {
            self.conn.data(&self.out)?;
            self.out.clear();
        }
        Ok(())
    }

    /// Sends what is gathered once it is a full frame.
    fn gathered(&mut self) -> Done<()> {
        if self.out.len() >= CHUNK {
            for frame in self.out.chunks(crate::MAX_FRAME) {
                self.conn.data(frame)?;
            }
            self.out.clear();
        }
        Ok(())
    }

    fn header(&mut self, head: &Header<'_>) -> Done<()> {
        header(&mut self.out, head);
        self.done.entries += 1;
        self.gathered()
    }

    fn tree(&mut self, root: OwnedFd, stat: &Stat, path: &[u8]) -> Done<()> {
        self.header(&head(b".", b'5', stat))?;
        let mut walk = Walk::new(root).map_err(at("pack", path))?;
        let mut steps = 0u64;
        loop {
            steps += 1;
            if steps % CHECK_EVERY == 0 {
                self.conn.check()?;
            }
            match walk.step() {
                Ok(None) => return Ok(()),
                Ok(Some(Step::Left(_))) => {}
                Ok(Some(Step::Name(name))) => {
                    let below = walk.path_of(&name);
                    if let Err(errno) = self.entry(&mut walk, &name, &below)? {
                        self.skip(&below, errno);
                    }
                }
                Err(errno) => return Err(at("pack", &crate::path::join(path, walk.path()))(errno)),
            }
        }
    }

    fn skip(&mut self, below: &[u8], errno: Errno) {
        match errno {
            // It is gone: then it is not of the tree.
            Errno::NOENT => {}
            Errno::XDEV => self.done.skipped.add(below, "mount"),
            errno => {
                let name = crate::error::errno_name(errno);
                self.done.skipped.add(below, &name);
            }
        }
    }

    /// One name. The inner error is of that file alone.
    fn entry(&mut self, walk: &mut Walk, name: &[u8], below: &[u8]) -> Done<Result<(), Errno>> {
        let found = walk
            .dir()
            .and_then(|dir| statat(dir, name, AtFlags::SYMLINK_NOFOLLOW));
        let stat = match found {
            Ok(stat) => stat,
            Err(errno) => return Ok(Err(errno)),
        };
        match kind_of(&stat) {
            FileType::Directory if below.len() > PATH_MAX => Ok(Err(Errno::NAMETOOLONG)),
            FileType::Directory => {
                self.header(&head(below, b'5', &stat))?;
                Ok(walk.enter(name))
            }
            FileType::Symlink => {
                let target = match walk.dir().and_then(|dir| readlinkat(dir, name, Vec::new())) {
                    Ok(target) => target.into_bytes(),
                    Err(errno) => return Ok(Err(errno)),
                };
                let mut head = head(below, b'2', &stat);
                head.link = &target;
                self.header(&head)?;
                Ok(Ok(()))
            }
            FileType::RegularFile => {
                if self.linked(&stat, below)? {
                    return Ok(Ok(()));
                }
                let flags = OFlags::RDONLY
                    | OFlags::NOFOLLOW
                    | OFlags::NONBLOCK
                    | OFlags::NOCTTY
                    | OFlags::CLOEXEC;
                let opened = walk
                    .dir()
                    .and_then(|dir| openat(dir, name, flags, Mode::empty()));
                let file = match opened {
                    Ok(file) => file,
                    Err(errno) => return Ok(Err(errno)),
                };
                match rustix::fs::fstat(&file) {
                    Ok(stat) if kind_of(&stat) == FileType::RegularFile => {
                        self.file(&file, &stat, below)?;
                        self.remember(&stat, below);
                    }
                    _ => self.done.changed.add(below, "replaced"),
                }
                Ok(Ok(()))
            }
            kind => {
                self.done.skipped.add(below, kind_name(kind));
                Ok(Ok(()))
            }
        }
    }

    /// Tells another name of a file that was told already.
    fn linked(&mut self, stat: &Stat, below: &[u8]) -> Done<bool> {
        if stat.st_nlink < 2 {
            return Ok(false);
        }
        let id = (stat.st_dev, stat.st_ino);
        let Some(first) = self.links.get(&id).cloned() else {
            return Ok(false);
        };
        let mut head = head(below, b'1', stat);
        head.link = &first;
        self.header(&head)?;
        Ok(true)
    }

    fn remember(&mut self, stat: &Stat, below: &[u8]) {
        if stat.st_nlink > 1 && self.links_bytes + below.len() <= LINKS_BYTES {
            self.links_bytes += below.len();
            let id = (stat.st_dev, stat.st_ino);
            self.links.insert(id, below.to_vec());
        }
    }

    fn file(&mut self, file: &OwnedFd, stat: &Stat, below: &[u8]) -> Done<()> {
        let mut head = head(below, b'0', stat);
        head.size = u64::try_from(stat.st_size).unwrap_or(0);
        if head.size == 0 {
            return self.sizeless(file, head, below);
        }
        let pieces = pieces_of(file, stat).unwrap_or(None);
        head.sparse = pieces.as_deref();
        self.header(&head)?;
        let all = [Piece {
            offset: 0,
            len: head.size,
        }];
        let mut short = None;
        let mut stored = 0;
        for piece in pieces.as_deref().unwrap_or(&all) {
            stored += piece.len;
            short = self.piece(file, *piece)?.or(short);
        }
        self.out.resize(self.out.len() + padding(stored), 0);
        if let Some(why) = short {
            self.done.changed.add(below, &why);
        }
        self.done.bytes += stored;
        Ok(())
    }

    /// Empty, or one of those that have no size and content.
    fn sizeless(&mut self, file: &OwnedFd, mut head: Header<'_>, below: &[u8]) -> Done<()> {
        let mut buf = std::mem::take(&mut self.buf);
        let read = read_full(file, &mut buf[..SIZELESS_MAX], 0);
        let n = match read {
            Ok(n) => n,
            Err(errno) => {
                self.done
                    .changed
                    .add(below, &crate::error::errno_name(errno));
                0
            }
        };
        if n == SIZELESS_MAX {
            self.done.changed.add(below, "cut");
        }
        head.size = n as u64;
        self.header(&head)?;
        self.out.extend_from_slice(&buf[..n]);
        self.out.resize(self.out.len() + padding(n as u64), 0);
        self.buf = buf;
        self.done.bytes += n as u64;
        self.gathered()
    }

    /// Sends a piece of a file, as long as the header said. Returns what was wrong with it.
    fn piece(&mut self, file: &OwnedFd, piece: Piece) -> Done<Option<String>> {
        let mut wrong = None;
        let mut done = 0;
        while done < piece.len {
            let want = usize::try_from(piece.len - done)
                .unwrap_or(CHUNK)
                .min(CHUNK);
            let n = match wrong {
                None => match read_full(file, &mut self.buf[..want], piece.offset + done) {
                    Ok(n) => n,
                    Err(errno) => {
                        wrong = Some(crate::error::errno_name(errno));
                        0
                    }
                },
                Some(_) => 0,
            };
            if n < want {
                wrong = wrong.or_else(|| Some("shrunk".to_owned()));
                self.buf[n..want].fill(0);
            }
            done += want as u64;
            if self.out.len() + want > CHUNK {
                self.flush()?;
            }
            if want == CHUNK {
                self.conn.data(&self.buf)?;
                self.conn.check()?;
            } else {
                self.out.extend_from_slice(&self.buf[..want]);
            }
        }
        Ok(wrong)
    }
}
