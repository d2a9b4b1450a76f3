//! File helpers: a client's connection goes to a process inside its sandbox, which lives as long as that.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dsec_launch::launcher::{begin, read_files_status, Entered, FilesPlan};
use dsec_launch::plan::Code;
use dsec_launch::LaunchError;
use dsec_sys::io::{wait_child, Who};
use rustix::event::epoll::EventFlags;
use rustix::net::SendFlags;
use rustix::process::Signal;
use serde_bytes::ByteBuf;

use super::results::gone;
use super::sandbox::Phase;
use super::{Server, Timer, Token};
use crate::backend::Leaf;
use crate::proto::{self, FilesArgs, Id, Nothing, Plain, Reply};
use crate::{info, util, warning};

/// From the request until it serves. In a frozen sandbox it never does.
const START_DEADLINE_NS: u64 = 10_000_000_000;

/// A helper, of this runtime or of an earlier one.
pub struct Helper {
    sandbox: u64,
    /// None: not made yet, or gone.
    leaf: Option<Arc<dyn Leaf>>,
    /// Of one that is our child.
    pidfd: Option<OwnedFd>,
    /// Until it serves.
    starting: Option<Starting>,
    /// Watches the cgroup of one that is not our child, or has left something.
    emptied: Option<OwnedFd>,
    /// It is to end as soon as it is there.
    unwanted: bool,
}

/// What is needed to say that it cannot serve.
struct Starting {
    socket: Arc<OwnedFd>,
    request: Id,
    status: Option<OwnedFd>,
    timer: (u64, u64),
}

type Launched = Result<(Entered, Arc<dyn Leaf>), LaunchError>;

impl Server {
    /// `files`. An error is answered to a client; from the handing over on the connection is not one any more.
    pub(super) fn files_start(
        &mut self,
        client: u64,
        id: Id,
        args: FilesArgs,
    ) -> Result<(), LaunchError> {
        proto::check_sandbox_id(&args.sandbox)?;
        let sandbox = self.sandbox_index(&args.sandbox)?;
        let place = self.running_place(sandbox)?;
        let init = self.init_fd(sandbox)?;
        let own = self.helpers.values().filter(|h| h.sandbox == sandbox);
        self.check_helper_room(own.count())?;
        let greeting = proto::frame(&Reply::Ok { id, ok: Nothing {} })?;
        let socket = Arc::new(self.hand_over(client)?);
        let index = self.index();
        let when = util::monotonic_ns() + START_DEADLINE_NS;
        let timer = self.at(when, Timer::Helper(index));
        let helper = Helper {
            sandbox,
            leaf: None,
            pidfd: None,
            starting: Some(Starting {
                socket: Arc::clone(&socket),
                request: id,
                status: None,
                timer,
            }),
            emptied: None,
            unwanted: false,
        };
        self.helpers.insert(index, helper);
        let name = self.files_leaf_name(sandbox);
        let plan = FilesPlan {
            sandbox: args.sandbox,
            user: args.user,
            cwd: args.cwd,
            greeting: ByteBuf::from(greeting),
            diff: args.diff,
        };
        self.launchers.run(move || {
            let launched = place.create_files_leaf(&name).and_then(|leaf| {
                let entered = place.enter_files(&plan, socket.as_fd(), &*leaf, init.as_fd());
                if entered.is_err() {
                    let _ = leaf.kill();
                    let _ = leaf.remove();
                }
                Ok((entered?, leaf))
            });
            Box::new(move |server: &mut Server| server.helper_launched(index, launched))
        });
        Ok(())
    }

    /// One that no earlier helper of this sandbox had: something may be left in it.
    fn files_leaf_name(&mut self, sandbox: u64) -> String {
        let Some(s) = self.sandboxes.get_mut(&sandbox) else {
            return String::new();
        };
        s.last_leaf += 1;
        s.last_leaf.to_string()
    }

