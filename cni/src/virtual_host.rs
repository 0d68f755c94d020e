//! Virtual hosts: network namespaces that a bridge of this machine connects. A local cluster runs one node in each.
//!
//! Operations are idempotent: after an interruption they can be repeated.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use coracle_nft::{BaseChain, Batch, Channel, Hook, R0, Rule, Transaction};
use ipnetwork::IpNetwork;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use crate::error::Error;
use crate::link::inside::{Setup, loopback_up};
use crate::link::{self, Links, Pair, random_mac};
use crate::netns::Netns;
use crate::spec::result::Route;
use crate::{nft, sysctl};

/// Name of the interface inside each virtual host.
const INSIDE: &str = "eth0";
/// `NFPROTO_IPV4` and `NFPROTO_IPV6` of linux/netfilter.h.
const FAMILIES: [u8; 2] = [2, 10];

/// A bridge of this machine with its virtual hosts. This machine forwards packets of the hosts to other networks, and
/// masquerades them with its own address.
#[derive(Debug, Clone)]
pub struct HostNetwork {
    /// Name of the bridge.
    pub bridge: String,
    /// Name of the nftables table.
    pub table: String,
    /// Addresses of the bridge, with the prefix lengths of the network. The hosts use them as gateways.
    pub gateways: Vec<IpNetwork>,
}

/// A virtual host.
#[derive(Debug, Clone)]
pub struct VirtualHost {
    /// Path at which its network namespace is mounted.
    pub namespace: PathBuf,
    /// Name of the host's port of the bridge.
    pub port: String,
    /// The host's addresses, with the prefix lengths of the network.
    pub addresses: Vec<IpNetwork>,
}

// === impl HostNetwork ===

impl HostNetwork {
    /// Makes the bridge with its addresses, sets up address translation, and enables forwarding.
    ///
    /// # Errors
    /// When the bridge belongs to another program, or netlink or nftables fail.
    pub async fn ensure(&self) -> Result<(), Error> {
        let links = Links::in_own_namespace()?;
        links.claim_bridge(&self.bridge, &self.gateways).await?;
        let wanted = link::Bridge { ours: true, ..link::Bridge::default() };
        let (bridge, _) = links.ensure_bridge(&self.bridge, wanted).await?;
        coracle_fault::point("virtual-host.bridge-marked");
        links.ensure_addresses(&bridge, &self.gateways).await?;
        coracle_fault::point("virtual-host.bridge-addressed");
        sysctl::forwarding(&self.gateways)?;
        commit(masquerade(&self.table, &self.gateways), "set up address translation")
    }

    /// Makes the host's namespace, and connects it with the bridge.
    ///
    /// # Errors
    /// When the bridge does not exist, or the namespace or its interface cannot be made.
    pub async fn connect(&self, host: &VirtualHost) -> Result<(), Error> {
        make_namespace(&host.namespace)?;
        coracle_fault::point("virtual-host.namespace-made");
        let netns = Netns::open(&host.namespace)?;
        loopback_up(&netns).await?;
        let setup = Setup {
            addresses: host.addresses.clone(),
            detect: false,
            no_link_local: false,
            host_end: None,
            up: true,
            routes: self.gateways.iter().map(|gateway| Route::default_by(gateway.ip())).collect(),
        };
        let links = Links::in_own_namespace()?;
        let bridge = links.get(&self.bridge).await?;
        let is_port = links.find(&host.port).await?.is_some_and(|port| port.controller == Some(bridge.index));
        if is_port && setup.clone().apply(&netns, INSIDE).await.is_ok() {
            return Ok(());
        }
        let pair = Pair {
            host: &host.port,
            inside: INSIDE,
            bridge: bridge.index,
            mtu: None,
            mac: random_mac(),
            host_mac: None,
            is_up: true,
        };
        links.add_pair(&pair, &netns).await?;
        coracle_fault::point("virtual-host.interface-made");
        setup.apply(&netns, INSIDE).await?;
        Ok(())
    }

    /// Whether another table of this machine, such as Docker's, drops forwarded packets. Then the hosts cannot reach
    /// other networks.
    ///
    /// # Errors
    /// When nftables fails.
    pub fn is_blocked(&self) -> Result<bool, Error> {
        let blocked = Channel::open().and_then(|mut channel| nft::forward_drops(&mut channel));
        blocked.map_err(|source| Error::Socket { action: "look up the policies of other tables", source })
    }

