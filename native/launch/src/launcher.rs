//! The runtime's handle on a launcher, a tiny process that clones inits and runs.

use std::cell::RefCell;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dsec_sys::io::{recv_msg, seqpacket_pair};
use dsec_sys::process;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};
use rustix::pipe::{pipe_with, PipeFlags};
use serde::Serialize;
use serde_bytes::ByteBuf;

use crate::cgroup::{Cgroups, RunFiles, SandboxCgroup, INIT};
use crate::check;
use crate::config::Config;
pub use crate::create::IDS;
use crate::layers::Pinned;
use crate::plan::{Code, LaunchError, Result, RunPlan, RunPolicy, SandboxPlan, Step};
use crate::run_cgroup::entering;
use crate::upper::Upper;
use crate::wire::{self, Helper, Home, Inbox, Lower, Reply, Request};
use crate::{failpoint, switch};

/// A launcher that is not ready by then is broken; it takes about 2 ms.
const START_DEADLINE: Duration = Duration::from_secs(10);
/// Entering waits for nothing but the clone.
const ENTER_DEADLINE: Duration = Duration::from_secs(10);
/// A killed init that cannot be reaped by then is stuck in the kernel; the caller's next step, removing
/// the cgroup, says so.
const REAP_DEADLINE_MS: i32 = 5_000;
/// A pipe takes this much at once, so a status is there whole or not at all.
pub(crate) const STATUS_MAX: usize = 4096;
/// The status of a file helper that serves. No error is encoded as this (msgpack's nil).
pub(crate) const SERVES: u8 = 0xc0;
/// Comes with the master of a run's terminal. No error is encoded as this either.
pub(crate) const TERMINAL: u8 = 0xc0;
const NAME: &str = "dsec-launcher";

/// One launcher process. Requests are served one after the other: for parallel creates hold several,
/// and keep one for `enter` alone. It ends when the handle is dropped or its owner dies. When it
/// dies or misses a deadline it is killed and started again with the next request.
#[derive(Debug)]
pub struct Launcher {
    config: Config,
    process: Mutex<Option<Process>>,
}

/// What the runtime made beforehand.
#[derive(Debug)]
pub struct Prepared<'a> {
    pub upper: &'a Upper,
    /// First of the 65,536 ids of the sandbox, none of them below 65,536.
    pub uid_base: u32,
    pub netns: BorrowedFd<'a>,
    pub cgroup: &'a SandboxCgroup,
}

/// The init is a child of the caller's process: wait for it by the pidfd. It is already set up.
#[derive(Debug)]
pub struct Created {
    pub init_pid: i32,
    pub init_pidfd: OwnedFd,
}

/// The sandbox that is entered.
#[derive(Debug)]
pub struct Target<'a> {
    pub init_pidfd: BorrowedFd<'a>,
    pub policy: &'a RunPolicy,
}

/// What a sandbox was made of, for a helper that compares.
#[derive(Debug)]
pub struct Below<'a> {
    /// Digests, the lowest first.
    pub layers: &'a [String],
    pub upper: &'a Upper,
}

/// A child of the caller's process. `status`: end of file = the program was exec'ed; otherwise a
/// msgpack `LaunchError` (see [`read_status`]) and the process exits with 127. Of a run with a terminal
/// it says before [`begin`] what [`read_terminal`] reads.
///
/// The child gets ready, and executes the program only after [`begin`] on `gate`. When every copy of
/// that is closed without it, nothing is executed: who has begun a program is decided in one place.
#[derive(Debug)]
pub struct Entered {
    pub pid: i32,
    pub pidfd: OwnedFd,
    pub status: OwnedFd,
    pub gate: OwnedFd,
}

/// What a file helper is told.
#[derive(Debug, Clone)]
pub struct FilesPlan {
    pub sandbox: String,
    /// As of a run.
    pub user: String,
    /// Absolute: begin of relative paths. Need not be there.
    pub cwd: ByteBuf,
    /// Said on its socket before it serves.
    pub greeting: ByteBuf,
    /// It can tell what was changed.
    pub diff: bool,
}

impl FilesPlan {
    fn as_run(&self) -> RunPlan {
        RunPlan {
            sandbox: self.sandbox.clone(),
            user: self.user.clone(),
            cwd: self.cwd.clone(),
            ..RunPlan::default()
        }
    }
}

/// Lets the program of a run begin.
pub fn begin(gate: BorrowedFd<'_>) -> std::io::Result<()> {
    Ok(rustix::io::write(gate, &[1]).map(drop)?)
}

#[derive(Debug)]
struct Process {
    child: Child,
    socket: OwnedFd,
    inbox: RefCell<Inbox>,
}

