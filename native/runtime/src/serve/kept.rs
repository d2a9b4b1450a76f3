//! What is kept of an output: which of its bytes, and where they are.

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;

use super::run::{self, Fetched, Run, Stream};
use super::spool::Layout;
use super::stream::PAGE;
use crate::proto;
use crate::util;

/// A piece of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub s: usize,
    pub from: u64,
    pub end: u64,
}

impl Stream {
    /// Offset of the first byte of the tail that is kept.
    pub(super) fn tail_start(&self, head: u64, tail: u64) -> u64 {
        self.total.saturating_sub(tail).max(head.min(self.total))
    }

    /// Offsets of what is there, in order; neighbours may touch, and some may be empty.
    fn kept(&self, head: u64) -> [(u64, u64); 3] {
        match &self.disk {
            None if self.hole_end == 0 => [(0, self.total), (0, 0), (0, 0)],
            None => [
                (0, head.min(self.total)),
                (self.hole_end, self.total),
                (0, 0),
            ],
            Some(disk) => {
                let head = head.min(disk.moved);
                [
                    (0, head),
                    (self.hole_end.max(head), disk.moved),
                    (disk.memory, self.total),
                ]
            }
        }
    }

    /// Where the kept bytes from an offset on begin, and where those end that come without a gap.
    pub(super) fn kept_from(&self, head: u64, offset: u64) -> (u64, u64) {
        let mut found: Option<(u64, u64)> = None;
        for (from, end) in self.kept(head) {
            match &mut found {
                Some((_, until)) if from <= *until => *until = end.max(*until),
                None if from < end && offset < end => found = Some((offset.max(from), end)),
                _ => {}
            }
        }
        found.unwrap_or((offset.max(self.total), self.total))
    }

    /// Whether what begins there is on the disk.
    pub(super) fn on_disk(&self, from: u64) -> bool {
        self.disk.as_ref().is_some_and(|disk| from < disk.moved)
    }

    /// Not all of it was kept that should have been: the disk refused it, or has lost it.
    pub(super) fn short(&self) -> bool {
        self.disk.as_ref().is_some_and(super::spool::OnDisk::short)
    }

    /// Head and tail of the result, as far as they are there: the end of the one, the beginning of the other.
    fn ends(&self, head: u64, tail: u64) -> (u64, u64) {
        let kept = self.kept(head);
        let mut head_end = 0;
        for (from, end) in kept {
            if from <= head_end && end > head_end {
                head_end = end;
            }
        }
        let mut tail_at = self.total;
        for (from, end) in kept.into_iter().rev() {
            if from < end && end >= tail_at && from < tail_at {
                tail_at = from;
            }
        }
        let head_end = head_end.min(head).min(self.total);
        (
            head_end,
            tail_at.max(self.total.saturating_sub(tail)).max(head_end),
        )
    }

    /// What an earlier runtime left: how much has left the pipe, and what of it is where.
    pub(super) fn recovered(&mut self, meta: &run::Meta, s: usize) -> io::Result<()> {
        if let Some(file) = &self.segment {
            self.total = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
        }
        if let Some(outcome) = &meta.outcome {
            self.total = outcome.total(s);
        }
        let total = self.total;
        let data_from = |start: u64| match &self.segment {
            Some(file) if start < total => {
                match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(start)) {
                    Err(Errno::NXIO) => Ok(total),
                    found => found,
                }
            }
            _ => Ok(start),
        };
        let Some(disk) = &mut self.disk else {
            let start = meta.head_bytes.next_multiple_of(PAGE);
            let data = data_from(start)?;
            if data > start {
                self.hole_end = data;
            }
            return Ok(());
        };
        disk.memory = match (&self.segment, &disk.file) {
            (None, Some(_)) => total,
            _ => data_from(0)?,
        };
        disk.moved = disk.memory;
        if let Some(end) = meta.spool_ends[s] {
            disk.failed = true;
            disk.moved = end;
        }
        self.hole_end = meta.layout().begin_safe(disk.moved);
        Ok(())
    }

    /// Bytes at an offset, from memory or from what is kept with the outcome.
    pub(super) fn read(&self, s: usize, meta: &run::Meta, from: u64, len: u64) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        self.append(s, meta, (from, len), &mut out)?;
        Some(out)
    }

    /// As `read`, behind what a buffer has.
    pub(super) fn append(
        &self,
        s: usize,
        meta: &run::Meta,
        (from, len): (u64, u64),
        out: &mut Vec<u8>,
    ) -> Option<()> {
        let inline = meta.outcome.as_ref().and_then(|o| o.inline(s));
        if let Some(data) = inline {
            let end = usize::try_from(from + len).ok()?;
            out.extend_from_slice(data.get(usize::try_from(from).ok()?..end)?);
            return Some(());
        }
        if len == 0 {
            return Some(());
        }
        let segment = self.segment.as_ref()?.as_fd();
        util::append_exact_at(segment, out, usize::try_from(len).ok()?, from).ok()
    }
}

