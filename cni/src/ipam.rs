//! Addresses from the node's ranges: one file per address, as host-local keeps them, whose exclusive
//! creation is the lock of truth.
//!
//! The files are derived state: [`Ipam::rebuild`] makes them what the records of living sandboxes say.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ipnetwork::{IpNetwork, Ipv4Network, Ipv6Network};

use crate::error::Error;

/// Ranges longer than this are not walked to their end: no node holds 2^20 pods.
const WALK_LIMIT: u128 = 1 << 20;

/// The allocator of a node's pod addresses, one from each range.
pub(crate) struct Ipam {
    dir: PathBuf,
    ranges: Vec<Range>,
}

struct Range {
    network: IpNetwork,
    /// Offset given last, so that an address rests as long as possible before it is given again.
    last: AtomicU64,
}

impl Ipam {
    pub(crate) fn open(dir: &Path, cidrs: &[IpNetwork]) -> Result<Self, Error> {
        fs::create_dir_all(dir).map_err(|source| file("create", dir, source))?;
        let ranges = cidrs.iter().map(|c| Range::new(*c)).collect::<Result<_, _>>()?;
        Ok(Self { dir: dir.to_owned(), ranges })
    }

    /// The first address of each range, with the range's prefix: the bridge's own.
    pub(crate) fn gateways(&self) -> Vec<IpNetwork> {
        self.ranges.iter().filter_map(|r| r.at(1)).collect()
    }

    /// Takes one address from each range for the sandbox; none is kept when one range is full.
    pub(crate) fn reserve(&self, id: &str, ifname: &str) -> Result<Vec<IpNetwork>, Error> {
        let mut taken = Vec::with_capacity(self.ranges.len());
        for range in &self.ranges {
            match self.reserve_from(range, id, ifname) {
                Ok(address) => taken.push(address),
                Err(error) => {
                    self.release(id)?;
                    return Err(error);
                }
            }
        }
        Ok(taken)
    }

    /// Frees all that the sandbox holds.
    pub(crate) fn release(&self, id: &str) -> Result<(), Error> {
        for (address, owner) in self.held()? {
            if owner == id {
                self.remove(address)?;
            }
        }
        Ok(())
    }

    /// Makes the files say exactly who owns what.
    pub(crate) fn rebuild(&self, owned: &[(IpAddr, &str)]) -> Result<(), Error> {
        for (address, owner) in self.held()? {
            if !owned.iter().any(|(a, o)| *a == address && *o == owner) {
                self.remove(address)?;
            }
        }
        for (address, owner) in owned {
            self.create(*address, owner, "eth0")?;
        }
        Ok(())
    }

    fn reserve_from(&self, range: &Range, id: &str, ifname: &str) -> Result<IpNetwork, Error> {
        let size = range.size().min(WALK_LIMIT);
        for step in 1..=size {
            let offset = (u128::from(range.last.load(Ordering::Relaxed)) + step - 2) % size + 2;
            let Some(address) = range.at(offset) else { continue };
            if self.create(address.ip(), id, ifname)? {
                range.last.store(u64::try_from(offset).unwrap_or(1), Ordering::Relaxed);
                return Ok(address);
            }
        }
        Err(Error::RangeFull { range: range.network, size: range.size() })
    }

    fn create(&self, address: IpAddr, id: &str, ifname: &str) -> Result<bool, Error> {
        let path = self.dir.join(address.to_string());
        let created = OpenOptions::new().write(true).create_new(true).open(&path);
        match created {
            Ok(mut out) => {
                out.write_all(format!("{id}\n{ifname}").as_bytes()).map_err(|e| file("write", &path, e))?;
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(e) => Err(file("create", &path, e)),
        }
    }

    fn held(&self) -> Result<Vec<(IpAddr, String)>, Error> {
        let mut held = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(|e| file("read", &self.dir, e))? {
            let path = entry.map_err(|e| file("read", &self.dir, e))?.path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            if let Ok(address) = name.parse() {
                let text = fs::read_to_string(&path).map_err(|e| file("read", &path, e))?;
                held.push((address, text.lines().next().unwrap_or_default().to_owned()));
            }
        }
        Ok(held)
    }

    fn remove(&self, address: IpAddr) -> Result<(), Error> {
        let path = self.dir.join(address.to_string());
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(file("remove", &path, e)),
            _ => Ok(()),
        }
    }
}

// === impl Range ===

