//! Network namespaces of a test's own. Nothing here has a way out of the machine.
#![allow(dead_code)] // every test binary uses its own part of the kit

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use dsec_net::steer;
use dsec_sys::{net, process, route};

/// Why these tests cannot run here, if they cannot.
pub fn missing() -> Option<String> {
    if !rustix::process::getuid().is_root() {
        return Some("needs root".to_owned());
    }
    steer::missing()
}

#[macro_export]
macro_rules! require {
    () => {
        if let Some(reason) = kit::missing() {
            println!("skipped: {reason}");
            return;
        }
    };
}

/// A network namespace.
pub struct Place(pub OwnedFd);

impl Place {
    /// With loopback only.
    pub fn new() -> Self {
        let made = thread::spawn(|| {
            process::unshare(process::NEW_NET).expect("a namespace");
            net::loopback_up().expect("loopback");
            File::open("/proc/thread-self/ns/net").expect("its file")
        });
        Self(made.join().expect("made").into())
    }

    /// Where every address can be bound and reached: what stands for the world outside.
    pub fn world() -> Self {
        let place = Self::new();
        place.run(|| route::everything_local().expect("routes"));
        place
    }

    /// Does something in there.
    pub fn run<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let done = scope.spawn(|| {
                process::setns(self.0.as_fd(), process::NEW_NET).expect("entered");
                what()
            });
            match done.join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }
}
