//! Reconciliation of addresses, interfaces and firewall with the running sandboxes: at start, on GC, and when the
//! network changes.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use coracle_backoff::Backoff;
use futures::future::BoxFuture;
use serde_json::{Map, Value};
use tracing::{debug, warn};

use super::attachment::parameters;
use super::{Attachment, Network, State};
use crate::attachment_cache::{Cache, Entry};
use crate::bridge;
use crate::error::Error;
use crate::firewall::{Claim, Firewall};
use crate::host_local;
use crate::invoke::ExecutionPlace;
use crate::link::derived::host_interface;
use crate::link::{Link, Links, format_mac};
use crate::netns::Netns;
use crate::plugin;
use crate::plugin_kind::Kind;
use crate::source_guard::Source;
use crate::spec::Command;
use crate::spec::list::List;
use crate::spec::request::{Request, Valid};
use crate::spec::result::{Answer, Interface, Ip};

/// The data for the missing record of a running sandbox, read from the sandbox's namespace.
struct Adopted {
    netns_id: Option<u64>,
    result: Answer,
}

/// Back-off before the retry of a GC by executables that was cancelled because a pod waited: first and maximum delay.
const FIRST_BACKOFF: Duration = Duration::from_secs(10);
const MAX_BACKOFF: Duration = Duration::from_secs(300);

impl Network {
    /// Restores the addresses, interfaces and firewall rules of running sandboxes, and frees those of all other
    /// sandboxes (CNI GC). For a sandbox without a record, `live` must contain the parameters of its
    /// [`add`](Self::add).
    ///
    /// # Errors
    /// The first failure. The later steps run nevertheless.
    pub async fn reconcile(&self, live: &[Attachment]) -> Result<(), Error> {
        let inner = &self.inner;
        let mut state = inner.state.write().await;
        let mut first = Ok(());
        let ids: HashSet<&str> = live.iter().map(|l| l.id.as_str()).collect();
        for entry in inner.cache.all().into_iter().filter(|e| !ids.contains(e.at.container_id.as_str())) {
            let id = entry.at.container_id.as_str();
            debug!(sandbox = id, "releasing the network of a removed sandbox");
            if entry.list.is_in_process() {
                let deleted = self.delete_attachment(&entry).await;
                if deleted.is_err() {
                    self.retry_later(id);
                }
                first = first.and(deleted);
            } else {
                // This call does not wait for executables: they may wait for a part of the node that is not started
                // yet.
                inner.cache.mark_releasing(id);
                self.schedule_removal(id);
            }
        }
        coracle_fault::point("recover.network-freed");
        let unknown = live.iter().filter(|l| inner.cache.get(&l.id).is_none());
        state.unrecorded = Some(unknown.cloned().collect());
        first.and(self.derive(&mut state).await)
    }

    /// Removes the bridge, the firewall table and all records, for the removal of a node.
    ///
    /// # Errors
    /// The first failure. The later steps run nevertheless.
    pub async fn remove(&self) -> Result<(), Error> {
        let inner = &self.inner;
        let claimed = self.claim_bridge(&[]).await;
        let mut reconciled = self.reconcile(&[]).await;
        // GC by executables is not deferred here: the process ends.
        for list in self.with_executables().await {
            let collected = inner.gc_lock.run(self.collect(&list)).await;
            reconciled = reconciled.and(collected.unwrap_or(Ok(())));
        }
        // DELs are not deferred here: the process ends.
        for entry in inner.cache.all() {
            inner.releases.cancel(&entry.at.container_id);
            reconciled = reconciled.and(self.del(&entry.at.container_id).await);
        }
        let guard = inner.host.guard.as_ref().map_or(Ok(()), |guard| guard.clear());
        let connections = inner.host.connections.as_ref().map_or(Ok(()), |connections| connections.clear());
        let firewall = inner.host.firewall.clear().and(guard).and(connections);
        let bridge = match inner.host.links.find_ours(&inner.config.bridge).await {
            Ok(Some(bridge)) => inner.host.links.delete(&bridge.name).await,
            found => found.map(drop),
        };
        self.set_ready(Err("the network was removed".to_owned()));
        claimed.and(reconciled).and(firewall).and(bridge)
    }

