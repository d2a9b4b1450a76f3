//! The process end to end: programs in a sandbox, servers in a world, and what comes through between them.

mod kit;

use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::AsFd;

use dsec_net::dns::wire::{self, A, AAAA};
use dsec_net::table::{Action, Check, Of};
use kit::{
    allow, allow_range, connect, exchange, hello, is_reset, passes, refuses, resolve, rule, server,
    Node, Resolver,
};

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

#[test]
fn an_allowed_name_is_reached_and_both_ends_are_exact() {
    require!();
    let mut node = Node::new("");
    let resolver = Resolver::new(&node.world, &[("a.example", "20.0.0.1 2a00::1")]);
    let place = node.sandbox("one", vec![allow("a.example")]);
    let web = server(&node.world, 443);
    assert_eq!(resolve(&place, "a.example", A), (0, vec![ip("20.0.0.1")]));
    assert_eq!(resolve(&place, "a.example", AAAA), (0, vec![ip("2a00::1")]));
    let mut client = connect(&place, "20.0.0.1:443").expect("connected");
    let mut outside = passes(&web, &mut client, &hello("A.example"));
    assert_eq!(
        outside.local_addr().expect("its address").to_string(),
        "20.0.0.1:443"
    );
    // One direction ends, the other goes on.
    client.write_all(b"last words").expect("written");
    client.shutdown(Shutdown::Write).expect("ended");
    let mut rest = Vec::new();
    outside.read_to_end(&mut rest).expect("read to the end");
    assert_eq!(rest, b"last words");
    let body: Vec<u8> = (0..3_000_000u32).map(|n| n as u8).collect();
    let sent = body.clone();
    let writer = std::thread::spawn(move || outside.write_all(&sent).expect("written"));
    let mut got = Vec::new();
    client.read_to_end(&mut got).expect("read to the end");
    writer.join().expect("written");
    assert!(got == body);
    assert_eq!(resolver.questions().len(), 2);
}

#[test]
fn what_no_rule_allows_is_refused_and_nothing_leaves() {
    require!();
    let mut node = Node::new("");
    let resolver = Resolver::new(&node.world, &[("b.example", "20.0.0.2")]);
    let place = node.sandbox("one", vec![allow("a.example")]);
    node.control.watch();
    let web = server(&node.world, 443);
    for name in [
        "b.example",
        "x.a.example",
        "secret.in.the.question",
        "example",
    ] {
        assert_eq!(resolve(&place, name, A), (wire::NO_NAME, vec![]), "{name}");
    }
    assert!(
        resolver.questions().is_empty(),
        "{:?}",
        resolver.questions()
    );
    assert!(refuses(&place, "20.0.0.2:443"));
    web.set_nonblocking(true).expect("not blocking");
    assert!(web.accept().is_err());
    let told = node.control.verdict(|event| event.kind == "connect");
    assert_eq!((told.allow, told.rule, told.port), (false, None, Some(443)));
    assert_eq!(
        (told.sandbox.as_str(), told.address.as_deref()),
        ("one", Some("20.0.0.2"))
    );
}

#[test]
fn another_name_at_an_allowed_address_is_refused() {
    require!();
    let spoofs: [&[u8]; 4] = [
        &hello("b.example"),
        b"GET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"SSH-2.0-client\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ];
    for (off, passing) in [("", false), ("net.check", true)] {
        let mut node = Node::new(off);
        let names = [("a.example", "20.0.0.1"), ("c.example", "20.0.0.3")];
        let _resolver = Resolver::new(&node.world, &names);
        let place = node.sandbox("one", vec![allow("a.example"), allow("c.example")]);
        let web = server(&node.world, 443);
        // Allowed by name, but never resolved here: the address alone opens nothing.
        assert!(refuses(&place, "20.0.0.1:443"));
        resolve(&place, "a.example", A);
        if passing {
            let mut client = connect(&place, "20.0.0.1:443").expect("taken");
            passes(&web, &mut client, spoofs[0]);
            continue;
        }
        for spoof in spoofs {
            let mut client = connect(&place, "20.0.0.1:443").expect("taken");
            client.write_all(spoof).expect("written");
            assert!(is_reset(&client), "{spoof:?}");
        }
        // Allowed too, at another address.
        let mut client = connect(&place, "20.0.0.1:443").expect("taken");
        client.write_all(&hello("c.example")).expect("written");
        assert!(is_reset(&client));
        web.set_nonblocking(true).expect("not blocking");
        assert!(web.accept().is_err());
    }
}

