//! Launching: a mark on disk before it, everything of the run in the keeper right after the clone, and
//! only then the program begins.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use dsec_launch::plan::{Code, Step};
use dsec_launch::{switch, LaunchError, RunPlan};
use rustix::event::epoll::EventFlags;
use rustix::pipe::PipeFlags;

use super::input::make_stdin;
use super::launching::{Copies, Launch, Launched, Pipes, Stdio, TakenLeaf};
use super::pool::{Done, Finish};
use super::results::gone;
use super::room::fds_of;
use super::run::{self, Fetched, Meta, Reader, Run, Stream, Unsettled};
use super::sandbox::Phase;
use super::spool::OnDisk;
use super::stream::slack;
use super::{terminals, Server, Timer, Token};
use crate::backend::Place;
use crate::proto::{self, Follow, Id, Nothing};
use crate::{info, util};

/// Most programs of a tool loop have ended by then, and what they said waits in their pipes: before that
/// neither the output nor the success of the exec of a run that nobody follows is waited for. Each would
/// wake the event loop, and the second its client, once more for every run. A program that fills its pipe
/// sooner waits so long, once.
const SETTLED_NS: u64 = 5_000_000;

impl Server {
    /// `run.start`.
    pub(super) fn run_start(&mut self, client: u64, id: Id, plan: RunPlan, follow: Follow) {
        match self.try_start(client, id, plan, follow) {
            Ok(()) => {}
            Err(err) => self.answer(client, id, Err::<Nothing, _>(err)),
        }
    }

    fn try_start(
        &mut self,
        client: u64,
        id: Id,
        plan: RunPlan,
        follow: Follow,
    ) -> Result<(), LaunchError> {
        proto::check_run(&plan)?;
        let name = (plan.sandbox.clone(), plan.run.clone());
        if let Some(&index) = self.run_ids.get(&name) {
            self.follow(index, client, id, &follow);
            return Ok(());
        }
        if self.unknown.contains(&name) {
            return Err(unknown(&plan.run));
        }
        let sandbox_index = self.sandbox_index(&plan.sandbox)?;
        let place = self.running_place(sandbox_index)?;
        let on_disk = on_disk(&plan);
        self.check_room(sandbox_index, fds_of(plan.control, on_disk))?;
        let init = self.init_fd(sandbox_index)?;
        let index = self.index();
        let (stdio, pipes) = make_pipes(&plan).step("run.pipes")?;
        let leaf = self.take_leaf(sandbox_index, plan.memory_cgroup);
        let copies = Copies::of(&pipes);
        let run = self.new_run(sandbox_index, &plan, &follow, pipes, leaf.name());
        self.run_ids.insert(name.clone(), index);
        if let Some(s) = self.sandboxes.get_mut(&sandbox_index) {
            s.runs.insert(name.1, index);
        }
        self.runs.insert(index, run);
        self.count_descriptors(index);
        self.arm_timeout(index);
        self.follow(index, client, id, &follow);
        self.launch(index, plan, (stdio, copies), place, init, leaf);
        Ok(())
    }

    /// A cgroup that an earlier run left empty, or the name for a new one. Without a memory group of its
    /// own a leaf is cheap, and is made each time.
    fn take_leaf(&mut self, sandbox: u64, memory: bool) -> TakenLeaf {
        let Some(s) = self.sandboxes.get_mut(&sandbox) else {
            return TakenLeaf::New(String::new());
        };
        if let (true, Some(free)) = (memory, s.free_leaves.pop()) {
            return TakenLeaf::Free(free);
        }
        s.last_leaf += 1;
        TakenLeaf::New(s.last_leaf.to_string())
    }

    fn new_run(
        &self,
        sandbox: u64,
        plan: &RunPlan,
        follow: &Follow,
        pipes: Pipes,
        leaf: &str,
    ) -> Run {
        let mut out = pipes.out.into_iter();
        Run {
            sandbox,
            sandbox_id: plan.sandbox.clone(),
            id: plan.run.clone(),
            meta: Meta {
                version: run::META_VERSION,
                started_ns: util::realtime_ns(),
                started_mono_ns: util::monotonic_ns(),
                timeout_ms: plan.timeout_ms,
                head_bytes: plan.head_bytes,
                tail_bytes: plan.tail_bytes,
                leaf: leaf.to_owned(),
                base_oom: 0,
                base_pids: 0,
                base_user_us: 0,
                base_system_us: 0,
                marked: None,
                signals: 0,
                with_sandbox: false,
                outcome: None,
                streamed: follow.stream && !follow.lossy,
                forgotten: false,
                stdin_open: plan.stdin_open || plan.tty.is_some(),
                spool_bytes: plan.spool_bytes,
                slack_bytes: slack(plan.tail_bytes.max(plan.spool_bytes)),
                on_disk: on_disk(plan),
                spool_ends: [None; run::OUTPUTS],
                tty: plan.tty.is_some(),
                control: plan.control,
                fence: 0,
            },
            leaf: None,
            spent: None,
            pid: None,
            pidfd: None,
            adopted: false,
            status: None,
            exec_done: false,
            ending: false,
            streams: std::array::from_fn(|_| Stream {
                pipe: out.next(),
                disk: on_disk(plan).then(OnDisk::default),
                ..Stream::default()
            }),
            barriers: VecDeque::new(),
            kept_others: 0,
            opening: None,
            terminal: None,
            feed: pipes.feed,
            fed: plan.stdin.len() as u64,
            senders: Vec::new(),
            readers: Vec::new(),
            delivered: false,
            timer: None,
            unsettled: None,
            hold: false,
            emptied: None,
            dying: None,
            held: 0,
            killed_ns: None,
            failure: None,
            counted: 0,
        }
    }

