//! `tree.in`: unpacks a tar stream into a directory, and never outside it.

use rustix::fs::{ftruncate, openat, seek, Mode, OFlags, SeekFrom, CWD};
use rustix::io::Errno;
use serde::Serialize;

use crate::conn::Conn;
use crate::error::{at, Code, Done, Failure, Stop};
use crate::path::{absolute, make_all};
use crate::place_in::{clean, Meta, PlaceIn};
use crate::tar::read::{check_pieces, more_pieces, raw, Map, Pax, Raw};
use crate::tar::{padding, Piece, BLOCK};
use crate::tree_out::Skipped;
use crate::wire::TreeInArgs;
use crate::write::{named_full, write_all};
use crate::Settings;

/// One extended header or long name.
const EXTENDED_MAX: u64 = 1 << 20;

#[derive(Serialize)]
pub(crate) struct Unpacked {
    pub entries: u64,
    /// Of content.
    pub bytes: u64,
    pub skipped: Skipped,
}

pub(crate) fn tree_in(conn: &mut Conn, set: &Settings, args: &TreeInArgs) -> Done<Unpacked> {
    let path = absolute(set, "path", &args.path)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let open = || openat(CWD, &path, flags, Mode::empty());
    let mut made = false;
    let root = match open() {
        Err(Errno::NOENT) if args.parents => {
            made = make_all(&path, None).map_err(at("mkdir", &path))?;
            open()
        }
        other => other,
    };
    let root = root.map_err(at("unpack into", &path))?;
    let full = root
        .try_clone()
        .map_err(|_| at("unpack into", &path)(Errno::MFILE))?;
    let mut unpacking = Unpacking {
        stream: Stream { conn },
        set,
        owners: args.owners,
        to: PlaceIn::new(root, made),
        done: Unpacked {
            entries: 0,
            bytes: 0,
            skipped: Skipped::default(),
        },
    };
    unpacking
        .run()
        .map_err(|stop| stop.map(named_full(&full)))?;
    let finished = unpacking.to.finish();
    finished.map_err(|(errno, dir)| at("set the mode of", &dir)(errno))?;
    Ok(unpacking.done)
}

/// The bytes of the archive.
struct Stream<'a> {
    conn: &'a mut Conn,
}

fn cut(entry: &[u8]) -> Stop {
    refused(entry, after(entry, "the stream ends early".to_owned()))
}

impl Stream<'_> {
    fn block(&mut self, entry: &[u8]) -> Done<[u8; BLOCK]> {
        let mut block = [0; BLOCK];
        let mut have = 0;
        while have < BLOCK {
            match self.conn.piece_of(BLOCK - have)? {
                Some(piece) => {
                    block[have..have + piece.len()].copy_from_slice(piece);
                    have += piece.len();
                }
                None => return Err(cut(entry)),
            }
        }
        Ok(block)
    }

    /// Gives `len` bytes of the stream to `each`.
    fn copy(
        &mut self,
        mut len: u64,
        entry: &[u8],
        mut each: impl FnMut(&[u8]) -> Done<()>,
    ) -> Done<()> {
        while len > 0 {
            let most = usize::try_from(len).unwrap_or(usize::MAX);
            match self.conn.piece_of(most)? {
                Some(piece) => {
                    len -= piece.len() as u64;
                    each(piece)?;
                }
                None => return Err(cut(entry)),
            }
        }
        Ok(())
    }

    fn skip(&mut self, len: u64, entry: &[u8]) -> Done<()> {
        self.copy(len, entry, |_| Ok(()))
    }
}

struct Unpacking<'a> {
    stream: Stream<'a>,
    set: &'a Settings,
    owners: bool,
    to: PlaceIn,
    done: Unpacked,
}

fn refused(entry: &[u8], why: impl Into<String>) -> Stop {
    Failure::new(Code::BadRequest, why).entry(entry).into()
}

/// What the content of an entry is.
struct Content {
    /// Bytes in the stream, without padding.
    stored: u64,
    /// Of a sparse file: the pieces and the real size.
    sparse: Option<(Vec<Piece>, u64)>,
}

