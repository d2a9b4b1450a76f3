//! Plans that could not work are refused before anything is made.

use std::mem::size_of;

use dsec_sys::cred::CAP_NAMES;

use crate::layers::check_name;
use crate::plan::{Code, LaunchError, Result, RunPlan, SandboxPlan, TtySize};

/// Docker's default set without NET_RAW, which would see and forge packets of the namespace.
pub const DEFAULT_CAPS: [&str; 13] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];
/// What a plan may add. Never SYS_ADMIN: in the sandbox's own user namespace it could take `nodev` off
/// the root and open device nodes of a layer.
const GRANTABLE: [&str; 6] = [
    "DAC_READ_SEARCH",
    "IPC_LOCK",
    "IPC_OWNER",
    "LEASE",
    "SYS_NICE",
    "SYS_PTRACE",
];

const LAYERS_MAX: usize = 128;
const TMPFS_MAX: usize = 64;
const FILES_MAX: usize = 64;
const FILES_BYTES_MAX: usize = 1 << 20;
const HOSTNAME_MAX: usize = 64;
const PATH_MAX: usize = 4095;
const RUN_NAME_MAX: usize = 64;
const USER_MAX: usize = 256;
/// The kernel's limit for one string of `execve`, its final NUL included.
const STRING_MAX: usize = 128 << 10;
/// The kernel's limit for all of them at the usual 8 MiB of stack: a quarter.
const STRINGS_MAX: usize = 2 << 20;
const NOFILE_MIN: u64 = 16;
const WEIGHT_MAX: u32 = 10_000;

fn in_range(field: &str, value: u64, min: u64, max: u64) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(LaunchError::field(
        field,
        format!("{field} must be {min} to {max}"),
    ))
}

fn inside_path(field: &str, path: &str) -> Result<()> {
    let fine = path.starts_with('/')
        && path.len() > 1
        && path.len() <= PATH_MAX
        && !path.contains('\0')
        && path[1..]
            .split('/')
            .all(|part| !matches!(part, "" | "." | ".."));
    if fine {
        return Ok(());
    }
    let text = format!("{field} must be an absolute path without '.', '..' and empty parts");
    Err(LaunchError::field(field, text))
}

/// The bits of a plan's capabilities.
pub(crate) fn capabilities(caps: Option<&[String]>) -> Result<u64> {
    let Some(caps) = caps else {
        return capability_bits(DEFAULT_CAPS.iter().copied());
    };
    let bare = |name: &String| name.strip_prefix("CAP_").unwrap_or(name).to_owned();
    let names: Vec<String> = caps.iter().map(bare).collect();
    for name in &names {
        let name = name.as_str();
        if !CAP_NAMES.contains(&name) {
            return Err(LaunchError::field(
                "caps",
                format!("caps: no capability {name:?}"),
            ));
        }
        if !DEFAULT_CAPS.contains(&name) && !GRANTABLE.contains(&name) {
            let text = format!("the capability {name} would weaken the isolation");
            return Err(LaunchError::unsupported("caps", text));
        }
    }
    capability_bits(names.iter().map(String::as_str))
}

fn capability_bits<'a>(names: impl Iterator<Item = &'a str>) -> Result<u64> {
    let mut bits = 0;
    for name in names {
        let number = CAP_NAMES.iter().position(|known| *known == name);
        let number = number.ok_or_else(|| LaunchError::field("caps", "no such capability"))?;
        bits |= 1 << number;
    }
    Ok(bits)
}

/// Checks a sandbox's plan.
pub fn sandbox(plan: &SandboxPlan) -> Result<()> {
    check_name("id", &plan.id)?;
    if plan.id.contains(':') {
        return Err(LaunchError::field("id", "id must not contain ':'"));
    }
    let host = plan.hostname.as_bytes();
    let fine = |c: &u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'.' | b'_');
    if host.is_empty() || host.len() > HOSTNAME_MAX || !host.iter().all(fine) {
        let text = "hostname must be 1 to 64 letters, digits, '-', '.', '_'";
        return Err(LaunchError::field("hostname", text));
    }
    in_range("layers", plan.layers.len() as u64, 1, LAYERS_MAX as u64)?;
    for digest in &plan.layers {
        check_name("layers", digest)?;
    }
    in_range("upper.bytes", plan.upper.bytes, 1, i64::MAX as u64)?;
    in_range("memory_bytes", plan.memory_bytes, 0, i64::MAX as u64)?;
    in_range("swap_bytes", plan.swap_bytes, 0, i64::MAX as u64)?;
    in_range("cpu_milli", plan.cpu_milli, 0, 1 << 20)?;
    in_range(
        "cpu_weight",
        u64::from(plan.cpu_weight),
        1,
        u64::from(WEIGHT_MAX),
    )?;
    in_range("pids_max", plan.pids_max, 2, 1 << 22)?;
    in_range("nofile", plan.nofile, NOFILE_MIN, 1 << 30)?;
    in_range("pty_max", u64::from(plan.pty_max), 0, 1 << 20)?;
    in_range("shm_bytes", plan.shm_bytes, 4096, i64::MAX as u64)?;
    in_range("deadline_ms", plan.deadline_ms, 1, 3_600_000)?;
    mounts(plan)?;
    if plan.network != "loopback" {
        let text = format!("network {:?}: only \"loopback\" is there", plan.network);
        return Err(LaunchError::unsupported("network", text));
    }
    capabilities(plan.caps.as_deref())?;
    crate::filter::compile(&plan.seccomp).map(drop)
}