    pub(super) fn arm_timeout(&mut self, index: u64) {
        let Some(run) = self.runs.get(&index) else {
            return;
        };
        if run.meta.timeout_ms == 0 || run.done() {
            return;
        }
        let span = run.meta.timeout_ms.saturating_mul(1_000_000);
        let when = run.meta.started_mono_ns.saturating_add(span);
        let timer = self.at(when, Timer::Timeout(index));
        if let Some(run) = self.runs.get_mut(&index) {
            run.timer = Some(timer);
        }
    }

    fn launch(
        &mut self,
        index: u64,
        plan: RunPlan,
        (stdio, copies): (Stdio, Copies),
        place: Arc<dyn Place>,
        init: Arc<OwnedFd>,
        leaf: TakenLeaf,
    ) {
        let Some(run) = self.runs.get(&index) else {
            return;
        };
        let (link, meta) = (Arc::clone(&self.link), run.meta.clone());
        let (records, keeper) = (self.records.clone(), self.instance.clone());
        let epoll = Arc::clone(&self.epoll);
        let awaited = self.unsettle(index);
        self.launchers.run_done(move || {
            let launch = Launch {
                plan: &plan,
                stdio: &stdio,
                copies: &copies,
                place: &*place,
                init: init.as_fd(),
                link: &link,
                records: &records,
                keeper: &keeper,
            };
            if plan.tty.is_some() {
                let cloned = launch.clone_it(leaf, meta);
                let finish: Finish = Box::new(move |server| match cloned {
                    Ok(cloned) => server.await_terminal(index, cloned, copies),
                    Err(err) => server.launched(index, Err(err)),
                });
                return finish.into();
            }
            let mut done = launch.carry_out(leaf, meta);
            if let Ok(launched) = &mut done {
                launched.watch(index, &epoll);
            }
            let watched = done.as_ref().is_ok_and(|launched| launched.watched);
            let finish: Finish = Box::new(move |server| server.launched(index, done));
            match awaited {
                Some(awaited) if watched => Done::later(finish, awaited),
                _ => finish.into(),
            }
        });
    }

    /// Nothing but its end is waited for at first, unless somebody reads along. The timer is set before the
    /// launch: whatever comes of that, the event loop looks at the run soon.
    fn unsettle(&mut self, index: u64) -> Option<Arc<AtomicBool>> {
        let meta = &self.runs.get(&index)?.meta;
        // Opening a terminal is waited for at once.
        if meta.streamed || meta.tty {
            return None;
        }
        let timer = self.at(util::monotonic_ns() + SETTLED_NS, Timer::Settled(index));
        let awaited = Arc::new(AtomicBool::new(false));
        self.runs.get_mut(&index)?.unsettled = Some(Unsettled {
            timer,
            awaited: Arc::clone(&awaited),
        });
        Some(awaited)
    }

    pub(super) fn launched(&mut self, index: u64, done: Result<Launched, LaunchError>) {
        let done = match done {
            Ok(done) => done,
            Err(err) => return self.launch_failed(index, err),
        };
        let Some(run) = self.runs.get_mut(&index) else {
            // Forgotten while it was being launched.
            let _ = done.leaf.kill();
            self.unwatch(done.process.pidfd.as_fd());
            return;
        };
        let kill = run.meta.marked;
        // A follower may have come, a kill been asked for, since the keeper was told.
        let signals = run.meta.signals;
        let stale = kill.is_some() || signals != 0 || run.meta.streamed != done.meta.streamed;
        run.meta = Meta {
            marked: kill,
            signals,
            with_sandbox: run.meta.with_sandbox,
            streamed: run.meta.streamed,
            ..done.meta
        };
        for stream in &mut run.streams {
            stream.kept_pipe = stream.pipe.is_some();
        }
        let feed = run.feed.as_ref().map_or(0, |feed| feed.kept().len() as u64);
        run.kept_others = 2 + feed + if run.meta.tty { 2 } else { 0 };
        run.leaf = Some(done.leaf);
        run.pid = Some(done.process.pid);
        run.pidfd = Some(done.process.pidfd);
        run.status = Some(done.process.status);
        let stopping = self
            .sandboxes
            .get(&run.sandbox)
            .map_or(true, |s| s.phase != Phase::Running);
        if let Err(err) = self.watch_run(index, !done.watched) {
            info!("run.watch", error = err);
        }
        if stale {
            self.keep_meta(index);
        }
        if kill.is_some() || stopping {
            self.kill_tree(index);
        } else if signals != 0 {
            self.send_signals(index, signals);
        }
    }