    fn helper_launched(&mut self, index: u64, launched: Launched) {
        let (entered, leaf) = match launched {
            Ok(launched) => launched,
            Err(err) => {
                self.refuse_helper(index, err);
                self.helpers.remove(&index);
                return;
            }
        };
        let Some(helper) = self.helpers.get_mut(&index) else {
            return;
        };
        let running = |s: &super::sandbox::Sandbox| s.phase == Phase::Running;
        let kill = helper.unwanted || !self.sandboxes.get(&helper.sandbox).is_some_and(running);
        helper.leaf = Some(leaf);
        let Entered {
            pidfd,
            status,
            gate,
            ..
        } = entered;
        let mut watched = rustix::event::epoll::add(
            &self.epoll,
            &pidfd,
            Token::Helper(index).pack(),
            EventFlags::IN,
        );
        helper.pidfd = Some(pidfd);
        if let Some(starting) = &mut helper.starting {
            let token = Token::HelperStatus(index).pack();
            let added = rustix::event::epoll::add(&self.epoll, &status, token, EventFlags::IN);
            watched = watched.and(added);
            starting.status = Some(status);
        }
        if let Err(e) = &watched {
            warning!("files.watch", error = e);
        }
        if kill || watched.is_err() {
            return self.kill_helper(index);
        }
        // One that has died by now says so by its status.
        let _ = begin(gate.as_fd());
    }

    /// Also before it has joined its groups of v1, and in a frozen sandbox.
    fn kill_helper(&mut self, index: u64) {
        let Some(helper) = self.helpers.get_mut(&index) else {
            return;
        };
        helper.unwanted = true;
        if let Some(Err(e)) = helper.leaf.as_ref().map(|leaf| leaf.kill()) {
            info!("files.kill", error = e);
        }
        if let Some(pidfd) = &helper.pidfd {
            let _ = rustix::process::pidfd_send_signal(pidfd, Signal::KILL);
        }
    }

    /// It serves, or says why not.
    pub(super) fn helper_status(&mut self, index: u64) {
        let Some(helper) = self.helpers.get_mut(&index) else {
            return;
        };
        let Some(starting) = &mut helper.starting else {
            return;
        };
        let Some(status) = starting.status.take() else {
            return;
        };
        let (timer, sandbox) = (starting.timer, helper.sandbox);
        self.unwatch(status.as_fd());
        match read_files_status(status.as_fd()) {
            None => {
                self.timers.remove(&timer);
                if let Some(helper) = self.helpers.get_mut(&index) {
                    helper.starting = None;
                }
            }
            Some(err) if self.sandbox_ending(sandbox) => {
                self.refuse_helper(index, gone().with("met", err.message));
            }
            Some(err) => self.refuse_helper(index, err),
        }
    }

    /// The last that is said on a connection whose helper does not serve.
    fn refuse_helper(&mut self, index: u64, err: LaunchError) {
        let Some(helper) = self.helpers.get_mut(&index) else {
            return;
        };
        let (Some(starting), sandbox) = (helper.starting.take(), helper.sandbox) else {
            return;
        };
        self.timers.remove(&starting.timer);
        if let Some(status) = &starting.status {
            self.unwatch(status.as_fd());
        }
        let err = if err.code != Code::Gone && self.sandbox_ending(sandbox) {
            gone().with("met", err.message)
        } else {
            err
        };
        info!("files.refused", error = err);
        let id = starting.request;
        if let Ok(frame) = proto::frame(&Plain::Err { id, err: &err }) {
            // One that takes not even this has gone, or has not read for long.
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let _ = rustix::net::send(&*starting.socket, &frame, flags);
        }
        // The child may hold a copy: the end is to be seen at once.
        let _ = rustix::net::shutdown(&*starting.socket, rustix::net::Shutdown::Both);
    }

    pub(super) fn helper_late(&mut self, index: u64) {
        // It may have said so just now.
        self.helper_status_if_said(index);
        let starting = |h: &Helper| h.starting.is_some();
        if !self.helpers.get(&index).is_some_and(starting) {
            return;
        }
        let text = "the file helper did not get ready in time; is the sandbox frozen?";
        self.refuse_helper(index, LaunchError::new(Code::Deadline, text));
        self.kill_helper(index);
    }

