//! The native daemon of a node: keeper, runtime, launcher and the init of a container.

mod args;
mod backend;
mod fail;
mod keeper;
mod kproto;
mod log;
mod marks;
mod netchild;
mod outframe;
mod proto;
mod real;
mod record;
mod serve;
mod store;
mod util;

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

use args::{Options, USAGE};
use backend::Backend;

/// Its memory is bounded, and sandboxes of a whole node hang on it.
const NET_OOM_SCORE_ADJ: i32 = -900;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let role = args.first().and_then(|a| a.to_str()).unwrap_or("");
    let rest = args.get(1..).unwrap_or_default();
    let result = match role {
        "keeper" => keeper(rest),
        "serve" => serve(rest),
        "launcher" => dsec_launch::launcher::main(),
        "idle-user-namespace" => dsec_launch::probe::idle_user_namespace(),
        "net" => match net(rest) {
            Some(result) => result,
            None => {
                eprint!("usage:\n{}", dsec_net::program::USAGE);
                return ExitCode::from(2);
            }
        },
        "failpoints" => {
            for name in dsec_launch::failpoint::NAMES.iter().chain(fail::NAMES) {
                println!("{name}");
            }
            Ok(())
        }
        "version" | "--version" => {
            println!("dsec-runtime {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("dsec-runtime {role}: {e}");
            ExitCode::FAILURE
        }
    }
}

fn options(args: &[OsString]) -> io::Result<Options> {
    Options::parse(args).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))
}

fn keeper(args: &[OsString]) -> io::Result<()> {
    // It lives long: whatever else its starter had open must not stay open with it, a pipe whose end
    // somebody waits for, a lock. Nothing of ours is open yet.
    dsec_sys::process::close_all_but(&[0, 1, 2])?;
    let options = options(args)?;
    std::fs::create_dir_all(&options.run_dir)?;
    if options.foreground {
        log::init("keeper", options.log_path());
        return keeper::run(options);
    }
    background(&options)
}

/// Starts the keeper as a daemon: a fresh process in a session of its own, whose parent ends. Returns
/// once clients can connect.
fn background(options: &Options) -> io::Result<()> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["keeper", "--foreground"])
        .args(options.to_args())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .current_dir("/")
        .process_group(0)
        .spawn()?;
    let mut said = String::new();
    if let Some(mut out) = child.stdout.take() {
        let mut line = [0u8; 64];
        let n = out.read(&mut line)?;
        said.push_str(&String::from_utf8_lossy(&line[..n]));
    }
    if said.trim() == "ready" {
        return Ok(());
    }
    let mut why = String::new();
    if let Some(err) = child.stderr.take() {
        let _ = err.take(4096).read_to_string(&mut why);
    }
    let _ = child.wait();
    io::stderr().write_all(why.as_bytes())?;
    Err(io::Error::other("the keeper did not start"))
}

/// The process that serves the connections of steered sandboxes.
fn net(args: &[OsString]) -> Option<io::Result<()>> {
    let words: Option<Vec<&str>> = args.iter().map(|arg| arg.to_str()).collect();
    let words = words?;
    if words.contains(&"--with-parent") {
        // The keeper's is that of who is killed last.
        if let Err(e) = util::shield_from_oom(NET_OOM_SCORE_ADJ) {
            info!("oom_score_adj.refused", error = e);
        }
    }
    dsec_net::program::run(&words)
}

fn serve(args: &[OsString]) -> io::Result<()> {
    let options = options(args)?;
    log::init("runtime", options.log_path());
    let result = serve::run(options);
    if let Err(e) = &result {
        warning!("runtime.failed", error = e);
    }
    result
}

fn open_backend(options: &Options) -> io::Result<Arc<dyn Backend>> {
    Ok(Arc::new(
        real::Real::open(options).map_err(io::Error::other)?,
    ))
}