#[test]
fn a_hello_in_pieces_and_each_request_of_a_connection_are_heard() {
    require!();
    let mut node = Node::new("");
    let _resolver = Resolver::new(&node.world, &[("a.example", "20.0.0.1")]);
    let place = node.sandbox("one", vec![allow("a.example")]);
    let web = server(&node.world, 80);
    resolve(&place, "a.example", A);
    let said = hello("a.example");
    let mut client = connect(&place, "20.0.0.1:80").expect("taken");
    client.set_nodelay(true).expect("at once");
    for byte in &said[..said.len() - 1] {
        client.write_all(&[*byte]).expect("written");
    }
    client.write_all(&said[said.len() - 1..]).expect("written");
    let (mut taken, _) = web.accept().expect("taken");
    let mut got = vec![0; said.len()];
    taken.read_exact(&mut got).expect("read");
    assert_eq!(got, said);
    let mut client = connect(&place, "20.0.0.1:80").expect("taken");
    let get = b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";
    let mut outside = passes(&web, &mut client, get);
    outside
        .write_all(b"HTTP/1.1 204 x\r\n\r\n")
        .expect("answered");
    let mut answer = [0; 18];
    client.read_exact(&mut answer).expect("read");
    client.write_all(get).expect("written");
    let mut second = vec![0; get.len()];
    outside
        .read_exact(&mut second)
        .expect("the same connection goes on");
    client
        .write_all(b"GET / HTTP/1.1\r\nHost: b.example\r\n\r\n")
        .expect("written");
    assert!(is_reset(&client));
    assert!(is_reset(&outside), "the server is not left with half of it");
}

#[test]
fn closed_addresses_are_left_out_and_not_dialed() {
    require!();
    for (off, passing) in [("", false), ("net.closed", true)] {
        let mut node = Node::new(off);
        let names = [
            ("a.example", "10.0.0.5 20.0.0.1 fd00::1"),
            ("own.example", "20.0.0.99"),
            ("meta.example", "169.254.169.254"),
        ];
        let resolver = Resolver::new(&node.world, &names);
        let mut rules: Vec<_> = names.iter().map(|(name, _)| allow(name)).collect();
        let place = node.sandbox("one", rules.clone());
        let web = server(&node.world, 443);
        let (_, all) = resolve(&place, "a.example", A);
        assert_eq!(all.contains(&ip("10.0.0.5")), passing);
        for name in ["own.example", "meta.example"] {
            assert_eq!(resolve(&place, name, A).1.is_empty(), !passing, "{name}");
        }
        for (to, name) in [
            ("10.0.0.5:443", "a.example"),
            ("169.254.169.254:443", "meta.example"),
            ("20.0.0.99:443", "own.example"),
            ("[::ffff:10.0.0.5]:443", "a.example"),
        ] {
            if passing {
                let mut client = connect(&place, to).expect("taken");
                passes(&web, &mut client, &hello(name));
            } else {
                assert!(refuses(&place, to), "{to}");
            }
        }
        // A rule for the range opens it.
        rules.insert(0, allow_range("10.0.0.0/8"));
        node.set("one", rules);
        let mut client = connect(&place, "10.0.0.5:443").expect("taken");
        passes(&web, &mut client, b"anything");
        // Later it means something else: the answer of before stands for its life.
        resolver.means("a.example", "20.0.0.7");
        assert!(!resolve(&place, "a.example", A).1.contains(&ip("20.0.0.7")));
    }
}

