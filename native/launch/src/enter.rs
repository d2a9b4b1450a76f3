//! Entering a sandbox from outside: the launcher clones, the child joins and becomes the program.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use dsec_sys::io::send_msg;
use dsec_sys::process::{self, CloneSpec, Cloned};
use dsec_sys::{cred, seccomp};
use rustix::fs::{openat, Mode, OFlags, CWD};

use crate::check;
use crate::failpoint;
use crate::filter::Program;
use crate::init;
use crate::launcher::{STATUS_MAX, TERMINAL};
use crate::mounting::cstring;
use crate::plan::{Code, LaunchError, Result, RunPlan, RunPolicy, Step, TtySize};
use crate::server::Server;
use crate::terminal::{self, Terminal};
use crate::users::{self, User};
use crate::views::Views;
use crate::wire::Helper;
use crate::{file_helper, switch};

/// Where programs are looked for when the environment has no PATH.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Exit code of a child whose program never ran; its status descriptor says why.
const FAILED: i32 = 127;
/// `oom_score_adj` of a run, always above its init's: with one the launcher could lower (and its inits
/// have from it), and with one that stayed at 0.
const OOM_SCORE_ABOVE_LOWERED: &str = "0";
const OOM_SCORE_ABOVE_ZERO: &str = "500";
/// Longest program name made of PATH and argv[0].
const PROGRAM_MAX: usize = 4096;

/// Descriptors of every request; a third output and those of v1 follow.
const ALWAYS: usize = 7;
/// The program's number of its third output.
const CONTROL: RawFd = 3;

/// The descriptors of a request, in order.
#[derive(Debug)]
pub(crate) struct EnterFds {
    pub init: OwnedFd,
    pub stdio: [OwnedFd; 3],
    pub status: OwnedFd,
    pub gate: OwnedFd,
    /// To be born in.
    pub cgroup: OwnedFd,
    /// The third output.
    pub control: Option<OwnedFd>,
    /// To join, one of each v1 hierarchy.
    pub tasks: Vec<OwnedFd>,
}

impl EnterFds {
    pub(crate) fn of(mut fds: Vec<OwnedFd>, control: bool) -> Option<Self> {
        let needed = ALWAYS + usize::from(control);
        let tasks = (fds.len() >= needed).then(|| fds.split_off(needed))?;
        let control = control.then(|| fds.pop()).flatten();
        let [init, stdin, stdout, stderr, status, gate, cgroup]: [OwnedFd; ALWAYS] =
            fds.try_into().ok()?;
        Some(Self {
            init,
            stdio: [stdin, stdout, stderr],
            status,
            gate,
            cgroup,
            control,
            tasks,
        })
    }
}

/// What the child needs, all of it made before the clone.
pub(crate) struct Entry<'a> {
    pub plan: &'a RunPlan,
    pub policy: &'a RunPolicy,
    pub filter: &'a Program,
    pub fds: EnterFds,
    /// Where it is born when its group has no process left; made then, and gone with it.
    pub entering: &'a str,
    /// A file helper instead of a program.
    pub helper: Option<&'a Helper>,
    /// What it compares.
    pub views: Option<Views>,
    /// The launcher's own `oom_score_adj` could be lowered.
    pub lowered: bool,
}

/// Clones the run and returns at once: the child may be frozen from its first instant.
pub(crate) fn enter(server: &Server, entry: &Entry<'_>) -> Result<(i32, OwnedFd)> {
    let born = if entry.helper.is_some() && !switch::off(switch::FILES_HIDDEN) {
        // In our own: nobody inside sees it, so nobody can signal it, trace it, or count it among its own.
        birth(server, entry)?
    } else {
        birth_inside(server, entry)?
    };
    failpoint::at("enter.cloned")?;
    Ok(born)
}

fn birth_inside(server: &Server, entry: &Entry<'_>) -> Result<(i32, OwnedFd)> {
    // The next child is born in the sandbox's pid namespace; we stay where we are.
    process::setns(entry.fds.init.as_fd(), process::NEW_PID)
        .map_err(|error| gone_if(libc::ESRCH, "enter.setns_pid", &error))?;
    let born = birth(server, entry);
    process::setns(server.own_pid.as_fd(), process::NEW_PID).step("enter.setns_back")?;
    born
}

fn birth(server: &Server, entry: &Entry<'_>) -> Result<(i32, OwnedFd)> {
    match give_birth(server, entry, entry.fds.cgroup.as_fd()) {
        Err(error) if is_full(&error) && !server.cgroups.has_v1() => birth_beside(server, entry),
        other => other.map_err(|error| refused(&error)),
    }
}

