//! Tables as the node's compiler makes them, and what it says of names, addresses and connections.

use std::collections::HashMap;
use std::net::IpAddr;

use dsec_net::ranges::Range;
use dsec_net::table::{is_closed, normal, Begin, Protocol, Table, To, Verdict, DENIED};
use serde::Deserialize;

const VECTORS: &str = include_str!("../../../tests/contract/vectors/policy.json");

#[derive(Deserialize)]
struct Vectors {
    names: Vec<Said>,
    closed: Vec<Closed>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Said {
    said: String,
    name: Option<String>,
}

#[derive(Deserialize)]
struct Closed {
    address: IpAddr,
    closed: bool,
}

#[derive(Deserialize)]
struct Case {
    case: String,
    node: Vec<String>,
    table: Table,
    msgpack: String,
    decide: Vec<Asked>,
    resolves: Vec<Asked>,
}

#[derive(Debug, Deserialize)]
struct Asked {
    name: Option<String>,
    address: Option<IpAddr>,
    #[serde(default)]
    port: u16,
    protocol: Option<Protocol>,
    allow: bool,
    rule: Option<String>,
}

fn vectors() -> Vectors {
    serde_json::from_str(VECTORS).expect("vectors")
}

fn own(case: &Case) -> Vec<Range> {
    let ranges = case.node.iter();
    ranges.map(|text| text.parse().expect("a range")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = (0..hex.len()).step_by(2);
    digits
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex"))
        .collect()
}

fn said(table: &Table, verdict: Verdict) -> (bool, Option<String>) {
    let id = verdict.rule.map(|at| table.rules[at].id.clone());
    (verdict.allow, id)
}

#[test]
fn names_have_one_form() {
    for Said { said, name } in vectors().names {
        // A program inside says ASCII: what is not was made so by the compiler.
        if said.is_ascii() {
            assert_eq!(normal(&said), name, "{said:?}");
        }
    }
}

#[test]
fn the_same_addresses_are_closed() {
    let all = vectors();
    let own = own(&all.cases[0]);
    for Closed { address, closed } in all.closed {
        assert_eq!(is_closed(address, &own), closed, "{address}");
    }
}

#[test]
fn a_table_is_read_as_it_was_written() {
    for case in vectors().cases {
        let read: Table = rmp_serde::from_slice(&bytes(&case.msgpack)).expect("a table");
        assert_eq!(read, case.table, "{}", case.case);
        assert_eq!(read.fault(), None, "{}", case.case);
    }
}

#[test]
fn connections_and_questions_are_decided_alike() {
    let all = vectors();
    let forms: HashMap<_, _> = all.names.into_iter().map(|n| (n.said, n.name)).collect();
    for case in all.cases {
        let own = own(&case);
        for asked in &case.decide {
            let address = asked.address.expect("an address");
            let to = To {
                address,
                port: asked.port,
                protocol: asked.protocol.unwrap_or(Protocol::Tcp),
                closed: is_closed(address, &own),
            };
            let verdict = match &asked.name {
                Some(name) => forms[name]
                    .as_deref()
                    .map_or(DENIED, |name| case.table.named(name, &to)),
                None => match case.table.begin(&[], &to) {
                    Begin::Decided(verdict) | Begin::Listen(verdict) => verdict,
                    Begin::Hear => panic!("{}: {asked:?} has no name to hear", case.case),
                },
            };
            let found = said(&case.table, verdict);
            assert_eq!(
                found,
                (asked.allow, asked.rule.clone()),
                "{}: {asked:?}",
                case.case
            );
        }
        for asked in &case.resolves {
            let name = asked.name.as_ref().and_then(|name| forms[name].as_deref());
            let Some(name) = name else {
                assert!(!asked.allow, "{}: {asked:?}", case.case);
                continue;
            };
            let answered = asked.address.map_or(true, |address| {
                case.table.answers(name, address, is_closed(address, &own))
            });
            let allow = case.table.resolves(name).allow && answered;
            assert_eq!(allow, asked.allow, "{}: {asked:?}", case.case);
        }
    }
}
