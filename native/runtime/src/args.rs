//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

pub const USAGE: &str = "\
usage: dsec-runtime keeper [--foreground] [OPTIONS]   start the keeper (and with it the runtime)
       dsec-runtime serve [OPTIONS] --fds=A,B         the runtime; started by the keeper
       dsec-runtime launcher ...                      started by the runtime
       dsec-runtime idle-user-namespace               started by the probe
       dsec-runtime net serve|probe ...               what steered sandboxes connect to
       dsec-runtime failpoints                        names of the failpoints
       dsec-runtime version
OPTIONS
  --run-dir DIR     sockets, pinned namespaces, handles    (/run/dsec)
  --state-dir DIR   writable layers                        (/var/lib/dsec)
  --cgroup NAME     below the root of each hierarchy       (dsec)
  --binary PATH     what the keeper starts as the runtime  (this program)
";

/// What every role is told.
#[derive(Debug, Clone)]
pub struct Options {
    pub run_dir: PathBuf,
    pub state_dir: PathBuf,
    pub cgroup: String,
    pub binary: PathBuf,
    pub foreground: bool,
    /// The runtime's inherited descriptors: the keeper's socket, the listening socket.
    pub fds: Option<(i32, i32)>,
}

impl Options {
    pub fn parse(args: &[OsString]) -> Result<Self, String> {
        let mut out = Self {
            run_dir: "/run/dsec".into(),
            state_dir: "/var/lib/dsec".into(),
            cgroup: "dsec".into(),
            binary: own_path()?,
            foreground: false,
            fds: None,
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let text = arg.to_str().ok_or("an option is not UTF-8")?;
            let (name, inline) = match text.split_once('=') {
                Some((n, v)) => (n, Some(v.to_owned())),
                None => (text, None),
            };
            if name == "--foreground" {
                out.foreground = true;
                continue;
            }
            let value = match inline {
                Some(v) => v,
                None => args
                    .next()
                    .and_then(|v| v.to_str())
                    .ok_or(format!("{name} needs a value"))?
                    .to_owned(),
            };
            out.set(name, value)?;
        }
        Ok(out)
    }

    fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        match name {
            "--run-dir" => self.run_dir = absolute(name, &value)?,
            "--state-dir" => self.state_dir = absolute(name, &value)?,
            "--binary" => self.binary = absolute(name, &value)?,
            "--cgroup" => self.cgroup = cgroup_name(&value)?,
            "--fds" => {
                let (a, b) = value.split_once(',').ok_or("--fds=A,B")?;
                let number = |s: &str| s.parse::<i32>().map_err(|e| format!("--fds: {e}"));
                self.fds = Some((number(a)?, number(b)?));
            }
            _ => return Err(format!("unknown option {name}")),
        }
        Ok(())
    }

    /// The same options for a child.
    pub fn to_args(&self) -> Vec<OsString> {
        let mut out = Vec::new();
        for (name, value) in [
            ("--run-dir", self.run_dir.as_os_str()),
            ("--state-dir", self.state_dir.as_os_str()),
            ("--cgroup", self.cgroup.as_ref()),
            ("--binary", self.binary.as_os_str()),
        ] {
            out.push(name.into());
            out.push(value.to_owned());
        }
        out
    }

    pub fn net_socket(&self) -> PathBuf {
        self.run_dir.join("net.sock")
    }

    pub fn log_path(&self) -> PathBuf {
        self.run_dir.join("runtime.log")
    }
}

/// Where this program was started from; right also after the file was replaced by a newer one.
fn own_path() -> Result<PathBuf, String> {
    const GONE: &str = " (deleted)";
    let path = std::env::current_exe().map_err(|e| format!("/proc/self/exe: {e}"))?;
    Ok(match path.to_str().and_then(|p| p.strip_suffix(GONE)) {
        Some(p) => p.into(),
        None => path,
    })
}

fn absolute(name: &str, value: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(value);
    if !path.is_absolute() {
        return Err(format!("{name} must be an absolute path"));
    }
    Ok(path)
}

fn cgroup_name(value: &str) -> Result<String, String> {
    let good = !value.is_empty()
        && value.split('/').all(|part| {
            !part.is_empty()
                && !part.starts_with('.')
                && part
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_.@".contains(c))
        });
    if good {
        Ok(value.to_owned())
    } else {
        Err("--cgroup: letters, digits, - _ . @ and / between names".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Options, String> {
        Options::parse(&args.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn options_survive_being_handed_down() {
        let a = parse(&["--run-dir", "/r", "--cgroup=a/b", "--fds=7,8"]).unwrap();
        assert_eq!(a.fds, Some((7, 8)));
        let b = Options::parse(&a.to_args()).unwrap();
        assert_eq!((b.run_dir, b.cgroup), (a.run_dir, a.cgroup));
    }

    #[test]
    fn bad_options_are_refused() {
        for bad in [
            &["--run-dir", "r"][..],
            &["--cgroup", "../x"],
            &["--cgroup", ""],
            &["--cgroup", "a//b"],
            &["--nothing", "x"],
            &["--run-dir"],
            &["--fds", "3"],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
