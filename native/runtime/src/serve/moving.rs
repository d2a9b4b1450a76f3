//! Output on its way out of memory, and back to who asks for it. Whatever waits for the disk is done by threads; the
//! program is held back while they are behind. A disk that fails shortens what is kept, says so, and ends nothing.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use dsec_launch::LaunchError;
use dsec_sys::io::punch_hole;

use super::kept::Piece;
use super::run::{self, Fetched, Run};
use super::spool::{self, Trouble, MOVE_FROM, STEP, WINDOW, WITHOUT_DISK};
use super::stream::PAGE;
use super::Server;
use crate::kproto::Put;
use crate::proto::{self, Id, Kept, ReadArgs, RunArgs};
use crate::{fail, warning};

/// What is read while it is being written over is read again, from a later offset; after so many times from memory.
const TRIES: u32 = 4;

/// In `limits_hit`: not everything was kept that should have been.
pub const SPOOL: &str = "spool";

impl Run {
    /// What may be moved next of a stream: from where, and how much.
    fn next_step(&self, s: usize) -> Option<(u64, u64)> {
        let stream = &self.streams[s];
        let disk = stream.disk.as_ref()?;
        if disk.busy || disk.failed || self.hold || stream.segment.is_none() {
            return None;
        }
        let waiting = stream.total - disk.moved;
        // What has a file has all of it there in the end.
        let last = self.done() && disk.file.is_some();
        if waiting < MOVE_FROM && !last {
            return None;
        }
        let mut n = waiting.min(STEP);
        if let Some(pos) = self.slowest(s) {
            let end = self.meta.layout().end_before(pos.max(stream.hole_end));
            n = n.min(end.saturating_sub(disk.moved));
        }
        // Whole pages: a new runtime finds what was not moved by asking memory for its first data.
        if !(last && n == waiting) {
            n -= n % PAGE;
        }
        (n > 0).then_some((disk.moved, n))
    }

    /// Without the disk only the newest is kept.
    pub(super) fn give_back_undisked(&mut self, s: usize) {
        let slowest = self.slowest(s);
        let stream = &mut self.streams[s];
        let (Some(disk), Some(file)) = (&mut stream.disk, &stream.segment) else {
            return;
        };
        if !disk.failed || self.hold {
            return;
        }
        let mut end = stream.total.saturating_sub(WITHOUT_DISK);
        if let Some(pos) = slowest {
            end = end.min(pos);
        }
        end -= end % PAGE;
        // In steps, so that punching costs little per byte.
        if end < disk.memory + WITHOUT_DISK / 4 {
            return;
        }
        if punch_hole(file.as_fd(), disk.memory, end - disk.memory).is_ok() {
            disk.memory = end;
        }
    }

    /// More of it waits in memory than should.
    pub(super) fn crowded(&self, s: usize) -> bool {
        let stream = &self.streams[s];
        let disk = stream.disk.as_ref().filter(|disk| !disk.failed);
        disk.is_some_and(|disk| stream.total - disk.moved >= WINDOW)
    }
}

impl Server {
    /// Moves what is to be moved of every output.
    pub(super) fn spool_all(&mut self, index: u64) {
        for s in 0..run::OUTPUTS {
            self.spool(index, s);
        }
    }