    /// Runs GC in process, and restores address files, firewall claims and interfaces. The future is boxed, as that of
    /// [`plugin::run`](crate::plugin::run).
    pub(super) fn derive<'a>(&'a self, state: &'a mut State) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(self.derive_all(state))
    }

    async fn derive_all(&self, state: &mut State) -> Result<(), Error> {
        let inner = &self.inner;
        let mut first = self.adopt(state).await;
        coracle_fault::point("recover.network-adopted");
        let entries = inner.cache.all();
        let valid = valid(&entries, state);
        for list in lists(&entries, state) {
            first = first.and(self.invoker().gc(list, &valid, ExecutionPlace::InProcess).await);
        }
        coracle_fault::point("recover.network-collected");
        for entry in entries.iter().filter(|entry| !entry.is_releasing()) {
            first = first.and(restore(entry));
        }
        coracle_fault::point("recover.network-restored");
        let ids: HashSet<&str> = valid.iter().map(|v| v.container_id.as_str()).collect();
        let retained =
            inner.host.firewall.retain(|claim| claim.id.is_empty() || ids.contains(claim.id.as_str()));
        first = first.and(retained);
        let (wanted, result) = claims(&entries);
        first = first.and(result).and(inner.host.firewall.ensure(wanted));
        first = first.and(withdraw_released(&inner.host.firewall, &inner.cache, &entries));
        coracle_fault::point("recover.network-claimed");
        let (sources, result) = sources(&entries);
        first = first.and(result);
        self.set_flooding(&sources).await;
        if let Some(guard) = &inner.host.guard {
            first = first.and(guard.replace(sources));
        }
        // The order matters: an intermediate device is removed after its port.
        first = first.and(self.sweep_ports(&valid).await);
        coracle_fault::point("recover.network-swept");
        first = first.and(inner.host.links.sweep_ifbs().await);
        self.spawn_gc();
        first
    }

    /// Sets flooding and learning of the bridge ports of these attachments. An earlier process may have set them
    /// differently. A failure is only logged, because a port may be removed with its pod at any time.
    async fn set_flooding(&self, sources: &BTreeMap<String, Source>) {
        let host = &self.inner.host;
        let floods = host.guard.is_none();
        for (port, source) in sources {
            if let Err(error) = host.links.set_flooding(port, source.mac, floods).await {
                warn!(port, error = error.chain(), "cannot set the flooding of a port");
            }
        }
    }

    /// Runs GC of executables in its own task. Each executable may take a minute, or wait for a part of the node that
    /// is not started yet. A GC that was cancelled for a pod is retried with back-off, unless a later GC was begun.
    fn spawn_gc(&self) {
        let (network, number) = (self.weak(), self.inner.gc_lock.begin());
        tokio::spawn(async move {
            let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
            loop {
                let Some(here) = network() else { return };
                if here.collect_all().await {
                    return;
                }
                drop(here);
                tokio::time::sleep(backoff.next_delay()).await;
                if network().is_none_or(|here| !here.inner.gc_lock.is_newest(number)) {
                    return;
                }
            }
        });
    }

    /// Runs GC of all lists with executables. Returns false if a GC was cancelled because a pod waited.
    async fn collect_all(&self) -> bool {
        let mut is_complete = true;
        for list in self.with_executables().await {
            let collected = self.inner.gc_lock.run(self.collect(&list)).await;
            let network = &list.name;
            match collected {
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    warn!(network, error = error.chain(), "cannot collect garbage with a plugin");
                }
                None => {
                    warn!(network, "garbage collection cancelled because a pod waited, retrying");
                    is_complete = false;
                }
            }
        }
        is_complete
    }

    async fn collect(&self, list: &List) -> Result<(), Error> {
        let valid = self.known_attachments().await;
        self.invoker().gc(list, &valid, ExecutionPlace::Executable).await
    }

    /// The attachments that keep their resources. The state is locked before the records are read. Under this lock a
    /// sandbox moves from the list of sandboxes without a record to the records. So it is always found in one of the
    /// two.
    async fn known_attachments(&self) -> Vec<Valid> {
        let state = self.inner.state.read().await;
        valid(&self.inner.cache.all(), &state)
    }

    async fn with_executables(&self) -> Vec<List> {
        let state = self.inner.state.read().await;
        let entries = self.inner.cache.all();
        lists(&entries, &state).into_iter().filter(|list| !list.is_in_process()).cloned().collect()
    }

    /// Removes the ports that have no attachment from the default network's bridge. The bridge has no other users.
    async fn sweep_ports(&self, valid: &[Valid]) -> Result<(), Error> {
        let links = &self.inner.host.links;
        let Some(bridge) = links.find_ours(&self.inner.config.bridge).await? else { return Ok(()) };
        let wanted: Vec<String> = valid.iter().map(|v| host_interface(&v.container_id, &v.ifname)).collect();
        links.delete_ports_except(&bridge, &wanted).await
    }

    /// Restores the missing records of running sandboxes from the state of their namespaces. A sandbox whose process
    /// has ended gets no record.
    async fn adopt(&self, state: &mut State) -> Result<(), Error> {
        let Some(list) = state.list.clone() else { return Ok(()) };
        let mut first = Ok(());
        for live in state.unrecorded.as_mut().map(std::mem::take).unwrap_or_default() {
            match self.read_attachment(&live).await {
                Ok(None) => debug!(sandbox = live.id, "the process of a sandbox without a record has ended"),
                Ok(Some(Adopted { netns_id, result })) => {
                    warn!(
                        sandbox = live.id,
                        "the record of a sandbox's network is missing, restoring it from the namespace"
                    );
                    let mut entry = Entry::new(Arc::clone(&list), parameters(&live), netns_id);
                    entry.result = Some(result);
                    first = first.and(self.inner.cache.put(entry));
                }
                Err(error) => {
                    first = first.and(Err(error));
                    state.unrecorded.get_or_insert_default().push(live);
                }
            }
        }
        first
    }

    /// Reads the addresses and interfaces of the sandbox from its namespace. `None` if its process has ended.
    async fn read_attachment(&self, live: &Attachment) -> Result<Option<Adopted>, Error> {
        let Some(netns) = open_namespace(live)? else { return Ok(None) };
        let result = self.read_namespace(live, &netns).await?;
        Ok(Some(Adopted { netns_id: netns.id(), result }))
    }

    async fn read_namespace(&self, live: &Attachment, netns: &Netns) -> Result<Answer, Error> {
        let host = &self.inner.host.links;
        let links = Links::inside(netns)?;
        let Some(link) = links.find(&live.ifname).await? else { return Ok(Answer::default()) };
        let addresses = links.addresses(&link).await?;
        let outside = host.find(&host_interface(&live.id, &live.ifname)).await?;
        let bridge = match outside.as_ref().and_then(|outside| outside.controller) {
            Some(bridge) => host.find_index(bridge).await?,
            None => None,
        };
        let of_host = |link: &Link| Interface {
            name: link.name.clone(),
            mac: format_mac(&link.mac),
            mtu: Some(link.mtu),
            ..Interface::default()
        };
        let sandbox = live.netns.to_string_lossy().into_owned();
        let inside = Interface { sandbox, ..of_host(&link) };
        // The interfaces are in the order of the bridge plugin's result.
        let mut interfaces: Vec<_> = bridge.iter().chain(&outside).map(of_host).collect();
        let ips = addresses.iter().map(|a| Ip {
            interface: Some(interfaces.len()),
            address: a.network,
            gateway: None,
        });
        let ips = ips.collect();
        interfaces.push(inside);
        Ok(Answer { interfaces, ips, ..Answer::default() })
    }
}

