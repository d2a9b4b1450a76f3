//! Putting a container together, and entering one.
//!
//! The pieces a runtime prepares (cgroups, layers, the writable part, a network namespace) have a
//! module each and know nothing of one another; [`launcher::Launcher`] joins them in a process of
//! its own. [`assembly`] is the usual order of doing all of it, with everything undone on failure.

pub mod assembly;
mod backing;
pub mod cgroup;
pub mod check;
pub mod config;
mod create;
pub mod dying;
mod enter;
pub mod failpoint;
mod file_helper;
mod filter;
mod fullness;
mod hierarchy;
mod init;
pub mod launcher;
pub mod layers;
mod mounting;
pub mod netns;
pub mod plan;
pub mod probe;
pub mod processes;
mod run_cgroup;
mod run_files;
mod server;
mod spare;
pub mod switch;
mod syscalls;
pub mod terminal;
pub mod upper;
mod users;
mod views;
mod wire;

pub use config::Config;
pub use plan::{Code, LaunchError, Probe, Result, RunPlan, RunPolicy, SandboxPlan, TtySize, Usage};