fn mounts(plan: &SandboxPlan) -> Result<()> {
    in_range("tmpfs", plan.tmpfs.len() as u64, 0, TMPFS_MAX as u64)?;
    for tmpfs in &plan.tmpfs {
        inside_path("tmpfs.path", &tmpfs.path)?;
        in_range("tmpfs.bytes", tmpfs.bytes, 4096, i64::MAX as u64)?;
        in_range("tmpfs.mode", u64::from(tmpfs.mode), 0, 0o1777)?;
    }
    in_range("files", plan.files.len() as u64, 0, FILES_MAX as u64)?;
    for path in plan.files.keys() {
        inside_path("files", path)?;
    }
    let all: usize = plan.files.values().map(|content| content.len()).sum();
    in_range("files", all as u64, 0, FILES_BYTES_MAX as u64)
}

fn too_long(what: &str, limit: usize) -> LaunchError {
    LaunchError::new(
        Code::TooLong,
        format!("{what} is longer than {limit} bytes"),
    )
    .with("limit", limit as i64)
}

pub fn cwd(cwd: &[u8]) -> Result<()> {
    if cwd.first() != Some(&b'/') || cwd.contains(&0) || cwd.len() > PATH_MAX {
        return Err(LaunchError::field(
            "cwd",
            format!("cwd must be an absolute path of at most {PATH_MAX} bytes"),
        ));
    }
    Ok(())
}

pub fn user(user: &str) -> Result<()> {
    if user.is_empty() || user.len() > USER_MAX || user.contains('\0') {
        return Err(LaunchError::field("user", "user must be 1 to 256 bytes"));
    }
    Ok(())
}

/// Checks the terminal of a run, if it is to have one.
pub fn terminal(plan: &RunPlan) -> Result<()> {
    let Some(size) = plan.tty else { return Ok(()) };
    if plan.control {
        let text = "a program with a terminal has no output beside it";
        return Err(LaunchError::field("control", text));
    }
    tty_size(size)
}

/// Checks the size of a terminal.
pub fn tty_size(size: TtySize) -> Result<()> {
    for (field, value) in [("rows", size.rows), ("cols", size.cols)] {
        in_range(field, u64::from(value), 1, u64::from(u16::MAX))?;
    }
    Ok(())
}

/// Checks a run's plan.
pub fn run(plan: &RunPlan) -> Result<()> {
    let name = plan.run.as_bytes();
    let fine = |c: &u8| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == b'-';
    if name.is_empty() || name.len() > RUN_NAME_MAX || !name.iter().all(fine) {
        return Err(LaunchError::field("run", "run must match [a-z0-9-]{1,64}"));
    }
    if plan.argv.is_empty() || plan.argv[0].is_empty() {
        return Err(LaunchError::field("argv", "argv must name a program"));
    }
    cwd(&plan.cwd)?;
    user(&plan.user)?;
    terminal(plan)?;
    if !(-20..=19).contains(&plan.nice) {
        return Err(LaunchError::field("nice", "nice must be -20 to 19"));
    }
    let mut all = 0;
    for argument in &plan.argv {
        if argument.contains(&0) {
            return Err(LaunchError::field("argv", "argv must not contain NUL"));
        }
        if argument.len() >= STRING_MAX {
            return Err(too_long("an argument", STRING_MAX - 1));
        }
        all += argument.len() + 1 + size_of::<usize>();
    }
    for (key, value) in &plan.env {
        if key.is_empty() || key.contains(&b'=') || key.contains(&0) || value.contains(&0) {
            return Err(LaunchError::field(
                "env",
                "env: bad name, or NUL in a value",
            ));
        }
        if key.len() + value.len() + 2 > STRING_MAX {
            return Err(too_long("an environment variable", STRING_MAX - 2));
        }
        all += key.len() + value.len() + 2 + size_of::<usize>();
    }
    if all > STRINGS_MAX {
        return Err(too_long("argv and env together", STRINGS_MAX));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_by_name() {
        assert_eq!(capabilities(Some(&[])), Ok(0));
        assert_eq!(
            capabilities(Some(&["CAP_KILL".to_owned(), "CHOWN".to_owned()])),
            Ok(0b10_0001)
        );
        let refused = capabilities(Some(&["SYS_ADMIN".to_owned()])).expect_err("refused");
        assert_eq!(refused.code, Code::Unsupported);
        let unknown = capabilities(Some(&["FLY".to_owned()])).expect_err("refused");
        assert_eq!(unknown.code, Code::BadRequest);
    }

    #[test]
    fn a_terminal_has_a_size_and_nothing_beside_it() {
        let mut plan = RunPlan {
            control: true,
            ..RunPlan::default()
        };
        assert_eq!(terminal(&plan), Ok(()));
        plan.tty = Some(TtySize { rows: 1, cols: 1 });
        let refused = terminal(&plan).expect_err("refused");
        assert_eq!(refused.detail["field"], "control".into());
        plan.control = false;
        assert_eq!(terminal(&plan), Ok(()));
        for (rows, cols, field) in [(0, 1, "rows"), (1, 0, "cols")] {
            plan.tty = Some(TtySize { rows, cols });
            let refused = terminal(&plan).expect_err("refused");
            assert_eq!(refused.detail["field"], field.into());
        }
    }

    #[test]
    fn paths_inside() {
        for bad in ["", "/", "a", "/a/../b", "/a//b", "/./a", "/a/", "/a\0"] {
            assert!(inside_path("files", bad).is_err(), "{bad:?}");
        }
        assert!(inside_path("files", "/etc/hosts").is_ok());
    }
}
