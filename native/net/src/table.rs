//! The compiled policy of a sandbox: an ordered list of rules, the first that matches decides, none is a denial.
//!
//! As msgpack a map, see [`Table`]; a compiler that knows profiles, phases and precedence makes it.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::ranges::{closed, Range};

/// The form that is understood here.
pub const FORMAT: u32 = 1;
/// Rules of one table.
pub const RULES_MAX: usize = 10_000;
/// A rule's id.
const ID_MAX: usize = 200;
/// Connections of one sandbox, if its table does not say.
pub const CONNECTIONS: u32 = 1024;
/// And at most.
pub const CONNECTIONS_MAX: u32 = 20_000;

/// The map: `{"format": 1, "generation": 7, "rules": [...], "connections": 1024}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    pub format: u32,
    /// Counts the changes of one sandbox's policy; stands in verdicts.
    #[serde(default)]
    pub generation: u64,
    pub rules: Vec<Rule>,
    /// At once.
    #[serde(default = "connections")]
    pub connections: u32,
}

fn connections() -> u32 {
    CONNECTIONS
}

/// `{"id": "pypi/1", "action": "allow", "name": "pypi.org", "ports": [[443, 443]], "protocol": "tcp"}`; exactly one of
/// `name`, `suffix`, `range`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    pub id: String,
    pub action: Action,
    #[serde(flatten)]
    pub of: Of,
    /// First and last of each; none: all.
    #[serde(default)]
    pub ports: Vec<(u16, u16)>,
    /// None: both.
    #[serde(default)]
    pub protocol: Option<Protocol>,
    /// How it is made sure that a connection is for the name.
    #[serde(default)]
    pub check: Check,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    Allow,
    Deny,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    Tcp,
    Udp,
}

/// What a rule is about. Names are lower case ASCII (IDN as `xn--`), without the final dot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Of {
    /// This name alone.
    Name(String),
    /// Every name below this one, at any depth, not itself.
    Suffix(String),
    /// Addresses, those that are closed to names too.
    Range(Range),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Check {
    /// Only TLS that names it (SNI) or HTTP that does (Host) passes.
    #[default]
    Spoken,
    /// That the address was resolved for the name is enough: for SSH, git and the like. Whoever shares the address
    /// can be reached with it.
    Address,
}

/// A decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    pub allow: bool,
    /// Its place in the table.
    pub rule: Option<usize>,
}

/// No rule was for it.
pub const DENIED: Verdict = Verdict {
    allow: false,
    rule: None,
};

/// What can be said of a connection before anything was said in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// It is decided, whatever it says.
    Decided(Verdict),
    /// Its name must be heard and allowed.
    Hear,
    /// It is allowed unless it says a name that is denied.
    Listen(Verdict),
}

/// Where a connection goes.
#[derive(Debug, Clone, Copy)]
pub struct To {
    pub address: IpAddr,
    pub port: u16,
    pub protocol: Protocol,
    /// Only rules for ranges open it.
    pub closed: bool,
}

impl To {
    pub fn tcp(address: IpAddr, port: u16, own: &[Range]) -> Self {
        Self {
            address,
            port,
            protocol: Protocol::Tcp,
            closed: is_closed(address, own),
        }
    }
}

/// Closed to everybody, or the node's own.
pub fn is_closed(address: IpAddr, own: &[Range]) -> bool {
    closed(address) || own.iter().any(|range| range.contains(address))
}

impl Rule {
    fn carries(&self, to: &To) -> bool {
        let ports = &self.ports;
        self.protocol.map_or(true, |only| only == to.protocol)
            && (ports.is_empty() || ports.iter().any(|(a, b)| (*a..=*b).contains(&to.port)))
    }

    fn names(&self, name: &str) -> bool {
        match &self.of {
            Of::Name(own) => own == name,
            Of::Suffix(own) => {
                let above = name.strip_suffix(own.as_str());
                above.is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
            }
            Of::Range(_) => false,
        }
    }

    fn covers(&self, address: IpAddr) -> bool {
        matches!(&self.of, Of::Range(range) if range.contains(address))
    }

    /// Whether it is about this name at this address.
    fn about(&self, name: &str, address: IpAddr, closed: bool) -> bool {
        let opens = self.action == Action::Deny || !closed;
        self.covers(address) || (self.names(name) && opens)
    }

    fn verdict(&self, at: usize) -> Verdict {
        Verdict {
            allow: self.action == Action::Allow,
            rule: Some(at),
        }
    }
}