impl Unpacking<'_> {
    fn run(&mut self) -> Done<()> {
        let mut global = Pax::default();
        let mut pax = global.clone();
        let mut last = Vec::new();
        loop {
            let block = self.stream.block(&last)?;
            let Some(mut header) = raw(&block).map_err(|why| refused(&last, after(&last, why)))?
            else {
                break;
            };
            match header.kind {
                b'x' | b'g' | b'L' | b'K' => {
                    let body = self.extended(&header)?;
                    match header.kind {
                        b'x' => pax.read(&body),
                        b'g' => global.read(&body).map(|()| pax = global.clone()),
                        kind => {
                            pax.long_name(kind, &body);
                            Ok(())
                        }
                    }
                    .map_err(|why| refused(&header.path, why))?;
                }
                _ => {
                    let real = pax.over(&mut header);
                    pax = global.clone();
                    last.clone_from(&header.path);
                    let real = real.map_err(|why| refused(&header.path, why))?;
                    self.entry(&mut header, real)
                        .map_err(|stop| stop.map(|f| named(f, &header.path)))?;
                    self.done.entries += 1;
                }
            }
        }
        // The second block of zeros, and whatever pads the stream.
        while self.stream.conn.piece()?.is_some() {}
        Ok(())
    }

    fn extended(&mut self, header: &Raw) -> Done<Vec<u8>> {
        if header.size > EXTENDED_MAX {
            let why = format!("an extended header of more than {EXTENDED_MAX} bytes");
            return Err(refused(&header.path, why));
        }
        let mut body = Vec::new();
        self.stream.copy(header.size, &header.path, |piece| {
            body.extend_from_slice(piece);
            Ok(())
        })?;
        self.stream
            .skip(padding(header.size) as u64, &header.path)?;
        Ok(body)
    }

    fn entry(&mut self, header: &mut Raw, real: Option<u64>) -> Done<()> {
        // Old archives: a file whose name ends in a slash is a directory.
        let slash = header.path.last() == Some(&b'/');
        let old = matches!(header.kind, b'0' | 0) && slash;
        let kind = if old { b'5' } else { header.kind };
        let path = clean(&header.path).map_err(|why| refused(&header.path, why))?;
        if path.is_empty() && kind != b'5' {
            return Err(refused(&header.path, "it has no name"));
        }
        let meta = self.meta(header)?;
        let doing = |errno| at("unpack", &path)(errno);
        // Only these have content; what others claim is skipped.
        match kind {
            b'0' | 0 | b'7' | b'S' => return self.file(header, &path, real, meta),
            b'1' => {
                let target = clean(&header.link);
                let target = target.map_err(|_| refused(&header.path, "its link leads outside"))?;
                if target.is_empty() {
                    return Err(refused(&header.path, "it links to nothing"));
                }
                self.to.hard_link(&path, &target).map_err(doing)?;
            }
            b'2' => {
                if header.link.is_empty() || header.link.contains(&0) {
                    return Err(refused(&header.path, "it links to nothing"));
                }
                self.to.symlink(&path, &header.link, meta).map_err(doing)?;
                // POSIX gives links no content, whatever the size says.
                return Ok(());
            }
            b'5' => {
                self.to.directory(&path, meta).map_err(doing)?;
                return Ok(());
            }
            b'3' => self.done.skipped.add(&path, "char"),
            b'4' => self.done.skipped.add(&path, "block"),
            b'6' => self.done.skipped.add(&path, "fifo"),
            _ => {
                self.done.skipped.add(&path, "unknown");
                return self.skip_padded(header);
            }
        }
        Ok(())
    }

    fn skip_padded(&mut self, header: &Raw) -> Done<()> {
        self.stream.skip(header.size, &header.path)?;
        self.stream.skip(padding(header.size) as u64, &header.path)
    }

    fn meta(&self, header: &Raw) -> Done<Meta> {
        let id = |id: u64| {
            let id = u32::try_from(id).ok().filter(|id| *id != u32::MAX);
            id.ok_or_else(|| refused(&header.path, "its owner is no id"))
        };
        Ok(Meta {
            mode: header.mode & if self.owners { 0o7777 } else { 0o1777 },
            owner: if self.owners {
                Some((id(header.uid)?, id(header.gid)?))
            } else {
                None
            },
            mtime: header.mtime,
        })
    }

    fn content(&mut self, header: &mut Raw, real: Option<u64>) -> Done<Content> {
        let name = header.path.clone();
        let fail = |why: String| refused(&name, why);
        let mut stored = header.size;
        let sparse = match (real, header.sparse.take()) {
            (Some(real), _) => {
                let mut map = Map::default();
                let pieces = loop {
                    if map.len() + BLOCK as u64 > header.size {
                        return Err(fail("its sparse map does not end".to_owned()));
                    }
                    let block = self.stream.block(&name)?;
                    if let Some(pieces) = map.block(&block).map_err(fail)? {
                        break pieces;
                    }
                };
                stored -= map.len();
                Some((pieces, real))
            }
            (None, Some((mut pieces, mut more, real))) => {
                while more {
                    let block = self.stream.block(&name)?;
                    more = more_pieces(&block, &mut pieces).map_err(fail)?;
                }
                Some((pieces, real))
            }
            (None, None) => None,
        };
        if let Some((pieces, real)) = &sparse {
            check_pieces(pieces, *real, stored).map_err(fail)?;
        }
        Ok(Content { stored, sparse })
    }

    fn file(&mut self, header: &mut Raw, path: &[u8], real: Option<u64>, meta: Meta) -> Done<()> {
        if header.kind == b'S' && header.sparse.is_none() {
            return Err(refused(&header.path, "a sparse file of an unknown version"));
        }
        let content = self.content(header, real)?;
        let fail = at("unpack", path);
        let sink = self.to.file(path, self.set.temps()).map_err(&fail)?;
        let file = sink.file();
        let write = |bytes: &[u8]| write_all(file, bytes).map_err(&fail);
        match &content.sparse {
            None => self.stream.copy(content.stored, &header.path, write)?,
            Some((pieces, real)) => {
                for piece in pieces {
                    seek(file, SeekFrom::Start(piece.offset)).map_err(&fail)?;
                    self.stream.copy(piece.len, &header.path, write)?;
                }
                ftruncate(file, *real).map_err(&fail)?;
            }
        }
        sink.put(meta).map_err(&fail)?;
        self.done.bytes += content.stored;
        self.stream
            .skip(padding(content.stored) as u64, &header.path)
    }
}

fn after(entry: &[u8], why: String) -> String {
    if entry.is_empty() {
        return why;
    }
    format!("{why}, in or after this entry")
}

/// A failure of an entry names it, once.
fn named(failure: Failure, entry: &[u8]) -> Failure {
    if failure.detail.entry.is_some() || failure.code == Code::Cancelled {
        return failure;
    }
    failure.entry(entry)
}