#[test]
fn a_tighter_table_cuts_what_it_denies_before_it_is_answered() {
    require!();
    let mut node = Node::new("");
    let names = [("a.example", "20.0.0.1"), ("b.example", "20.0.0.2")];
    let _resolver = Resolver::new(&node.world, &names);
    let both = vec![
        allow("a.example"),
        allow("b.example"),
        allow_range("21.0.0.0/8"),
    ];
    let place = node.sandbox("one", both);
    let other = node.sandbox("two", vec![allow_range("21.0.0.0/8")]);
    let web = server(&node.world, 443);
    for (name, _) in names {
        resolve(&place, name, A);
    }
    let mut a = connect(&place, "20.0.0.1:443").expect("taken");
    let mut far_a = passes(&web, &mut a, &hello("a.example"));
    let mut b = connect(&place, "20.0.0.2:443").expect("taken");
    let far_b = passes(&web, &mut b, &hello("b.example"));
    let mut c = connect(&place, "21.0.0.1:443").expect("taken");
    let far_c = passes(&web, &mut c, b"raw");
    let mut d = connect(&other, "21.0.0.1:443").expect("taken");
    let mut far_d = passes(&web, &mut d, b"raw");
    assert_eq!(node.set("one", vec![allow("a.example")]), 2);
    assert!(is_reset(&b) && is_reset(&c) && is_reset(&far_b) && is_reset(&far_c));
    assert!(refuses(&place, "21.0.0.1:443"));
    assert_eq!(resolve(&place, "b.example", A).0, wire::NO_NAME);
    for (near, far) in [(&mut a, &mut far_a), (&mut d, &mut far_d)] {
        near.write_all(b"on").expect("written");
        far.read_exact(&mut [0; 2]).expect("the others go on");
    }
    let status = node.control.status("one");
    assert_eq!((status.connections, status.unmatched >= 1), (1, true));
}

