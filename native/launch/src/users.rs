//! Users of a sandbox, from its own files. A static binary has no `getpwnam`, and should not: what a
//! sandbox says about its users is read in bounds and believed for that sandbox only.

use std::fs::File;
use std::io::{self, Read};

use rustix::fs::{fstat, open, FileType, Mode, OFlags};

use crate::plan::{Code, LaunchError, Result};

/// No more of /etc/passwd or /etc/group is looked at.
const FILE_MAX: u64 = 4 << 20;
/// The kernel's own limit is higher; nobody is in more groups than this.
const GROUPS_MAX: usize = 1024;
/// Ids of a sandbox are 0 to 65535.
const ID_END: u32 = 65_536;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub name: Option<String>,
    pub home: String,
}

/// Reads a file that may be anything: a device, a pipe, endless.
fn read_bounded(path: &str) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = open(path, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // Most are shorter: one read, and one that says so.
    let mut bytes = Vec::with_capacity(4096);
    File::from(file).take(FILE_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Resolves `name`, `uid`, `name:group`, `uid:gid` against the root of the caller.
pub(crate) fn resolve(user: &str) -> Result<User> {
    // A root without these files still has numeric users.
    let passwd = read_bounded("/etc/passwd").unwrap_or_default();
    let group = read_bounded("/etc/group").unwrap_or_default();
    resolve_in(user, &passwd, &group)
}

fn no_user(user: &str) -> LaunchError {
    LaunchError::new(Code::NoUser, format!("no user {user:?} in the sandbox")).with("user", user)
}

fn id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id < ID_END)
}

fn resolve_in(wanted: &str, passwd: &str, group: &str) -> Result<User> {
    let (user, wanted_group) = match wanted.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (wanted, None),
    };
    let number = id(user);
    let mut entries = passwd
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>());
    let entry = entries.find(|fields| {
        fields.len() >= 6 && (fields[0] == user || number.is_some() && id(fields[2]) == number)
    });
    let mut found = match (&entry, number) {
        (Some(fields), _) => User {
            uid: id(fields[2]).ok_or_else(|| no_user(wanted))?,
            gid: id(fields[3]).ok_or_else(|| no_user(wanted))?,
            groups: Vec::new(),
            name: Some(fields[0].to_owned()),
            home: fields[5].to_owned(),
        },
        (None, Some(uid)) => User {
            uid,
            gid: 0,
            groups: Vec::new(),
            name: None,
            home: "/".to_owned(),
        },
        // Root needs no file to say so: an image without one still has it.
        (None, None) if user == "root" => User {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            name: Some(user.to_owned()),
            home: "/root".to_owned(),
        },
        (None, None) => return Err(no_user(wanted)),
    };
    if let Some(name) = wanted_group {
        found.gid = group_id(name, group).ok_or_else(|| no_user(wanted))?;
    } else if let Some(name) = &found.name {
        // As initgroups does it: the primary group is one of them.
        found.groups = memberships(name, group);
        found.groups.retain(|gid| *gid != found.gid);
        found.groups.insert(0, found.gid);
    }
    Ok(found)
}

fn group_id(wanted: &str, group: &str) -> Option<u32> {
    let named = group.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(wanted))
            .then(|| fields.nth(1))
            .flatten()
    });
    named.and_then(id).or_else(|| id(wanted))
}

fn memberships(name: &str, group: &str) -> Vec<u32> {
    let mut groups = Vec::new();
    for line in group.lines() {
        let fields: Vec<_> = line.split(':').collect();
        if fields.len() >= 4 && fields[3].split(',').any(|member| member == name) {
            groups.extend(id(fields[2]));
        }
        if groups.len() >= GROUPS_MAX {
            break;
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001:,:/home/ann:/bin/sh\n\
        far:x:4000000000:0::/:/bin/sh\nshort:x:3\n";
    const GROUP: &str = "root:x:0:\nusers:x:100:bob,ann\nstaff:x:50:ann\nann:x:1001:\n";

    #[test]
    fn names_and_numbers() {
        let ann = resolve_in("ann", PASSWD, GROUP).expect("ann");
        assert_eq!(
            (ann.uid, ann.gid, ann.groups.as_slice()),
            (1000, 1001, &[1001, 100, 50][..])
        );
        assert_eq!(resolve_in("1000", PASSWD, GROUP), Ok(ann));
        let both = resolve_in("ann:users", PASSWD, GROUP).expect("ann:users");
        assert_eq!((both.gid, both.groups.len()), (100, 0));
        let bare = resolve_in("77:88", "", "").expect("77:88");
        assert_eq!((bare.uid, bare.gid, bare.home.as_str()), (77, 88, "/"));
    }

    #[test]
    fn what_is_not_there_or_not_ours_is_no_user() {
        for bad in [
            "bob",
            "",
            "far",
            "short",
            "70000",
            "ann:nogroup",
            "-1",
            "0:70000",
        ] {
            let error = resolve_in(bad, PASSWD, GROUP).expect_err(bad);
            assert_eq!(error.code, Code::NoUser, "{bad}");
        }
    }
}
