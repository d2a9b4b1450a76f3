//! How fast files go over the socket, beside `cat | cat` in the same run: `cargo run --release --example measure DIR`.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use dsec_files::{serve, Settings, DATA};

const BIG: usize = 1 << 30;
const SMALL: usize = 2_000;
const CHUNK: usize = 256 << 10;

fn control(out: &mut Vec<u8>, op: &str, path: &Path, data: Option<&[u8]>) {
    use rmpv::Value;
    let path = path.as_os_str().as_encoded_bytes();
    let mut args = vec![(Value::from("path"), Value::from(path))];
    if let Some(data) = data {
        args.push((Value::from("data"), Value::from(data)));
    }
    if op == "remove" {
        args.push((Value::from("recursive"), Value::from(true)));
    }
    let request = Value::Map(vec![
        (Value::from("id"), Value::from(1)),
        (Value::from("op"), Value::from(op)),
        (Value::from("args"), Value::Map(args)),
    ]);
    let mut body = Vec::new();
    rmpv::encode::write_value(&mut body, &request).expect("encodes");
    out.extend((body.len() as u32).to_be_bytes());
    out.extend(body);
}

struct Client(UnixStream);

impl Client {
    fn send(&mut self, op: &str, path: &Path, data: Option<&[u8]>) {
        let mut out = Vec::new();
        control(&mut out, op, path, data);
        self.0.write_all(&out).expect("sent");
    }

    /// Reads frames to the answer; gives the data to `each`.
    fn reply(&mut self, mut each: impl FnMut(&[u8])) {
        let mut buf = vec![0; 1 << 20];
        loop {
            let mut head = [0; 4];
            self.0.read_exact(&mut head).expect("a frame");
            let raw = u32::from_be_bytes(head);
            let len = (raw & !DATA) as usize;
            self.0.read_exact(&mut buf[..len]).expect("its body");
            if raw & DATA != 0 {
                each(&buf[..len]);
                continue;
            }
            let value = rmpv::decode::read_value(&mut &buf[..len]).expect("msgpack");
            let has = |key: &str| {
                value
                    .as_map()
                    .is_some_and(|m| m.iter().any(|(k, _)| k.as_str() == Some(key)))
            };
            assert!(!has("err"), "{value}");
            if has("ok") {
                return;
            }
        }
    }

    fn call(&mut self, op: &str, path: &Path, data: Option<&[u8]>) {
        self.send(op, path, data);
        self.reply(|_| {});
    }

    fn upload(&mut self, op: &str, path: &Path, content: impl Iterator<Item = Vec<u8>>) {
        self.send(op, path, None);
        for mut part in content {
            let head = (part.len() as u32 | DATA).to_be_bytes();
            part.splice(0..0, head);
            self.0.write_all(&part).expect("sent");
        }
        self.0.write_all(&DATA.to_be_bytes()).expect("sent");
        self.reply(|_| {});
    }
}

fn rate(what: &str, bytes: usize, run: impl FnOnce()) {
    let begun = Instant::now();
    run();
    let seconds = begun.elapsed().as_secs_f64();
    println!("{what:<40} {:>8.0} MB/s", bytes as f64 / seconds / 1e6);
}

fn count(what: &str, run: impl FnOnce()) {
    let begun = Instant::now();
    run();
    let seconds = begun.elapsed().as_secs_f64();
    println!("{what:<40} {:>8.0} files/s", SMALL as f64 / seconds);
}

fn shell(command: &str, dir: &Path) {
    let status = Command::new("sh")
        .args(["-c", command])
        .current_dir(dir)
        .status();
    assert!(status.is_ok_and(|status| status.success()), "{command}");
}

fn main() {
    let dir = std::env::args().nth(1).expect("usage: measure DIR");
    let dir = Path::new(&dir).join(format!("measure-{}", std::process::id()));
    std::fs::create_dir(&dir).expect("a new directory");
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    std::thread::spawn(move || serve(OwnedFd::from(theirs), &Settings::new("/")));
    let mut c = Client(ours);
    let big = dir.join("big");
    for _ in 0..2 {
        let parts = || (0..BIG / CHUNK).map(|i| vec![i as u8; CHUNK]);
        rate("write 1 GiB", BIG, || c.upload("write", &big, parts()));
        rate("read 1 GiB", BIG, || {
            let mut sum = 0;
            c.send("read", &big, None);
            c.reply(|part| sum += part.len());
            assert_eq!(sum, BIG);
        });
        rate("cat | cat > /dev/null", BIG, || {
            shell("cat big | cat > /dev/null", &dir)
        });
        rate("cat | cat > file", BIG, || {
            shell("cat big | cat > copy", &dir)
        });
        rate("hash", BIG, || c.call("hash", &big, None));
        rate("tree.out of 1 GiB", BIG, || c.call("tree.out", &big, None));
    }
    let tree = dir.join("tree");
    let content = vec![7; 2048];
    for _ in 0..2 {
        std::fs::create_dir(&tree).expect("made");
        count("write, one at a time", || {
            for i in 0..SMALL {
                c.call("write", &tree.join(format!("f{i}")), Some(&content));
            }
        });
        count("read, one at a time", || {
            for i in 0..SMALL {
                c.call("read", &tree.join(format!("f{i}")), None);
            }
        });
        let mut stream = Vec::new();
        count("tree.out", || {
            c.send("tree.out", &tree, None);
            c.reply(|part| stream.extend_from_slice(part));
        });
        let copy = dir.join("copy-tree");
        std::fs::create_dir(&copy).expect("made");
        let parts = || stream.chunks(CHUNK).map(<[u8]>::to_vec);
        count("tree.in, new", || c.upload("tree.in", &copy, parts()));
        count("tree.in, over", || c.upload("tree.in", &copy, parts()));
        count("tar c | tar x", || {
            shell(
                "mkdir tarred && tar -C tree -c . | tar -C tarred -x && rm -r tarred",
                &dir,
            );
        });
        count("remove", || c.call("remove", &copy, None));
        c.call("remove", &tree, None);
    }
    c.call("remove", &dir, None);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status
        .lines()
        .find(|line| line.starts_with("VmHWM"))
        .unwrap_or("");
    println!("both ends: {peak}");
}
