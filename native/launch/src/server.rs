//! The launcher process: one thread, almost no mounts, almost no memory, no policy.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use dsec_sys::{cred, mount, net, process};
use rustix::fs::{mkdirat, openat, unlinkat, AtFlags, Mode, OFlags, CWD};
use rustix::io::Errno;

use crate::cgroup::{Cgroups, INIT};
use crate::create::{self, Born};
use crate::enter::{self, EnterFds, Entry};
use crate::filter::{self, Program};
use crate::hierarchy::join_file;
use crate::init::{self, Hidden};
use crate::layers::empty_namespace;
use crate::mounting::{self, attach_at};
use crate::plan::{Code, LaunchError, Result, SeccompSpec, Step};
use crate::views;
use crate::wire::{self, Home, Inbox, Reply, Request};

/// Different filters kept compiled; a node has a handful.
const FILTERS_MAX: usize = 64;
/// Never ended for want of memory: inits keep this, runs go back to 0. A sandbox whose memory is full of
/// what no process holds (tmpfs, shared memory) would otherwise lose its init to the next charge.
const OOM_SCORE: &str = "-1000";

/// Our directory in each hierarchy, as descriptors: the launcher's mount namespace has no cgroups.
#[derive(Debug)]
pub(crate) struct CgroupDirs {
    v2: OwnedFd,
    v1: Vec<OwnedFd>,
}

impl CgroupDirs {
    fn open(cgroups: &Cgroups) -> Result<Self> {
        let open = |path: &Path| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            openat(CWD, path, flags, Mode::empty()).step("launcher.cgroup")
        };
        let (v2, v1) = cgroups.bases();
        Ok(Self {
            v2: open(v2)?,
            v1: v1.into_iter().map(open).collect::<Result<_>>()?,
        })
    }

    /// Moves to `CG` itself in v1. A run is seen inside from its clone on, before it joins its groups, and
    /// `/proc/PID/cgroup` tells everybody where it is: it is to be nowhere with a name of the host's.
    fn join(&self) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let open = |base: &OwnedFd| {
            let file = openat(base, "cgroup.procs", flags, Mode::empty());
            file.step("launcher.join")
        };
        init::join(&self.v1.iter().map(open).collect::<Result<Vec<_>>>()?)
    }

    pub(crate) fn leaf(&self, path: &str) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(&self.v2, path, flags, Mode::empty()).step("launcher.cgroup")
    }

    /// What an init writes "0" to: first memory, then the others.
    fn tasks(&self, id: &str) -> Result<Vec<OwnedFd>> {
        let file = join_file();
        let mut opened = Vec::with_capacity(self.v1.len());
        for base in &self.v1 {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            let at = openat(base, format!("{id}/{file}"), flags, Mode::empty());
            opened.push(at.step("launcher.tasks")?);
        }
        Ok(opened)
    }

    /// Whether one more process would be over the bound of all sandboxes together.
    pub(crate) fn full(&self) -> Result<bool> {
        let read = |file: &str| -> Result<u64> {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let opened = openat(&self.v2, file, flags, Mode::empty()).step("launcher.pids")?;
            let text = io::read_to_string(File::from(opened)).step("launcher.pids")?;
            // "max" is no bound.
            Ok(text.trim().parse().unwrap_or(u64::MAX))
        };
        Ok(read("pids.current")? >= read("pids.max")?)
    }

    /// A group outside the bounds of a sandbox's payload, empty.
    pub(crate) fn make_entering(&self, path: &str) -> Result<OwnedFd> {
        match mkdirat(&self.v2, path, Mode::from_raw_mode(0o755)) {
            Err(Errno::EXIST) => {}
            other => other.step("launcher.entering")?,
        }
        self.leaf(path)
    }

    pub(crate) fn remove_entering(&self, path: &str) {
        // What is left of it goes with the sandbox.
        let _ = unlinkat(&self.v2, path, AtFlags::REMOVEDIR);
    }

    pub(crate) fn has_v1(&self) -> bool {
        !self.v1.is_empty()
    }

    pub(crate) fn open_sandbox(&self, id: &str) -> Result<(OwnedFd, Vec<OwnedFd>)> {
        Ok((self.leaf(&format!("{id}/{INIT}"))?, self.tasks(id)?))
    }
}

/// What a launcher has in hand for its whole life.
#[derive(Debug)]
pub(crate) struct Server {
    pub alone: process::SingleThreaded,
    pub control: OwnedFd,
    pub pinned: OwnedFd,
    pub own_mnt: OwnedFd,
    /// Where inits are born: as ours, and nothing is mounted there.
    pub birth_mnt: OwnedFd,
    pub proc: OwnedFd,
    pub own_net: OwnedFd,
    pub own_pid: OwnedFd,
    pub cgroups: CgroupDirs,
    pub hidden: Hidden,
    /// For all sandboxes; of our own network namespace.
    pub sys: OwnedFd,
    pub points: OwnedFd,
    lowered: bool,
    filters: HashMap<SeccompSpec, Program>,
}

/// `launcher` with the control socket as standard input; returns an exit code.
pub(crate) fn main() -> i32 {
    match start().and_then(|mut server| server.serve()) {
        Ok(()) => 0,
        Err(error) => {
            // The parent sees the end of the socket; the reason is for the log.
            eprintln!("launcher: {error}");
            1
        }
    }
}

