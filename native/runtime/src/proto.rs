//! The client protocol: frames, requests, answers. Values only.

use dsec_launch::plan::Code;
use dsec_launch::processes::Process;
use dsec_launch::{check, LaunchError, RunPlan, SandboxPlan};
use serde::de::{DeserializeOwned, Error, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize};
use serde_bytes::ByteBuf;

use crate::record::Exit;

pub const PROTOCOL: u32 = 1;
/// Body of one frame.
pub const MAX_FRAME: usize = 8 << 20;
/// Kept output of one stream: both streams of a result, head and tail, fit one frame.
pub const MAX_CAPTURE: u64 = 3 << 20;
/// Data of one `out` event: whatever passes one on pays by the event, not by the byte. Longer ones leave the caches
/// between one copy and the next.
pub const OUT_CHUNK: usize = 256 << 10;
/// One `run.read`.
pub const MAX_READ: u64 = 1 << 20;
/// Newest bytes of one stream that can be kept readable.
pub const MAX_SPOOL: u64 = 1 << 30;
/// Longest sandbox id.
pub const MAX_SANDBOX_ID: usize = 64;
/// Longest run id.
pub const MAX_RUN_ID: usize = 64;
/// Longest standard input given with a run.
pub const MAX_STDIN: usize = 4 << 20;
/// The kernel's limit for one argument or variable (MAX_ARG_STRLEN), its final NUL included.
pub const MAX_ARG: usize = 128 << 10;
/// All arguments and variables: a quarter of the 8 MiB stack limit a run gets, as the kernel counts,
/// which adds a pointer for each.
pub const MAX_ARGS_TOTAL: usize = 2 << 20;
/// Depth of a decoded value: deeper is an attack, not a plan.
const MAX_DEPTH: usize = 32;

pub type Id = u64;

/// The part of a request that is read first.
#[derive(Debug, Deserialize)]
pub struct Head {
    pub id: Id,
    pub op: String,
    #[serde(default)]
    _args: IgnoredAny,
}

#[derive(Debug, Deserialize)]
struct Body<T> {
    args: T,
}

#[derive(Debug, Default, Deserialize)]
pub struct HelloArgs {
    pub protocol: u32,
}
#[derive(Debug, Deserialize)]
pub struct LayerArgs {
    pub digest: String,
    #[serde(default)]
    pub path: String,
}
#[derive(Debug, Deserialize)]
pub struct CreateArgs {
    pub plan: SandboxPlan,
}
#[derive(Debug, Deserialize)]
pub struct IdArgs {
    pub id: String,
}
#[derive(Debug, Deserialize)]
pub struct StopArgs {
    pub id: String,
    #[serde(default)]
    pub grace_ms: u64,
}
/// How a client wants to follow a run. In `run.start` these stand beside the fields of the plan.
#[derive(Debug, Default, Deserialize)]
pub struct Follow {
    #[serde(default)]
    pub stream: bool,
    #[serde(default)]
    pub window: u64,
    #[serde(default, deserialize_with = "offsets")]
    pub offsets: [u64; 3],
    /// Never hold the program back: what is not kept any more is skipped.
    #[serde(default)]
    pub lossy: bool,
}
fn offsets<'de, D: Deserializer<'de>>(from: D) -> Result<[u64; 3], D::Error> {
    let given = Vec::<u64>::deserialize(from)?;
    let mut all = [0; 3];
    let places = all.get_mut(..given.len());
    let places = places.ok_or_else(|| D::Error::custom("at most three offsets"))?;
    places.copy_from_slice(&given);
    Ok(all)
}