/// Opens the namespace of a sandbox. `None` if its process has ended.
fn open_namespace(live: &Attachment) -> Result<Option<Netns>, Error> {
    let opened = Netns::open(&live.netns);
    // The check follows the open: if the process is still alive, its pid was not reused before the open.
    if live.process.as_ref().is_some_and(|process| !process.is_alive()) {
        return Ok(None);
    }
    opened.map(Some)
}

/// Firewall claims of these attachments, and the first error.
fn claims(entries: &[Entry]) -> (Vec<Claim>, Result<(), Error>) {
    let (mut claims, mut first) = (Vec::new(), Ok(()));
    for entry in entries.iter().filter(|entry| !entry.is_releasing()) {
        let Some(result) = &entry.result else { continue };
        for conf in &entry.list.plugins {
            let Some(kind) = conf.get("type").and_then(|kind| Kind::parse(kind.as_str()?)) else { continue };
            match plugin::claim(kind, &request(entry, conf, Some(result))) {
                Ok(claim) => claims.extend(claim),
                Err(error) => first = first.and(Err(error)),
            }
        }
    }
    (claims, first)
}

/// Removes the firewall claims of sandboxes that were released after these entries were read: the next pod may need
/// their host ports. A release marks the sandbox before it removes the claims. So either this function finds the mark,
/// or the release removes the claims later.
fn withdraw_released(firewall: &Firewall, cache: &Cache, entries: &[Entry]) -> Result<(), Error> {
    let mut first = Ok(());
    for entry in entries.iter().filter(|entry| !entry.is_releasing()) {
        let id = &entry.at.container_id;
        if cache.is_releasing(id) {
            first = first.and(firewall.remove_sandbox(id));
        }
    }
    first
}

/// Permitted sources of the ports of these attachments, and the first error.
fn sources(entries: &[Entry]) -> (BTreeMap<String, Source>, Result<(), Error>) {
    let (mut sources, mut first) = (BTreeMap::new(), Ok(()));
    for entry in entries.iter().filter(|entry| !entry.is_releasing()) {
        let Some(result) = &entry.result else { continue };
        for conf in entry.list.plugins.iter().filter(|conf| is_bridge(conf)) {
            match bridge::source(&request(entry, conf, Some(result))) {
                Ok(source) => sources.extend(source),
                Err(error) => first = first.and(Err(error)),
            }
        }
    }
    (sources, first)
}

fn is_bridge(conf: &Map<String, Value>) -> bool {
    let kind = conf.get("type").and_then(|kind| Kind::parse(kind.as_str()?));
    matches!(kind, Some(Kind::Bridge))
}

