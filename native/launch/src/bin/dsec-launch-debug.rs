//! The launch crate without the runtime, for its tests and measurements.
//!
//! `PLAN` and `RUN` are JSON files in the form of `docs/reference/native.md`.

use std::time::{Duration, Instant};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["launcher", ..] => dsec_launch::launcher::main(&arguments[1..]),
        ["idle-user-namespace"] => dsec_launch::probe::idle_user_namespace(),
        ["failpoints"] => {
            for name in dsec_launch::failpoint::NAMES {
                println!("{name}");
            }
        }
        _ => {
            eprintln!("usage: dsec-launch-debug launcher|failpoints");
            std::process::exit(2);
        }
    }
    let _ = (Duration::ZERO, Instant::now());
}