#[derive(Debug, Deserialize)]
pub struct RunArgs {
    pub sandbox: String,
    pub run: String,
}
#[derive(Debug, Deserialize)]
pub struct StdinArgs {
    pub sandbox: String,
    pub run: String,
    #[serde(default)]
    pub offset: u64,
    #[serde(default)]
    pub d: ByteBuf,
    #[serde(default)]
    pub eof: bool,
}
#[derive(Debug, Deserialize)]
pub struct ReadArgs {
    pub sandbox: String,
    pub run: String,
    /// 1 or 2, or 3 for the third output.
    pub s: u8,
    #[serde(default)]
    pub offset: u64,
    #[serde(default = "read_max")]
    pub max: u64,
}
/// What lives in a sandbox.
#[derive(Debug, Serialize)]
pub struct ProcessList {
    pub processes: Vec<Process>,
    /// There are more than are told.
    pub more: bool,
}
/// Kept output, from `o` on; `total` is how much there was so far.
#[derive(Debug, Serialize)]
pub struct Kept {
    pub o: u64,
    pub d: ByteBuf,
    pub total: u64,
    /// Where what is kept from `o` on ends, if it goes on after a gap.
    pub gap: Option<u64>,
    pub state: &'static str,
}
/// How much of an open standard input was received, and whether more is of any use.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Fed {
    pub size: u64,
    pub closed: bool,
}
/// A run as it is now.
#[derive(Debug, Serialize)]
pub struct RunStatus {
    pub state: &'static str,
    pub pid: Option<i32>,
    pub usage: StatusUsage,
    pub limits_hit: Vec<String>,
    pub met: Met,
    pub totals: [u64; 3],
    pub input: Fed,
    /// The newest; 0: none.
    pub fence: u64,
}
/// How often a run has met a limit since it began.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Met {
    /// Processes that were killed.
    pub memory: u64,
    /// Forks that were refused, of its whole sandbox.
    pub pids: u64,
}
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct StatusUsage {
    pub user_us: u64,
    pub system_us: u64,
    pub memory_peak_bytes: u64,
}
#[derive(Debug, Serialize)]
pub struct Fence {
    pub fence: u64,
}
#[derive(Debug, Deserialize)]
pub struct SandboxArgs {
    pub sandbox: String,
}
#[derive(Debug, Deserialize)]
pub struct AckArgs {
    pub request: Id,
    pub bytes: u64,
}
#[derive(Debug, Deserialize)]
pub struct KillArgs {
    pub sandbox: String,
    pub run: String,
    #[serde(default)]
    pub signal: i32,
    #[serde(default = "killed")]
    pub cause: Cause,
    /// Only what is in this fence.
    #[serde(default)]
    pub fence: Option<u64>,
}
#[derive(Debug, Deserialize)]
pub struct FilesArgs {
    pub sandbox: String,
    #[serde(default = "root")]
    pub user: String,
    #[serde(default = "slash")]
    pub cwd: ByteBuf,
    #[serde(default)]
    pub diff: bool,
}
#[derive(Debug, Deserialize)]
pub struct ShutdownArgs {
    #[serde(default)]
    pub restart: bool,
}

fn read_max() -> u64 {
    MAX_READ
}

fn root() -> String {
    "root".into()
}

fn slash() -> ByteBuf {
    ByteBuf::from("/")
}