#[test]
fn a_dead_client_changes_nothing_a_dead_process_closes_everything() {
    require!();
    let mut node = Node::new("");
    let _resolver = Resolver::new(&node.world, &[]);
    let place = kit::Place::new();
    let steering = dsec_net::steer::steer(place.0.as_fd()).expect("steered");
    node.add("one", vec![allow_range("20.0.0.0/8")], &steering);
    drop(steering);
    let web = server(&node.world, 443);
    let mut first = connect(&place, "20.0.0.1:443").expect("taken");
    let mut far = passes(&web, &mut first, b"raw");
    node.reconnect();
    first.write_all(b"on").expect("written");
    far.read_exact(&mut [0; 2]).expect("it goes on");
    let mut second = connect(&place, "20.0.0.2:443").expect("taken");
    passes(&web, &mut second, b"raw");
    let list = kit::Ask {
        op: "list",
        ..kit::Ask::default()
    };
    assert_eq!(
        node.control.ask(list).sandboxes,
        Some(vec!["one".to_owned()])
    );
    node.kill();
    let end = first.read(&mut [0; 1]);
    assert!(matches!(end, Ok(0) | Err(_)));
    let error = connect(&place, "20.0.0.1:443").expect_err("refused");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_server_that_speaks_first_needs_a_rule_for_it() {
    require!();
    let mut node = Node::new("");
    let names = [("git.example", "20.0.0.1"), ("evil.example", "20.0.0.2")];
    let _resolver = Resolver::new(&node.world, &names);
    let mut git = allow("git.example");
    git.check = Check::Address;
    git.ports = vec![(22, 22)];
    let evil = rule(Action::Deny, Of::Name("evil.example".to_owned()));
    let place = node.sandbox("one", vec![git, evil, allow_range("0.0.0.0/0")]);
    let ssh = server(&node.world, 22);
    resolve(&place, "git.example", A);
    for to in ["20.0.0.1:22", "20.0.0.3:22"] {
        let mut client = connect(&place, to).expect("taken");
        let (mut outside, _) = ssh.accept().expect("taken before a word was said");
        outside.write_all(b"SSH-2.0").expect("written");
        client.read_exact(&mut [0; 7]).expect("read");
        client.write_all(b"SSH-2.0").expect("written");
        outside.read_exact(&mut [0; 7]).expect("read");
    }
    // Everything is allowed but one name: it cannot be said either.
    let mut client = connect(&place, "20.0.0.2:22").expect("taken");
    client.write_all(&hello("evil.example")).expect("written");
    assert!(is_reset(&client));
    assert_eq!(resolve(&place, "evil.example", A).0, wire::NO_NAME);
}

#[test]
fn questions_of_every_kind_get_sane_answers() {
    require!();
    let mut node = Node::new("");
    let many: Vec<String> = (1..=32).map(|n| format!("20.0.1.{n}")).collect();
    let resolver = Resolver::new(
        &node.world,
        &[("a.example", "20.0.0.1"), (kit::LONG, &many.join(" "))],
    );
    let place = node.sandbox(
        "one",
        vec![allow("a.example"), allow(kit::LONG), allow("gone.example")],
    );
    assert_eq!(resolve(&place, "gone.example", A), (wire::NO_NAME, vec![]));
    assert_eq!(resolve(&place, "a.example", AAAA), (0, vec![]));
    assert_eq!(resolve(&place, "a.example", 16), (0, vec![]), "TXT");
    assert_eq!(
        resolver.questions().len(),
        2,
        "of those only A and AAAA left"
    );
    assert_eq!(
        resolve(&place, kit::LONG, A).1.len(),
        32,
        "the resolver was asked by TCP"
    );
    // Without EDNS it does not fit, and says so; by TCP it does.
    let mut plain = wire::ask(7, kit::LONG, A);
    plain.truncate(plain.len() - 11);
    plain[11] = 0;
    let cut = exchange(&place, &plain);
    assert_eq!((cut[2] & 2, cut[7]), (2, 0));
    let mut stream = connect(&place, "1.1.1.1:53").expect("taken");
    let mut asked = Vec::new();
    for data in [&plain, &wire::ask(8, "b.example", A)] {
        asked.extend((data.len() as u16).to_be_bytes());
        asked.extend(data);
    }
    stream.write_all(&asked).expect("written");
    let mut answers = [0, 0].map(|_: u8| {
        let mut length = [0; 2];
        stream.read_exact(&mut length).expect("read");
        let mut body = vec![0; u16::from_be_bytes(length).into()];
        stream.read_exact(&mut body).expect("read");
        body
    });
    answers.sort_by_key(|body| body[1]);
    assert_eq!((answers[0][7], answers[1][3] & 15), (32, wire::NO_NAME));
    // Rubbish does not end it, and what can be answered is.
    let mut bad = wire::ask(9, "a.example", A);
    bad[5] = 2;
    assert_eq!(exchange(&place, &bad)[3] & 15, wire::FORMAT_ERROR);
    let mut chaos = wire::ask(9, "a.example", A);
    let class = chaos.len() - 12;
    chaos[class] = 3;
    assert_eq!(exchange(&place, &chaos)[3] & 15, wire::REFUSED);
    place.run(|| {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").expect("bound");
        for size in [0, 1, 11, 12, 600, 5000] {
            let _ = socket.send_to(&vec![0xc0; size], "9.9.9.9:53");
        }
    });
    assert_eq!(resolve(&place, "a.example", A).1, [ip("20.0.0.1")]);
}

#[test]
fn resolvers_that_are_silent_or_gone_are_passed_over() {
    require!();
    let mut node = Node::new("");
    let _resolver = Resolver::new(&node.world, &[("a.example", "20.0.0.1")]);
    node.configure(&["20.0.0.54:53", "20.0.0.53:53"]);
    let place = node.sandbox("one", vec![allow("a.example")]);
    assert_eq!(resolve(&place, "a.example", A).1, [ip("20.0.0.1")]);
    node.configure(&[]);
    let place = node.sandbox("two", vec![allow("a.example")]);
    assert_eq!(resolve(&place, "a.example", A).0, wire::SERVER_FAILURE);
}

#[test]
fn a_sandbox_has_no_more_connections_than_its_table_says() {
    require!();
    let mut node = Node::new("");
    let place = node.sandbox("one", vec![allow_range("20.0.0.0/8")]);
    let web = server(&node.world, 443);
    let mut table = kit::table(vec![allow_range("20.0.0.0/8")]);
    table.connections = 2;
    let ask = kit::Ask {
        op: "set",
        sandbox: Some("one"),
        table: Some(table),
        ..kit::Ask::default()
    };
    node.control.ask(ask);
    node.control.watch();
    let mut kept = Vec::new();
    for _ in 0..2 {
        let mut client = connect(&place, "20.0.0.1:443").expect("taken");
        let far = passes(&web, &mut client, b"raw");
        kept.push((client, far));
    }
    assert!(refuses(&place, "20.0.0.1:443"));
    let told = node.control.verdict(|event| !event.allow);
    assert_eq!(told.why.as_deref(), Some("limit"));
    kept.clear();
    loop {
        // The end of the others is seen when it is.
        let mut client = connect(&place, "20.0.0.1:443").expect("taken");
        if client.write_all(b"raw").is_ok() && !node_refuses(&mut client, &web) {
            break;
        }
    }
}

/// Whether it was reset instead of taken.
fn node_refuses(client: &mut TcpStream, web: &std::net::TcpListener) -> bool {
    web.set_nonblocking(true).expect("not blocking");
    let wait = Some(std::time::Duration::from_millis(100));
    client.set_read_timeout(wait).expect("a limit");
    is_reset(client) && web.accept().is_err()
}

#[test]
fn the_process_keeps_no_right_and_bad_clients_end_alone() {
    require!();
    let mut node = Node::new("");
    let place = node.sandbox("one", vec![allow_range("20.0.0.0/8")]);
    let text = std::fs::read_to_string(format!("/proc/{}/status", node.pid())).expect("its status");
    let field = |name: &str| {
        let line = text
            .lines()
            .find(|line| line.starts_with(name))
            .expect(name);
        line.split_whitespace()
            .skip(1)
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(field("Uid:"), "65534 65534 65534 65534");
    assert_eq!(field("Gid:"), "65534 65534 65534 65534");
    for set in ["CapPrm:", "CapEff:", "CapBnd:", "CapInh:", "CapAmb:"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    assert_eq!(
        (field("NoNewPrivs:"), field("Seccomp:")),
        ("1".to_owned(), "2".to_owned())
    );
    node.control.send_raw(b"\xc1 rubbish");
    assert!(node.control.ended());
    node.reconnect();
    for (op, sandbox) in [("set", "none"), ("remove", "none"), ("add", "one")] {
        let ask = kit::Ask {
            op,
            sandbox: Some(sandbox),
            table: Some(kit::table(Vec::new())),
            ..kit::Ask::default()
        };
        assert!(node.control.ask(ask).error.is_some(), "{op}");
    }
    let hello = kit::Ask {
        op: "hello",
        protocol: Some(1),
        ..kit::Ask::default()
    };
    assert_eq!(node.control.ask(hello).protocol, Some(1));
    let web = server(&node.world, 443);
    let mut client = connect(&place, "20.0.0.1:443").expect("taken");
    passes(&web, &mut client, b"raw");
    let remove = kit::Ask {
        op: "remove",
        sandbox: Some("one"),
        ..kit::Ask::default()
    };
    assert_eq!(node.control.ask(remove).error, None);
    let error = connect(&place, "20.0.0.1:443").expect_err("refused");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn what_is_not_taken_is_not_read_and_one_sandbox_does_not_fill_the_memory() {
    require!();
    let mut node = Node::new("");
    let place = node.sandbox("one", vec![allow_range("20.0.0.0/8")]);
    let web = server(&node.world, 443);
    let before = memory_kib(node.pid());
    let mut kept = Vec::new();
    // Each would keep 256 KiB.
    for _ in 0..100 {
        let mut client = connect(&place, "20.0.0.1:443").expect("taken");
        let far = passes(&web, &mut client, b"raw");
        client.set_nonblocking(true).expect("not blocking");
        // Until nothing is taken any more, by the buffers of the kernel and by ours.
        let mut sent = 0;
        let mut idle = 0;
        while idle < 3 {
            match client.write(&[7; 64 << 10]) {
                Ok(count) => (sent, idle) = (sent + count, 0),
                Err(_) => {
                    idle += 1;
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            }
        }
        kept.push((client, far, sent));
    }
    let grown = memory_kib(node.pid()) - before;
    assert!(grown < 16 << 10, "{grown} KiB");
    let (client, mut far, sent) = kept.pop().expect("one");
    // Not closed: of a socket nobody holds a kernel short of memory for buffers drops the rest.
    client.shutdown(Shutdown::Write).expect("its end");
    let mut got = Vec::new();
    far.read_to_end(&mut got)
        .expect("the rest comes, and the end");
    assert_eq!(got.len(), sent);
}

fn memory_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let line = text.lines().find(|line| line.starts_with("VmRSS:"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok())
        .expect("a number")
}

#[test]
fn sockets_of_a_removed_sandbox_that_others_hold_do_not_keep_the_loop_busy() {
    require!();
    let mut node = Node::new("");
    let place = kit::Place::new();
    let steering = dsec_net::steer::steer(place.0.as_fd()).expect("steered");
    node.add("one", vec![allow_range("20.0.0.0/8")], &steering);
    let remove = kit::Ask {
        op: "remove",
        sandbox: Some("one"),
        ..kit::Ask::default()
    };
    assert_eq!(node.control.ask(remove).error, None);
    let _waiting = connect(&place, "20.0.0.1:443").expect("by the kernel, for whoever takes it");
    let before = switches(node.pid());
    let list = || kit::Ask {
        op: "list",
        ..kit::Ask::default()
    };
    for _ in 0..20 {
        std::thread::sleep(std::time::Duration::from_millis(10));
        node.control.ask(list());
    }
    // It slept in between: a loop that is told without end never does, a slow one not each time.
    assert!(switches(node.pid()) >= before + 5);
}

/// How often it went to sleep by itself.
fn switches(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let line = text
        .lines()
        .find(|line| line.starts_with("voluntary_ctxt_switches:"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok())
        .expect("a number")
}

#[test]
fn verdicts_that_nobody_takes_are_counted() {
    require!();
    let mut node = Node::new("");
    let _resolver = Resolver::new(&node.world, &[]);
    let place = node.sandbox("one", vec![allow("a.example")]);
    let calm = node.sandbox("two", vec![allow("a.example")]);
    for number in 0..600 {
        resolve(&place, &format!("n{number}.example"), A);
    }
    resolve(&calm, "b.example", A);
    node.control.watch();
    let (mut loud, mut dropped, mut calm) = (0, 0, 0);
    while calm == 0 {
        let message = node.control.next();
        loud += message
            .events
            .iter()
            .filter(|event| event.sandbox == "one")
            .count();
        calm += message
            .events
            .iter()
            .filter(|event| event.sandbox == "two")
            .count();
        dropped += message.dropped.get("one").copied().unwrap_or(0);
    }
    assert_eq!((loud, dropped, calm), (512, 88, 1));
}