    fn helper_status_if_said(&mut self, index: u64) {
        let starting = self.helpers.get(&index).and_then(|h| h.starting.as_ref());
        let status = starting.and_then(|s| s.status.as_ref());
        let said = status.is_some_and(|s| rustix::io::ioctl_fionread(s).is_ok_and(|n| n > 0));
        if said {
            self.helper_status(index);
        }
    }

    /// The process of a helper ended.
    pub(super) fn helper_ended(&mut self, index: u64) {
        self.helper_status(index);
        let Some(helper) = self.helpers.get_mut(&index) else {
            return;
        };
        let Some(pidfd) = helper.pidfd.take() else {
            return;
        };
        self.unwatch(pidfd.as_fd());
        match wait_child(Who::PidFd(pidfd.as_fd()), true) {
            Ok(Some(end)) if end.signal.is_some() => {
                info!("files.killed", signal = end.signal.unwrap_or(0));
            }
            Ok(_) => {}
            Err(e) => warning!("files.reap", error = e),
        }
        self.let_helper_go(index);
    }

    /// Its cgroup goes with the last process in it.
    fn let_helper_go(&mut self, index: u64) {
        let Some(helper) = self.helpers.get_mut(&index) else {
            return;
        };
        let Some(leaf) = helper.leaf.clone() else {
            self.helpers.remove(&index);
            return;
        };
        if leaf.remove().is_ok() {
            return self.helper_over(index);
        }
        match leaf.events() {
            Ok(events) => {
                let token = Token::HelperEmptied(index);
                if let Err(e) = self.watch(events.as_fd(), token, EventFlags::PRI) {
                    warning!("files.watch", error = e);
                }
                if let Some(helper) = self.helpers.get_mut(&index) {
                    helper.emptied = Some(events);
                }
                // It may have emptied before it was watched.
                self.helper_emptied(index);
            }
            Err(e) => {
                info!("files.events", error = e);
                self.helper_over(index);
            }
        }
    }

    pub(super) fn helper_emptied(&mut self, index: u64) {
        let leaf = self.helpers.get(&index).and_then(|h| h.leaf.clone());
        if leaf.is_some_and(|leaf| leaf.remove().is_ok()) {
            self.helper_over(index);
        }
    }

    fn helper_over(&mut self, index: u64) {
        if let Some(events) = self.helpers.remove(&index).and_then(|h| h.emptied) {
            self.unwatch(events.as_fd());
        }
    }

    /// A sandbox has ended, its cgroups are gone: those that are still to be reaped have nothing else left.
    pub(super) fn helpers_over(&mut self, sandbox: u64) {
        let own = self.helpers.iter().filter(|(_, h)| h.sandbox == sandbox);
        let own: Vec<u64> = own.map(|(index, _)| *index).collect();
        for index in own {
            let Some(helper) = self.helpers.get_mut(&index) else {
                continue;
            };
            helper.leaf = None;
            // One that is being launched is ended when the launch is over.
            if helper.pidfd.is_none() && helper.starting.is_none() {
                self.helper_over(index);
            }
        }
    }

    /// Helpers of an earlier runtime serve on, until their clients go.
    pub(super) fn recover_helpers(&mut self) {
        let mut found = Vec::new();
        for (index, s) in &mut self.sandboxes {
            let Some(place) = &s.place else { continue };
            for (name, leaf) in place.files_leaves().unwrap_or_default() {
                s.last_leaf = s.last_leaf.max(name.parse().unwrap_or(0));
                found.push((*index, leaf));
            }
        }
        for (sandbox, leaf) in found {
            let index = self.index();
            let helper = Helper {
                sandbox,
                leaf: Some(leaf),
                pidfd: None,
                starting: None,
                emptied: None,
                unwanted: false,
            };
            self.helpers.insert(index, helper);
            self.let_helper_go(index);
        }
    }
}