impl Range {
    fn new(network: IpNetwork) -> Result<Self, Error> {
        let range = Self { network, last: AtomicU64::new(1) };
        if range.total() < 4 {
            return Err(Error::RangeTooSmall { range: network });
        }
        Ok(range)
    }

    fn total(&self) -> u128 {
        match self.network {
            IpNetwork::V4(n) => u128::from(n.size()),
            IpNetwork::V6(n) => n.size(),
        }
    }

    /// Addresses for pods: without the network's own, the gateway and (IPv4) the broadcast address.
    fn size(&self) -> u128 {
        self.total() - if self.network.is_ipv4() { 3 } else { 2 }
    }

    fn at(&self, offset: u128) -> Option<IpNetwork> {
        match self.network {
            IpNetwork::V4(n) => {
                let ip = n.nth(u32::try_from(offset).ok()?)?;
                Some(IpNetwork::V4(Ipv4Network::new(ip, n.prefix()).ok()?))
            }
            IpNetwork::V6(n) => {
                let ip = (n.network().to_bits() + offset).into();
                Some(IpNetwork::V6(Ipv6Network::new(ip, n.prefix()).ok()?))
            }
        }
    }
}

fn file(action: &'static str, path: &Path, source: io::Error) -> Error {
    Error::File { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ipam(cidrs: &[&str]) -> (tempfile::TempDir, Ipam) {
        let dir = tempfile::tempdir().unwrap();
        let cidrs: Vec<IpNetwork> = cidrs.iter().map(|c| c.parse().unwrap()).collect();
        let ipam = Ipam::open(dir.path(), &cidrs).unwrap();
        (dir, ipam)
    }

    fn text(addresses: &[IpNetwork]) -> Vec<String> {
        addresses.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_first_address_is_the_gateway_and_pods_follow() {
        let (_dir, ipam) = ipam(&["10.1.2.0/24", "fd00::/64"]);
        assert_eq!(text(&ipam.gateways()), ["10.1.2.1/24", "fd00::1/64"]);
        assert_eq!(text(&ipam.reserve("a", "eth0").unwrap()), ["10.1.2.2/24", "fd00::2/64"]);
        assert_eq!(text(&ipam.reserve("b", "eth0").unwrap()), ["10.1.2.3/24", "fd00::3/64"]);
    }

    #[test]
    fn a_freed_address_rests_before_it_is_given_again() {
        let (_dir, ipam) = ipam(&["10.1.2.0/29"]);
        assert_eq!(text(&ipam.reserve("a", "eth0").unwrap()), ["10.1.2.2/29"]);
        ipam.release("a").unwrap();
        assert_eq!(text(&ipam.reserve("b", "eth0").unwrap()), ["10.1.2.3/29"]);
    }

    #[test]
    fn a_full_range_says_so_and_recovers_when_a_pod_leaves() {
        let (_dir, ipam) = ipam(&["10.1.2.0/29"]);
        for id in ["a", "b", "c", "d", "e"] {
            ipam.reserve(id, "eth0").unwrap();
        }
        let error = ipam.reserve("f", "eth0").unwrap_err();
        assert_eq!(error.to_string(), "no address is free in 10.1.2.0/29: all 5 are in use");
        ipam.release("c").unwrap();
        assert_eq!(text(&ipam.reserve("f", "eth0").unwrap()), ["10.1.2.4/29"]);
    }

    #[test]
    fn a_full_second_range_keeps_nothing_of_the_first() {
        let (_dir, ipam) = ipam(&["10.1.2.0/24", "10.1.3.0/30"]);
        ipam.reserve("a", "eth0").unwrap();
        ipam.reserve("b", "eth0").unwrap_err();
        assert_eq!(ipam.held().unwrap().iter().filter(|(_, id)| id == "b").count(), 0);
    }

    #[test]
    fn rebuilding_frees_strangers_and_restores_owners() {
        let (_dir, ipam) = ipam(&["10.1.2.0/24"]);
        ipam.reserve("gone", "eth0").unwrap();
        ipam.rebuild(&[("10.1.2.9".parse().unwrap(), "here")]).unwrap();
        assert_eq!(ipam.held().unwrap(), [("10.1.2.9".parse().unwrap(), "here".to_owned())]);
    }

    #[test]
    fn a_range_without_room_for_a_pod_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Ipam::open(dir.path(), &["10.0.0.0/31".parse().unwrap()]).is_err());
    }
}
