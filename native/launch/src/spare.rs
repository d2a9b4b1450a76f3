//! v1 groups of ended sandboxes that wait for the next one.
//!
//! Making and removing the three of a sandbox costs 0.5 ms and later as much of kernel threads, and every
//! value written into a new one goes through groups of the whole machine again. v1 can rename a group, so
//! one that nothing is charged to serves again; nobody inside can see it. v2 cannot, and its groups are what
//! a sandbox is known by; where it has the controllers nothing is kept.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::cgroup::Limits;
use crate::failpoint;
use crate::hierarchy::{key, number, oom_kills, read, remove_tree, write};
use crate::plan::{Result, Step};
use crate::switch;

/// No sandbox can be called so: ids do not start with a dot.
const PREFIX: &str = ".spare-";
/// Kept at most; a stop that finds so many removes its groups.
const SPARES_MAX: usize = 32;
/// Memory that may stay charged to a group that serves again: what the kernel charges ahead for each CPU
/// is of this order. It counts against the next sandbox's limit.
const RESIDUE_MAX: u64 = 1 << 20;
const CPU_PERIOD_US: u64 = 100_000;
/// What memory and swap together may be above memory alone, without swap too: the limit of both is asked first, and
/// newer kernels count only how often that of memory was met (`memory.memsw.failcnt` stays 0). One page, of any size.
const SWAP_MIN: i64 = 64 << 10;
/// v1 counts shares, of which a weight of 100 is this many.
const SHARES_AT_100: u64 = 1024;

/// A sandbox's directory in each v1 hierarchy.
#[derive(Debug, Clone)]
pub(crate) struct Groups<'a> {
    pub memory: &'a Path,
    pub cpu: &'a Path,
    pub pids: &'a Path,
}

/// What is written into the groups. Unset is -1, as the kernel has it for most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Values {
    memory: i64,
    both: i64,
    quota: i64,
    shares: u64,
    pids: u64,
}

impl Values {
    /// Those of a group that was just made.
    pub(crate) fn new() -> Self {
        Self::of(&Limits::default())
    }

    fn of(limits: &Limits) -> Self {
        let bytes = |n: u64| match n {
            0 => -1,
            n => i64::try_from(n).unwrap_or(i64::MAX),
        };
        let memory = bytes(limits.memory_bytes);
        let swap = i64::try_from(limits.swap_bytes).unwrap_or(i64::MAX);
        Self {
            memory,
            both: if memory < 0 {
                -1
            } else {
                memory.saturating_add(swap.max(SWAP_MIN))
            },
            quota: bytes(limits.cpu_milli * CPU_PERIOD_US / 1000),
            shares: match limits.cpu_weight {
                0 => SHARES_AT_100,
                weight => (u64::from(weight) * SHARES_AT_100 / 100).max(2),
            },
            pids: limits.pids_max,
        }
    }
}

/// Writes what differs from what is there.
pub(crate) fn limit(at: &Groups<'_>, now: &Values, limits: &Limits) -> Result<()> {
    let new = Values::of(limits);
    let set = |at: &Path, file: &str, value: String| write(&at.join(file), &value).step(file);
    limit_memory(at.memory, now, &new)?;
    if new.quota != now.quota {
        // The period is what a new group has: each write goes through all groups of the machine.
        set(at.cpu, "cpu.cfs_quota_us", new.quota.to_string())?;
    }
    if new.shares != now.shares {
        set(at.cpu, "cpu.shares", new.shares.to_string())?;
    }
    if new.pids != now.pids {
        let value = match new.pids {
            0 => "max".to_owned(),
            n => n.to_string(),
        };
        set(at.pids, "pids.max", value)?;
    }
    Ok(())
}

const MEMORY: &str = "memory.limit_in_bytes";
const BOTH: &str = "memory.memsw.limit_in_bytes";

/// Memory alone may never be above memory and swap together, so the order depends on the direction.
fn limit_memory(at: &Path, now: &Values, new: &Values) -> Result<()> {
    static SWAP: OnceLock<bool> = OnceLock::new();
    let swap = *SWAP.get_or_init(|| at.join(BOTH).exists());
    let set = |file: &str, value: i64| write(&at.join(file), &value.to_string()).step(file);
    let unlimited = |n: i64| if n < 0 { i64::MAX } else { n };
    let both = swap && new.both != now.both;
    let grows = unlimited(new.both) > unlimited(now.both);
    if both && grows {
        set(BOTH, new.both)?;
    }
    if new.memory != now.memory {
        set(MEMORY, new.memory)?;
    }
    if both && !grows {
        set(BOTH, new.both)?;
    }
    Ok(())
}

