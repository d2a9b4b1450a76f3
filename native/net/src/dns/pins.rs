//! What was resolved for one sandbox.
//!
//! An answer stays the same for its life, so that a name cannot be made to mean another address between two looks; and
//! an address is known by the names it was resolved for, for longer: programs go on with an address they have.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Lives of answers: shorter ones are lengthened, longer ones cut.
pub const TTL_MIN: u32 = 10;
pub const TTL_MAX: u32 = 3600;
/// An address is known by a name for so long after the last answer with it.
const KNOWN: Duration = Duration::from_secs(2 * TTL_MAX as u64);
/// Answers, and pairs of an address and a name, per sandbox. Beyond, the oldest go.
const ANSWERS_MAX: usize = 512;
const PAIRS_MAX: usize = 4096;

#[derive(Debug, Clone)]
struct Answer {
    addresses: Vec<IpAddr>,
    until: Instant,
}

#[derive(Debug, Default)]
pub struct Pins {
    /// By name and kind.
    answers: HashMap<(String, u16), Answer>,
    names: HashMap<IpAddr, Vec<(String, Instant)>>,
    pairs: usize,
}

impl Pins {
    /// A standing answer and what is left of its life in seconds.
    pub fn answer(&self, name: &str, kind: u16, now: Instant) -> Option<(&[IpAddr], u32)> {
        let found = self.answers.get(&(name.to_owned(), kind))?;
        let left = found.until.checked_duration_since(now)?.as_secs();
        Some((&found.addresses, u32::try_from(left).unwrap_or(TTL_MAX)))
    }

    /// Keeps an answer; its life in seconds.
    pub fn keep(
        &mut self,
        name: &str,
        kind: u16,
        addresses: &[IpAddr],
        ttl: u32,
        now: Instant,
    ) -> u32 {
        let ttl = ttl.clamp(TTL_MIN, TTL_MAX);
        if self.answers.len() >= ANSWERS_MAX {
            let limit = middle(self.answers.values().map(|answer| answer.until)).max(now);
            self.answers.retain(|_, answer| answer.until > limit);
        }
        let until = now + Duration::from_secs(ttl.into());
        let answer = Answer {
            addresses: addresses.to_vec(),
            until,
        };
        self.answers.insert((name.to_owned(), kind), answer);
        for address in addresses {
            self.know(*address, name, now);
        }
        ttl
    }

    /// A name's addresses are told again: it is known for longer.
    pub fn again(&mut self, name: &str, kind: u16, now: Instant) {
        let found = self.answers.get(&(name.to_owned(), kind));
        let addresses = found.map(|answer| answer.addresses.clone());
        for address in addresses.unwrap_or_default() {
            self.know(address, name, now);
        }
    }

    fn know(&mut self, address: IpAddr, name: &str, now: Instant) {
        let until = now + KNOWN;
        let names = self.names.entry(address).or_default();
        match names.iter_mut().find(|(known, _)| known == name) {
            Some((_, life)) => *life = until,
            None => {
                names.push((name.to_owned(), until));
                self.pairs += 1;
            }
        }
        if self.pairs > PAIRS_MAX {
            self.thin(now);
        }
    }

    /// Lets go what has ended, and if that is not enough the older half.
    fn thin(&mut self, now: Instant) {
        let lives = self.names.values().flatten().map(|pair| pair.1);
        let limit = middle(lives).max(now);
        self.names.retain(|_, names| {
            names.retain(|(_, life)| *life > limit);
            !names.is_empty()
        });
        self.pairs = self.names.values().map(Vec::len).sum();
    }

    /// The names that an address was resolved for.
    pub fn names(&self, address: IpAddr, now: Instant) -> Vec<&str> {
        let all = self.names.get(&address).into_iter().flatten();
        all.filter(|(_, life)| *life > now)
            .map(|(name, _)| name.as_str())
            .collect()
    }
}

/// Half of them are later. Letting go half at once keeps a sandbox that asks for ever new names from costing a look at
/// all of them each time.
fn middle(times: impl Iterator<Item = Instant>) -> Instant {
    let mut all: Vec<Instant> = times.collect();
    let at = all.len() / 2;
    *all.select_nth_unstable(at).1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u32) -> IpAddr {
        IpAddr::from((20 << 24 | last).to_be_bytes())
    }

    #[test]
    fn answers_stand_for_their_life_and_names_are_known_for_longer() {
        let start = Instant::now();
        let later = |secs| start + Duration::from_secs(secs);
        let mut pins = Pins::default();
        assert_eq!(pins.keep("a.x", 1, &[ip(1)], 1, start), TTL_MIN);
        assert_eq!(pins.answer("a.x", 1, later(4)), Some((&[ip(1)][..], 6)));
        assert_eq!(pins.answer("a.x", 28, start), None);
        assert_eq!(pins.answer("a.x", 1, later(11)), None);
        assert_eq!(pins.names(ip(1), later(3600)), ["a.x"]);
        assert!(pins.names(ip(1), later(8000)).is_empty());
        assert!(pins.names(ip(2), start).is_empty());
        pins.again("a.x", 1, later(100));
        assert_eq!(pins.names(ip(1), later(7250)), ["a.x"]);
    }

    #[test]
    fn a_sandbox_keeps_no_more_than_it_may() {
        let start = Instant::now();
        let mut pins = Pins::default();
        for n in 0..30_000u32 {
            let now = start + Duration::from_millis(n.into());
            pins.keep(&format!("n{n}.x"), 1, &[ip(n)], 60, now);
            assert!(pins.answers.len() <= ANSWERS_MAX && pins.pairs <= PAIRS_MAX);
        }
        let now = start + Duration::from_secs(30);
        assert_eq!(pins.names(ip(29_999), now), ["n29999.x"], "the newest stay");
    }
}