impl Process {
    fn start(config: &Config) -> Result<Self> {
        let kind = SocketType::SEQPACKET;
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let (socket, theirs) = pair.step("launcher.socketpair")?;
        // Its arguments and environment are those of every init and can be seen inside, so they are the same
        // everywhere; what it is to know comes by its socket.
        let kept = [failpoint::VARIABLE, switch::VARIABLE];
        let kept = kept.map(|name| Some((name, std::env::var_os(name)?)));
        let child = Command::new(&config.binary)
            .arg0(NAME)
            .arg("launcher")
            .env_clear()
            .envs(kept.into_iter().flatten())
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .step("launcher.spawn")?;
        let process = Self {
            child,
            socket,
            inbox: RefCell::default(),
        };
        let home = Home {
            run_dir: config.run_dir.clone(),
            cgroup: config.cgroup.clone(),
        };
        process.send(&home, &[])?;
        match process.receive(Instant::now() + START_DEADLINE)? {
            (Reply::Ready, _) => Ok(process),
            _ => Err(LaunchError::new(
                Code::Internal,
                "the launcher did not say it is ready",
            )),
        }
    }

    fn send<T: Serialize>(&self, message: &T, fds: &[BorrowedFd<'_>]) -> Asked<()> {
        match wire::send(self.socket.as_fd(), message, fds) {
            Err(error) if is_gone(&error) => Err(Failed::Unread),
            other => Ok(other.step("launcher.send")?),
        }
    }

    fn receive(&self, end: Instant) -> Asked<(Reply, Vec<OwnedFd>)> {
        wait_readable(self.socket.as_fd(), end)?;
        let mut inbox = self.inbox.borrow_mut();
        match inbox.receive(self.socket.as_fd()) {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(Failed::Died),
            // The kernel says so, instead of the end, when what we have sent was not taken.
            Err(error) if is_gone(&error) => Err(Failed::Unread),
            Err(error) => Err(LaunchError::step("launcher.receive", &error).into()),
        }
    }
}

fn died() -> LaunchError {
    LaunchError::new(Code::Launch, "the launcher died").with("step", "launcher")
}

fn is_gone(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPIPE | libc::ECONNRESET))
}

/// How asking a launcher failed.
enum Failed {
    /// It was gone before it had read the request, or what it had begun is undone: another one may be asked.
    Unread,
    /// It died, perhaps with the request in hand: one that is killed while a packet comes takes it along.
    Died,
    /// What it has begun is not known.
    Broken(LaunchError),
}

type Asked<T> = std::result::Result<T, Failed>;

impl From<LaunchError> for Failed {
    fn from(error: LaunchError) -> Self {
        Self::Broken(error)
    }
}

impl From<Failed> for LaunchError {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Unread | Failed::Died => died(),
            Failed::Broken(error) => error,
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It holds nothing that outlives it; waiting for a polite end would gain nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_readable(fd: BorrowedFd<'_>, end: Instant) -> Result<()> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => return Err(LaunchError::new(Code::Deadline, "set-up took too long")),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).step("launcher.poll"),
        }
    }
}

/// The half-made init of a failed create: ended and reaped unless it was handed out.
struct Newborn<'a> {
    cgroup: &'a SandboxCgroup,
    pidfd: Option<OwnedFd>,
}

impl Newborn<'_> {
    fn undo(&mut self) {
        if let Some(pidfd) = self.pidfd.take() {
            // Gone already is as good.
            let _ = process::signal(pidfd.as_fd(), libc::SIGKILL);
            let _ = process::reap(pidfd.as_fd(), REAP_DEADLINE_MS);
            return;
        }
        end_strays(&[format!("{}/{INIT}", self.cgroup.sandbox_id())]);
    }
}

impl Drop for Newborn<'_> {
    fn drop(&mut self) {
        self.undo();
    }
}

/// A launcher that died between a clone and telling us leaves a child of ours that nobody knows, alive
/// or a zombie; a zombie keeps its pid namespace from ending. The cgroup says whose it is. Reads all
/// of /proc, but only after such a failure.
fn end_strays(leaves: &[String]) {
    let own = std::process::id().to_string();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Some(pid) = rustix::process::Pid::from_raw(pid) else {
            continue;
        };
        let read = |file: &str| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        // After the last ')': a name may contain anything.
        let stat = read("stat");
        let parent = stat
            .rsplit(')')
            .next()
            .and_then(|rest| rest.split_whitespace().nth(1));
        let in_leaf = |path: &str| {
            leaves
                .iter()
                .any(|leaf| path.ends_with(&format!("/{leaf}")))
        };
        let inside = |line: &str| line.strip_prefix("0::").is_some_and(in_leaf);
        if parent != Some(own.as_str()) || !read("cgroup").lines().any(inside) {
            continue;
        }
        let flags = rustix::process::PidfdFlags::empty();
        if let Ok(pidfd) = rustix::process::pidfd_open(pid, flags) {
            // Gone already is as good.
            let _ = process::signal(pidfd.as_fd(), libc::SIGKILL);
            let _ = process::reap(pidfd.as_fd(), REAP_DEADLINE_MS);
        }
    }
}