/// The child's way ends in its program.
fn give_birth(
    server: &Server,
    entry: &Entry<'_>,
    cgroup: BorrowedFd<'_>,
) -> std::io::Result<(i32, OwnedFd)> {
    let spec = CloneSpec {
        namespaces: 0,
        sibling: true,
        cgroup: Some(cgroup),
    };
    match process::clone(&server.alone, &spec)? {
        Cloned::Parent { pid, pidfd } => Ok((pid, pidfd)),
        Cloned::Child => child(entry),
    }
}

/// A clone into a cgroup of v2 that has all its processes is refused, a move is not (nor is it on v1). So
/// who comes from outside can always enter and end what is there, and the payload cannot have one more for it.
fn birth_beside(server: &Server, entry: &Entry<'_>) -> Result<(i32, OwnedFd)> {
    if server.cgroups.full()? {
        let text = "the sandboxes of this node have all the processes they may have";
        return Err(LaunchError::new(Code::Limit, text).with("resource", "pids"));
    }
    let beside = server.cgroups.make_entering(entry.entering)?;
    let born = give_birth(server, entry, beside.as_fd()).map_err(|error| refused(&error));
    let moved = born.and_then(|(pid, pidfd)| {
        failpoint::at("enter.beside")?;
        match move_to(entry.fds.cgroup.as_fd(), pid) {
            // Killed from inside, where it has been seen since the clone.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            other => other.step("enter.move")?,
        }
        Ok((pid, pidfd))
    });
    server.cgroups.remove_entering(entry.entering);
    moved
}

fn move_to(leaf: BorrowedFd<'_>, pid: i32) -> std::io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let procs = openat(leaf, "cgroup.procs", flags, Mode::empty())?;
    rustix::io::write(procs, pid.to_string().as_bytes())?;
    Ok(())
}

fn is_full(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAGAIN)
}

/// ENOMEM: the pid namespace's init is dying, no process can be born there. EAGAIN: the machine has no
/// process left.
fn refused(error: &std::io::Error) -> LaunchError {
    let said = gone_if(libc::ENOMEM, "enter.clone", error);
    if is_full(error) {
        return said.with("resource", "pids");
    }
    said
}

/// How a step says that the init is no more.
fn gone_if(errno: i32, step: &str, error: &std::io::Error) -> LaunchError {
    if error.raw_os_error() == Some(errno) {
        return LaunchError::new(Code::Gone, "the sandbox has ended");
    }
    LaunchError::step(step, error)
}

fn child(entry: &Entry<'_>) -> ! {
    let Err(error) = match entry.helper {
        Some(helper) => file_helper::become_helper(entry, helper),
        None => become_program(entry),
    };
    // The reader sees the error, or nothing if even this fails: then the exit code is all there is.
    if let Ok(bytes) = rmp_serde::to_vec_named(&error.bounded(STATUS_MAX)) {
        let _ = rustix::io::write(&entry.fds.status, &bytes);
    }
    process::exit(FAILED)
}

pub(crate) enum Never {}

fn become_program(entry: &Entry<'_>) -> std::result::Result<Never, LaunchError> {
    let plan = entry.plan;
    let (user, bounding) = go_in(entry, &[entry.fds.gate.as_raw_fd()])?;
    let (argv, env) = (strings(plan)?, environment(plan, &user)?);
    let permitted = become_user(&user, bounding)?;
    let for_filter = for_filter(permitted);
    // The working directory as the user sees it: without capabilities for anybody but root.
    cred::set_caps(for_filter, permitted).step("enter.caps")?;
    if let Some(size) = plan.tty {
        take_terminal(entry, size)?;
    }
    change_directory(plan)?;
    confine(entry, permitted)?;
    wait_for(&entry.fds.gate)?;
    Err(exec(plan, &argv, &env))
}

