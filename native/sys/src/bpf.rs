//! Small BPF programs, written instruction by instruction: an assembler, maps, loading, attaching.
//!
//! Nothing is compiled and no library is asked for: what is here is the part of `bpf(2)` that is used. Whether a
//! kernel can do it is found out by loading, never by its version.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::check;

const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;

/// What the verifier said of a refused program is kept up to here.
const LOG_BYTES: usize = 32 << 10;
/// Of it, the end is told: that is where the reason stands.
const LOG_TOLD: usize = 600;

/// A register. R1 to R5 are arguments and lost over a call, R0 is the answer, R6 to R9 are kept, R10 is the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reg(u8);

pub const R0: Reg = Reg(0);
pub const R1: Reg = Reg(1);
pub const R2: Reg = Reg(2);
pub const R3: Reg = Reg(3);
pub const R4: Reg = Reg(4);
pub const R5: Reg = Reg(5);
pub const R6: Reg = Reg(6);
pub const R7: Reg = Reg(7);
pub const R8: Reg = Reg(8);
pub const FRAME: Reg = Reg(10);

/// Helper functions of the kernel, by their numbers in linux/bpf.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Helper {
    MapLookup = 1,
    SkRelease = 86,
    SkAssign = 124,
}

/// Conditions of a jump, comparing 64 bits of a register with a constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    Equal = 0x10,
    Differs = 0x50,
}

/// One instruction, as the kernel reads it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Instruction {
    code: u8,
    /// Source in the upper half, destination in the lower.
    registers: u8,
    offset: i16,
    constant: i32,
}

/// A program that is being written. Jumps go to names, which stand anywhere behind them.
#[derive(Debug, Default)]
pub struct Assembler<'fd> {
    code: Vec<Instruction>,
    jumps: Vec<(usize, &'static str)>,
    places: Vec<(&'static str, usize)>,
    maps: std::marker::PhantomData<BorrowedFd<'fd>>,
}

const LOAD_WORD: u8 = 0x61;
const STORE_WORD: u8 = 0x62;
const LOAD_WIDE: u8 = 0x18;
const MOVE: u8 = 0xbf;
const MOVE_CONSTANT: u8 = 0xb7;
const ADD_CONSTANT: u8 = 0x07;
const AND_CONSTANT: u8 = 0x57;
const OR: u8 = 0x4f;
const JUMP: u8 = 0x05;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// In the source of a wide load: the constant is a map's descriptor.
const MAP_FD: u8 = 1;

impl<'fd> Assembler<'fd> {
    pub fn new() -> Self {
        Self::default()
    }

    fn put(&mut self, code: u8, to: u8, from: u8, offset: i16, constant: i32) -> &mut Self {
        self.code.push(Instruction {
            code,
            registers: from << 4 | to,
            offset,
            constant,
        });
        self
    }

    /// `to = from`
    pub fn copy(&mut self, to: Reg, from: Reg) -> &mut Self {
        self.put(MOVE, to.0, from.0, 0, 0)
    }

    /// `to = value`
    pub fn set(&mut self, to: Reg, value: i32) -> &mut Self {
        self.put(MOVE_CONSTANT, to.0, 0, 0, value)
    }

    /// `to += value`
    pub fn add(&mut self, to: Reg, value: i32) -> &mut Self {
        self.put(ADD_CONSTANT, to.0, 0, 0, value)
    }

    /// `to &= value`
    pub fn and(&mut self, to: Reg, value: i32) -> &mut Self {
        self.put(AND_CONSTANT, to.0, 0, 0, value)
    }

    /// `to |= from`
    pub fn or(&mut self, to: Reg, from: Reg) -> &mut Self {
        self.put(OR, to.0, from.0, 0, 0)
    }

    /// `to` = the 32 bits at `from + offset`, the upper half zero.
    pub fn load(&mut self, to: Reg, from: Reg, offset: i16) -> &mut Self {
        self.put(LOAD_WORD, to.0, from.0, offset, 0)
    }

    /// The 32 bits at `to + offset` = value.
    pub fn store(&mut self, to: Reg, offset: i16, value: i32) -> &mut Self {
        self.put(STORE_WORD, to.0, 0, offset, value)
    }

    /// `to` = a map, which must be open until the program is loaded.
    pub fn map(&mut self, to: Reg, map: BorrowedFd<'fd>) -> &mut Self {
        self.put(LOAD_WIDE, to.0, MAP_FD, 0, map.as_raw_fd());
        self.put(0, 0, 0, 0, 0)
    }

    pub fn call(&mut self, helper: Helper) -> &mut Self {
        self.put(CALL, 0, 0, 0, helper as i32)
    }

    pub fn exit(&mut self) -> &mut Self {
        self.put(EXIT, 0, 0, 0, 0)
    }

    pub fn go(&mut self, place: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), place));
        self.put(JUMP, 0, 0, 0, 0)
    }

    pub fn go_if(&mut self, reg: Reg, when: When, value: i32, place: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), place));
        self.put(JUMP | when as u8, reg.0, 0, 0, value)
    }

    /// Jumps to `name` arrive here.
    pub fn place(&mut self, name: &'static str) -> &mut Self {
        self.places.push((name, self.code.len()));
        self
    }

    /// The instructions with every jump resolved; InvalidInput names a place that is missing or too far.
    fn finish(&self) -> io::Result<Vec<Instruction>> {
        let mut code = self.code.clone();
        for (at, name) in &self.jumps {
            let wrong = || io::Error::new(io::ErrorKind::InvalidInput, format!("bpf: {name}"));
            let found = self.places.iter().find(|(known, _)| known == name);
            let to = found.ok_or_else(wrong)?.1;
            let far = to.checked_sub(at + 1).ok_or_else(wrong)?;
            code[*at].offset = i16::try_from(far).map_err(|_| wrong())?;
        }
        Ok(code)
    }

    /// Loads the program. The error of a refused one ends with what the verifier said.
    pub fn load_program(&self, kind: &Kind, name: &str) -> io::Result<OwnedFd> {
        let code = self.finish()?;
        let mut log = vec![0u8; LOG_BYTES];
        let mut attr = ProgLoad {
            kind: kind.program,
            count: u32::try_from(code.len()).unwrap_or(u32::MAX),
            instructions: code.as_ptr() as u64,
            // No helper of ours is for GPL programs only.
            license: c"Apache-2.0".as_ptr() as u64,
            name: short_name(name),
            attach: kind.attach,
            ..ProgLoad::default()
        };
        // Without a log first: writing one costs more than the check itself.
        if let Ok(program) = descriptor(PROG_LOAD, &attr) {
            return Ok(program);
        }
        attr.log_level = 1;
        attr.log_size = LOG_BYTES as u32;
        attr.log = log.as_mut_ptr() as u64;
        descriptor(PROG_LOAD, &attr).map_err(|error| {
            let end = log.iter().position(|b| *b == 0).unwrap_or(LOG_BYTES);
            let said = String::from_utf8_lossy(&log[end.saturating_sub(LOG_TOLD)..end]);
            let text = format!("bpf program {name}: {error}: {}", said.trim());
            io::Error::new(error.kind(), text)
        })
    }
}

