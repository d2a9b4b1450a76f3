//! `dsec-net` by itself; in a node it is a role of the one binary.

use std::process::ExitCode;

use dsec_net::program::{run, USAGE};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&words) {
        Some(Ok(())) => ExitCode::SUCCESS,
        Some(Err(error)) => {
            eprintln!("dsec-net: {error}");
            ExitCode::FAILURE
        }
        None => {
            eprint!("usage:\n{USAGE}");
            ExitCode::from(2)
        }
    }
}