/// The ADD request that one of the list's plugins got for an attachment.
fn request(entry: &Entry, plugin: &Map<String, Value>, previous: Option<&Answer>) -> Request {
    let previous = previous.map(|answer| answer.to_value(entry.list.version));
    Request {
        command: Command::Add,
        container_id: entry.at.container_id.clone(),
        netns: None,
        ifname: entry.at.ifname.clone(),
        args: entry.at.args.clone(),
        path: Vec::new(),
        conf: entry.list.derive(plugin, &entry.at.capabilities, previous),
    }
}

/// The attachments that keep their resources. With our own plugins, an attachment is valid until it is deleted. With
/// executables, it is valid until its deletion is requested.
fn valid(entries: &[Entry], state: &State) -> Vec<Valid> {
    let present = entries.iter().filter(|entry| entry.list.is_in_process() || !entry.is_releasing());
    let known = present.map(|entry| (&entry.at.container_id, &entry.at.ifname));
    let unrecorded = state.unrecorded.iter().flatten().map(|at| (&at.id, &at.ifname));
    let valid = |(id, ifname): (&String, &String)| Valid { container_id: id.clone(), ifname: ifname.clone() };
    known.chain(unrecorded).map(valid).collect()
}

/// The current list, and all lists of attachments.
fn lists<'l>(entries: &'l [Entry], state: &'l State) -> Vec<&'l List> {
    let mut lists: Vec<&Arc<List>> = state.list.iter().collect();
    for entry in entries {
        if !lists.iter().any(|known| Arc::ptr_eq(known, &entry.list) || **known == entry.list) {
            lists.push(&entry.list);
        }
    }
    lists.into_iter().map(Arc::as_ref).collect()
}

/// Restores the address files of an attachment of our own plugins.
fn restore(entry: &Entry) -> Result<(), Error> {
    let Some(result) = &entry.result else { return Ok(()) };
    let mut first = Ok(());
    for plugin in &entry.list.plugins {
        let ipam = plugin.get("ipam").and_then(|ipam| ipam.get("type")).and_then(|kind| kind.as_str());
        if ipam != Some(Kind::HostLocal.name()) {
            continue;
        }
        let request = request(entry, plugin, None);
        for ip in result.addresses_of(&entry.at.ifname) {
            first = first.and(host_local::restore(&request, ip.address.ip()).map(drop));
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace, in_new_namespace_async};
    use serde_json::json;

    use super::*;
    use crate::network::NetworkConfig;

    fn live(id: &str) -> Attachment {
        Attachment { id: id.to_owned(), ifname: "eth0".to_owned(), ..Attachment::default() }
    }

    fn entry(live: &Attachment) -> Entry {
        let list = json!({"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "bridge"}]});
        Entry::new(Arc::new(List::parse(list).unwrap()), parameters(live), None)
    }

    #[test]
    fn a_sandbox_that_gets_its_record_meanwhile_is_known_to_gc() {
        in_new_namespace_async(async move || {
            let dir = tempfile::tempdir().unwrap();
            let [state, root] = ["state", "root"].map(|name| dir.path().join(name));
            let config = NetworkConfig::of_default_network(state, root, "coracle0", "coracle");
            let network = Network::open(config).await.unwrap();
            let mut state = network.inner.state.write().await;
            state.unrecorded = Some(vec![live("a")]);
            let mut known = std::pin::pin!(network.known_attachments());
            tokio::select! {
                biased;
                _ = &mut known => panic!("the state is locked"),
                () = std::future::ready(()) => {}
            }
            // `adopt` records a sandbox in the same way.
            network.inner.cache.put(entry(&live("a"))).unwrap();
            state.unrecorded = Some(Vec::new());
            drop(state);
            let ids: Vec<String> = known.await.into_iter().map(|valid| valid.container_id).collect();
            assert_eq!(ids, ["a"]);
        });
    }

    #[test]
    fn a_sandbox_that_is_released_during_a_reconcile_keeps_no_host_port() {
        in_new_namespace(|| {
            let dir = tempfile::tempdir().unwrap();
            let firewall = Firewall::open("coracle-test", dir.path(), false).unwrap();
            let cache = Cache::open(dir.path(), &dir.path().join("root")).unwrap();
            let claim = |id: &str| Claim { id: id.to_owned(), ..Claim::default() };
            for id in ["released", "running"] {
                cache.put(entry(&live(id))).unwrap();
            }
            let entries = cache.all();
            cache.mark_releasing("released");
            firewall.ensure(vec![claim("released"), claim("running")]).unwrap();
            withdraw_released(&firewall, &cache, &entries).unwrap();
            assert!(firewall.get(&claim("released")).is_none());
            assert!(firewall.get(&claim("running")).is_some());
        });
    }
}