/// What a program is for: its type and where it is attached.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    program: u32,
    attach: u32,
}

/// Chooses the socket for a packet that belongs to no connection, per network namespace.
pub const SK_LOOKUP: Kind = Kind {
    program: 30,
    attach: 36,
};

#[repr(C)]
#[derive(Debug, Default)]
struct ProgLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach: u32,
}

#[repr(C)]
#[derive(Debug, Default)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    entries: u32,
    flags: u32,
    inner: u32,
    node: u32,
    name: [u8; 16],
}

#[repr(C)]
struct MapUpdate {
    map: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach: u32,
    flags: u32,
}

/// Names are letters, digits, `_` and `.`, 15 of them.
fn short_name(name: &str) -> [u8; 16] {
    let mut out = [0; 16];
    let good = name
        .bytes()
        .filter(|b| b.is_ascii_alphanumeric() || *b == b'_');
    for (to, from) in out[..15].iter_mut().zip(good) {
        *to = from;
    }
    out
}

fn call<T>(command: libc::c_int, attr: &T) -> io::Result<libc::c_long> {
    loop {
        // SAFETY: each attr is a repr(C) prefix of bpf_attr for its command, its size is passed along, and what its
        // pointers point to lives in the caller for the whole call.
        let rc = unsafe {
            let at = std::ptr::from_ref(attr);
            libc::syscall(libc::SYS_bpf, command, at, std::mem::size_of::<T>())
        };
        match check(rc) {
            // A load that was interrupted by a signal says EAGAIN.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

fn descriptor<T>(command: libc::c_int, attr: &T) -> io::Result<OwnedFd> {
    let fd = call(command, attr)?;
    // SAFETY: these commands return a new descriptor, close-on-exec, which is ours.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

/// An array of sockets. A socket that is closed leaves it by itself.
#[derive(Debug)]
pub struct SocketMap(OwnedFd);

impl SocketMap {
    pub fn new(entries: u32, name: &str) -> io::Result<Self> {
        const SOCKMAP: u32 = 15;
        let attr = MapCreate {
            kind: SOCKMAP,
            key_size: 4,
            value_size: 8,
            entries,
            name: short_name(name),
            ..MapCreate::default()
        };
        let fd = descriptor(MAP_CREATE, &attr).map_err(|error| {
            let text = format!("bpf map {name} (sockmap): {error}");
            io::Error::new(error.kind(), text)
        })?;
        Ok(Self(fd))
    }

    pub fn put(&self, index: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        let value = socket.as_raw_fd() as u64;
        let attr = MapUpdate {
            map: self.0.as_raw_fd() as u32,
            _pad: 0,
            key: std::ptr::from_ref(&index) as u64,
            value: std::ptr::from_ref(&value) as u64,
            flags: 0,
        };
        call(MAP_UPDATE_ELEM, &attr).map(drop)
    }
}

impl AsFd for SocketMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Attaches a program to a network namespace or a cgroup; off again once the link's last descriptor is closed.
pub fn attach(program: BorrowedFd<'_>, kind: &Kind, target: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let attr = LinkCreate {
        program: program.as_raw_fd() as u32,
        target: target.as_raw_fd() as u32,
        attach: kind.attach,
        flags: 0,
    };
    descriptor(LINK_CREATE, &attr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_go_where_their_names_stand_and_only_there() {
        let mut good = Assembler::new();
        good.go_if(R1, When::Equal, 7, "end")
            .set(R0, 1)
            .go("end")
            .set(R0, 2)
            .place("end")
            .exit();
        let code = good.finish().expect("finished");
        assert_eq!((code[0].offset, code[2].offset), (3, 1));
        let mut bad = Assembler::new();
        bad.place("start").go("start");
        assert!(bad.finish().is_err(), "a loop");
        let mut bad = Assembler::new();
        bad.go("nowhere").exit();
        assert!(bad.finish().is_err());
    }

    #[test]
    fn a_refused_program_says_why() {
        if !rustix::process::getuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let mut program = Assembler::new();
        program.exit();
        let error = program
            .load_program(&SK_LOOKUP, "bad")
            .expect_err("refused");
        assert!(error.to_string().contains("R0"), "{error}");
        let mut program = Assembler::new();
        program.set(R0, 1).exit();
        program.load_program(&SK_LOOKUP, "good").expect("loaded");
    }
}
