//! One direction of a connection.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

/// Reads of one turn: one fast connection does not hold up the others.
const TURNS: usize = 4;

/// Bytes go straight through one common buffer; only what the other side does not take at once is kept, and until that
/// is gone nothing more is read.
#[derive(Debug, Default)]
pub struct Lane {
    held: Vec<u8>,
    /// Of `held`, what went already.
    gone: usize,
    /// Nothing more comes.
    pub ended: bool,
    /// And the other side was told, after the last byte.
    pub shut: bool,
    pub bytes: u64,
}

impl Lane {
    /// Bytes that wait for the other side.
    pub fn waiting(&self) -> usize {
        self.held.len() - self.gone
    }

    /// Memory it takes.
    pub fn room(&self) -> usize {
        self.held.capacity()
    }

    /// Bytes that were not read here, to be sent first.
    pub fn hold(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// Moves what can be moved. An error is the end of both directions.
    pub fn pump(&mut self, from: &TcpStream, to: &TcpStream, room: &mut [u8]) -> io::Result<()> {
        for _ in 0..TURNS {
            if !self.flush(to)? || self.ended {
                return Ok(());
            }
            let count = match (&*from).read(room) {
                Ok(0) => {
                    self.ended = true;
                    continue;
                }
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let sent = self.send(to, &room[..count])?;
            self.hold(&room[sent..count]);
            if count < room.len() {
                // Most likely all there was.
                return Ok(());
            }
        }
        Ok(())
    }

    /// Sends what waits; the end after the last byte. `true`: nothing is left.
    pub fn flush(&mut self, to: &TcpStream) -> io::Result<bool> {
        if !self.held.is_empty() {
            let held = std::mem::take(&mut self.held);
            let sent = self.send(to, &held[self.gone..]);
            self.gone += sent?;
            if self.gone < held.len() {
                self.held = held;
                return Ok(false);
            }
            self.gone = 0;
        }
        if self.ended && !self.shut {
            self.shut = true;
            match to.shutdown(Shutdown::Write) {
                // It went meanwhile; reading tells how.
                Err(error) if error.kind() == ErrorKind::NotConnected => {}
                other => other?,
            }
        }
        Ok(true)
    }

    fn send(&mut self, to: &TcpStream, data: &[u8]) -> io::Result<usize> {
        let mut sent = 0;
        while sent < data.len() {
            match (&*to).write(&data[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.bytes += sent as u64;
        Ok(sent)
    }
}
