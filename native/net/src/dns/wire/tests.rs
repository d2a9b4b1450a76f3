use super::*;

fn record(owner: &str, kind: u16, ttl: u32, data: &[u8]) -> Vec<u8> {
    let mut out = labels(owner);
    out.extend(kind.to_be_bytes());
    out.extend(IN.to_be_bytes());
    out.extend(ttl.to_be_bytes());
    out.extend((data.len() as u16).to_be_bytes());
    out.extend(data);
    out
}

fn labels(name: &str) -> Vec<u8> {
    let asked = ask(0, name, A);
    asked[HEAD..HEAD + name.len() + 2].to_vec()
}

/// An answer to `ask(7, name, A)`.
fn response(name: &str, flags: u16, records: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    for short in [7, ANSWER | flags, 1, records.len() as u16, 0, 0] {
        out.extend(short.to_be_bytes());
    }
    out.extend(labels(name));
    out.extend(A.to_be_bytes());
    out.extend(IN.to_be_bytes());
    out.extend(records.concat());
    out
}

#[test]
fn a_question_is_read_and_answered_in_its_own_words() {
    let mut data = ask(0x1234, "a.example", A);
    data[13] = b'A';
    let one = question(&data).expect("a question");
    assert_eq!(
        (one.name.as_deref(), one.kind, one.class_in),
        (Some("a.example"), A, true)
    );
    assert_eq!(one.room(), 1232);
    let addresses: Vec<IpAddr> = vec!["20.0.0.1".parse().expect("an address")];
    let answer = one.answer(NO_ERROR, &addresses, 60, one.room());
    assert_eq!(answer[12..25], data[12..25], "with its case");
    let told = told(&answer, 0x1234, "a.example", A).expect("an answer");
    assert_eq!(told, Told::Addresses { addresses, ttl: 60 });
    let many = vec!["20.0.0.1".parse().expect("an address"); 40];
    let cut = one.answer(NO_ERROR, &many, 60, 100);
    assert_eq!(cut[2] & 2, 2);
    assert_eq!(u16::from_be_bytes([cut[6], cut[7]]), 0);
}

#[test]
fn what_is_no_question_is_answered_sanely_or_not_at_all() {
    let good = ask(1, "a.x", A);
    assert_eq!(question(&good[..11]), Err(None));
    let mut answer = good.clone();
    answer[2] |= 0x80;
    assert_eq!(question(&answer), Err(None));
    let mut update = good.clone();
    update[2] |= 5 << 3;
    assert_eq!(
        question(&update).expect_err("refused").expect("told")[3] & 15,
        NOT_IMPLEMENTED
    );
    for at in [4, 5, 6, 8] {
        let mut bad = good.clone();
        bad[at] = 9;
        assert_eq!(
            question(&bad).expect_err("refused").expect("told")[3] & 15,
            FORMAT_ERROR
        );
    }
    for end in 12..good.len() {
        assert!(question(&good[..end]).is_err());
    }
    let mut newer = good.clone();
    let version = newer.len() - 5;
    newer[version] = 1;
    let newer = question(&newer).expect("a question");
    let said = newer.bad_version().expect("refused");
    assert_eq!((said[3] & 15, said[said.len() - 6]), (0, 1));
    // A label with a dot is another name than the one it looks like.
    let mut dotted = ask(1, "ab.x", A);
    dotted[12..18].copy_from_slice(&[4, b'a', b'.', b'x', b'x', 0]);
    let read = question(&dotted);
    assert!(read.is_err() || read.is_ok_and(|one| one.name.is_none()));
}

#[test]
fn names_are_followed_from_the_one_asked_for_only() {
    let alias = record("a.x", CNAME, 300, &labels("b.y"));
    let address = record("b.y", A, 20, &[20, 0, 0, 1]);
    let foreign = record("c.z", A, 900, &[66, 6, 6, 6]);
    let all = response("a.x", 0, &[foreign.clone(), alias.clone(), address]);
    let addresses = vec!["20.0.0.1".parse().expect("an address")];
    assert_eq!(
        told(&all, 7, "a.x", A),
        Some(Told::Addresses { addresses, ttl: 20 })
    );
    let name = "b.y".to_owned();
    let half = response("a.x", 0, &[alias, foreign.clone()]);
    assert_eq!(
        told(&half, 7, "a.x", A),
        Some(Told::Alias { name, ttl: 300 })
    );
    let nothing = response("a.x", 0, &[foreign]);
    assert_eq!(
        told(&nothing, 7, "a.x", A),
        Some(Told::Nothing { exists: true })
    );
    let around = [
        record("a.x", CNAME, 1, &labels("b.x")),
        record("b.x", CNAME, 1, &labels("a.x")),
    ];
    assert_eq!(
        told(&response("a.x", 0, &around), 7, "a.x", A),
        Some(Told::Failed)
    );
}

#[test]
fn only_the_answer_to_the_question_counts() {
    let good = response("a.x", 0, &[]);
    assert!(told(&good, 7, "a.x", A).is_some());
    assert_eq!(told(&good, 8, "a.x", A), None);
    assert_eq!(told(&good, 7, "b.x", A), None);
    assert_eq!(told(&good, 7, "a.x", AAAA), None);
    let mut asked = good.clone();
    asked[2] &= 0x7f;
    assert_eq!(told(&asked, 7, "a.x", A), None);
    assert_eq!(
        told(&response("a.x", 3, &[]), 7, "a.x", A),
        Some(Told::Nothing { exists: false })
    );
    assert_eq!(
        told(&response("a.x", 2, &[]), 7, "a.x", A),
        Some(Told::Failed)
    );
    assert_eq!(
        told(&response("a.x", 0x200, &[]), 7, "a.x", A),
        Some(Told::Cut)
    );
}

#[test]
fn rubbish_never_ends_it() {
    let records = [
        record("a.x", CNAME, 1, &[0xc0, 12]),
        record("a.x", A, 1, &[1, 2, 3, 4]),
    ];
    let good = response("a.x", 0, &records);
    for at in 0..good.len() {
        for value in [0, 1, 0x3f, 0x40, 0xc0, 0xff, good[at] ^ 1] {
            let mut bad = good.clone();
            bad[at] = value;
            let _ = told(&bad, 7, "a.x", A);
            let _ = question(&bad);
        }
        let _ = told(&good[..at], 7, "a.x", A);
    }
}