fn start() -> Result<Server> {
    process::set_undumpable().step("launcher.undumpable")?;
    process::set_name(c"dsec-launcher").step("launcher.name")?;
    // Once for every run: a child inherits the actions. Ours are the defaults too from here on.
    process::reset_signals();
    let alone = process::SingleThreaded::prove().step("launcher.threads")?;
    let control = process::dup_above(io::stdin().as_fd(), 3).step("launcher.control")?;
    let home: Option<(Home, _)> = wire::receive(control.as_fd()).step("launcher.home")?;
    let Some((Home { run_dir, cgroup }, _)) = home else {
        return Err(LaunchError::new(Code::BadRequest, "nobody says what for"));
    };
    let open = |path: &Path| File::open(path).map(OwnedFd::from).step("launcher.open");
    let pinned = open(&run_dir.join("ns/mnt"))?;
    let own_net = alone_in_a_network()?;
    let own_pid = open(Path::new("/proc/self/ns/pid"))?;
    let node = Cgroups::open(&cgroup)?;
    node.house_launcher()?;
    let cgroups = CgroupDirs::open(&node)?;
    cgroups.join()?;
    // Refused without CAP_SYS_RESOURCE: then runs put themselves above instead.
    let lowered = init::write_proc("/proc/self/oom_score_adj", OOM_SCORE).is_ok();
    // The host's /proc and /sys are still visible.
    let hidden = Hidden::find();
    let sys = create::own_sysfs()?;
    rustix::process::umask(Mode::empty());
    empty_namespace(&run_dir, "1m", &["proc", "stage", "s"])?;
    let attributes = mount::NOSUID | mount::NODEV | mount::NOEXEC;
    let proc = mounting::make("launcher.proc", c"proc", &[], attributes)?;
    let (own_mnt, birth_mnt) = namespaces(&proc)?;
    attach_at(proc.as_fd(), "/proc").step("launcher.proc")?;
    cred::keep_caps_over_ids().step("launcher.securebits")?;
    Ok(Server {
        alone,
        control,
        pinned,
        own_mnt,
        birth_mnt,
        proc,
        own_net,
        own_pid,
        cgroups,
        hidden,
        sys,
        points: create::points()?,
        lowered,
        filters: HashMap::new(),
    })
}

/// Our own mount namespace, and a copy of it for births that cannot be written. A namespace gets what is mounted
/// in another user's locked: an init could not take our /proc away.
fn namespaces(proc: &OwnedFd) -> Result<(OwnedFd, OwnedFd)> {
    let step = "launcher.namespace";
    let here = || {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        openat(proc, "self/ns/mnt", flags, Mode::empty()).step(step)
    };
    let own = here()?;
    process::unshare(process::NEW_NS).step(step)?;
    let root = openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).step(step)?;
    mount::restrict(root.as_fd(), mount::RDONLY).step(step)?;
    let birth = here()?;
    process::setns(own.as_fd(), process::NEW_NS).step(step)?;
    Ok((own, birth))
}

/// Moves to a network namespace with nothing but loopback, as every sandbox has one, for good: whoever enters
/// a sandbox can be seen inside from the clone on, and anybody may read `/proc/PID/net` of what he sees. It is
/// also what the sandboxes' sysfs shows.
fn alone_in_a_network() -> Result<OwnedFd> {
    process::unshare(process::NEW_NET).step("launcher.unshare_net")?;
    net::loopback_up().step("launcher.loopback")?;
    let net = File::open("/proc/self/ns/net").step("launcher.open")?;
    Ok(net.into())
}

impl Server {
    fn serve(&mut self) -> Result<()> {
        wire::send(self.control.as_fd(), &Reply::Ready, &[]).step("launcher.ready")?;
        let mut inbox = Inbox::default();
        while let Some((request, fds)) = inbox
            .receive::<Request>(self.control.as_fd())
            .step("launcher.receive")?
        {
            let mut born = None;
            let reply = match (self.answer(request, fds, &mut born), &born) {
                (Ok(()), Some((pid, _))) => Reply::Cloned { pid: *pid },
                (Ok(()), None) => Reply::Failed(LaunchError::new(Code::Internal, "no child")),
                (Err(error), _) => Reply::Failed(error),
            };
            let fds: Vec<_> = born.iter().map(|(_, pidfd)| pidfd.as_fd()).collect();
            match wire::send(self.control.as_fd(), &reply, &fds) {
                // The runtime died: so do we.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => return Ok(()),
                other => other.step("launcher.reply")?,
            }
        }
        Ok(())
    }

    /// What is `born` is told with the answer, also with an error.
    fn answer(
        &mut self,
        request: Request,
        fds: Vec<OwnedFd>,
        born: &mut Option<Born>,
    ) -> Result<()> {
        let bad = || LaunchError::new(Code::Internal, "wrong number of descriptors");
        match request {
            Request::Create {
                plan,
                upper,
                uid_base,
            } => {
                let netns = fds.first().ok_or_else(bad)?;
                create::create(self, &plan, &upper, uid_base, netns.as_fd(), born)
            }
            Request::Enter {
                plan,
                policy,
                entering,
                helper,
            } => {
                let fds = EnterFds::of(fds, plan.control).ok_or_else(bad)?;
                let filter = self.filter(&policy.seccomp)?;
                let lower = helper.as_ref().and_then(|helper| helper.lower.as_ref());
                let views = lower.map(|of| views::make(self, of, fds.init.as_fd()));
                let views = views.transpose()?;
                let entry = Entry {
                    plan: &plan,
                    policy: &policy,
                    filter: &filter,
                    fds,
                    entering: &entering,
                    helper: helper.as_deref(),
                    views,
                    lowered: self.lowered,
                };
                *born = Some(enter::enter(self, &entry)?);
                Ok(())
            }
        }
    }

    fn filter(&mut self, spec: &SeccompSpec) -> Result<Program> {
        if let Some(known) = self.filters.get(spec) {
            return Ok(known.clone());
        }
        if self.filters.len() >= FILTERS_MAX {
            self.filters.clear();
        }
        let program = filter::compile(spec)?;
        self.filters.insert(spec.clone(), program.clone());
        Ok(program)
    }
}