#[derive(Debug)]
struct Spare {
    name: String,
    values: Values,
}

/// The spare groups of a node; lost with the process, found as strangers by the next one.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    kept: Mutex<Vec<Spare>>,
    /// What the sandboxes that live were given, by id; unknown for those of an earlier process.
    given: Mutex<HashMap<String, Values>>,
    next: AtomicU64,
}

impl Spares {
    /// Gives the sandbox `id` groups with what is written in them; `None`: they are to be made.
    pub(crate) fn take(&self, bases: &[&Path], id: &str) -> Option<Values> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let spare = kept.pop()?;
        drop(kept);
        for (done, base) in bases.iter().enumerate() {
            let renamed = fs::rename(base.join(&spare.name), base.join(id));
            if renamed.is_ok() && failpoint::at("spare.taking").is_ok() {
                continue;
            }
            // Nothing is in them: what is there of either name goes, and all are made again.
            for base in &bases[..=done] {
                let _ = remove_tree(&base.join(id));
            }
            for base in &bases[done..] {
                let _ = remove_tree(&base.join(&spare.name));
            }
            return None;
        }
        Some(spare.values)
    }

    /// Notes what the groups of `id` were given.
    pub(crate) fn given(&self, id: &str, limits: &Limits) {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        given.insert(id.to_owned(), Values::of(limits));
    }

    /// Keeps the groups of an ended sandbox, if they are as good as new. `false`: they are to be removed.
    /// What is below them has been removed, and so have its groups in v2: no process is in them.
    pub(crate) fn keep(&self, bases: &[&Path], groups: &Groups<'_>, id: &str) -> bool {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let values = given.remove(id);
        drop(given);
        let Some(values) = values.filter(|_| !switch::off(switch::CGROUP_REUSE)) else {
            return false;
        };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= SPARES_MAX || !as_new(groups) {
            return false;
        }
        let name = format!("{PREFIX}{}", self.next.fetch_add(1, Ordering::Relaxed));
        for base in bases {
            let renamed = fs::rename(base.join(id), base.join(&name));
            if renamed.is_err() || failpoint::at("spare.keeping").is_err() {
                // Removed under one name or the other.
                for base in bases {
                    let _ = remove_tree(&base.join(&name));
                }
                return false;
            }
        }
        kept.push(Spare { name, values });
        true
    }

    /// Removes all that are kept.
    pub(crate) fn clear(&self, bases: &[&Path]) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        for spare in kept.drain(..) {
            for base in bases {
                let _ = remove_tree(&base.join(&spare.name));
            }
        }
    }
}

/// Whether the memory group of an ended sandbox's first run may stay where it is, for the first run of the next:
/// nothing was refused or killed in it. Its peak is set back; what stayed charged is in its parent's reading.
pub(crate) fn keep_first_run(memory: &Path) -> bool {
    !switch::off(switch::CGROUP_REUSE)
        && number(&memory.join("memory.failcnt")) == 0
        && oom_kills(memory) == 0
        && write(&memory.join("memory.max_usage_in_bytes"), "0").is_ok()
}

/// Whether the counters of the groups say that nothing was ever refused or killed in them and nothing is
/// in them. The peak of memory is set back.
fn as_new(at: &Groups<'_>) -> bool {
    let quiet = |file: PathBuf| -> io::Result<bool> { Ok(key(&read(&file)?, "max") == 0) };
    let empty = |file: PathBuf| -> io::Result<bool> { Ok(read(&file)?.trim() == "0") };
    let charged = read(&at.memory.join("memory.usage_in_bytes"));
    let charged = charged.ok().and_then(|text| text.trim().parse().ok());
    charged.is_some_and(|bytes: u64| bytes <= RESIDUE_MAX)
        && empty(at.pids.join("pids.current")).unwrap_or(false)
        && quiet(at.pids.join("pids.events")).unwrap_or(false)
        && number(&at.memory.join("memory.failcnt")) == 0
        && oom_kills(at.memory) == 0
        // It cannot be set back, and would be told of the next sandbox.
        && read(&at.cpu.join("cpu.stat")).is_ok_and(|stat| key(&stat, "throttled_time") == 0)
        && write(&at.memory.join("memory.max_usage_in_bytes"), "0").is_ok()
}
