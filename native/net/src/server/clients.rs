//! The control connections: from the node's runtime, which may end and come again.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};

use dsec_sys::packet::{self, Inbox};
use rustix::net::{accept_with, SocketFlags};
use serde::Serialize;

use super::sandbox::Sandbox;
use super::{reaches, Server, CLIENT, DNS_4, DNS_6, LISTENER};
use crate::dns::pins::Pins;
use crate::poller::{Interest, Key, Ready, READ};
use crate::proto::{Op, Reply, Request, NAME_MAX, PROTOCOL};
use crate::table::Table;

/// At once.
const CLIENTS_MAX: usize = 16;
/// Answers that a client did not take.
const REPLIES_MAX: usize = 256;
/// Requests of one turn.
const TURNS: usize = 64;
/// What comes with a sandbox.
const FDS: usize = 4;

pub(super) struct Client {
    socket: OwnedFd,
    inbox: Inbox,
    replies: VecDeque<Vec<u8>>,
    interest: Interest,
}

fn packed(value: &impl Serialize) -> io::Result<Vec<u8>> {
    rmp_serde::to_vec_named(value).map_err(io::Error::other)
}

impl Server {
    pub(super) fn take_client(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = accept_with(&self.control, flags) else {
            return;
        };
        if self.clients.len() >= CLIENTS_MAX {
            return;
        }
        let key = self.clients.insert(Client {
            socket,
            inbox: Inbox::default(),
            replies: VecDeque::new(),
            interest: READ,
        });
        let added = self.clients.get(key).map(|client| {
            let token = key.token(CLIENT);
            self.poller.add(&client.socket, token, READ)
        });
        if !matches!(added, Some(Ok(()))) {
            self.clients.remove(key);
        }
    }

    pub(super) fn client_ready(&mut self, key: Key, ready: &Ready) {
        if ready.read && self.serve(key).is_err() {
            self.drop_client(key);
            return;
        }
        if ready.failed || (ready.over && !ready.read) {
            self.drop_client(key);
            return;
        }
        self.flush_client(key);
    }

