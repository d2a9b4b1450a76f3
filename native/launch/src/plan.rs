//! Values of the contract in `docs/reference/native.md`: plans, answers, errors. No I/O.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// What kind of file system carries the writable part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UpperKind {
    /// The best kind the probe found that keeps the limits asked for.
    Auto,
    /// A subvolume with a simple quota on one shared loop file.
    Btrfs,
    /// A loop file of its own with ext4.
    Ext4,
    /// Memory.
    Tmpfs,
    /// A directory of the state file system with a project quota.
    Prjquota,
}

impl UpperKind {
    /// The name used in plans and probes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Btrfs => "btrfs",
            Self::Ext4 => "ext4",
            Self::Tmpfs => "tmpfs",
            Self::Prjquota => "prjquota",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpperSpec {
    pub kind: UpperKind,
    /// Exact limit; 0 is refused.
    pub bytes: u64,
    /// 0 = no limit of its own.
    #[serde(default)]
    pub inodes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TmpfsSpec {
    pub path: String,
    pub bytes: u64,
    pub mode: u32,
}

/// Changes to the default filter, by syscall name; `ioctl_deny` are command numbers (argument 1).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SeccompSpec {
    #[serde(default)]
    pub deny: Vec<String>,
    #[serde(default)]
    pub allow: Vec<String>,
    #[serde(default)]
    pub ioctl_deny: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxPlan {
    pub id: String,
    pub hostname: String,
    /// Digests, base first.
    pub layers: Vec<String>,
    pub upper: UpperSpec,
    /// 0 = no limit.
    pub memory_bytes: u64,
    #[serde(default)]
    pub swap_bytes: u64,
    /// Quota in thousandths of a CPU; 0 = none.
    #[serde(default)]
    pub cpu_milli: u64,
    #[serde(default = "default_weight")]
    pub cpu_weight: u32,
    /// CPU numbers for affinity; empty = all.
    #[serde(default)]
    pub cpus: Vec<u32>,
    pub pids_max: u64,
    pub nofile: u64,
    pub shm_bytes: u64,
    #[serde(default)]
    pub tmpfs: Vec<TmpfsSpec>,
    /// Absolute path inside -> content.
    #[serde(default)]
    pub files: BTreeMap<String, ByteBuf>,
    #[serde(default)]
    pub no_new_privs: bool,
    /// Names without `CAP_`; nil = the default set.
    #[serde(default)]
    pub caps: Option<Vec<String>>,
    #[serde(default)]
    pub seccomp: SeccompSpec,
    #[serde(default = "default_network")]
    pub network: String,
    #[serde(default = "default_pty_max")]
    pub pty_max: u32,
    #[serde(default = "default_deadline_ms")]
    pub deadline_ms: u64,
}

fn default_weight() -> u32 {
    100
}

fn default_network() -> String {
    "loopback".to_owned()
}

fn default_pty_max() -> u32 {
    64
}

fn default_deadline_ms() -> u64 {
    30_000
}

/// Of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TtySize {
    pub rows: u16,
    pub cols: u16,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunPlan {
    pub sandbox: String,
    pub run: String,
    pub argv: Vec<ByteBuf>,
    /// Complete; nothing is inherited. HOME and USER are added when absent.
    #[serde(default)]
    pub env: BTreeMap<ByteBuf, ByteBuf>,
    pub cwd: ByteBuf,
    /// `name`, `uid`, `name:group` or `uid:gid`; resolved inside.
    pub user: String,
    #[serde(default)]
    pub stdin: ByteBuf,
    #[serde(default)]
    pub stdin_open: bool,
    /// It has a terminal, and one output.
    #[serde(default)]
    pub tty: Option<TtySize>,
    /// Descriptor 3 of the program is an output too.
    #[serde(default)]
    pub control: bool,
    #[serde(default)]
    pub timeout_ms: u64,
    #[serde(default)]
    pub head_bytes: u64,
    #[serde(default)]
    pub tail_bytes: u64,
    /// So many of the newest bytes of each output stay readable, beside what the result has.
    #[serde(default)]
    pub spool_bytes: u64,
    #[serde(default)]
    pub memory_cgroup: bool,
    #[serde(default)]
    pub nice: i32,
}

/// What of a sandbox's plan every run of it needs; small, kept with the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunPolicy {
    pub caps: Option<Vec<String>>,
    pub seccomp: SeccompSpec,
    pub no_new_privs: bool,
    pub nofile: u64,
    pub cpus: Vec<u32>,
}

impl RunPolicy {
    pub fn of(plan: &SandboxPlan) -> Self {
        Self {
            caps: plan.caps.clone(),
            seccomp: plan.seccomp.clone(),
            no_new_privs: plan.no_new_privs,
            nofile: plan.nofile,
            cpus: plan.cpus.clone(),
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub memory_bytes: u64,
    pub memory_peak_bytes: u64,
    pub swap_bytes: u64,
    pub cpu_us: u64,
    pub user_us: u64,
    pub system_us: u64,
    pub pids: u64,
    pub oom_kills: u64,
    pub pids_max_events: u64,
    /// How long it was kept from running by its quota.
    pub throttled_us: u64,
    /// How often memory was short at its limit.
    pub memory_max_events: u64,
    pub pressure: Pressure,
    pub disk_bytes: u64,
    pub disk_inodes: u64,
}

/// How long some task of a sandbox waited for a resource; `None` where the kernel keeps no account of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pressure {
    pub cpu_us: Option<u64>,
    pub memory_us: Option<u64>,
    pub io_us: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupMode {
    /// cgroup v2 with the controllers.
    V2,
    /// v1 memory, cpu, pids and a v2 tree without controllers.
    Hybrid,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupProbe {
    pub mode: Option<CgroupMode>,
    pub controllers: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErofsWay {
    File,
    Loop,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OverlayWay {
    Fd,
    Path,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdmapProbe {
    pub erofs: bool,
    pub ext4: bool,
    pub tmpfs: bool,
    pub btrfs: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    pub kernel: String,
    pub cgroup: CgroupProbe,
    pub erofs: Option<ErofsWay>,
    pub overlay: Option<OverlayWay>,
    pub idmap: IdmapProbe,
    /// Best first.
    pub upper: Vec<UpperKind>,
    /// How connections of sandboxes are steered to the node, if they can be.
    #[serde(default)]
    pub network: Option<String>,
    /// Name -> why not.
    pub reasons: BTreeMap<String, String>,
}

/// A stable code of the client protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    BadRequest,
    NotFound,
    Exists,
    Conflict,
    Busy,
    Unsupported,
    NoProgram,
    NoUser,
    NoCwd,
    TooLong,
    NoSpace,
    Limit,
    Launch,
    Deadline,
    Unknown,
    Gone,
    Internal,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Detail {
    Int(i64),
    Text(String),
}

impl From<i64> for Detail {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<&str> for Detail {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<String> for Detail {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

/// Why something was not done, in the form that crosses the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchError {
    pub code: Code,
    pub message: String,
    #[serde(default)]
    pub detail: BTreeMap<String, Detail>,
}

pub type Result<T> = std::result::Result<T, LaunchError>;

impl LaunchError {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            detail: BTreeMap::new(),
        }
    }

    /// The same error with one more fact.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Detail>) -> Self {
        self.detail.insert(key.to_owned(), value.into());
        self
    }

    /// The same error in at most `max` encoded bytes: what was named by a caller may be of any length.
    #[must_use]
    pub(crate) fn bounded(mut self, max: usize) -> Self {
        let mut keep = max;
        while keep > 0 && rmp_serde::to_vec_named(&self).map_or(0, |bytes| bytes.len()) > max {
            keep /= 2;
            clip(&mut self.message, keep);
            for value in self.detail.values_mut() {
                if let Detail::Text(text) = value {
                    clip(text, keep);
                }
            }
        }
        self
    }

    /// A system call of the step `step` failed.
    pub fn step(step: &str, error: &io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(0);
        let code = match errno {
            libc::ENOSPC | libc::EDQUOT => Code::NoSpace,
            libc::EMFILE | libc::ENFILE | libc::EAGAIN => Code::Limit,
            _ => Code::Launch,
        };
        Self::new(code, format!("{step}: {error}"))
            .with("step", step)
            .with("errno", i64::from(errno))
    }

    pub fn field(field: &str, message: impl Into<String>) -> Self {
        Self::new(Code::BadRequest, message).with("field", field)
    }

    pub fn unsupported(mechanism: &str, message: impl Into<String>) -> Self {
        Self::new(Code::Unsupported, message).with("mechanism", mechanism)
    }
}

fn clip(text: &mut String, most: usize) {
    if text.len() <= most {
        return;
    }
    let end = (0..=most).rev().find(|at| text.is_char_boundary(*at));
    text.truncate(end.unwrap_or(0));
    text.push_str("...");
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)
    }
}

impl std::error::Error for LaunchError {}

/// Names the step a failed system call belongs to.
pub trait Step<T> {
    fn step(self, step: &str) -> Result<T>;
}

impl<T> Step<T> for io::Result<T> {
    fn step(self, step: &str) -> Result<T> {
        self.map_err(|error| LaunchError::step(step, &error))
    }
}

impl<T> Step<T> for std::result::Result<T, rustix::io::Errno> {
    fn step(self, step: &str) -> Result<T> {
        self.map_err(|errno| LaunchError::step(step, &io::Error::from(errno)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_a_bound_and_keeps_what_matters() {
        let long = "\u{fffd}".repeat(5000);
        let error = LaunchError::new(Code::NoCwd, format!("cannot enter {long:?}: too long"))
            .with("cwd", long)
            .with("errno", 36);
        let bounded = error.bounded(4096);
        let bytes = rmp_serde::to_vec_named(&bounded).expect("encoded");
        assert!(bytes.len() <= 4096, "{}", bytes.len());
        assert_eq!(bounded.code, Code::NoCwd);
        assert_eq!(bounded.detail["errno"], Detail::Int(36));
        assert!(bounded.message.starts_with("cannot enter"));
        let short = LaunchError::new(Code::NoCwd, "no");
        assert_eq!(short.clone().bounded(4096), short);
    }
}
