//! Waiting for many descriptors, and places for what belongs to them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::Timespec;
use rustix::io::Errno;

/// Taken at once.
const BATCH: usize = 256;

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Interest {
    pub read: bool,
    pub write: bool,
}

pub const READ: Interest = Interest {
    read: true,
    write: false,
};
pub const NONE: Interest = Interest {
    read: false,
    write: false,
};

impl Interest {
    fn flags(self) -> EventFlags {
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, self.read);
        flags.set(EventFlags::OUT, self.write);
        flags
    }
}

/// What has come.
#[derive(Debug, Clone, Copy)]
pub struct Ready {
    pub token: u64,
    pub read: bool,
    pub write: bool,
    /// The connection was reset or could not be made.
    pub failed: bool,
    /// Both directions are over; told again and again, whatever is waited for.
    pub over: bool,
}

pub struct Poller {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

impl Poller {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            events: Vec::with_capacity(BATCH),
        })
    }

    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let data = EventData::new_u64(token);
        Ok(epoll::add(&self.epoll, fd, data, interest.flags())?)
    }

    pub fn change(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let data = EventData::new_u64(token);
        Ok(epoll::modify(&self.epoll, fd, data, interest.flags())?)
    }

    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// Appends what is ready to `out`; waits for no longer than `limit`, without one as long as it takes.
    pub fn wait(&mut self, limit: Option<Duration>, out: &mut Vec<Ready>) -> io::Result<()> {
        // Up to the next millisecond: a timer that is not due yet would be asked for again and again.
        let limit = limit.map(|limit| limit + Duration::from_millis(1));
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        self.events.clear();
        let room = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, room, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        out.extend(self.events.iter().map(|event| {
            let flags = event.flags;
            Ready {
                token: event.data.u64(),
                read: flags.contains(EventFlags::IN),
                write: flags.contains(EventFlags::OUT),
                failed: flags.contains(EventFlags::ERR),
                over: flags.contains(EventFlags::HUP),
            }
        }));
        Ok(())
    }
}

/// Names one thing in a [`Slab`], for ever: its place may serve another, under another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    place: u32,
    generation: u32,
}

const GENERATIONS: u32 = 1 << 28;

impl Key {
    /// In a token, beside four bits of the caller's.
    pub fn token(self, kind: u8) -> u64 {
        u64::from(kind) << 60 | u64::from(self.generation) << 32 | u64::from(self.place)
    }

    pub fn of_token(token: u64) -> (u8, Self) {
        let key = Self {
            place: token as u32,
            generation: (token >> 32) as u32 % GENERATIONS,
        };
        ((token >> 60) as u8, key)
    }
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Things by key.
#[derive(Debug)]
pub struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn insert(&mut self, value: T) -> Key {
        let key = self.reserve();
        self.lay(key, value);
        key
    }

    /// A key for what is laid there later.
    pub fn reserve(&mut self) -> Key {
        let place = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                value: None,
            });
            self.slots.len() as u32 - 1
        });
        let generation = self.slots[place as usize].generation;
        Key { place, generation }
    }

    pub fn get(&self, key: Key) -> Option<&T> {
        let slot = self.slots.get(key.place as usize)?;
        slot.value
            .as_ref()
            .filter(|_| slot.generation == key.generation)
    }

    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let slot = self.slots.get_mut(key.place as usize)?;
        slot.value
            .as_mut()
            .filter(|_| slot.generation == key.generation)
    }

    /// Takes it out; its key names nothing from then on.
    pub fn remove(&mut self, key: Key) -> Option<T> {
        let slot = self.slots.get_mut(key.place as usize)?;
        if slot.generation != key.generation {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation = (slot.generation + 1) % GENERATIONS;
        self.free.push(key.place);
        Some(value)
    }

    /// Takes it out for a while: its key stays, and names nothing until [`Slab::lay`] or for ever after
    /// [`Slab::forget`].
    pub fn lift(&mut self, key: Key) -> Option<T> {
        let slot = self.slots.get_mut(key.place as usize)?;
        if slot.generation != key.generation {
            return None;
        }
        slot.value.take()
    }

    pub fn lay(&mut self, key: Key, value: T) {
        self.slots[key.place as usize].value = Some(value);
    }

    pub fn forget(&mut self, key: Key) {
        let slot = &mut self.slots[key.place as usize];
        slot.generation = (slot.generation + 1) % GENERATIONS;
        self.free.push(key.place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_never_names_another_thing() {
        let mut slab = Slab::default();
        let first = slab.insert("a");
        assert_eq!(Key::of_token(first.token(9)), (9, first));
        assert_eq!(slab.remove(first), Some("a"));
        let second = slab.insert("b");
        assert_eq!((slab.get(first), slab.get(second)), (None, Some(&"b")));
        assert_eq!((slab.remove(first), slab.len()), (None, 1));
        assert_eq!(slab.lift(second), Some("b"));
        assert_eq!((slab.get(second), slab.len()), (None, 1));
        slab.lay(second, "c");
        assert_eq!(slab.get_mut(second), Some(&mut "c"));
        slab.lift(second);
        slab.forget(second);
        assert_eq!((slab.get(second), slab.is_empty()), (None, true));
    }
}