    /// An error, or the end, ends the client; its sandboxes go on.
    fn serve(&mut self, key: Key) -> io::Result<()> {
        for _ in 0..TURNS {
            let Some(client) = self.clients.get_mut(key) else {
                return Ok(());
            };
            let received = client.inbox.receive(client.socket.as_fd());
            let (body, fds) = match received {
                Ok(Some(message)) => message,
                Ok(None) => return Err(ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            let request: Request = rmp_serde::from_slice(&body).map_err(io::Error::other)?;
            let mut reply = Reply {
                id: request.id,
                ..Reply::default()
            };
            if let Err(why) = self.perform(key, request.op, fds, &mut reply) {
                reply.error = Some(why);
            }
            let packed = packed(&reply)?;
            if let Some(client) = self.clients.get_mut(key) {
                client.replies.push_back(packed);
                if client.replies.len() > REPLIES_MAX {
                    return Err(io::Error::other("answers are not taken"));
                }
            }
        }
        Ok(())
    }

    fn perform(
        &mut self,
        client: Key,
        op: Op,
        fds: Vec<OwnedFd>,
        reply: &mut Reply,
    ) -> Result<(), String> {
        match op {
            Op::Hello { protocol } if protocol != PROTOCOL => {
                return Err(format!("protocol {PROTOCOL} is spoken here"));
            }
            Op::Hello { .. } => reply.protocol = Some(PROTOCOL),
            Op::Node { resolvers, own } => {
                let wrong = |text: &str| format!("{text:?} is no address with a port");
                let parse = |text: &String| text.parse().map_err(|_| wrong(text));
                self.resolvers = resolvers.iter().map(parse).collect::<Result<_, _>>()?;
                self.own = own;
                self.reach = [
                    reaches("0.0.0.0:0", "8.0.0.0:53"),
                    reaches("[::]:0", "[2600::]:53"),
                ];
                reply.cut = Some(self.cut_all());
            }
            Op::Add { sandbox, table } => self.add(sandbox, table, fds)?,
            Op::Set { sandbox, table } => {
                fault(&table)?;
                let key = self.named(&sandbox)?;
                if let Some(sandbox) = self.sandboxes.get_mut(key) {
                    sandbox.replace(table);
                }
                reply.cut = Some(self.cut(key));
            }
            Op::Remove { sandbox } => {
                let key = self.named(&sandbox)?;
                self.end_sandbox(key);
            }
            Op::Status { sandbox } => {
                let key = self.named(&sandbox)?;
                reply.status = self.sandboxes.get(key).map(Sandbox::status);
            }
            Op::List => reply.sandboxes = Some(self.by_name.keys().cloned().collect()),
            Op::Events => self.watcher = Some(client),
        }
        Ok(())
    }

    fn named(&self, sandbox: &str) -> Result<Key, String> {
        let found = self.by_name.get(sandbox).copied();
        found.ok_or_else(|| format!("there is no sandbox {sandbox}"))
    }

    fn add(&mut self, name: String, table: Table, fds: Vec<OwnedFd>) -> Result<(), String> {
        fault(&table)?;
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(format!("a name of 1 to {NAME_MAX} bytes"));
        }
        let four = <[OwnedFd; FDS]>::try_from(fds);
        let [tcp, dns_4, dns_6, link] = four.map_err(|fds| format!("{} descriptors", fds.len()))?;
        let listener = TcpListener::from(tcp);
        if let Some(old) = self.by_name.get(&name).copied() {
            self.end_sandbox(old);
        }
        let nonblocking = listener.set_nonblocking(true);
        let key = self.sandboxes.insert(Sandbox {
            name: name.clone(),
            hits: vec![0; table.rules.len()],
            unmatched: 0,
            table,
            listener,
            dns: [dns_4, dns_6],
            _link: link,
            pins: Pins::default(),
            flows: Default::default(),
            lookups: Default::default(),
            askers: Default::default(),
            sent: 0,
            received: 0,
            charged: 0,
        });
        self.by_name.insert(name, key);
        let watched = nonblocking.and_then(|()| self.watch_sandbox(key));
        watched.map_err(|error| {
            self.end_sandbox(key);
            format!("these are not the descriptors of a steered namespace: {error}")
        })
    }

    fn watch_sandbox(&self, key: Key) -> io::Result<()> {
        let Some(sandbox) = self.sandboxes.get(key) else {
            return Ok(());
        };
        self.poller
            .add(&sandbox.listener, key.token(LISTENER), READ)?;
        self.poller.add(&sandbox.dns[0], key.token(DNS_4), READ)?;
        self.poller.add(&sandbox.dns[1], key.token(DNS_6), READ)
    }

    fn end_sandbox(&mut self, key: Key) {
        let Some(sandbox) = self.sandboxes.remove(key) else {
            return;
        };
        if self.by_name.get(&sandbox.name) == Some(&key) {
            self.by_name.remove(&sandbox.name);
        }
        // Others may have copies of them: as long as one is open, what is waited for is told of, to nobody.
        let own = [&sandbox.dns[0], &sandbox.dns[1]].map(AsFd::as_fd);
        for socket in [sandbox.listener.as_fd()].iter().chain(&own) {
            // One that was never waited for is none to be told of.
            let _ = self.poller.remove(socket);
        }
        for flow in &sandbox.flows {
            if let Some(flow) = self.flows.remove(*flow) {
                flow.reset();
            }
        }
        for lookup in sandbox.lookups.values() {
            self.lookups.remove(*lookup);
        }
        for asker in &sandbox.askers {
            self.askers.remove(*asker);
        }
    }

    fn drop_client(&mut self, key: Key) {
        self.clients.remove(key);
        if self.watcher == Some(key) {
            self.watcher = None;
        }
    }

    /// Sends what waits for a client.
    fn flush_client(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let mut full = false;
        while let Some(reply) = client.replies.front() {
            match packet::send(client.socket.as_fd(), reply, &[]) {
                Ok(()) => drop(client.replies.pop_front()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    full = true;
                    break;
                }
                Err(_) => return self.drop_client(key),
            }
        }
        self.want_client(key, full);
    }

    fn want_client(&mut self, key: Key, write: bool) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let interest = Interest { read: true, write };
        if interest == client.interest {
            return;
        }
        client.interest = interest;
        let token = key.token(CLIENT);
        if self.poller.change(&client.socket, token, interest).is_err() {
            self.drop_client(key);
        }
    }

    /// Tells verdicts, as far as they are taken.
    pub(super) fn tell(&mut self) {
        let Some(key) = self.watcher else {
            return;
        };
        while !self.events.is_empty() {
            let Some(client) = self.clients.get(key) else {
                return;
            };
            let sent = packed(&self.events.batch())
                .and_then(|batch| packet::send(client.socket.as_fd(), &batch, &[]));
            match sent {
                Ok(()) => self.events.told(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return self.want_client(key, true);
                }
                Err(_) => return self.drop_client(key),
            }
        }
    }
}

fn fault(table: &Table) -> Result<(), String> {
    table.fault().map_or(Ok(()), Err)
}