fn killed() -> Cause {
    Cause::Killed
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    Exited,
    Signalled,
    Timeout,
    Oom,
    Killed,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxStatus {
    pub id: String,
    pub state: String,
    pub init_pid: i32,
    pub started_ns: u64,
    pub uid_base: u32,
    pub upper_kind: String,
    pub exit: Option<Exit>,
    pub cgroup_id: u64,
    pub runs: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamResult {
    pub total: u64,
    pub head: ByteBuf,
    pub tail: ByteBuf,
    pub dropped: u64,
}

/// `user_us` and `system_us` are those of the run's cgroup where the kernel counts them (cgroup v2),
/// else those of the process and the children it waited for; `max_rss_bytes` is always the latter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResultUsage {
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_bytes: u64,
    pub memory_peak_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResult {
    pub run: String,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub cause: Cause,
    pub limits_hit: Vec<String>,
    pub started_ns: u64,
    pub duration_ns: u64,
    pub streams: [StreamResult; 2],
    pub usage: ResultUsage,
    pub leftover: u64,
}

/// One frame to a client.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Reply<'a, T: Serialize> {
    Ok {
        id: Id,
        ok: T,
    },
    Err {
        id: Id,
        err: &'a LaunchError,
    },
    Started {
        id: Id,
        ev: &'static str,
        pid: i32,
    },
    Out {
        id: Id,
        ev: &'static str,
        s: u8,
        o: u64,
        #[serde(with = "serde_bytes")]
        d: &'a [u8],
    },
    Ended {
        id: Id,
        ev: &'static str,
        sandbox: String,
        status: T,
    },
}

/// An answer without content.
#[derive(Debug, Serialize)]
pub struct Nothing {}

/// A frame that carries no value of its own.
pub type Plain<'a> = Reply<'a, Nothing>;

/// Encodes a frame: length and body.
pub fn frame<T: Serialize>(value: &T) -> Result<Vec<u8>, LaunchError> {
    let mut out = vec![0u8; 4];
    value
        .serialize(&mut rmp_serde::Serializer::new(&mut out).with_struct_map())
        .map_err(|e| LaunchError::new(Code::Internal, format!("encoding an answer: {e}")))?;
    let len = out.len() - 4;
    if len > MAX_FRAME {
        return Err(LaunchError::new(
            Code::Internal,
            "an answer is too big for a frame",
        ));
    }
    out[..4].copy_from_slice(&(len as u32).to_be_bytes());
    Ok(out)
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, rmp_serde::decode::Error> {
    let mut de = rmp_serde::Deserializer::from_read_ref(body);
    de.set_max_depth(MAX_DEPTH);
    T::deserialize(&mut de)
}

/// Reads a request's head. An error means that the client does not speak the protocol.
pub fn head(body: &[u8]) -> Result<Head, String> {
    decode(body).map_err(|e| e.to_string())
}

/// Reads a request's arguments.
pub fn args<T: DeserializeOwned>(body: &[u8]) -> Result<T, LaunchError> {
    decode::<Body<T>>(body)
        .map(|b| b.args)
        .map_err(|e| LaunchError::field("args", format!("arguments do not decode: {e}")))
}

fn is_id(text: &str, max: usize, extra: &str) -> bool {
    !text.is_empty()
        && text.len() <= max
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || extra.contains(char::from(b)))
}

/// Sandbox ids name files and cgroups: nothing that could be a path or hidden.
pub fn check_sandbox_id(id: &str) -> Result<(), LaunchError> {
    let good = !id.starts_with('-') && is_id(&id.to_ascii_lowercase(), MAX_SANDBOX_ID, "-_");
    good.then_some(()).ok_or_else(|| {
        LaunchError::field(
            "id",
            format!("an id is 1 to {MAX_SANDBOX_ID} of [A-Za-z0-9_-]"),
        )
    })
}

pub fn check_run_id(id: &str) -> Result<(), LaunchError> {
    is_id(id, MAX_RUN_ID, "-").then_some(()).ok_or_else(|| {
        LaunchError::field("run", format!("a run id is 1 to {MAX_RUN_ID} of [a-z0-9-]"))
    })
}

/// Checks what can be checked without the sandbox.
pub fn check_run(plan: &RunPlan) -> Result<(), LaunchError> {
    check_run_id(&plan.run)?;
    for (name, value) in [
        ("head_bytes", plan.head_bytes),
        ("tail_bytes", plan.tail_bytes),
    ] {
        if value > MAX_CAPTURE {
            return Err(LaunchError::field(name, format!("at most {MAX_CAPTURE}")));
        }
    }
    if plan.spool_bytes > MAX_SPOOL {
        return Err(LaunchError::field(
            "spool_bytes",
            format!("at most {MAX_SPOOL}"),
        ));
    }
    if plan.head_bytes + plan.tail_bytes > MAX_CAPTURE {
        return Err(LaunchError::field(
            "tail_bytes",
            format!("head_bytes and tail_bytes together are at most {MAX_CAPTURE}"),
        ));
    }
    check::terminal(plan)?;
    if plan.stdin.len() > MAX_STDIN {
        return Err(too_long("stdin", MAX_STDIN));
    }
    check_argv(plan)
}

pub fn too_long(what: &str, limit: usize) -> LaunchError {
    LaunchError::new(
        Code::TooLong,
        format!("{what} is longer than {limit} bytes"),
    )
    .with("field", what)
    .with("limit", i64::try_from(limit).unwrap_or(i64::MAX))
}

fn check_argv(plan: &RunPlan) -> Result<(), LaunchError> {
    if plan.argv.first().map_or(true, |a| a.is_empty()) {
        return Err(LaunchError::field("argv", "needs a program"));
    }
    let has_nul = |b: &ByteBuf| b.contains(&0);
    if plan.argv.iter().any(has_nul) {
        return Err(LaunchError::field("argv", "a NUL byte cannot be passed"));
    }
    if !plan.cwd.starts_with(b"/") || has_nul(&plan.cwd) {
        return Err(LaunchError::field("cwd", "an absolute path without NUL"));
    }
    for (key, value) in &plan.env {
        if key.is_empty() || key.contains(&b'=') || has_nul(key) || has_nul(value) {
            return Err(LaunchError::field(
                "env",
                "a name is not empty and has no =; no NUL anywhere",
            ));
        }
    }
    let pointer = std::mem::size_of::<usize>();
    let mut total = 0;
    let sizes = plan
        .argv
        .iter()
        .map(|a| a.len() + 1)
        .chain(plan.env.iter().map(|(k, v)| k.len() + v.len() + 2));
    for size in sizes {
        if size > MAX_ARG {
            return Err(too_long("argv or env: one string", MAX_ARG - 1));
        }
        total += size + pointer;
    }
    if total > MAX_ARGS_TOTAL {
        return Err(too_long("argv and env together", MAX_ARGS_TOTAL));
    }
    Ok(())
}

/// Splits a client's byte stream into frames.
#[derive(Debug, Default)]
pub struct Splitter {
    buf: Vec<u8>,
    start: usize,
}

impl Splitter {
    pub fn push(&mut self, data: &[u8]) {
        if self.start > 0 {
            self.buf.drain(..self.start);
            self.start = 0;
        }
        self.buf.extend_from_slice(data);
    }

    /// Whether every byte has been taken.
    pub fn is_empty(&self) -> bool {
        self.start == self.buf.len()
    }

    /// The next whole body. `Err`: the length is over the limit.
    pub fn next(&mut self) -> Result<Option<Vec<u8>>, usize> {
        let rest = &self.buf[self.start..];
        let Some(len) = rest.get(..4) else {
            return Ok(None);
        };
        let len = u32::from_be_bytes([len[0], len[1], len[2], len[3]]) as usize;
        if len > MAX_FRAME {
            return Err(len);
        }
        let Some(body) = rest.get(4..4 + len) else {
            return Ok(None);
        };
        let body = body.to_vec();
        self.start += 4 + len;
        if self.start == self.buf.len() {
            // A buffer that once held a big frame must not stay big for an idle client.
            self.buf = Vec::new();
            self.start = 0;
        }
        Ok(Some(body))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn plan() -> RunPlan {
        RunPlan {
            sandbox: "s".into(),
            run: "r-1".into(),
            argv: vec![ByteBuf::from("true")],
            env: BTreeMap::new(),
            cwd: ByteBuf::from("/"),
            user: "root".into(),
            stdin: ByteBuf::new(),
            stdin_open: false,
            tty: None,
            control: false,
            timeout_ms: 0,
            head_bytes: 0,
            tail_bytes: 0,
            spool_bytes: 0,
            memory_cgroup: false,
            nice: 0,
        }
    }

    #[test]
    fn a_frame_comes_back_in_any_pieces() {
        let one = frame(&Reply::Ok {
            id: 7,
            ok: Nothing {},
        })
        .unwrap();
        let mut s = Splitter::default();
        for b in one.iter().chain(&one) {
            s.push(&[*b]);
        }
        assert_eq!(s.next().unwrap().unwrap(), one[4..]);
        assert_eq!(s.next().unwrap().unwrap(), one[4..]);
        assert_eq!(s.next().unwrap(), None);
        s.push(&[0xff; 4]);
        assert!(s.next().is_err());
    }

    #[test]
    fn limits_are_refused_by_name() {
        check_run(&plan()).unwrap();
        let mut p = plan();
        p.argv.push(ByteBuf::from(vec![b'x'; MAX_ARG]));
        assert_eq!(check_run(&p).unwrap_err().code, Code::TooLong);
        let mut p = plan();
        p.argv.push(ByteBuf::from(vec![b'x'; MAX_ARG - 1]));
        check_run(&p).unwrap();
        for _ in 0..20 {
            p.argv.push(ByteBuf::from(vec![b'x'; MAX_ARG - 1]));
        }
        let err = check_run(&p).unwrap_err();
        assert_eq!(err.code, Code::TooLong);
        assert_eq!(err.detail["limit"], (MAX_ARGS_TOTAL as i64).into());
        for bad in ["", "..", "A", "a/b", &"x".repeat(65)] {
            assert!(check_run_id(bad).is_err(), "{bad}");
        }
        for bad in ["", ".", "..", "a/b", "a\0", "-a", &"x".repeat(300)] {
            assert!(check_sandbox_id(bad).is_err(), "{bad}");
        }
        check_sandbox_id("sbx-n1-0aZ_").unwrap();
    }

    #[test]
    fn garbage_is_an_error_and_never_a_panic() {
        let mut seed = 1u64;
        for _ in 0..20_000 {
            let mut body = Vec::new();
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            for i in 0..(seed >> 58) {
                body.push((seed >> (i % 56)) as u8 ^ (i as u8).wrapping_mul(31));
            }
            let _ = head(&body);
            let _ = args::<CreateArgs>(&body);
        }
        // Nested beyond any plan: refused, not a stack overflow.
        let deep = vec![0x91u8; 1 << 20];
        assert!(head(&deep).is_err());
    }
}
