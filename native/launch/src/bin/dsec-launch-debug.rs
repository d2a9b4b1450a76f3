//! The launch crate without the runtime, for its tests and measurements.

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["launcher"] => dsec_launch::launcher::main(),
        ["idle-user-namespace"] => dsec_launch::probe::idle_user_namespace(),
        ["probe", run_dir, state_dir] => {
            let config = dsec_launch::Config {
                run_dir: run_dir.into(),
                state_dir: state_dir.into(),
                cgroup: "dsec".to_owned(),
                binary: "/proc/self/exe".into(),
            };
            println!("{:#?}", dsec_launch::probe::probe(&config));
        }
        // A set-id program for tests: busybox gives such privileges up by itself.
        ["euid"] => println!("{}", rustix::process::geteuid().as_raw()),
        ["failpoints"] => {
            for name in dsec_launch::failpoint::NAMES {
                println!("{name}");
            }
        }
        _ => {
            eprintln!("usage: dsec-launch-debug launcher|failpoints|probe RUN_DIR STATE_DIR");
            std::process::exit(2);
        }
    }
}
