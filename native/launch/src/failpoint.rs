//! Switches that make a named point fail, for the sweep that looks for leftovers.
//!
//! `DSEC_NATIVE_FAILPOINTS=name:nth:action[,..]`, read once; `action` is `error`, `kill` (SIGKILL to
//! itself) or `hang`. `nth` counts from 1 within one process. Off, a point costs one atomic load.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::OnceLock;

use crate::plan::{LaunchError, Result};

/// The environment variable that switches points on.
pub const VARIABLE: &str = "DSEC_NATIVE_FAILPOINTS";

/// Every name of this crate, for `dsec-runtime failpoints`. In the order they are passed.
pub const NAMES: &[&str] = &[
    "spare.taking",
    "assembly.cgroup",
    "assembly.upper",
    "assembly.netns",
    "create.layers",
    "create.sysfs",
    "create.cloned",
    "create.mapped",
    "create.idmapped",
    "create.dev",
    "create.overlay",
    "create.sent",
    "init.received",
    "init.staged",
    "init.rooted",
    "init.mounted",
    "init.masked",
    "init.confined",
    "create.ready",
    "views.copies",
    "views.made",
    "enter.beside",
    "enter.cloned",
    "enter.joined",
    "enter.entered",
    "enter.terminal",
    "enter.confined",
    "spare.keeping",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Error,
    Kill,
    Hang,
}

#[derive(Debug)]
struct Armed {
    name: String,
    nth: u32,
    action: Action,
    passed: AtomicU32,
}

static ARMED: OnceLock<Vec<Armed>> = OnceLock::new();

fn armed() -> &'static [Armed] {
    ARMED.get_or_init(|| std::env::var(VARIABLE).map_or_else(|_| Vec::new(), |v| parse(&v)))
}

fn parse(text: &str) -> Vec<Armed> {
    text.split(',').filter_map(parse_one).collect()
}

fn parse_one(item: &str) -> Option<Armed> {
    let mut parts = item.trim().split(':');
    let (name, nth, action) = (parts.next()?, parts.next()?, parts.next()?);
    let action = match action {
        "error" => Action::Error,
        "kill" => Action::Kill,
        "hang" => Action::Hang,
        _ => return None,
    };
    Some(Armed {
        name: name.to_owned(),
        nth: nth.parse().ok()?,
        action,
        passed: AtomicU32::new(0),
    })
}

/// Does what was asked for this point, usually nothing.
pub fn at(name: &str) -> Result<()> {
    for point in armed() {
        if point.name == name && point.passed.fetch_add(1, Ordering::Relaxed) + 1 == point.nth {
            match point.action {
                Action::Error => return Err(failed(name)),
                Action::Kill => dsec_sys::process::kill_self(),
                Action::Hang => loop {
                    std::thread::park();
                },
            }
        }
    }
    Ok(())
}

fn failed(name: &str) -> LaunchError {
    let error = io::Error::from_raw_os_error(libc::EIO);
    LaunchError::step(&format!("failpoint {name}"), &error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_is_well_formed_and_drops_the_rest() {
        let points = parse("a.b:2:kill, c:1:error,bad,d:x:hang,e:1:nothing");
        let seen: Vec<_> = points
            .iter()
            .map(|p| (p.name.as_str(), p.nth, p.action))
            .collect();
        assert_eq!(seen, [("a.b", 2, Action::Kill), ("c", 1, Action::Error)]);
    }
}