/// Into the groups and namespaces, as their root, with no more than the sandbox's limits allow. Descriptors are
/// closed but for the first three, the status and those in `keep`.
pub(crate) fn go_in(entry: &Entry<'_>, keep: &[RawFd]) -> Result<(User, u64)> {
    let (plan, policy) = (entry.plan, entry.policy);
    // First of all: in every second run it is a move to another CPU, which starts with cold caches there.
    if !policy.cpus.is_empty() {
        process::set_affinity(&policy.cpus).step("enter.affinity")?;
    }
    join(entry, keep)?;
    failpoint::at("enter.joined")?;
    let all = process::NEW_USER
        | process::NEW_NS
        | process::NEW_UTS
        | process::NEW_IPC
        | process::NEW_NET
        | process::NEW_CGROUP;
    process::setns(entry.fds.init.as_fd(), all)
        .map_err(|error| gone_if(libc::ESRCH, "enter.setns", &error))?;
    cred::set_groups(&[]).step("enter.groups")?;
    cred::set_ids(0, 0).step("enter.ids")?;
    failpoint::at("enter.entered")?;
    let user = users::resolve(&plan.user)?;
    limit(plan, policy)?;
    let bounding = check::capabilities(policy.caps.as_deref())?;
    cred::bound_caps(bounding).step("enter.bound")?;
    if policy.no_new_privs {
        cred::no_new_privs().step("enter.no_new_privs")?;
    }
    Ok((user, bounding))
}

/// Takes the user's ids; what he may have of capabilities is returned, and still permitted.
pub(crate) fn become_user(user: &User, bounding: u64) -> Result<u64> {
    cred::set_groups(&user.groups).step("enter.groups")?;
    // The filter needs a capability after the change of ids.
    cred::keep_permitted().step("enter.keep_caps")?;
    cred::set_ids(user.uid, user.gid).step("enter.ids")?;
    Ok(if user.uid == 0 { bounding } else { 0 })
}

/// A new terminal of the user's is the controlling one of our session, and our standard descriptors. Its master goes
/// to who launches: that must be kept before anything of the program happens.
fn take_terminal(entry: &Entry<'_>, size: TtySize) -> Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(CWD, "/", flags, Mode::empty()).step("terminal.root")?;
    let Terminal { master, slave } = terminal::make(root.as_fd(), size)?;
    failpoint::at("enter.terminal")?;
    rustix::process::ioctl_tiocsctty(&slave).step("terminal.control")?;
    for number in 0..3 {
        process::dup_to(slave.as_fd(), number).step("terminal.stdio")?;
    }
    let status = entry.fds.status.as_fd();
    send_msg(status, &[TERMINAL], &[master.as_fd()], false).step("terminal.send")
}

fn for_filter(permitted: u64) -> u64 {
    permitted | 1 << cred::CAP_SYS_ADMIN
}

/// The filter, and no capability beyond `permitted`.
pub(crate) fn confine(entry: &Entry<'_>, permitted: u64) -> Result<()> {
    let for_filter = for_filter(permitted);
    cred::set_caps(for_filter, for_filter).step("enter.caps")?;
    failpoint::at("enter.confined")?;
    seccomp::install(entry.filter).step("enter.seccomp")?;
    cred::set_caps(permitted, permitted).step("enter.caps")
}

/// Nothing of the program may happen before it is known to be remembered that it has begun.
pub(crate) fn wait_for(gate: &OwnedFd) -> Result<()> {
    let mut byte = [0u8];
    match rustix::io::retry_on_intr(|| rustix::io::read(gate, &mut byte)).step("enter.gate")? {
        0 => Err(LaunchError::new(
            Code::Limit,
            "it could not be remembered; nothing was begun",
        )),
        _ => Ok(()),
    }
}

/// Descriptors and groups: the last that is done with anything of the host's in hand.
pub(crate) fn join(entry: &Entry<'_>, keep: &[RawFd]) -> Result<()> {
    let score = if entry.lowered {
        OOM_SCORE_ABOVE_LOWERED
    } else {
        OOM_SCORE_ABOVE_ZERO
    };
    // Before the first charge to the sandbox's memory.
    init::write_proc("/proc/self/oom_score_adj", score).step("enter.oom")?;
    init::join(&entry.fds.tasks)?;
    for (number, fd) in entry.fds.stdio.iter().enumerate() {
        process::dup_to(fd.as_fd(), number as i32).step("enter.stdio")?;
    }
    let (init, status) = (&entry.fds.init, &entry.fds.status);
    let mut all = vec![0, 1, 2, init.as_raw_fd(), status.as_raw_fd()];
    all.extend(keep);
    if let Some(control) = &entry.fds.control {
        // The launcher's own socket has this number, so nothing that came by it.
        if all.contains(&CONTROL) {
            return Err(LaunchError::new(Code::Internal, "descriptor 3 is taken"));
        }
        process::dup_to(control.as_fd(), CONTROL).step("enter.control")?;
        all.push(CONTROL);
    }
    process::close_all_but(&all).step("enter.close")?;
    rustix::process::setsid().step("enter.setsid").map(drop)
}

