//! The seccomp filter of a sandbox: an allow-list, extendable by a plan.
//!
//! Known and not allowed gives EPERM; newer than this table gives ENOSYS, so that a C library falls
//! back instead of giving up. So do some old ones (`ABSENT`); `clone3` because its flags lie in memory
//! where no filter sees them, while `clone`, to which everybody falls back, has them in a register.

use dsec_sys::seccomp::{Instruction, MAX_INSTRUCTIONS};

use crate::plan::{LaunchError, Result, SeccompSpec};
use crate::syscalls::{ABSENT, ALLOWED, KNOWN_DENIED};

const ALLOW: u32 = 0x7fff_0000;
const KILL: u32 = 0x8000_0000;
const ERRNO: u32 = 0x0005_0000;
const EPERM: u32 = ERRNO | libc::EPERM as u32;
/// What a kernel without a protocol says.
const NO_PROTOCOL: u32 = ERRNO | libc::EPROTONOSUPPORT as u32;
const ENOSYS: u32 = ERRNO | libc::ENOSYS as u32;

const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const IF_EQUAL: u16 = 0x15;
const IF_AT_LEAST: u16 = 0x35;
const IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;

/// Offsets in `seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCH_AT: u32 = 4;
const ARGUMENTS_AT: u32 = 16;

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;
/// x32 system calls of x86_64 carry this bit.
const X32: u32 = 0x4000_0000;

/// Every namespace flag of `clone`.
const NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWCGROUP) as u32;
/// What `personality` may be asked: Linux, Linux in 32 bits, both without randomisation, query.
const PERSONALITIES: [u32; 5] = [0, 8, 0x2_0000, 0x2_0008, u32::MAX];
const IOCTL_DENY_MAX: usize = 512;
/// Segments whose tree conditional jumps can cross from any place in it, its returns included.
const SHORT_JUMPS: usize = 250;

/// A filter, ready to install.
pub(crate) type Program = Vec<Instruction>;

fn number(field: &str, name: &str) -> Result<u32> {
    let all = ALLOWED.iter().chain(KNOWN_DENIED);
    let found = all.clone().find(|(known, _)| *known == name);
    found.map(|(_, nr)| *nr).ok_or_else(|| {
        let text = format!("{field}: {name:?} is not a system call known here");
        LaunchError::field(field, text)
    })
}

fn op(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    Instruction { code, jt, jf, k }
}

/// Compiles the filter of a plan.
pub(crate) fn compile(spec: &SeccompSpec) -> Result<Program> {
    if spec.ioctl_deny.len() > IOCTL_DENY_MAX {
        let text = format!("seccomp.ioctl_deny: at most {IOCTL_DENY_MAX} commands");
        return Err(LaunchError::field("seccomp.ioctl_deny", text));
    }
    let numbers = |field: &str, names: &[String]| -> Result<Vec<u32>> {
        names.iter().map(|name| number(field, name)).collect()
    };
    let extra = numbers("seccomp.allow", &spec.allow)?;
    let denied = numbers("seccomp.deny", &spec.deny)?;
    let mut allowed: Vec<u32> = ALLOWED.iter().map(|(_, nr)| *nr).collect();
    allowed.extend(&extra);
    // A name in both lists is denied: of two wishes the stricter one.
    allowed.retain(|nr| !denied.contains(nr));
    allowed.sort_unstable();
    allowed.dedup();
    let absent = ABSENT.iter().map(|name| number("seccomp", name));
    let absent = absent.collect::<Result<Vec<u32>>>()?;
    let mut program = head(EPERM);
    let checked = |nr: libc::c_long| {
        let nr = nr as u32;
        allowed.contains(&nr) && !extra.contains(&nr)
    };
    if checked(libc::SYS_clone) {
        on(&mut program, libc::SYS_clone as u32, &clone_body());
    }
    if checked(libc::SYS_personality) {
        on(
            &mut program,
            libc::SYS_personality as u32,
            &equal_body(&PERSONALITIES, ALLOW, EPERM),
        );
    }
    if checked(libc::SYS_socket) {
        on(&mut program, libc::SYS_socket as u32, &socket_body());
    }
    if !spec.ioctl_deny.is_empty() && allowed.contains(&(libc::SYS_ioctl as u32)) {
        let mut body = equal_body(&spec.ioctl_deny, EPERM, ALLOW);
        body[0] = argument(1);
        on(&mut program, libc::SYS_ioctl as u32, &body);
    }
    let newest = ALLOWED.iter().chain(KNOWN_DENIED).map(|(_, nr)| *nr).max();
    let mut verdicts = segments(newest.unwrap_or(0), |nr| {
        if absent.contains(&nr) && !extra.contains(&nr) {
            ENOSYS
        } else if allowed.binary_search(&nr).is_ok() {
            ALLOW
        } else {
            EPERM
        }
    });
    verdicts.push((newest.map_or(0, |nr| nr + 1), ENOSYS));
    if cfg!(target_arch = "x86_64") {
        verdicts.push((X32, EPERM));
    }
    program.extend(tree(&verdicts));
    if program.len() > MAX_INSTRUCTIONS {
        return Err(LaunchError::field(
            "seccomp",
            "seccomp: the filter is too long",
        ));
    }
    Ok(program)
}

