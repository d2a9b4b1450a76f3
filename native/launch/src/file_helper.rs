//! The file helper: enters a sandbox like a run, but for its pid namespace, and serves instead of executing.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use dsec_files::Settings;
use dsec_sys::process;
use rustix::fs::{openat, Mode, OFlags, CWD};
use rustix::net::SendFlags;

use crate::enter::{become_user, confine, go_in, join, wait_for, Entry, Never};
use crate::launcher::SERVES;
use crate::plan::{Code, LaunchError, Result, Step};
use crate::switch;
use crate::views::Views;
use crate::wire::Helper;

/// Never returns but with why it cannot serve; then nothing was said on the socket.
pub(crate) fn become_helper(entry: &Entry<'_>, helper: &Helper) -> Result<Never> {
    // Of a /proc that knows us: that inside does not.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let own = openat(CWD, "/proc/self/fd", flags, Mode::empty()).step("files.proc")?;
    let gate = &entry.fds.gate;
    let mut kept: Vec<RawFd> = vec![own.as_raw_fd()];
    kept.extend(entry.views.iter().flat_map(Views::fds));
    let keep = [&kept[..], &[gate.as_raw_fd()]].concat();
    let mut outside = Vec::new();
    if switch::off(switch::FILES_CONFINED) {
        outside = way_in(entry)?;
        join(entry, &keep)?;
    } else {
        let (user, bounding) = go_in(entry, &keep)?;
        let permitted = become_user(&user, bounding)?;
        confine(entry, permitted)?;
    }
    // Each is told by the call that meets it.
    process::ignore_signal(libc::SIGPIPE);
    process::ignore_signal(libc::SIGXFSZ);
    process::set_name(c"dsec-files").step("files.name")?;
    // The change of ids may have undone it, and no exec does it again.
    process::set_undumpable().step("files.undumpable")?;
    // Two of them on one connection, one after a launcher that died, must not both speak.
    wait_for(gate)?;
    let socket = alone_with_socket(entry, &kept)?;
    let mut settings = Settings::new(entry.plan.cwd.to_vec());
    settings.outside = outside;
    settings.proc_fd = Some(own);
    settings.views = entry.views.as_ref().map(views).transpose()?;
    let seen = settings.views.iter();
    let seen = seen.flat_map(|views| [&views.now, &views.before, &views.touched]);
    let mut kept: Vec<RawFd> = seen.map(AsRawFd::as_raw_fd).collect();
    kept.extend(settings.proc_fd.iter().map(AsRawFd::as_raw_fd));
    // First, so that whoever has read the greeting has a helper that the runtime takes for one. Without a reader,
    // the runtime being dead, it serves all the same.
    let _ = rustix::io::write(&entry.fds.status, &[SERVES]);
    greet(&socket, &helper.greeting)?;
    kept.extend([0, 1, 2, socket.as_raw_fd()]);
    process::close_all_but(&kept).step("files.close")?;
    dsec_files::serve(socket, &settings);
    process::exit(0)
}

/// What leads from outside to the sandbox's root.
fn way_in(entry: &Entry<'_>) -> Result<Vec<u8>> {
    let about = format!("/proc/self/fdinfo/{}", entry.fds.init.as_raw_fd());
    let about = std::fs::read_to_string(about).step("files.outside")?;
    let pid = about.lines().find_map(|line| line.strip_prefix("Pid:"));
    let pid = pid.ok_or_else(|| LaunchError::new(Code::Internal, "a pidfd without a number"))?;
    Ok(format!("/proc/{}/root", pid.trim()).into_bytes())
}

/// The tree as it is now is the sandbox's own.
fn views(views: &Views) -> Result<dsec_files::Views> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let now = openat(CWD, "/", flags, Mode::empty()).step("files.root")?;
    let again = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 3).step("files.views");
    Ok(dsec_files::Views {
        now,
        before: again(&views.before)?,
        touched: again(&views.touched)?,
    })
}

/// Keeps the socket, where no number of standard descriptors names it, the status and `kept`.
fn alone_with_socket(entry: &Entry<'_>, kept: &[RawFd]) -> Result<OwnedFd> {
    let socket = process::dup_above(rustix::stdio::stdin(), 3).step("files.socket")?;
    process::dup_to(rustix::stdio::stdout().as_fd(), 0).step("files.stdin")?;
    let own = [0, 1, 2, socket.as_raw_fd(), entry.fds.status.as_raw_fd()];
    process::close_all_but(&[&own[..], kept].concat()).step("files.close")?;
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
