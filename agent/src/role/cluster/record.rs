//! Names, numbers, directories and records of local clusters.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context;
use coracle_cni::{HostNetwork, VirtualHost};
use ipnetwork::{IpNetwork, Ipv4Network, Ipv6Network};
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

/// Name of the cluster if none is given.
pub(super) const DEFAULT: &str = "local";
/// Maximum length of a name. It is part of socket paths, which have at most 107 bytes.
const MAX_NAME_BYTES: usize = 24;
/// Version of the record's format.
const VERSION: u32 = 1;
/// Maximum size of a record in bytes.
const RECORD_MAX: u64 = 256 << 10;
/// Highest number of a cluster.
const MAX_NUMBER: u8 = 250;
/// Name of the record in the state directory of a cluster.
const RECORD: &str = "cluster.json";

/// Name of a cluster: a DNS label. It is part of paths, names of nodes and the context of kubectl.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name(String);

/// Directories of all clusters.
pub(super) struct Roots {
    pub(super) state: PathBuf,
    pub(super) run: PathBuf,
}

/// The record of a cluster. It is written before the cluster is created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    version: u32,
    /// Number, unique among the clusters of this machine. Interface names and addresses contain it.
    pub(super) number: u8,
    pub(super) nodes: u8,
    pub(super) ipv6: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) registry_config_dir: Option<PathBuf>,
    /// Files to which the cluster was added.
    pub(super) kubeconfigs: BTreeSet<PathBuf>,
}

/// A recorded cluster.
#[derive(Debug, Clone)]
pub(super) struct Cluster {
    pub(super) name: Name,
    pub(super) record: Record,
    /// Its state directory.
    pub(super) state: PathBuf,
    /// Its run directory.
    pub(super) run: PathBuf,
}

/// The lock of a directory. The kernel releases it when the process ends.
pub(super) struct Lock {
    _directory: Flock<File>,
}

// === impl Name ===

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let ends_well = |c: char| is_inner(c) && c != '-';
        let is_label = text.starts_with(ends_well) && text.ends_with(ends_well) && text.chars().all(is_inner);
        if !is_label || text.len() > MAX_NAME_BYTES {
            return Err(format!(
                "a cluster name has lower case letters, digits and inner hyphens, and at most {MAX_NAME_BYTES} characters"
            ));
        }
        Ok(Self(text.to_owned()))
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl Name {
    /// Name of the context, cluster and user in kubeconfig files.
    pub(super) fn context(&self) -> String {
        format!("coracle-{self}")
    }
}

// === impl Roots ===

impl Roots {
    /// The recorded clusters, and the names of directories without a readable record.
    pub(super) fn all(&self) -> anyhow::Result<(Vec<Cluster>, Vec<Name>)> {
        let entries = match fs::read_dir(&self.state) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
            entries => entries.with_context(|| format!("cannot read {}", self.state.display()))?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut names: Vec<Name> = names.collect();
        names.sort();
        let (mut clusters, mut unreadable) = (Vec::new(), Vec::new());
        for name in names {
            match self.find(&name) {
                Ok(Some(cluster)) => clusters.push(cluster),
                Ok(None) | Err(_) => unreadable.push(name),
            }
        }
        Ok((clusters, unreadable))
    }

    /// The cluster, if it is recorded.
    pub(super) fn find(&self, name: &Name) -> anyhow::Result<Option<Cluster>> {
        let path = self.state_of(name).join(RECORD);
        let text = match coracle_agent::read_text(&path, RECORD_MAX) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let record: Record = serde_json::from_str(&text).with_context(|| {
            format!(
                "{} is damaged; stop the processes of the cluster and remove the directory",
                path.display()
            )
        })?;
        anyhow::ensure!(
            record.version == VERSION,
            "the cluster {name} was made by a later version of coracle; use that version"
        );
        Ok(Some(self.cluster(name, record)))
    }

    /// The cluster, which must be recorded.
    pub(super) fn existing(&self, name: &Name) -> anyhow::Result<Cluster> {
        self.find(name)?.with_context(|| {
            format!("there is no cluster {name}; `coracle cluster create {name}` creates it")
        })
    }

    /// A cluster with this record, which is not written.
    pub(super) fn cluster(&self, name: &Name, record: Record) -> Cluster {
        Cluster { name: name.clone(), record, state: self.state_of(name), run: self.run.join(&name.0) }
    }

    /// Locks a cluster, and creates its state directory if it is absent.
    pub(super) fn lock_cluster(&self, name: &Name) -> anyhow::Result<Lock> {
        Lock::acquire(&self.state_of(name))
    }