/// What an init may do: reap, sleep, end.
pub(crate) fn for_init() -> Program {
    let allowed = [
        libc::SYS_wait4,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_restart_syscall,
        libc::SYS_exit_group,
    ]
    .map(|nr| nr as u32);
    let newest = allowed.iter().max().copied().unwrap_or(0);
    let verdict = |nr| if allowed.contains(&nr) { ALLOW } else { EPERM };
    let mut program = head(KILL);
    program.extend(tree(&segments(newest + 1, verdict)));
    program
}

/// `foreign` is the answer to another architecture's calls.
fn head(foreign: u32) -> Program {
    vec![
        op(LOAD, 0, 0, ARCH_AT),
        op(IF_EQUAL, 1, 0, ARCH),
        op(RETURN, 0, 0, foreign),
        op(LOAD, 0, 0, NUMBER_AT),
    ]
}

/// `body`, which ends with a return on every path, for one system call.
fn on(program: &mut Program, number: u32, body: &[Instruction]) {
    if let Ok(length) = u8::try_from(body.len()) {
        program.push(op(IF_EQUAL, 0, length, number));
    } else {
        program.push(op(IF_EQUAL, 1, 0, number));
        // Conditional jumps reach 255 instructions, this one any distance.
        program.push(op(JUMP, 0, 0, body.len() as u32));
    }
    program.extend_from_slice(body);
}

fn argument(index: u32) -> Instruction {
    // The low half; both architectures are little-endian.
    op(LOAD, 0, 0, ARGUMENTS_AT + 8 * index)
}

fn clone_body() -> Program {
    vec![
        argument(0),
        op(IF_ANY_BIT, 0, 1, NAMESPACES),
        op(RETURN, 0, 0, EPERM),
        op(RETURN, 0, 0, ALLOW),
    ]
}

/// Not AF_VSOCK: it reaches the hypervisor past every network namespace. Nor the kernel's messages about
/// devices: every namespace that belongs to the host's user namespace, as ours do, hears those of the machine.
fn socket_body() -> Program {
    vec![
        argument(0),
        op(IF_EQUAL, 0, 1, libc::AF_VSOCK as u32),
        op(RETURN, 0, 0, EPERM),
        op(IF_EQUAL, 0, 3, libc::AF_NETLINK as u32),
        argument(2),
        op(IF_EQUAL, 0, 1, libc::NETLINK_KOBJECT_UEVENT as u32),
        op(RETURN, 0, 0, NO_PROTOCOL),
        op(RETURN, 0, 0, ALLOW),
    ]
}

/// Argument 0 is one of `values` -> `then`, else `otherwise`.
fn equal_body(values: &[u32], then: u32, otherwise: u32) -> Program {
    let mut body = vec![argument(0)];
    for value in values {
        body.extend([op(IF_EQUAL, 0, 1, *value), op(RETURN, 0, 0, then)]);
    }
    body.push(op(RETURN, 0, 0, otherwise));
    body
}

/// The numbers from which on an answer holds, and the answer; the last one holds for all that follow.
type Segments = Vec<(u32, u32)>;