    fn spool(&mut self, index: u64, s: usize) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some((from, n)) = run.next_step(s) else {
            return;
        };
        let layout = run.meta.layout();
        let stream = &mut run.streams[s];
        let (Some(disk), Some(segment)) = (&mut stream.disk, &stream.segment) else {
            return;
        };
        disk.busy = true;
        stream.hole_end = stream.hole_end.max(layout.begin(from + n));
        let (file, segment) = (disk.file.clone(), Arc::clone(segment));
        let dir = Arc::clone(&self.spool_dir);
        self.spoolers.run(move || {
            let done =
                fail::at("output.move").map_err(|e| Trouble::Refused(io::Error::other(e.message)));
            let done = done.and_then(|()| {
                spool::write(&dir, file.as_deref(), layout, segment.as_fd(), (from, n))
            });
            Box::new(move |server: &mut Server| server.moved(index, s, n, done))
        });
    }

    fn moved(
        &mut self,
        index: u64,
        s: usize,
        n: u64,
        done: Result<Option<std::os::fd::OwnedFd>, Trouble>,
    ) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let key = run.key();
        let stream = &mut run.streams[s];
        // Forgotten meanwhile.
        let (Some(disk), Some(segment)) = (&mut stream.disk, &stream.segment) else {
            return;
        };
        disk.busy = false;
        if disk.failed {
            // It is in memory still; what was moved before is not trusted any more.
            return self.pump(index);
        }
        let new = match done {
            Ok(new) => new,
            Err(Trouble::Refused(e)) => return self.spool_refused(index, s, &e),
            Err(Trouble::Lost(e)) => return self.spool_lost(index, s, &e),
        };
        if let Some(file) = new {
            // Before anything leaves memory.
            let put = Put {
                key,
                add: vec![run::SPOOLS[s].to_owned()],
                ..Put::default()
            };
            if let Err(e) = self.link.put(put, &[file.as_fd()]) {
                return self.spool_refused(index, s, &e);
            }
            disk.file = Some(Arc::new(file));
            disk.kept_file = true;
        }
        fail::pass("output.moved");
        // What cannot be given back is found, and moved, again by a new runtime.
        let _ = punch_hole(segment.as_fd(), disk.moved, n);
        disk.moved += n;
        disk.memory = disk.moved;
        if run.done()
            && run.streams[s]
                .disk
                .as_ref()
                .is_some_and(|d| d.moved == run.streams[s].total)
        {
            self.drop_segment(index, s);
        }
        self.pump(index);
    }

    /// All of it is on the disk, and no more will come.
    fn drop_segment(&mut self, index: u64, s: usize) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let key = run.key();
        let stream = &mut run.streams[s];
        stream.segment = None;
        stream.kept_segment = false;
        let put = Put {
            key,
            close: vec![run::SEGMENTS[s].to_owned()],
            ..Put::default()
        };
        if let Err(e) = self.link.put(put, &[]) {
            warning!("keeper.put", error = e);
        }
        self.count_descriptors(index);
    }

    /// Nothing more is moved; what was is there.
    fn spool_refused(&mut self, index: u64, s: usize, e: &io::Error) {
        let moved = self
            .runs
            .get(&index)
            .and_then(|r| r.streams[s].disk.as_ref())
            .map_or(0, |disk| disk.moved);
        self.spool_ends(index, s, moved, e);
    }

    /// What was moved cannot be trusted.
    fn spool_lost(&mut self, index: u64, s: usize, e: &io::Error) {
        self.spool_ends(index, s, 0, e);
    }

    fn spool_ends(&mut self, index: u64, s: usize, end: u64, e: &io::Error) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        warning!(
            "output.disk",
            run = run.key(),
            stream = s + 1,
            kept = end,
            error = e
        );
        if let Some(disk) = &mut run.streams[s].disk {
            disk.failed = true;
            disk.moved = end;
        }
        run.meta.spool_ends[s] = Some(end);
        // Before memory has a hole that is nowhere on the disk.
        self.keep_meta(index);
        if let Some(run) = self.runs.get_mut(&index) {
            run.give_back_undisked(s);
        }
        self.pump(index);
    }

    /// Gets pieces from where they are, and goes on with them; not at once if any of it is on the disk.
    fn fetch(
        &mut self,
        index: u64,
        pieces: Vec<Piece>,
        then: impl FnOnce(&mut Server, Vec<Vec<u8>>, bool) + Send + 'static,
    ) {
        let Some(run) = self.runs.get(&index) else {
            return;
        };
        let parts = run.split(&pieces);
        if parts.iter().all(|(on_disk, _)| *on_disk == 0) {
            let data = parts.into_iter().map(|(_, data)| data).collect();
            return then(self, data, true);
        }
        let layout = run.meta.layout();
        let files: [_; run::OUTPUTS] = std::array::from_fn(|s| {
            let disk = run.streams[s].disk.as_ref();
            disk.and_then(|disk| disk.file.clone())
        });
        self.spoolers.run(move || {
            let (mut all, mut failed) = (Vec::new(), None);
            for (piece, (on_disk, data)) in pieces.iter().zip(parts) {
                match fetch_one(files[piece.s].as_deref(), layout, piece.from, on_disk) {
                    Ok(mut out) => {
                        out.extend_from_slice(&data);
                        all.push(out);
                    }
                    Err(e) => failed = Some((piece.s, e)),
                }
            }
            Box::new(move |server: &mut Server| match failed {
                None => {
                    let there = server.still_there(index, &pieces);
                    then(server, all, there);
                }
                Some((s, e)) => {
                    server.spool_lost(index, s, &e);
                    then(server, Vec::new(), false);
                }
            })
        });
    }

    /// Whether nothing of it has begun to be written over since it was asked for.
    fn still_there(&self, index: u64, pieces: &[Piece]) -> bool {
        let Some(run) = self.runs.get(&index) else {
            return false;
        };
        pieces.iter().all(|piece| {
            piece.from >= piece.end || {
                let hole = run.streams[piece.s].hole_end;
                piece.end <= run.meta.head_bytes || piece.from >= hole
            }
        })
    }

    /// A follower is to get what is on the disk.
    pub(super) fn fetch_for(&mut self, index: u64, position: usize, piece: Piece) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let reader = &mut run.readers[position];
        reader.fetched = Fetched::Busy;
        let (client, request) = (reader.client, reader.request);
        self.fetch(index, vec![piece], move |server, mut data, good| {
            let Some(run) = server.runs.get_mut(&index) else {
                return;
            };
            let mut readers = run.readers.iter_mut();
            let Some(reader) = readers.find(|r| r.client == client && r.request == request) else {
                return;
            };
            reader.fetched = match data.pop().filter(|_| good) {
                Some(data) => Fetched::Ready(piece, data),
                // Where to go on is looked up anew.
                None => Fetched::Nothing,
            };
            server.pump(index);
        });
    }

    /// A follower is to get the result, of which some may be on the disk.
    pub(super) fn collect(&mut self, index: u64, position: usize) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let pieces = run.result_pieces();
        let reader = &mut run.readers[position];
        reader.fetched = Fetched::Busy;
        let (client, request) = (reader.client, reader.request);
        let asked = pieces.clone();
        self.fetch(index, pieces, move |server, data, good| {
            let Some(run) = server.runs.get_mut(&index) else {
                return;
            };
            let mut readers = run.readers.iter();
            let found = readers.position(|r| r.client == client && r.request == request);
            let Some(position) = found else { return };
            if good {
                let streams = run.stream_results(&asked, data);
                return server.deliver(index, position, streams);
            }
            run.readers[position].fetched = Fetched::Nothing;
            server.pump(index);
        });
    }

    /// `run.read`.
    pub(super) fn read_request(
        &mut self,
        client: u64,
        id: Id,
        args: &ReadArgs,
    ) -> Result<(), LaunchError> {
        let index = self.run_index(&RunArgs {
            sandbox: args.sandbox.clone(),
            run: args.run.clone(),
        })?;
        let outputs = self.runs.get(&index).map_or(0, |r| r.meta.outputs());
        let s = usize::from(args.s).checked_sub(1).filter(|s| *s < outputs);
        let s = s.ok_or_else(|| LaunchError::field("s", "no such output of this run"))?;
        // Nobody may have looked into its pipes yet.
        self.settle(index);
        let max = args.max.min(proto::MAX_READ);
        self.read_kept(index, (client, id), (s, args.offset, max), TRIES);
        Ok(())
    }

    fn read_kept(
        &mut self,
        index: u64,
        (client, id): (u64, Id),
        (s, offset, max): (usize, u64, u64),
        tries: u32,
    ) {
        let Some(run) = self.runs.get(&index) else {
            return self.answer(client, id, Err::<Kept, _>(super::results::forgotten()));
        };
        let stream = &run.streams[s];
        let (mut from, mut end) = run.kept_from(s, offset);
        if tries == 0 {
            let memory = stream.disk.as_ref().map_or(0, |disk| disk.memory);
            (from, end) = run.kept_from(s, from.max(memory));
        }
        let gap = Some(end).filter(|end| *end < stream.total);
        let end = end.min(from.saturating_add(max)).max(from);
        let piece = Piece { s, from, end };
        self.fetch(index, vec![piece], move |server, mut data, good| {
            if !good {
                let asked = (s, offset, max);
                return server.read_kept(index, (client, id), asked, tries.saturating_sub(1));
            }
            let kept = server.runs.get(&index).map(|run| Kept {
                o: from,
                d: data.pop().unwrap_or_default().into(),
                total: run.streams[s].total,
                gap,
                state: run.state(),
            });
            server.answer(client, id, kept.ok_or_else(super::results::forgotten));
        });
    }
}

fn fetch_one(
    file: Option<&std::os::fd::OwnedFd>,
    layout: spool::Layout,
    from: u64,
    len: u64,
) -> io::Result<Vec<u8>> {
    if len == 0 {
        return Ok(Vec::new());
    }
    fail::at("output.fetch").map_err(|e| io::Error::other(e.message))?;
    let file = file.ok_or(io::ErrorKind::NotFound)?;
    spool::read(file.as_fd(), layout, from, len)
}
