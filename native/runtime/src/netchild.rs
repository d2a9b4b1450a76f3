//! The process for sandboxes' connections, as a child of the keeper: started once it is asked for, and again whenever
//! it has died. What it held ended with it, so until it is told anew nothing is reached.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dsec_sys::io::{wait_child, Who};
use rustix::process::{kill_process, Pid, Signal};

use crate::args::Options;
use crate::{info, warning};

/// After a life of this length it is started again at once.
const LONG_LIFE: Duration = Duration::from_secs(2);
const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(10);

#[derive(Debug)]
enum State {
    /// Nobody has asked for it.
    Idle,
    Running {
        pid: i32,
        since: Instant,
    },
    Waiting(Instant),
}

#[derive(Debug)]
pub struct NetChild {
    state: State,
    backoff: Duration,
}

impl NetChild {
    pub fn new() -> Self {
        Self {
            state: State::Idle,
            backoff: BACKOFF_MIN,
        }
    }

    /// From now on it is to run.
    pub fn want(&mut self, options: &Options) {
        if matches!(self.state, State::Idle) {
            self.start(options);
        }
    }

    /// When it is to be looked at again.
    pub fn due(&self) -> Option<Instant> {
        match self.state {
            State::Waiting(at) => Some(at),
            State::Idle | State::Running { .. } => None,
        }
    }

    pub fn look(&mut self, options: &Options) {
        if self.due().is_some_and(|at| at <= Instant::now()) {
            self.start(options);
        }
    }

    /// Whether it was this one that ended.
    pub fn ended(&mut self, ended: i32, code: Option<i32>, signal: Option<i32>) -> bool {
        let State::Running { pid, since } = self.state else {
            return false;
        };
        if pid != ended {
            return false;
        }
        warning!(
            "net.ended",
            code = code.unwrap_or(-1),
            signal = signal.unwrap_or(0)
        );
        if since.elapsed() >= LONG_LIFE {
            self.backoff = BACKOFF_MIN;
        }
        self.later();
        true
    }

    fn later(&mut self) {
        self.state = State::Waiting(Instant::now() + self.backoff);
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
    }

    fn start(&mut self, options: &Options) {
        let log = crate::log::open(&options.log_path());
        let child = Command::new(&options.binary)
            .args(["net", "serve", "--with-parent", "--socket"])
            .arg(options.net_socket())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.map_or_else(Stdio::null, Stdio::from))
            .current_dir("/")
            .spawn();
        match child.map(|child| i32::try_from(child.id())) {
            Ok(Ok(pid)) => {
                info!("net.start", pid = pid);
                let since = Instant::now();
                self.state = State::Running { pid, since };
            }
            Ok(Err(e)) => {
                warning!("net.start.failed", error = e);
                self.later();
            }
            Err(e) => {
                warning!("net.start.failed", error = e);
                self.later();
            }
        }
    }

    /// For good, with the keeper.
    pub fn end(&mut self, options: &Options) {
        if let State::Running { pid, .. } = self.state {
            let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
            let _ = wait_child(Who::Pid(pid), true);
        }
        self.state = State::Idle;
        // Not there if it never ran.
        let _ = std::fs::remove_file(options.net_socket());
    }
}
