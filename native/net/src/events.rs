//! Verdicts, on their way to whoever keeps them: bounded, and counted when there is no room.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Waiting, of all sandboxes and of one: one that scans ports does not take the room of the others.
const MAX: usize = 16_384;
const MAX_OF_ONE: usize = 512;
/// Told in one message: with the longest names well below what a packet takes.
const MESSAGE: usize = 64;

/// What was decided about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A connection that begins.
    Connect,
    /// A question for a name.
    Dns,
    /// A connection that was allowed and is not any more.
    Cut,
    /// An allowed connection that could not be made.
    Dial,
}

/// One verdict. Times are nanoseconds since 1970.
#[derive(Debug, Clone, Serialize)]
pub struct Event {
    pub at_ns: u64,
    pub sandbox: String,
    pub kind: Kind,
    pub allow: bool,
    /// Its id; none: no rule was for it.
    pub rule: Option<String>,
    /// What decided beside rules, in a word.
    pub why: Option<String>,
    pub name: Option<String>,
    pub address: Option<String>,
    pub port: Option<u16>,
    /// Of the program's socket, by which its process is found.
    pub from_port: Option<u16>,
    pub generation: u64,
}

impl Event {
    pub fn new(sandbox: &str, kind: Kind, allow: bool) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            at_ns: since.map_or(0, |since| since.as_nanos() as u64),
            sandbox: sandbox.to_owned(),
            kind,
            allow,
            rule: None,
            why: None,
            name: None,
            address: None,
            port: None,
            from_port: None,
            generation: 0,
        }
    }

    pub fn to(mut self, address: SocketAddr) -> Self {
        self.address = Some(address.ip().to_string());
        self.port = Some(address.port());
        self
    }
}

/// What one message tells.
#[derive(Debug, Serialize)]
pub struct Batch<'a> {
    events: Vec<&'a Event>,
    /// By sandbox, since the last message.
    dropped: &'a HashMap<String, u64>,
}

#[derive(Debug, Default)]
pub struct Events {
    waiting: VecDeque<Event>,
    of_one: HashMap<String, usize>,
    dropped: HashMap<String, u64>,
}

impl Events {
    pub fn add(&mut self, event: Event) {
        let own = self.of_one.entry(event.sandbox.clone()).or_default();
        if *own >= MAX_OF_ONE || self.waiting.len() >= MAX {
            *self.dropped.entry(event.sandbox).or_default() += 1;
            return;
        }
        *own += 1;
        self.waiting.push_back(event);
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.dropped.is_empty()
    }

    /// The next message. It stays until [`Events::told`].
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            events: self.waiting.iter().take(MESSAGE).collect(),
            dropped: &self.dropped,
        }
    }

    /// The last batch arrived.
    pub fn told(&mut self) {
        self.dropped.clear();
        let count = self.waiting.len().min(MESSAGE);
        for event in self.waiting.drain(..count) {
            let Some(own) = self.of_one.get_mut(&event.sandbox) else {
                continue;
            };
            *own -= 1;
            if *own == 0 {
                self.of_one.remove(&event.sandbox);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_finds_no_room_is_counted_and_takes_none_from_others() {
        let mut events = Events::default();
        for _ in 0..MAX_OF_ONE + 7 {
            events.add(Event::new("loud", Kind::Connect, false));
        }
        events.add(Event::new("calm", Kind::Connect, true));
        assert_eq!(events.batch().dropped.get("loud"), Some(&7));
        let mut told = 0;
        while !events.is_empty() {
            let batch = events.batch();
            assert!(batch.dropped.is_empty() || told == 0);
            told += batch.events.len();
            events.told();
        }
        assert_eq!(told, MAX_OF_ONE + 1);
        assert!(events.of_one.is_empty());
    }
}