fn segments(upto: u32, verdict: impl Fn(u32) -> u32) -> Segments {
    let mut all: Segments = Vec::new();
    for nr in 0..=upto {
        let answer = verdict(nr);
        if all.last().map_or(true, |(_, last)| *last != answer) {
            all.push((nr, answer));
        }
    }
    all
}

/// Finds the answer by halving. Not for the calls themselves, whose answers the kernel caches, but for the
/// installing: the kernel runs the program once for every number it has to fill that cache, which with a
/// linear program was the dearest step of a short run.
fn tree(segments: &[(u32, u32)]) -> Program {
    if segments.len() > SHORT_JUMPS {
        let (left, right) = segments.split_at(segments.len() / 2);
        let (first, left, right) = (right[0].0, tree(left), tree(right));
        let mut program = vec![op(IF_AT_LEAST, 0, 1, first)];
        program.push(op(JUMP, 0, 0, left.len() as u32));
        program.extend(left);
        program.extend(right);
        return program;
    }
    let mut answers: Vec<u32> = segments.iter().map(|(_, answer)| *answer).collect();
    answers.sort_unstable();
    answers.dedup();
    let branches = segments.len().saturating_sub(1);
    let ends = |answer: u32| branches + answers.binary_search(&answer).unwrap_or(0);
    let mut program = Vec::with_capacity(branches + answers.len());
    branch(&mut program, segments, &ends);
    program.extend(answers.iter().map(|answer| op(RETURN, 0, 0, *answer)));
    program
}