impl Table {
    /// What is wrong with it, if anything is.
    pub fn fault(&self) -> Option<String> {
        if self.format != FORMAT {
            return Some(format!("format {} is not {FORMAT}", self.format));
        }
        if self.rules.len() > RULES_MAX || self.connections > CONNECTIONS_MAX {
            return Some("more rules or connections than a table may have".to_owned());
        }
        let bad = self.rules.iter().find(|rule| {
            let named = match &rule.of {
                Of::Name(name) | Of::Suffix(name) => good_name(name),
                Of::Range(_) => true,
            };
            let ordered = rule.ports.iter().all(|(a, b)| a <= b);
            !named || !ordered || rule.id.is_empty() || rule.id.len() > ID_MAX
        });
        bad.map(|rule| format!("rule {:?} is not one", rule.id))
    }

    /// Whether a question for a name is asked at all: by the first rule that allows a port which none before denies.
    pub fn resolves(&self, name: &str) -> Verdict {
        self.reaches(|rule| rule.names(name))
    }

    /// Whether an address may be an answer: if anything may be reached there by the name.
    pub fn answers(&self, name: &str, address: IpAddr, closed: bool) -> bool {
        self.reaches(|rule| rule.about(name, address, closed)).allow
    }

    /// Whether rules like these allow any port; otherwise the first of them is why not.
    fn reaches(&self, about: impl Fn(&Rule) -> bool) -> Verdict {
        let mut left = [vec![ALL_PORTS], vec![ALL_PORTS]];
        let mut first = None;
        for (at, rule) in self
            .rules
            .iter()
            .enumerate()
            .filter(|(_, rule)| about(rule))
        {
            first = first.or(Some(at));
            for (ports, protocol) in left.iter_mut().zip([Protocol::Tcp, Protocol::Udp]) {
                if rule.protocol.is_some_and(|only| only != protocol) {
                    continue;
                }
                let rest = minus(ports, &rule.ports);
                if rule.action == Action::Allow && rest != *ports {
                    return rule.verdict(at);
                }
                *ports = rest;
            }
        }
        Verdict {
            allow: false,
            rule: first,
        }
    }

    /// A connection that said `name`, which was resolved to its address.
    pub fn named(&self, name: &str, to: &To) -> Verdict {
        let mut rules = self.rules.iter().enumerate();
        let about = |rule: &Rule| rule.carries(to) && rule.about(name, to.address, to.closed);
        let found = rules.find(|(_, rule)| about(rule));
        found.map_or(DENIED, |(at, rule)| rule.verdict(at))
    }

    /// A connection of which only the names are known that were resolved to its address.
    pub fn begin(&self, resolved: &[&str], to: &To) -> Begin {
        let (mut denied, mut named) = (false, false);
        for (at, rule) in self.rules.iter().enumerate() {
            if !rule.carries(to) {
                continue;
            }
            let verdict = rule.verdict(at);
            if rule.covers(to.address) {
                return match (verdict.allow, denied || named) {
                    (true, true) => Begin::Listen(verdict),
                    (false, _) if named => Begin::Hear,
                    _ => Begin::Decided(verdict),
                };
            }
            match (&rule.of, rule.action) {
                (Of::Name(_) | Of::Suffix(_), Action::Deny) => denied = true,
                (Of::Name(_) | Of::Suffix(_), Action::Allow) if !to.closed => {
                    // The first match of each name counts: an earlier denial of it stands before this.
                    let one =
                        |name: &str| rule.names(name) && self.named(name, to).rule == Some(at);
                    if !resolved.iter().any(|name| one(name)) {
                        continue;
                    }
                    if rule.check == Check::Address {
                        return Begin::Decided(verdict);
                    }
                    named = true;
                }
                _ => {}
            }
        }
        if named {
            Begin::Hear
        } else {
            Begin::Decided(DENIED)
        }
    }
}

const ALL_PORTS: (u16, u16) = (1, u16::MAX);

/// Ports without others; none are all.
fn minus(ports: &[(u16, u16)], taken: &[(u16, u16)]) -> Vec<(u16, u16)> {
    if taken.is_empty() {
        return Vec::new();
    }
    let mut left = ports.to_vec();
    for (low, high) in taken {
        let below = |(a, b): &(u16, u16)| (*a, (*b).min(low.saturating_sub(1)));
        let above = |(a, b): &(u16, u16)| ((*a).max(high.saturating_add(1)), *b);
        let mut cut: Vec<_> = left
            .iter()
            .map(below)
            .chain(left.iter().map(above))
            .collect();
        // Beyond the highest port there is none, though the sum stops at it.
        cut.retain(|(a, b)| {
            a <= b && *a >= 1 && !(*high == u16::MAX && *a == u16::MAX && *low <= *a)
        });
        left = cut;
    }
    left.sort_unstable();
    left
}

/// A host name as it stands in a table: lower case, labels of letters, digits, `-` and `_`.
pub fn good_name(name: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// A name as a table has it, from what a program said: without case and final dot; `None` if it is none.
pub fn normal(said: &str) -> Option<String> {
    let name = said.strip_suffix('.').unwrap_or(said).to_ascii_lowercase();
    good_name(&name).then_some(name)
}

#[cfg(test)]
mod tests;