    /// Whether the cluster has a state directory.
    pub(super) fn has_directory(&self, name: &Name) -> bool {
        self.state_of(name).exists()
    }

    /// Removes the directories of all clusters if they are empty.
    pub(super) fn remove_if_empty(&self) -> anyhow::Result<()> {
        for root in [&self.run, &self.state] {
            match fs::remove_dir(root) {
                Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
                    return Err(error).with_context(|| format!("cannot remove {}", root.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Records a new cluster with a free number.
    pub(super) fn record(&self, name: &Name, settings: &Settings) -> anyhow::Result<Cluster> {
        let _lock = Lock::acquire(&self.state)?;
        let (clusters, _) = self.all()?;
        let taken: BTreeSet<u8> = clusters.iter().map(|cluster| cluster.record.number).collect();
        let own = own_addresses()?;
        let is_free = |number: &u8| {
            let is_ours =
                |address: &IpAddr| networks(*number).iter().any(|network| network.contains(*address));
            !taken.contains(number) && !own.iter().any(is_ours) && !exists(&bridge(*number))
        };
        let number = (1..=MAX_NUMBER).find(is_free).context("too many local clusters; delete one")?;
        let Settings { nodes, ipv6, registry_config_dir } = settings.clone();
        let kubeconfigs = BTreeSet::new();
        let record = Record { version: VERSION, number, nodes, ipv6, registry_config_dir, kubeconfigs };
        let cluster = self.cluster(name, record);
        cluster.save()?;
        Ok(cluster)
    }

    /// Removes the directory of a cluster without a record. Fails if the directory contains files, because then it does
    /// not belong to a cluster.
    pub(super) fn remove_unrecorded(&self, name: &Name) -> anyhow::Result<()> {
        let path = self.state_of(name);
        let context = || {
            format!(
                "cannot remove {}, which has no record of a cluster; stop what uses it and remove it",
                path.display()
            )
        };
        // An interrupted command may have left the temporary file of the record.
        let temporary = path.join(RECORD).with_extension("tmp");
        coracle_tree::remove_file(&temporary).with_context(context)?;
        fs::remove_dir(&path).with_context(context)
    }

    fn state_of(&self, name: &Name) -> PathBuf {
        self.state.join(&name.0)
    }
}

/// Settings of a new cluster.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) nodes: u8,
    pub(super) ipv6: bool,
    pub(super) registry_config_dir: Option<PathBuf>,
}

// === impl Cluster ===

impl Cluster {
    /// Writes the record.
    pub(super) fn save(&self) -> anyhow::Result<()> {
        let path = self.state.join(RECORD);
        let text = serde_json::to_vec_pretty(&self.record)?;
        coracle_agent::replace_private(&path, &text)
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Removes the directories with their content. The record is removed last.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        let entries =
            fs::read_dir(&self.state).with_context(|| format!("cannot read {}", self.state.display()))?;
        let others = entries.flatten().filter(|entry| entry.file_name() != RECORD).map(|entry| entry.path());
        for path in others.chain([self.run.clone(), self.state.clone()]) {
            coracle_tree::remove(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        Ok(())
    }

    /// The numbers of the cluster's nodes.
    pub(super) fn numbers(&self) -> std::ops::RangeInclusive<u8> {
        1..=self.record.nodes
    }

    /// The cluster's bridge, networks and table on this machine.
    pub(super) fn network(&self) -> HostNetwork {
        let number = self.record.number;
        HostNetwork { bridge: bridge(number), table: bridge(number), gateways: self.addresses(1) }
    }

    /// The virtual host of a node.
    pub(super) fn host(&self, node: u8) -> VirtualHost {
        VirtualHost {
            namespace: self.run.join(format!("{node}.net")),
            port: format!("{}-{node}", bridge(self.record.number)),
            addresses: self.addresses(node.saturating_add(1)),
        }
    }

    /// The address of a node.
    pub(super) fn address(&self, node: u8) -> IpAddr {
        let [v4, v6] = networks(self.record.number).map(|network| nth(network, node.saturating_add(1)).ip());
        if self.record.ipv6 { v6 } else { v4 }
    }

    fn addresses(&self, host: u8) -> Vec<IpNetwork> {
        let used =
            networks(self.record.number).into_iter().filter(|network| network.is_ipv6() == self.record.ipv6);
        used.map(|network| nth(network, host)).collect()
    }
}

// === impl Lock ===

impl Lock {
    /// Locks the directory, and creates it if it is absent. Waits for another process that holds the lock.
    fn acquire(path: &Path) -> anyhow::Result<Self> {
        let context = || format!("cannot lock {}", path.display());
        loop {
            // Create the parent directory too: the removal of the last cluster removes it.
            DirBuilder::new().mode(0o700).recursive(true).create(path).with_context(context)?;
            let directory = match File::open(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                directory => directory.with_context(context)?,
            };
            let locked = Flock::lock(directory, FlockArg::LockExclusive);
            let locked = locked.map_err(|(_, errno)| errno).with_context(context)?;
            let own = geteuid().as_raw();
            check_owner(&locked.metadata().with_context(context)?, own).with_context(context)?;
            check_parents(path, own).with_context(context)?;
            // The last holder may have removed the directory.
            let identity = |found: fs::Metadata| (found.dev(), found.ino());
            if fs::metadata(path).map(identity).ok()
                == Some(identity(locked.metadata().with_context(context)?))
            {
                return Ok(Self { _directory: locked });
            }
        }
    }
}

/// Refuses a directory that another user created or can change, for example in /tmp. Otherwise root would run nodes
/// with that user's configuration.
fn check_owner(directory: &fs::Metadata, own: u32) -> anyhow::Result<()> {
    let is_private = directory.uid() == own && directory.mode() & 0o022 == 0;
    anyhow::ensure!(is_private, "other users may change the directory; use another --state-dir");
    Ok(())
}

/// Refuses a directory that another user can replace. Every directory above it must belong to root or to this user. If
/// other users may write to such a directory, it must be sticky, as /tmp is. The check covers the path as written, and
/// the path after symbolic links are resolved.
fn check_parents(path: &Path, own: u32) -> anyhow::Result<()> {
    let written = std::path::absolute(path)?;
    let resolved = fs::canonicalize(path)?;
    for parent in written.ancestors().chain(resolved.ancestors()) {
        let found = fs::symlink_metadata(parent)?;
        // For a link, the directory that contains it is checked, because a user who can write to that directory can
        // replace the link.
        if parent != written && parent != resolved && !found.is_symlink() {
            let is_safe = protects_entries(found.uid(), found.mode(), own);
            anyhow::ensure!(is_safe, "other users may change {}; use another --state-dir", parent.display());
        }
    }
    Ok(())
}

/// Whether a directory of this owner and mode keeps its entries from other users.
fn protects_entries(owner: u32, mode: u32, own: u32) -> bool {
    const STICKY: u32 = 0o1000;
    (owner == own || owner == 0) && (mode & 0o022 == 0 || mode & STICKY != 0)
}

/// The networks of the cluster with this number: an IPv4 network of the range for benchmarks (RFC 2544) and an IPv6
/// network for local use.
fn networks(number: u8) -> [IpNetwork; 2] {
    let v4 = Ipv4Addr::new(198, 18, number, 0);
    let v6 = Ipv6Addr::new(0xfdc0, 0x7ac1, 0xe000, u16::from(number), 0, 0, 0, 0);
    // The prefix lengths are valid.
    let v4 = Ipv4Network::new(v4, 24).map_or_else(|_| IpNetwork::from(IpAddr::V4(v4)), IpNetwork::V4);
    let v6 = Ipv6Network::new(v6, 64).map_or_else(|_| IpNetwork::from(IpAddr::V6(v6)), IpNetwork::V6);
    [v4, v6]
}

/// The address with this number in a network, with the prefix length.
fn nth(network: IpNetwork, host: u8) -> IpNetwork {
    let ip = match network.ip() {
        IpAddr::V4(ip) => IpAddr::V4(Ipv4Addr::from(u32::from(ip) | u32::from(host))),
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from(u128::from(ip) | u128::from(host))),
    };
    IpNetwork::new(ip, network.prefix()).unwrap_or(network)
}

/// Name of the cluster's bridge, and of its nftables table.
fn bridge(number: u8) -> String {
    format!("coracle-c{number}")
}

fn exists(interface: &str) -> bool {
    nix::net::if_::if_nametoindex(interface).is_ok()
}

/// All addresses of this machine.
fn own_addresses() -> anyhow::Result<Vec<IpAddr>> {
    let found = nix::ifaddrs::getifaddrs().context("cannot list the addresses of this machine")?;
    let ip = |address: nix::ifaddrs::InterfaceAddress| {
        let address = address.address?;
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    };
    Ok(found.filter_map(ip).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test panics")]

    use super::*;

    #[test]
    fn names_are_labels_that_fit_into_paths() {
        for good in ["a", "local", "ci-7", &"x".repeat(MAX_NAME_BYTES)] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a/b", "..", "a b", "ä", &"x".repeat(MAX_NAME_BYTES + 1)] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
    }

    fn settings(nodes: u8, ipv6: bool) -> Settings {
        Settings { nodes, ipv6, registry_config_dir: None }
    }

    #[test]
    fn a_directory_that_belongs_to_no_cluster_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let roots = Roots { state: directory.path().to_owned(), run: directory.path().join("run") };
        let (other, left): (Name, Name) = ("pods".parse().unwrap(), "left".parse().unwrap());
        fs::create_dir_all(directory.path().join("pods/data")).unwrap();
        assert!(roots.remove_unrecorded(&other).is_err());
        assert!(directory.path().join("pods/data").exists());
        drop(roots.lock_cluster(&left).unwrap());
        fs::write(directory.path().join("left/cluster.tmp"), "").unwrap();
        roots.remove_unrecorded(&left).unwrap();
        assert!(!roots.has_directory(&left));
    }

    #[test]
    fn a_directory_that_other_users_may_change_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        assert!(Lock::acquire(directory.path()).is_ok());
        let metadata = fs::metadata(directory.path()).unwrap();
        assert!(check_owner(&metadata, metadata.uid() + 1).is_err());
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Lock::acquire(directory.path()).is_err());
    }

    #[test]
    fn a_directory_that_other_users_may_replace_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        assert!(
            protects_entries(0, 0o755, 1000)
                && protects_entries(1000, 0o700, 1000)
                && protects_entries(0, 0o1777, 0)
        );
        assert!(
            !protects_entries(1000, 0o755, 0)
                && !protects_entries(0, 0o777, 0)
                && !protects_entries(0, 0o775, 0)
        );
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("shared/clusters");
        assert!(Lock::acquire(&below).is_ok());
        fs::set_permissions(below.parent().unwrap(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Lock::acquire(&below).is_err());
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&below, &link).unwrap();
        assert!(Lock::acquire(&link).is_err(), "the target of a link is checked");
    }

    #[test]
    fn clusters_have_different_numbers_and_are_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let roots = Roots { state: directory.path().join("state"), run: directory.path().join("run") };
        let record = |name: &str, ipv6| {
            let name = name.parse().unwrap();
            let _lock = roots.lock_cluster(&name).unwrap();
            roots.record(&name, &settings(2, ipv6)).unwrap()
        };
        let (first, second) = (record("a", false), record("b", true));
        assert_ne!(first.record.number, second.record.number);
        assert_ne!(first.network().bridge, second.network().bridge);
        let found = roots.existing(&"b".parse().unwrap()).unwrap();
        assert_eq!(found.record, second.record);
        assert!(found.address(1).is_ipv6() && first.address(1).is_ipv4());
        assert!(first.network().gateways[0].contains(first.address(2)), "one network");
        assert_ne!(first.address(1), first.network().gateways[0].ip());
        first.remove().unwrap();
        assert!(roots.find(&first.name).unwrap().is_none());
        assert_eq!(roots.all().unwrap().0.len(), 1);
    }

    #[test]
    fn a_damaged_record_is_named_and_does_not_hide_other_clusters() {
        let directory = tempfile::tempdir().unwrap();
        let roots = Roots { state: directory.path().join("state"), run: directory.path().join("run") };
        let (good, bad): (Name, Name) = ("good".parse().unwrap(), "bad".parse().unwrap());
        drop(roots.lock_cluster(&bad).unwrap());
        fs::write(roots.state.join("bad").join(RECORD), "{").unwrap();
        drop(roots.lock_cluster(&good).unwrap());
        roots.record(&good, &settings(1, false)).unwrap();
        let (clusters, unreadable) = roots.all().unwrap();
        assert_eq!((clusters.len(), unreadable), (1, vec![bad.clone()]));
        let error = roots.existing(&bad).unwrap_err().to_string();
        assert!(error.contains("bad/cluster.json is damaged"), "{error}");
    }

    #[test]
    fn interface_names_fit_into_the_kernels_limit() {
        let directory = tempfile::tempdir().unwrap();
        let roots = Roots { state: directory.path().to_owned(), run: directory.path().to_owned() };
        let record = Record {
            version: VERSION,
            number: MAX_NUMBER,
            nodes: 64,
            ipv6: false,
            registry_config_dir: None,
            kubeconfigs: BTreeSet::new(),
        };
        let cluster = roots.cluster(&"a".parse().unwrap(), record);
        assert!(cluster.host(64).port.len() <= 15, "IFNAMSIZ");
    }
}