/// One comparison for every border between segments; `ends` says where the return of an answer is.
fn branch(program: &mut Program, segments: &[(u32, u32)], ends: &impl Fn(u32) -> usize) {
    if segments.len() < 2 {
        return;
    }
    let (left, right) = segments.split_at(segments.len() / 2);
    let at = program.len();
    program.push(op(IF_AT_LEAST, 0, 0, right[0].0));
    for (half, hit) in [(left, false), (right, true)] {
        let target = match half {
            [(_, answer)] => ends(*answer),
            _ => program.len(),
        };
        // `tree` keeps within reach.
        let jump = (target - at - 1) as u8;
        if hit {
            program[at].jt = jump;
        } else {
            program[at].jf = jump;
        }
        branch(program, half, ends);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would do: the few operations used above.
    fn run(program: &[Instruction], arch: u32, nr: u32, arguments: [u32; 3]) -> u32 {
        let (mut at, mut value) = (0, 0);
        loop {
            let now = program[at];
            at += 1;
            let hit = match now.code {
                LOAD => {
                    value = match now.k {
                        NUMBER_AT => nr,
                        ARCH_AT => arch,
                        k => arguments[((k - ARGUMENTS_AT) / 8) as usize],
                    };
                    continue;
                }
                JUMP => {
                    at += now.k as usize;
                    continue;
                }
                RETURN => return now.k,
                IF_EQUAL => value == now.k,
                IF_AT_LEAST => value >= now.k,
                IF_ANY_BIT => value & now.k != 0,
                code => panic!("unknown operation {code}"),
            };
            at += usize::from(if hit { now.jt } else { now.jf });
        }
    }

    fn ask(spec: &SeccompSpec, nr: libc::c_long, arguments: [u32; 3]) -> u32 {
        let program = compile(spec).expect("a valid filter");
        run(&program, ARCH, nr as u32, arguments)
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn defaults() {
        let spec = SeccompSpec::default();
        for (_, nr) in ALLOWED {
            let nr = libc::c_long::from(*nr);
            if nr != libc::SYS_personality {
                assert_eq!(ask(&spec, nr, [0, 0, 0]), ALLOW, "{nr}");
            }
        }
        for (name, nr) in KNOWN_DENIED {
            let absent = *name == "clone3" || name.starts_with("io_") && !name.contains("uring");
            let expected = if absent { ENOSYS } else { EPERM };
            assert_eq!(
                ask(&spec, libc::c_long::from(*nr), [0, 0, 0]),
                expected,
                "{name}"
            );
        }
        assert_eq!(ask(&spec, 2000, [0, 0, 0]), ENOSYS);
        if cfg!(target_arch = "x86_64") {
            assert_eq!(ask(&spec, libc::c_long::from(X32), [0, 0, 0]), EPERM);
            assert_eq!(ask(&spec, libc::c_long::from(u32::MAX), [0, 0, 0]), EPERM);
        }
        assert_eq!(
            ask(&spec, libc::SYS_clone, [NAMESPACES & 0x1000_0000, 0, 0]),
            EPERM
        );
        assert_eq!(ask(&spec, libc::SYS_personality, [0x2_0000, 0, 0]), ALLOW);
        assert_eq!(ask(&spec, libc::SYS_personality, [1, 0, 0]), EPERM);
        assert_eq!(
            ask(&spec, libc::SYS_socket, [libc::AF_VSOCK as u32, 0, 0]),
            EPERM
        );
        let netlink = |protocol: libc::c_int| {
            let arguments = [libc::AF_NETLINK as u32, 0, protocol as u32];
            ask(&spec, libc::SYS_socket, arguments)
        };
        assert_eq!(netlink(libc::NETLINK_ROUTE), ALLOW);
        assert_eq!(netlink(libc::NETLINK_KOBJECT_UEVENT), NO_PROTOCOL);
    }

    #[test]
    fn every_number_finds_its_answer_in_trees_of_any_size() {
        for segment in [1u32, 2, 7, 500] {
            let verdict = |nr: u32| [EPERM, ALLOW, ENOSYS][(nr / segment) as usize % 3];
            let all = segments(999, verdict);
            let program = [head(KILL), tree(&all)].concat();
            for nr in 0..=999 {
                assert_eq!(
                    run(&program, ARCH, nr, [0, 0, 0]),
                    verdict(nr),
                    "{segment} {nr}"
                );
            }
            assert_eq!(run(&program, ARCH, u32::MAX, [0, 0, 0]), verdict(999));
        }
    }

    #[test]
    fn programs_are_short_and_an_init_may_do_four_things() {
        let program = compile(&SeccompSpec::default()).expect("a valid filter");
        assert!(program.len() < 160, "{}", program.len());
        let init = for_init();
        let allowed = |nr: &u32| run(&init, ARCH, *nr, [0, 0, 0]) == ALLOW;
        assert_eq!((0..u32::from(u16::MAX)).filter(allowed).count(), 4);
        assert_eq!(run(&init, 1, libc::SYS_wait4 as u32, [0, 0, 0]), KILL);
    }

    #[test]
    fn another_architecture_is_refused() {
        let program = compile(&SeccompSpec::default()).expect("a valid filter");
        assert_eq!(
            run(&program, 0x4000_0003, libc::SYS_read as u32, [0, 0, 0]),
            EPERM
        );
    }

    #[test]
    fn plans_extend_both_ways_and_deny_wins() {
        let spec = SeccompSpec {
            deny: names(&["ptrace", "unshare"]),
            allow: names(&["unshare", "clone3", "clone", "io_setup"]),
            ioctl_deny: vec![0x5412, 7],
        };
        assert_eq!(ask(&spec, libc::SYS_ptrace, [0, 0, 0]), EPERM);
        assert_eq!(ask(&spec, libc::SYS_unshare, [0, 0, 0]), EPERM);
        assert_eq!(ask(&spec, libc::SYS_clone3, [0, 0, 0]), ALLOW);
        assert_eq!(ask(&spec, libc::SYS_io_setup, [0, 0, 0]), ALLOW);
        assert_eq!(ask(&spec, libc::SYS_io_submit, [0, 0, 0]), ENOSYS);
        assert_eq!(ask(&spec, libc::SYS_clone, [0x1000_0000, 0, 0]), ALLOW);
        assert_eq!(ask(&spec, libc::SYS_ioctl, [0, 0x5412, 0]), EPERM);
        assert_eq!(ask(&spec, libc::SYS_ioctl, [0x5412, 8, 0]), ALLOW);
    }

    #[test]
    fn an_unknown_name_is_a_bad_request() {
        let spec = SeccompSpec {
            deny: names(&["no_such_call"]),
            ..SeccompSpec::default()
        };
        let error = compile(&spec).expect_err("refused");
        assert_eq!(error.code, crate::plan::Code::BadRequest);
    }
}