impl Launcher {
    /// Starts the process. Makes the pinned namespace and the node's cgroups where they are missing.
    pub fn spawn(config: &Config) -> Result<Self> {
        Pinned::open(config)?;
        Cgroups::open(&config.cgroup)?;
        Ok(Self {
            config: config.clone(),
            process: Mutex::new(Some(Process::start(config)?)),
        })
    }

    /// The process as it is now, for measurements and tests.
    pub fn pid(&self) -> Option<u32> {
        let process = self.process.lock().ok()?;
        process.as_ref().map(|process| process.child.id())
    }

    fn lock(&self) -> Result<MutexGuard<'_, Option<Process>>> {
        let broken = |_| LaunchError::new(Code::Internal, "a thread panicked with the launcher");
        self.process.lock().map_err(broken)
    }

    /// Runs `ask` with the process; on a failure that leaves it in an unknown state it is replaced. One that
    /// was found dead is replaced at once, and the new one asked.
    fn with<T>(&self, mut ask: impl FnMut(&Process) -> Asked<Outcome<T>>) -> Result<T> {
        let mut slot = self.lock()?;
        let used = slot.take();
        let again = used.is_some();
        let mut process = match used {
            Some(process) => process,
            None => Process::start(&self.config)?,
        };
        let mut asked = ask(&process);
        if let (Err(Failed::Unread), true) = (&asked, again) {
            process = Process::start(&self.config)?;
            asked = ask(&process);
        }
        let outcome = asked?;
        *slot = Some(process);
        match outcome {
            Outcome::Done(value) => Ok(value),
            Outcome::Refused(error) => Err(error),
        }
    }

    /// Blocks until the sandbox is complete or `plan.deadline_ms` passed. On failure no process is
    /// left; cgroup, upper and netns stay the caller's.
    pub fn create(&self, plan: &SandboxPlan, prepared: &Prepared<'_>) -> Result<Created> {
        if prepared.uid_base < IDS {
            let text = "uid_base must be above the host's own ids";
            return Err(LaunchError::field("uid_base", text));
        }
        let end = Instant::now() + Duration::from_millis(plan.deadline_ms);
        let request = Request::Create {
            plan: Box::new(plan.clone()),
            upper: prepared.upper.tree(),
            uid_base: prepared.uid_base,
        };
        let mut newborn = Newborn {
            cgroup: prepared.cgroup,
            pidfd: None,
        };
        let init_pid = self.with(|process| {
            process.send(&request, &[prepared.netns])?;
            let reply = process.receive(end);
            if let Err(Failed::Died) = reply {
                newborn.undo();
                return Err(Failed::Unread);
            }
            let (reply, fds) = reply?;
            newborn.pidfd = fds.into_iter().next();
            match reply {
                Reply::Cloned { pid } => Ok(Outcome::Done(pid)),
                Reply::Failed(error) => Ok(Outcome::Refused(error)),
                Reply::Ready => Err(died().into()),
            }
        })?;
        let created = Created {
            init_pid,
            init_pidfd: newborn.pidfd.take().ok_or_else(died)?,
        };
        // Grown up: nothing is undone any more.
        std::mem::forget(newborn);
        Ok(created)
    }

    /// `stdio`: the three, and the third output where the plan has one. Returns right after the clone, a frozen
    /// sandbox included.
    pub fn enter(
        &self,
        target: &Target<'_>,
        plan: &RunPlan,
        stdio: &[BorrowedFd<'_>],
        cgroup: &RunFiles,
    ) -> Result<Entered> {
        check::run(plan)?;
        if stdio.len() != 3 + usize::from(plan.control) {
            return Err(LaunchError::new(Code::Internal, "wrong number of outputs"));
        }
        let mut plan = plan.clone();
        // Its way in is the descriptor.
        plan.stdin.clear();
        self.enter_with(target, plan, None, stdio, cgroup)
    }

    /// Starts a file helper, which after [`begin`] says `greeting` on its socket and serves. Its status: see
    /// [`read_files_status`]. Returns right after the clone, as `enter`.
    pub fn enter_files(
        &self,
        target: &Target<'_>,
        plan: &FilesPlan,
        below: &Below<'_>,
        socket: BorrowedFd<'_>,
        cgroup: &RunFiles,
    ) -> Result<Entered> {
        check::user(&plan.user)?;
        check::cwd(&plan.cwd)?;
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let null = rustix::fs::open("/dev/null", flags, Mode::empty()).step("files.null")?;
        let null = null.as_fd();
        let lower = || Lower {
            layers: below.layers.to_vec(),
            upper: below.upper.tree(),
        };
        let helper = Helper {
            greeting: plan.greeting.clone(),
            lower: plan.diff.then(lower),
        };
        let stdio = [socket, null, null];
        self.enter_with(target, plan.as_run(), Some(helper), &stdio, cgroup)
    }

    fn enter_with(
        &self,
        target: &Target<'_>,
        plan: RunPlan,
        helper: Option<Helper>,
        stdio: &[BorrowedFd<'_>],
        cgroup: &RunFiles,
    ) -> Result<Entered> {
        // A pipe carries no descriptors.
        let pair = match plan.tty {
            Some(_) => seqpacket_pair(),
            None => pipe_with(PipeFlags::CLOEXEC).map_err(Into::into),
        };
        let (status, theirs) = pair.step("enter.pipe")?;
        let (their_gate, gate) = pipe_with(PipeFlags::CLOEXEC).step("enter.pipe")?;
        let path = cgroup.cgroup().path();
        let request = Request::Enter {
            plan: Box::new(plan),
            policy: target.policy.clone(),
            entering: entering(&path),
            helper: helper.map(Box::new),
        };
        let leaves = || [path.clone(), entering(&path)];
        let (first, more) = stdio.split_at(stdio.len().min(3));
        let mut fds = vec![target.init_pidfd];
        fds.extend(first);
        fds.extend([theirs.as_fd(), their_gate.as_fd()]);
        let mut groups = cgroup.to_enter();
        fds.extend(groups.next());
        fds.extend(more);
        fds.extend(groups);
        let entered = self.with(|process| {
            process.send(&request, &fds)?;
            let reply = process.receive(Instant::now() + ENTER_DEADLINE);
            if let Err(Failed::Died) = reply {
                // Without the gate nothing has begun.
                end_strays(&leaves());
                return Err(Failed::Unread);
            }
            match reply? {
                (Reply::Cloned { pid }, fds) => {
                    let pidfd = fds.into_iter().next().ok_or_else(died)?;
                    Ok(Outcome::Done((pid, pidfd)))
                }
                (Reply::Failed(error), _) => Ok(Outcome::Refused(error)),
                (Reply::Ready, _) => Err(died().into()),
            }
        });
        let (pid, pidfd) = entered.inspect_err(|_| end_strays(&leaves()))?;
        Ok(Entered {
            pid,
            pidfd,
            status,
            gate,
        })
    }
}

enum Outcome<T> {
    Done(T),
    /// An orderly no: the launcher is as good as before.
    Refused(LaunchError),
}

/// What a readable status descriptor says: `None` = exec succeeded.
pub fn read_status(status: BorrowedFd<'_>) -> Option<LaunchError> {
    let mut buffer = [0u8; STATUS_MAX];
    let length = loop {
        match rustix::io::read(status, &mut buffer) {
            Err(Errno::INTR) => {}
            Ok(length) => break length,
            Err(error) => return Some(LaunchError::step("enter.status", &error.into())),
        }
    };
    if length == 0 {
        return None;
    }
    let parsed = rmp_serde::from_slice(&buffer[..length]);
    Some(parsed.unwrap_or_else(|_| LaunchError::new(Code::Internal, "an unreadable status")))
}

/// The master of a run's terminal, from a readable status descriptor.
pub fn read_terminal(status: BorrowedFd<'_>) -> Result<OwnedFd> {
    let mut buffer = [0u8; STATUS_MAX];
    let died = || LaunchError::new(Code::Launch, "the program died before it had its terminal");
    let mut message = recv_msg(status, &mut buffer, true).step("terminal.receive")?;
    let said = &buffer[..message.len];
    match message.fds.pop() {
        Some(master) if said == [TERMINAL] => Ok(master),
        // The node's descriptors ran out: what came was lost.
        None if said == [TERMINAL] => {
            let text = "no descriptors left for a terminal on this node";
            Err(LaunchError::new(Code::Limit, text).with("resource", "descriptors"))
        }
        _ => Err(rmp_serde::from_slice(said).unwrap_or_else(|_| died().with("step", "terminal"))),
    }
}

/// What a readable status descriptor of a file helper says: `None` = it serves.
pub fn read_files_status(status: BorrowedFd<'_>) -> Option<LaunchError> {
    let mut buffer = [0u8; STATUS_MAX];
    let died = || LaunchError::new(Code::Launch, "the file helper died before it served");
    match rustix::io::retry_on_intr(|| rustix::io::read(status, &mut buffer)) {
        Ok(0) => Some(died().with("step", "files")),
        Ok(length) if buffer[..length] == [SERVES] => None,
        Ok(length) => Some(rmp_serde::from_slice(&buffer[..length]).unwrap_or_else(|_| died())),
        Err(error) => Some(LaunchError::step("files.status", &error.into())),
    }
}

/// `dsec-runtime launcher`: never returns.
pub fn main() -> ! {
    std::process::exit(crate::server::main())
}