    /// Removes the hosts' interfaces and namespaces, the bridge and the table. Absent objects are not an error.
    ///
    /// # Errors
    /// When netlink, nftables or an unmount fails.
    pub async fn remove(&self, hosts: &[VirtualHost]) -> Result<(), Error> {
        let links = Links::in_own_namespace()?;
        for host in hosts {
            links.delete(&host.port).await?;
            remove_namespace(&host.namespace)?;
        }
        // `ensure` marks the bridge after it has created it. The process may have been killed between the two steps.
        links.claim_bridge(&self.bridge, &self.gateways).await?;
        if links.find_ours(&self.bridge).await?.is_some() {
            links.delete_bridge(&self.bridge).await?;
        }
        commit(nft::remove(&self.table), "remove address translation")
    }
}

// === impl VirtualHost ===

impl VirtualHost {
    /// Runs `work` on a new thread inside the host. Processes that it starts stay inside.
    ///
    /// # Errors
    /// When the host has no namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        Netns::open(&self.namespace)?.run(work)
    }

    /// Inode number of the host's namespace, as in the links of `/proc/PID/ns`. `None` if the host has no namespace.
    #[must_use]
    pub fn namespace_id(&self) -> Option<u64> {
        Netns::open(&self.namespace).ok()?;
        crate::netns::id(&self.namespace)
    }
}

/// Runs `work` on a new thread in a new network namespace. The namespace ends with the thread.
///
/// # Errors
/// When the namespace cannot be made.
pub fn in_empty_namespace<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("netns".to_owned());
        let inside =
            thread.spawn_scoped(scope, || Ok(unshare(CloneFlags::CLONE_NEWNET).map(|()| work())?))?;
        inside.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    })
}

/// Mounts a new network namespace at the path, unless one is mounted there.
fn make_namespace(path: &Path) -> Result<(), Error> {
    if Netns::open(path).is_ok() {
        return Ok(());
    }
    let make = || -> io::Result<()> {
        let mut options = OpenOptions::new();
        // An interrupted call may have left the file.
        drop::<File>(options.write(true).create(true).truncate(false).mode(0o400).open(path)?);
        let own = Some("/proc/thread-self/ns/net");
        in_empty_namespace(|| mount(own, path, None::<&str>, MsFlags::MS_BIND, None::<&str>))??;
        Ok(())
    };
    make().map_err(|source| Error::Namespace { path: path.to_owned(), source })
}

/// Unmounts the namespace, and removes the mount point. The namespace ends with its last process.
fn remove_namespace(path: &Path) -> Result<(), Error> {
    let failed = |source| Error::Namespace { path: path.to_owned(), source };
    loop {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            // The path is not a mount, or does not exist.
            Err(Errno::EINVAL | Errno::ENOENT) => break,
            Err(errno) => return Err(failed(errno.into())),
        }
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(()),
    }
}

/// The transaction that replaces the table. The table masquerades packets from the networks to other networks.
fn masquerade(table: &str, networks: &[IpNetwork]) -> Batch {
    let mut transaction = Transaction::new(table);
    transaction.delete_table();
    transaction.make_table();
    let (hook, priority) = (Hook::Postrouting, 100);
    transaction.make_base_chain(BaseChain { name: "postrouting", hook, priority, kind: "nat" });
    for network in networks {
        let is_ipv4 = network.is_ipv4();
        let family = FAMILIES[usize::from(!is_ipv4)];
        let rule = Rule::default().family(family).from(*network, false).to(*network, true);
        // Multicast stays on the bridge.
        let mask: &[u8] =
            if is_ipv4 { &[0xf0, 0, 0, 0] } else { &[0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] };
        let multicast: &[u8] = if is_ipv4 { &[0xe0, 0, 0, 0] } else { mask };
        let rule = rule.destination(is_ipv4, R0).mask(R0, mask).unequal(R0, multicast);
        transaction.rule("postrouting", &rule.masquerade());
    }
    transaction.finish()
}

fn commit(batch: Batch, action: &'static str) -> Result<(), Error> {
    let committed = Channel::open().and_then(|mut channel| channel.commit(batch));
    committed.map_err(|source| Error::Socket { action, source })
}
