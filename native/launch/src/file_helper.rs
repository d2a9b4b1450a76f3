//! The file helper: enters a sandbox like a run, but for its pid namespace, and serves instead of executing.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use dsec_files::Settings;
use dsec_sys::process;
use rustix::fs::{openat, Mode, OFlags, CWD};
use rustix::net::SendFlags;

use crate::enter::{become_user, confine, go_in, wait_for, Entry, Never};
use crate::launcher::SERVES;
use crate::plan::{Code, LaunchError, Result, Step};
use crate::wire::Helper;

/// Never returns but with why it cannot serve; then nothing was said on the socket.
pub(crate) fn become_helper(entry: &Entry<'_>, helper: &Helper) -> Result<Never> {
    // Of a /proc that knows us: that inside does not.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let own = openat(CWD, "/proc/self/fd", flags, Mode::empty()).step("files.proc")?;
    let gate = &entry.fds.gate;
    let (user, bounding) = go_in(entry, &[own.as_raw_fd(), gate.as_raw_fd()])?;
    let permitted = become_user(&user, bounding)?;
    confine(entry, permitted)?;
    // Each is told by the call that meets it.
    process::ignore_signal(libc::SIGPIPE);
    process::ignore_signal(libc::SIGXFSZ);
    process::set_name(c"dsec-files").step("files.name")?;
    // The change of ids may have undone it, and no exec does it again.
    process::set_undumpable().step("files.undumpable")?;
    // Two of them on one connection, one after a launcher that died, must not both speak.
    wait_for(gate)?;
    let socket = alone_with_socket(entry, &own)?;
    let mut settings = Settings::new(entry.plan.cwd.to_vec());
    settings.proc_fd = Some(own);
    // First, so that whoever has read the greeting has a helper that the runtime takes for one. Without a reader,
    // the runtime being dead, it serves all the same.
    let _ = rustix::io::write(&entry.fds.status, &[SERVES]);
    greet(&socket, &helper.greeting)?;
    let own = settings.proc_fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    process::close_all_but(&[0, 1, 2, socket.as_raw_fd(), own]).step("files.close")?;
    dsec_files::serve(socket, &settings);
    process::exit(0)
}

/// Keeps the socket, where no number of standard descriptors names it, the status and `own`.
fn alone_with_socket(entry: &Entry<'_>, own: &OwnedFd) -> Result<OwnedFd> {
    let socket = process::dup_above(rustix::stdio::stdin(), 3).step("files.socket")?;
    process::dup_to(rustix::stdio::stdout().as_fd(), 0).step("files.stdin")?;
    let (status, own) = (entry.fds.status.as_raw_fd(), own.as_raw_fd());
    process::close_all_but(&[0, 1, 2, socket.as_raw_fd(), status, own]).step("files.close")?;
    Ok(socket)
}

fn greet(socket: &OwnedFd, greeting: &[u8]) -> Result<()> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = rustix::io::retry_on_intr(|| rustix::net::send(socket, greeting, flags));
    match sent.step("files.greet")? {
        n if n == greeting.len() => Ok(()),
        _ => Err(LaunchError::new(
            Code::Internal,
            "the client has left no room for an answer",
        )),
    }
}
