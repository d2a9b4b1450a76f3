//! Ranges of addresses, and those that no name opens.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Addresses with a common beginning, as `10.0.0.0/8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    base: IpAddr,
    length: u8,
}

impl Range {
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.base, plain(address)) {
            (IpAddr::V4(base), IpAddr::V4(other)) => {
                let rest = 32 - u32::from(self.length);
                let differ = u32::from(base) ^ u32::from(other);
                differ.checked_shr(rest).unwrap_or(0) == 0
            }
            (IpAddr::V6(base), IpAddr::V6(other)) => {
                let rest = 128 - u32::from(self.length);
                let differ = u128::from(base) ^ u128::from(other);
                differ.checked_shr(rest).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

impl FromStr for Range {
    type Err = String;

    /// `ADDRESS/LENGTH` without bits behind the length; an address alone is itself. IPv4 inside IPv6 is not taken: it
    /// is written as IPv4.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no range of addresses");
        let (base, length) = match text.split_once('/') {
            Some((base, length)) => (base, Some(length)),
            None => (text, None),
        };
        let base: IpAddr = base.parse().map_err(|_| wrong())?;
        if plain(base) != base {
            return Err(wrong());
        }
        let most = if base.is_ipv4() { 32 } else { 128 };
        let length: u8 = length.map_or(Ok(most), str::parse).map_err(|_| wrong())?;
        let beyond = match base {
            IpAddr::V4(v4) => u32::from(v4).checked_shl(length.into()).unwrap_or(0) != 0,
            IpAddr::V6(v6) => u128::from(v6).checked_shl(length.into()).unwrap_or(0) != 0,
        };
        if length > most || beyond {
            return Err(wrong());
        }
        Ok(Self { base, length })
    }
}

impl<'de> Deserialize<'de> for Range {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl Serialize for Range {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{}/{}", self.base, self.length))
    }
}

/// IPv4 inside IPv6 as IPv4: the kernel sends it there.
pub fn plain(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(address, IpAddr::V4),
        IpAddr::V4(_) => address,
    }
}

/// Of IPv4, what is not public (RFC 6890 and its registry), is a group, or is where a cloud's metadata is.
const CLOSED_V4: [(Ipv4Addr, u8); 16] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];
/// Of IPv6 only this is public at all; the ways to IPv4 (NAT64 and the like) are outside of it.
const PUBLIC_V6: (Ipv6Addr, u8) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);
/// Except for these: Teredo and other protocols, documentation, 6to4.
const CLOSED_V6: [(Ipv6Addr, u8); 4] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];

/// Whether only a rule for its range may open an address: private, link-local, metadata, groups.
pub fn closed(address: IpAddr) -> bool {
    fn inside<A: Into<IpAddr> + Copy>(list: &[(A, u8)], address: IpAddr) -> bool {
        list.iter().any(|(base, length)| {
            let range = Range {
                base: (*base).into(),
                length: *length,
            };
            range.contains(address)
        })
    }
    match plain(address) {
        v4 @ IpAddr::V4(_) => inside(&CLOSED_V4, v4),
        v6 @ IpAddr::V6(_) => !inside(&[PUBLIC_V6], v6) || inside(&CLOSED_V6, v6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn what_no_name_opens() {
        for shut in [
            "0.0.0.0",
            "10.1.2.3",
            "100.100.100.200",
            "127.0.0.1",
            "168.63.129.16",
            "169.254.169.254",
            "172.31.255.255",
            "192.168.0.1",
            "255.255.255.255",
            "224.0.0.251",
            "::",
            "::1",
            "::ffff:10.0.0.1",
            "::10.0.0.1",
            "64:ff9b::a00:1",
            "fe80::1",
            "fd00:ec2::254",
            "ff02::1",
            "2001:0:1::1",
            "2002:a00:1::",
            "2001:db8::1",
        ] {
            assert!(closed(ip(shut)), "{shut}");
        }
        for open in [
            "8.8.8.8",
            "172.32.0.1",
            "11.0.0.1",
            "100.128.0.1",
            "::ffff:8.8.8.8",
            "2606:4700::1111",
            "2a00::1",
        ] {
            assert!(!closed(ip(open)), "{open}");
        }
    }

    #[test]
    fn ranges_are_exact() {
        let range: Range = "10.0.0.0/9".parse().expect("a range");
        assert!(range.contains(ip("10.127.255.255")) && !range.contains(ip("10.128.0.0")));
        assert!(range.contains(ip("::ffff:10.1.1.1")));
        let all: Range = "0.0.0.0/0".parse().expect("a range");
        assert!(all.contains(ip("255.1.1.1")) && !all.contains(ip("2a00::1")));
        let one: Range = "2a00::1".parse().expect("a range");
        assert!(one.contains(ip("2a00::1")) && !one.contains(ip("2a00::2")));
        for bad in [
            "",
            "10.0.0.1/8",
            "10.0.0.0/33",
            "::/129",
            "::ffff:10.0.0.0/104",
            "x",
            "1.2.3.4/",
            "1.2.3.4/-1",
        ] {
            assert!(bad.parse::<Range>().is_err(), "{bad}");
        }
    }
}