    /// Watches everything of a run that is there; its process if that was not done before.
    pub(super) fn watch_run(&mut self, index: u64, process: bool) -> io::Result<()> {
        let Some(run) = self.runs.get(&index) else {
            return Ok(());
        };
        if let (Some(fd), None) = (&run.status, &run.unsettled) {
            self.watch(fd.as_fd(), Token::Status(index), EventFlags::IN)?;
        }
        let process = process && !run.done();
        if let Some(fd) = run.pidfd.as_ref().filter(|_| process) {
            self.watch(fd.as_fd(), Token::Process(index), EventFlags::IN)?;
        }
        self.watch_input(index)?;
        self.watch_output(index);
        Ok(())
    }

    /// From now on everything of a run is waited for.
    pub(super) fn settle(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(unsettled) = run.unsettled.take() else {
            return;
        };
        self.timers.remove(&unsettled.timer);
        if run.pid.is_none() {
            // The launch wakes us from now on, or has ended and did not.
            unsettled.awaited.store(true, Ordering::SeqCst);
            return self.results.wake();
        }
        if let Some(Err(e)) = self.runs.get(&index).and_then(|run| {
            let fd = run.status.as_ref()?.as_fd();
            Some(self.watch(fd, Token::Status(index), EventFlags::IN))
        }) {
            info!("run.watch", error = e);
        }
        self.watch_output(index);
    }

    /// The exec of a run has succeeded or failed.
    pub(super) fn status_ready(&mut self, index: u64) {
        if self.runs.get(&index).is_some_and(|r| r.opening.is_some()) {
            return self.terminal_opened(index);
        }
        self.take_status(index);
        if self
            .runs
            .get(&index)
            .is_some_and(|run| run.failure.is_none())
        {
            self.pump(index);
        }
    }

    /// What the exec of a run came to. Who waits for it is told later.
    pub(super) fn take_status(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(status) = run.status.take() else {
            return;
        };
        if run.unsettled.is_none() {
            self.unwatch(status.as_fd());
        }
        let failure = dsec_launch::launcher::read_status(status.as_fd());
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        run.exec_done = true;
        // Said when the process has been reaped: nothing of it is left then.
        run.failure = failure;
    }

    /// Nothing runs: whoever waits is told, and the id is free again.
    pub(super) fn launch_failed(&mut self, index: u64, err: LaunchError) {
        let Some(sandbox) = self.runs.get(&index).map(|r| r.sandbox) else {
            return;
        };
        let err = if self.sandbox_ending(sandbox) {
            // Whatever the launch met on its way, it met because the sandbox was being taken apart.
            gone().with("met", err.message)
        } else {
            err
        };
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        if let Some(leaf) = &run.leaf {
            let _ = leaf.remove();
        }
        let readers = std::mem::take(&mut run.readers);
        self.remove_run(index);
        self.refuse(readers, index, &err);
        // A stop may have waited for just this run.
        self.run_ended(sandbox);
    }

    /// Adds a reader; it is served at once with what is there.
    pub(super) fn follow(&mut self, index: u64, client: u64, id: Id, follow: &Follow) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        run.readers.push(Reader {
            client,
            request: id,
            stream: follow.stream,
            lossy: follow.lossy,
            pos: follow.offsets,
            credit: follow.window,
            fetched: Fetched::Nothing,
            told_started: false,
        });
        if let Some(c) = self.clients.get_mut(&client) {
            c.follows.insert(index);
        }
        if follow.stream && !follow.lossy {
            self.streamed(index);
        } else if follow.stream {
            self.settle(index);
        }
        self.pump(index);
    }
}

impl Server {
    /// Notes that somebody follows the output as it comes.
    fn streamed(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        run.hold = false;
        if !run.meta.streamed && !run.done() {
            run.meta.streamed = true;
            self.keep_meta(index);
        }
        self.settle(index);
    }
}

/// Whether what stays readable of its output does so on the disk.
fn on_disk(plan: &RunPlan) -> bool {
    plan.spool_bytes > 0 && !switch::off(switch::OUTPUT_DISK)
}

pub(super) fn unknown(run: &str) -> LaunchError {
    LaunchError::new(
        Code::Unknown,
        format!("run {run} was launched, and its ending was lost with the keeper or the runtime"),
    )
}

fn make_pipes(plan: &RunPlan) -> io::Result<(Stdio, Pipes)> {
    if plan.tty.is_some() {
        return terminals::make_pipes(&plan.stdin);
    }
    let (stdin, feed) = make_stdin(&plan.stdin, plan.stdin_open)?;
    let (mut theirs, mut out) = (vec![stdin], Vec::new());
    for _ in 0..run::CONTROL + usize::from(plan.control) {
        let (ours, their) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        out.push(Arc::new(ours));
        theirs.push(their);
    }
    let pipes = Pipes {
        out,
        feed,
        relay: None,
    };
    Ok((Stdio(theirs), pipes))
}