fn limit(plan: &RunPlan, policy: &RunPolicy) -> Result<()> {
    let (_, hard) = process::get_limit(process::LIMIT_NOFILE).step("enter.nofile")?;
    process::set_limit(process::LIMIT_NOFILE, policy.nofile.min(hard)).step("enter.nofile")?;
    process::set_limit(process::LIMIT_CORE, 0).step("enter.core")?;
    if plan.nice != 0 {
        process::set_nice(plan.nice).step("enter.nice")?;
    }
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    Ok(())
}

fn change_directory(plan: &RunPlan) -> Result<()> {
    rustix::process::chdir(plan.cwd.as_slice()).map_err(|errno| {
        let cwd = String::from_utf8_lossy(&plan.cwd).into_owned();
        LaunchError::new(Code::NoCwd, format!("cannot enter {cwd:?}: {errno}"))
            .with("cwd", cwd)
            .with("errno", i64::from(errno.raw_os_error()))
    })
}

fn strings(plan: &RunPlan) -> Result<Vec<CString>> {
    let all = plan
        .argv
        .iter()
        .map(|argument| cstring(argument.as_slice()));
    all.collect::<std::io::Result<_>>().step("enter.argv")
}

/// As the sandbox has it, unless it is no path: what it writes there is no reason why nothing can be run.
fn home(user: &User) -> &[u8] {
    let home = user.home.as_bytes();
    let is_path = home.len() < libc::PATH_MAX as usize && !home.contains(&0);
    if is_path {
        home
    } else {
        b"/"
    }
}

fn environment(plan: &RunPlan, user: &User) -> Result<Vec<CString>> {
    let mut all = Vec::with_capacity(plan.env.len() + 2);
    for (key, value) in &plan.env {
        let mut entry = key.to_vec();
        entry.push(b'=');
        entry.extend_from_slice(value);
        all.push(entry);
    }
    let missing = |name: &[u8]| !plan.env.keys().any(|key| key.as_slice() == name);
    if missing(b"HOME") {
        all.push([b"HOME=", home(user)].concat());
    }
    if let (true, Some(name)) = (missing(b"USER"), &user.name) {
        all.push([b"USER=", name.as_bytes()].concat());
    }
    let all: std::io::Result<_> = all.into_iter().map(cstring).collect();
    all.step("enter.env")
}

/// Returns only why nothing could be started.
fn exec(plan: &RunPlan, argv: &[CString], env: &[CString]) -> LaunchError {
    let name = plan.argv[0].as_slice();
    if name.contains(&b'/') {
        return explain(plan, &process::exec(&argv[0], argv, env));
    }
    let wanted = plan.env.iter().find(|(key, _)| key.as_slice() == b"PATH");
    let path = wanted.map_or(DEFAULT_PATH, |(_, value)| value.as_slice());
    let mut worst = std::io::Error::from_raw_os_error(libc::ENOENT);
    for directory in path.split(|byte| *byte == b':') {
        // An empty part means the working directory.
        let directory = if directory.is_empty() {
            b".".as_slice()
        } else {
            directory
        };
        let program = [directory, b"/", name].concat();
        if program.len() > PROGRAM_MAX {
            worst = std::io::Error::from_raw_os_error(libc::ENAMETOOLONG);
            continue;
        }
        let Ok(program) = cstring(program) else {
            continue;
        };
        let error = process::exec(&program, argv, env);
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {}
            // Not ours to run here, but maybe in the next directory.
            Some(libc::EACCES) => worst = error,
            _ => return explain(plan, &error),
        }
    }
    explain(plan, &worst)
}

fn explain(plan: &RunPlan, error: &std::io::Error) -> LaunchError {
    let program = String::from_utf8_lossy(&plan.argv[0]).into_owned();
    let errno = error.raw_os_error().unwrap_or(0);
    let code = match errno {
        libc::ENOENT
        | libc::ENOTDIR
        | libc::EACCES
        | libc::ENOEXEC
        | libc::ELOOP
        | libc::ENAMETOOLONG
        | libc::EISDIR => Code::NoProgram,
        libc::E2BIG => Code::TooLong,
        _ => return LaunchError::step("exec", error).with("program", program),
    };
    let mut said = LaunchError::new(code, format!("cannot run {program:?}: {error}"))
        .with("program", program)
        .with("errno", i64::from(errno));
    if code == Code::TooLong {
        // A quarter of the stack, the kernel's rule.
        let stack = process::get_limit(process::LIMIT_STACK).map_or(0, |(soft, _)| soft / 4);
        said = said.with("limit", i64::try_from(stack).unwrap_or(i64::MAX));
    }
    said
}
