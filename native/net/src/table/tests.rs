use super::*;

fn rule(id: &str, action: Action, of: Of) -> Rule {
    Rule {
        id: id.to_owned(),
        action,
        of,
        ports: Vec::new(),
        protocol: None,
        check: Check::Spoken,
    }
}

fn allow(of: Of) -> Rule {
    rule("a", Action::Allow, of)
}

fn deny(of: Of) -> Rule {
    rule("d", Action::Deny, of)
}

fn name(text: &str) -> Of {
    Of::Name(text.to_owned())
}

fn suffix(text: &str) -> Of {
    Of::Suffix(text.to_owned())
}

fn range(text: &str) -> Of {
    Of::Range(text.parse().expect("a range"))
}

fn table(rules: Vec<Rule>) -> Table {
    Table {
        format: FORMAT,
        generation: 0,
        rules,
        connections: CONNECTIONS,
    }
}

fn to(address: &str, port: u16) -> To {
    To::tcp(address.parse().expect("an address"), port, &[])
}

#[test]
fn the_first_rule_that_matches_decides_and_none_denies() {
    let both = table(vec![deny(name("a.x")), allow(suffix("x"))]);
    let at = to("20.0.0.1", 443);
    assert!(!both.named("a.x", &at).allow);
    assert!(both.named("b.x", &at).allow && both.named("c.b.x", &at).allow);
    assert!(!both.named("x", &at).allow, "itself is not below itself");
    assert!(!both.named("ax", &at).allow && !both.named(".x", &at).allow);
    assert_eq!(both.named("b.y", &at), DENIED);
    let turned = table(vec![allow(suffix("x")), deny(name("a.x"))]);
    assert!(turned.named("a.x", &at).allow);
}

#[test]
fn closed_addresses_open_by_ranges_only() {
    let ip = |text: &str| text.parse().expect("an address");
    let named = table(vec![allow(name("a.x"))]);
    for inside in ["10.0.0.1", "169.254.169.254", "::1", "fd00::1"] {
        let at = to(inside, 80);
        assert!(!named.named("a.x", &at).allow, "{inside}");
        assert_eq!(named.begin(&["a.x"], &at), Begin::Decided(DENIED));
        assert!(!named.answers("a.x", ip(inside), true));
    }
    let opened = table(vec![allow(name("a.x")), allow(range("10.0.0.0/8"))]);
    assert!(opened.named("a.x", &to("10.0.0.1", 80)).allow);
    assert!(opened.answers("a.x", ip("10.9.9.9"), true));
    let shut = table(vec![deny(range("20.0.0.0/8")), allow(name("a.x"))]);
    assert!(!shut.answers("a.x", ip("20.0.0.1"), false) && shut.resolves("a.x").allow);
    let own: Range = "20.0.0.0/24".parse().expect("a range");
    let at = To::tcp(ip("20.0.0.7"), 80, &[own]);
    assert!(!named.named("a.x", &at).allow, "the node's own");
}

#[test]
fn a_name_is_asked_for_if_any_port_is_left() {
    let denied = |ports: &[(u16, u16)]| {
        let mut rule = deny(name("a.x"));
        rule.ports = ports.to_vec();
        rule
    };
    let https = || {
        let mut rule = allow(name("a.x"));
        rule.ports = vec![(443, 443)];
        rule
    };
    let first = Verdict {
        allow: false,
        rule: Some(0),
    };
    let all = table(vec![denied(&[]), https()]);
    assert_eq!(all.resolves("a.x"), first);
    let same = table(vec![denied(&[(1, 442), (443, 65535)]), https()]);
    assert_eq!(same.resolves("a.x"), first);
    let other = table(vec![denied(&[(1, 442), (444, 65535)]), https()]);
    assert!(other.resolves("a.x").allow);
    let mut highest = allow(name("a.x"));
    highest.ports = vec![(65535, 65535)];
    assert!(
        table(vec![denied(&[(1, 65534)]), highest.clone()])
            .resolves("a.x")
            .allow
    );
    assert!(
        !table(vec![denied(&[(2, 65535)]), highest])
            .resolves("a.x")
            .allow
    );
}

#[test]
fn ports_and_protocols_narrow_a_rule() {
    let mut one = allow(name("a.x"));
    one.ports = vec![(443, 443), (8000, 8010)];
    one.protocol = Some(Protocol::Tcp);
    let one = table(vec![one]);
    for (port, good) in [(443, true), (8005, true), (80, false), (8011, false)] {
        assert_eq!(
            one.named("a.x", &to("20.0.0.1", port)).allow,
            good,
            "{port}"
        );
    }
    assert!(one.resolves("a.x").allow);
    let mut narrow = deny(name("a.x"));
    narrow.ports = vec![(22, 22)];
    let some = table(vec![narrow, allow(name("a.x"))]);
    assert!(some.resolves("a.x").allow, "only one port of it is denied");
    assert!(!some.named("a.x", &to("20.0.0.1", 22)).allow);
}

#[test]
fn how_a_connection_begins() {
    let at = to("20.0.0.1", 443);
    let named = table(vec![allow(name("a.x"))]);
    assert_eq!(named.begin(&[], &at), Begin::Decided(DENIED));
    assert_eq!(named.begin(&["b.x"], &at), Begin::Decided(DENIED));
    assert_eq!(named.begin(&["b.x", "a.x"], &at), Begin::Hear);
    let mut loose = allow(name("a.x"));
    loose.check = Check::Address;
    let allowed = Verdict {
        allow: true,
        rule: Some(0),
    };
    let loose = table(vec![loose]);
    assert_eq!(loose.begin(&["a.x"], &at), Begin::Decided(allowed));
    let second = Verdict {
        allow: true,
        rule: Some(1),
    };
    let all_but = table(vec![deny(suffix("x")), allow(range("20.0.0.0/8"))]);
    assert_eq!(all_but.begin(&[], &at), Begin::Listen(second));
    let shadowed = table(vec![deny(suffix("x")), allow(name("a.x"))]);
    assert_eq!(shadowed.begin(&["a.x"], &at), Begin::Decided(DENIED));
}

#[test]
fn a_table_survives_the_wire_and_a_bad_one_is_told() {
    let rules = vec![deny(name("a.x")), allow(range("10.0.0.0/8"))];
    let one = table(rules);
    let bytes = rmp_serde::to_vec_named(&one).expect("packed");
    assert_eq!(
        rmp_serde::from_slice::<Table>(&bytes).expect("unpacked"),
        one
    );
    for bad in ["", "A.x", "a..x", "a.x.", "*.x", "a x", "ä.x"] {
        assert!(table(vec![allow(name(bad))]).fault().is_some(), "{bad}");
    }
    let mut turned = allow(name("a.x"));
    turned.ports = vec![(2, 1)];
    assert!(table(vec![turned]).fault().is_some());
    assert_eq!(one.fault(), None);
    assert_eq!(normal("A.X."), Some("a.x".to_owned()));
    assert_eq!(
        (normal("a.x.."), normal("a/x"), normal(".")),
        (None, None, None)
    );
}