impl Fetched {
    /// What was fetched of an output from an offset on. `Busy`: what is, or was, is something else.
    pub(super) fn take(&mut self, s: usize, from: u64) -> Self {
        match self {
            Self::Ready(piece, _) if piece.s == s && piece.from == from => std::mem::take(self),
            Self::Ready(piece, _) if piece.s == s => {
                // It would go on somewhere else by now.
                std::mem::take(self);
                Self::Nothing
            }
            Self::Nothing => Self::Nothing,
            Self::Busy | Self::Ready(..) => Self::Busy,
        }
    }

    /// What goes on from memory needs nothing that was fetched.
    pub(super) fn forget(&mut self, s: usize) {
        if matches!(self, Self::Ready(piece, _) if piece.s == s) {
            std::mem::take(self);
        }
    }
}

impl run::Meta {
    pub(super) fn layout(&self) -> Layout {
        Layout::new(self.head_bytes, self.kept_tail() + self.slack_bytes)
    }
}

impl Run {
    pub(super) fn kept_from(&self, s: usize, offset: u64) -> (u64, u64) {
        self.streams[s].kept_from(self.meta.head_bytes, offset)
    }

    /// Everything, when nothing was given back or moved.
    pub(super) fn whole_stream(&self, s: usize) -> Option<Vec<u8>> {
        let stream = &self.streams[s];
        if stream.hole_end > 0 || stream.disk.as_ref().is_some_and(|disk| disk.memory > 0) {
            return None;
        }
        stream.read(s, &self.meta, 0, stream.total)
    }

    /// Head and tail of the two streams that the result tells of.
    pub(super) fn result_pieces(&self) -> Vec<Piece> {
        let pieces = (0..run::CONTROL).flat_map(|s| {
            let stream = &self.streams[s];
            let (end, from) = stream.ends(self.meta.head_bytes, self.meta.tail_bytes);
            let head = Piece { s, from: 0, end };
            let end = stream.total;
            [head, Piece { s, from, end }]
        });
        pieces.collect()
    }

    /// Those streams, made of their pieces: head, tail and how much is missing between them.
    pub(super) fn stream_results(
        &self,
        pieces: &[Piece],
        data: Vec<Vec<u8>>,
    ) -> [proto::StreamResult; run::CONTROL] {
        let mut data = data.into_iter();
        let mut next = || data.next().unwrap_or_default();
        std::array::from_fn(|s| {
            let (head, tail) = (next(), next());
            let total = self.streams[s].total;
            let dropped = pieces[2 * s + 1].from - pieces[2 * s].end;
            proto::StreamResult {
                total,
                head: head.into(),
                tail: tail.into(),
                dropped,
            }
        })
    }

    /// What of the pieces is in memory now, each with how much of it is on the disk before.
    pub(super) fn split(&self, pieces: &[Piece]) -> Vec<(u64, Vec<u8>)> {
        let split = pieces.iter().map(|piece| {
            let stream = &self.streams[piece.s];
            let moved = stream.disk.as_ref().map_or(0, |disk| disk.moved);
            let from = piece.from.max(moved).min(piece.end);
            let data = stream.read(piece.s, &self.meta, from, piece.end - from);
            (from - piece.from, data.unwrap_or_default())
        });
        split.collect()
    }
}
