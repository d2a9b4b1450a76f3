//! Golden vectors of the client protocol, this side. The other side and the file's origin:
//! `tests/contract/native_vectors.py`.

use std::collections::BTreeMap;
use std::path::Path;

use dsec_launch::plan::{
    CgroupMode, CgroupProbe, Code, ErofsWay, IdmapProbe, LaunchError, Pressure, Probe, RunPlan,
    SandboxPlan, UpperKind, Usage,
};

fn vectors() -> BTreeMap<String, Vec<u8>> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/contract/vectors/native.txt");
    let text = std::fs::read_to_string(path).expect("the vectors are in the repository");
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (name, hex) = line.split_once(' ').expect("name and hex");
            let bytes = (0..hex.len() / 2)
                .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("hex"))
                .collect();
            (name.to_owned(), bytes)
        })
        .collect()
}

fn written<T: serde::Serialize>(value: &T) -> Vec<u8> {
    rmp_serde::to_vec_named(value).expect("encodes")
}

#[test]
fn sandbox_plans_are_read() {
    let all = vectors();
    let plan: SandboxPlan = rmp_serde::from_slice(&all["sandbox_plan"]).unwrap();
    assert_eq!(plan.id, "sbx-n1-abcdefghijklm");
    assert_eq!(plan.layers, ["sha256:aa", "sha256:bb"]);
    assert_eq!(
        (plan.upper.kind, plan.upper.bytes, plan.upper.inodes),
        (UpperKind::Auto, 1 << 30, 65536)
    );
    assert_eq!(
        (plan.memory_bytes, plan.swap_bytes, plan.cpu_milli),
        (512 << 20, 0, 1500)
    );
    assert_eq!(
        (plan.cpu_weight, plan.cpus.as_slice(), plan.pids_max),
        (200, &[0, 3][..], 4096)
    );
    assert_eq!(
        (plan.nofile, plan.shm_bytes, plan.pty_max, plan.deadline_ms),
        (65536, 64 << 20, 256, 30_000)
    );
    assert_eq!(
        plan.files["/etc/hosts"].as_slice(),
        b"127.0.0.1 localhost\n\xff"
    );
    assert_eq!(plan.seccomp.deny, ["mount"]);
    assert_eq!(plan.seccomp.ioctl_deny, [0x5412]);
    assert!(plan.no_new_privs && plan.caps.is_none() && plan.network == "loopback");

    let small: SandboxPlan = rmp_serde::from_slice(&all["sandbox_plan_small"]).unwrap();
    assert_eq!((small.upper.kind, small.upper.inodes), (UpperKind::Auto, 0));
    assert_eq!(
        (small.cpu_milli, small.cpu_weight, small.swap_bytes),
        (0, 100, 0)
    );
    assert!(!small.no_new_privs && small.files.is_empty() && small.network == "loopback");
}

#[test]
fn run_plans_are_read() {
    let plan: RunPlan = rmp_serde::from_slice(&vectors()["run_start"]).unwrap();
    assert_eq!(
        (plan.sandbox.as_str(), plan.run.as_str()),
        ("sbx-n1-abcdefghijklm", "p-1")
    );
    let argv: Vec<&[u8]> = plan.argv.iter().map(|a| a.as_slice()).collect();
    assert_eq!(argv, [&b"/bin/sh"[..], b"-c", b"echo \xff"]);
    let env: Vec<(&[u8], &[u8])> = plan
        .env
        .iter()
        .map(|(k, v)| (k.as_slice(), v.as_slice()))
        .collect();
    assert_eq!(env, [(&b"PATH"[..], &b"/bin"[..]), (b"X", b"\xfe")]);
    assert_eq!(
        (plan.cwd.as_slice(), plan.user.as_str()),
        (&b"/tmp/\xfd"[..], "1000:1000")
    );
    assert_eq!(plan.stdin.as_slice(), b"in\0put");
    assert_eq!(
        (plan.timeout_ms, plan.head_bytes, plan.tail_bytes),
        (60_000, 1 << 20, 1 << 20)
    );
    assert!(plan.memory_cgroup && !plan.stdin_open && plan.nice == 0);
}

#[test]
fn answers_are_written_as_the_client_reads_them() {
    let all = vectors();
    let probe = Probe {
        kernel: "6.12.0".into(),
        cgroup: CgroupProbe {
            mode: Some(CgroupMode::Hybrid),
            controllers: vec!["memory".into(), "cpu".into(), "pids".into()],
        },
        erofs: Some(ErofsWay::File),
        overlay: None,
        idmap: IdmapProbe {
            erofs: true,
            ext4: true,
            tmpfs: false,
            btrfs: false,
        },
        upper: vec![UpperKind::Btrfs, UpperKind::Tmpfs],
        network: Some("sk_lookup".into()),
        reasons: BTreeMap::from([("overlay".into(), "no".into())]),
    };
    assert_eq!(written(&probe), all["probe"]);
    let usage = Usage {
        memory_bytes: 1 << 33,
        memory_peak_bytes: 2,
        swap_bytes: 3,
        cpu_us: 4,
        user_us: 5,
        system_us: 6,
        pids: 7,
        oom_kills: 8,
        pids_max_events: 9,
        throttled_us: 12,
        memory_max_events: 13,
        pressure: Pressure {
            cpu_us: Some(14),
            memory_us: Some(0),
            io_us: None,
        },
        disk_bytes: 10,
        disk_inodes: 11,
    };
    assert_eq!(written(&usage), all["usage"]);
    let error = LaunchError::new(Code::NoProgram, "/bin/x: none")
        .with("step", "exec")
        .with("errno", 2i64);
    assert_eq!(written(&error), all["error"]);
}
