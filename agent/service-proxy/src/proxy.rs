//! Writes the difference between the desired and the applied programs of services to the table in the kernel.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;

use coracle_nft::{Attributes, Channel, DataType, Element, INET, SetSpec, TableError, Transaction, Verb};
use coracle_services::ServiceState;
use coracle_values::object::Key;
use k8s_openapi::api::core::v1::Service;

use crate::flows::{self, Changed};
use crate::layout;
use crate::node_view::NodeView;
use crate::plan::plan;
use crate::program::{Affinity, AppliedProgram, ElementId, Entry, Map, Program, hash};

/// Maximum clients of an endpoint in its session affinity set.
const CLIENTS_MAX: u32 = 65_536;

/// Maximum chains and elements of a service in [`Proxy::are_small`], without its targets.
const SMALL_MAX: usize = 64;
/// Maximum elements of a service in the map of targets in [`Proxy::are_small`].
const FEW_TARGETS: usize = 512;

/// The key and the state of a service. `None` if the service does not exist.
pub type State = (Key, Option<ServiceState>);

/// A service that claims map keys. The oldest service is first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Owner {
    /// Unix time in seconds.
    created: i64,
    key: Key,
}

/// The proxy's table.
#[derive(Debug)]
pub struct Proxy {
    table: String,
    channel: Channel,
    node: NodeView,
    applied: HashMap<Key, (Owner, AppliedProgram)>,
    /// All services that claim a key of a map, the oldest first. The first service has the key.
    claims: HashMap<ElementId, Vec<(Owner, Entry)>>,
    /// Whether the table in the kernel is unknown, so that it must be replaced.
    is_unknown: bool,
    /// Ports whose conntrack entries may lead to former endpoints.
    stale: Changed,
}

/// The changes of one transaction.
#[derive(Default)]
struct Difference {
    /// New or changed chains.
    chains: BTreeMap<String, Vec<coracle_nft::Rule>>,
    /// Chains whose old rules are removed: changed chains that exist, and ended chains.
    flushed: BTreeSet<String>,
    ended_chains: BTreeSet<String>,
    affinities: BTreeMap<String, Affinity>,
    ended_affinities: BTreeSet<String>,
    /// The entry of each changed element before the change.
    before: BTreeMap<ElementId, Option<Entry>>,
    flows: Changed,
}

// === impl Proxy ===

impl Proxy {
    /// A proxy with this table. The kernel is not changed before the first [`replace`](Self::replace).
    ///
    /// # Errors
    /// When a netfilter netlink socket cannot be opened.
    pub fn open(table: &str, node: NodeView) -> Result<Self, TableError> {
        Ok(Self {
            table: table.to_owned(),
            channel: Channel::open().map_err(TableError::Socket)?,
            node,
            applied: HashMap::new(),
            claims: HashMap::new(),
            is_unknown: true,
            stale: Changed::new(),
        })
    }

    /// The netlink port that identifies the proxy's own changes in notifications.
    #[must_use]
    pub fn author(&self) -> u32 {
        self.channel.port()
    }

    /// Whether the table must be replaced because a change failed.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        self.is_unknown
    }

    /// Whether the kernel has the table with its rules: another process may have flushed it.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn is_intact(&mut self) -> Result<bool, TableError> {
        let rules = Attributes::default().text(1, &self.table).text(2, layout::POSTROUTING);
        let listed = self.channel.has_any(Verb::GetRule, INET, &rules);
        listed.map_err(|source| TableError::Commit { table: self.table.clone(), source })
    }

    /// Whether the applied programs of these services are small. Then a change takes less time than the wake-up of a
    /// thread.
    #[must_use]
    pub fn are_small<'a>(&self, mut services: impl Iterator<Item = &'a Key>) -> bool {
        let is_small = |(_, program): &(Owner, AppliedProgram)| {
            program.chains.len() + program.elements.len() <= SMALL_MAX && program.targets <= FEW_TARGETS
        };
        services.all(|key| self.applied.get(key).is_none_or(is_small))
    }

    /// Replaces the whole table in one transaction, and deletes stale conntrack entries.
    ///
    /// # Errors
    /// When the kernel rejects the transaction; the table is unchanged then.
    pub fn replace(
        &mut self,
        node: NodeView,
        all: impl IntoIterator<Item = State>,
    ) -> Result<(), TableError> {
        let clients = self.clients();
        self.node = node;
        self.is_unknown = true;
        self.applied.clear();
        self.claims.clear();
        let difference = self.record(all);
        let table = self.table.clone();
        let mut transaction = Transaction::new(&table);
        transaction.delete_table();
        transaction.make_table();
        layout::make(&mut transaction, &self.node);
        let sets: Vec<String> = difference.affinities.keys().cloned().collect();
        let flows = self.write(&mut transaction, difference);
        for set in sets {
            // Clients keep their endpoints across restarts and repairs.
            transaction.add(&set, clients.get(&set).into_iter().flatten());
        }
        self.commit(transaction, flows)?;
        self.delete_stale_flows();
        Ok(())
    }

    /// Applies changed services in one transaction, and deletes stale conntrack entries.
    ///
    /// # Errors
    /// When the kernel rejects the transaction; the table must be replaced then.
    pub fn change(&mut self, changed: impl IntoIterator<Item = State>) -> Result<(), TableError> {
        self.change_table(changed)?;
        self.delete_stale_flows();
        Ok(())
    }

    /// Applies changed services in one transaction. If the result is true, the caller must then call
    /// [`delete_stale_flows`](Self::delete_stale_flows).
    ///
    /// # Errors
    /// When the kernel rejects the transaction; the table must be replaced then.
    pub fn change_table(&mut self, changed: impl IntoIterator<Item = State>) -> Result<bool, TableError> {
        let difference = self.record(changed);
        let table = self.table.clone();
        let mut transaction = Transaction::new(&table);
        self.is_unknown = true;
        let flows = self.write(&mut transaction, difference);
        self.commit(transaction, flows)?;
        Ok(!self.stale.is_empty())
    }

    /// Deletes conntrack entries that lead to former endpoints. If a changed port may have such entries, this takes
    /// milliseconds, because the kernel visits all conntrack entries.
    pub fn delete_stale_flows(&mut self) {
        if let Err(error) = flows::delete_stale(&mut self.channel, &std::mem::take(&mut self.stale)) {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot remove conntrack entries, datagrams may reach former endpoints until they expire"
            );
        }
    }

    /// Removes the table.
    ///
    /// # Errors
    /// When the kernel rejects the transaction.
    pub fn remove(table: &str) -> Result<(), TableError> {
        let mut transaction = Transaction::new(table);
        transaction.delete_table();
        commit_once(table, transaction).map(drop)
    }

    /// Replaces the table by a table without services, which only drops packets of pods to the overlay's port. This is
    /// for a node whose services another program proxies. Without an overlay that has a port, the table is removed.
    /// Returns the netlink port that identifies this change in notifications.
    ///
    /// # Errors
    /// When the kernel rejects the transaction; the table is unchanged then.
    pub fn replace_by_guard(table: &str, node: &NodeView) -> Result<u32, TableError> {
        let mut transaction = Transaction::new(table);
        transaction.delete_table();
        layout::make_overlay_guard(&mut transaction, node);
        commit_once(table, transaction)
    }

    fn commit(&mut self, transaction: Transaction<'_>, flows: Changed) -> Result<(), TableError> {
        let committed = self.channel.commit(transaction.finish());
        committed.map_err(|source| TableError::Commit { table: self.table.clone(), source })?;
        coracle_fault::point("services.committed");
        self.is_unknown = false;
        self.stale.extend(flows);
        Ok(())
    }

    /// Plans the changed services, and records the difference from the applied programs.
    fn record(&mut self, changed: impl IntoIterator<Item = State>) -> Difference {
        let mut difference = Difference::default();
        for (key, state) in changed {
            let (owner, mut program) = match &state {
                Some(ServiceState { service, slices }) => {
                    (owner(&key, service), plan(service, slices, &self.node))
                }
                None => (Owner { created: 0, key: key.clone() }, Program::default()),
            };
            self.keep_numbers(&mut program, &key);
            let (old_owner, old) =
                self.applied.remove(&key).unwrap_or_else(|| (owner.clone(), AppliedProgram::default()));
            let summary = program.summary();
            difference.compare(&old, &program);
            flows::compare(&mut difference.flows, &old.connectionless, &program.connectionless);
            let same_owner = owner == old_owner;
            for element_id in old
                .elements
                .iter()
                .filter(|element_id| !same_owner || !program.elements.contains_key(element_id))
            {
                self.record_before(&mut difference, element_id);
                self.remove_claim(element_id, &old_owner);
            }
            for (element_id, entry) in program.elements {
                self.record_before(&mut difference, &element_id);
                self.claim(element_id, owner.clone(), entry);
            }
            if state.is_some() {
                self.applied.insert(key, (owner, summary));
            }
        }
        difference
    }

    /// Gives the targets of a service the numbers that they have in the kernel. So the change of one target changes few
    /// elements of the map of targets.
    fn keep_numbers(&self, program: &mut Program, service: &Key) {
        for (element_id, entry) in &mut program.elements {
            let Entry::OneOf(choice) = entry else { continue };
            let mut claims = self.claims.get(element_id).into_iter().flatten();
            let former = claims.find(|(owner, _)| owner.key == *service);
            if let Some((_, Entry::OneOf(former))) = former {
                *choice = choice.after(former);
            }
        }
    }

    fn claim(&mut self, element_id: ElementId, owner: Owner, entry: Entry) {
        // Nearly all keys have one claim, so a larger capacity would waste memory.
        let claims = self.claims.entry(element_id).or_insert_with(|| Vec::with_capacity(1));
        match claims.binary_search_by(|(known, _)| known.cmp(&owner)) {
            Ok(at) => claims[at].1 = entry,
            Err(at) => claims.insert(at, (owner, entry)),
        }
    }

    fn remove_claim(&mut self, element_id: &ElementId, owner: &Owner) {
        if let Some(claims) = self.claims.get_mut(element_id) {
            claims.retain(|(known, _)| known != owner);
            if claims.is_empty() {
                self.claims.remove(element_id);
            }
        }
    }

    /// Records the entry that the element has in the kernel, unless it is recorded already.
    fn record_before(&self, difference: &mut Difference, element_id: &ElementId) {
        if !difference.before.contains_key(element_id) {
            difference.before.insert(element_id.clone(), self.element(element_id));
        }
    }

    /// The entry of an element: the entry of the oldest service that claims the element.
    fn element(&self, element_id: &ElementId) -> Option<Entry> {
        self.claims.get(element_id)?.first().map(|(_, entry)| entry.clone())
    }

    /// Writes the difference in the order that the kernel requires. An element's chain exists before the element, and
    /// a chain is removed after the elements that lead to it.
    fn write(&self, transaction: &mut Transaction<'_>, difference: Difference) -> Changed {
        let mut gone: BTreeMap<_, Vec<Element>> = BTreeMap::new();
        let mut new: BTreeMap<_, Vec<Element>> = BTreeMap::new();
        for (element_id, before) in difference.before {
            let now = self.element(&element_id);
            if now == before {
                continue;
            }
            let element = |entry: &Option<Entry>| entry.as_ref().map(|entry| entry.element(&element_id));
            let (was, is) = (element(&before), element(&now));
            if was != is {
                let name = layout::name(element_id.map, element_id.is_ipv4);
                gone.entry(name).or_default().extend(was);
                new.entry(name).or_default().extend(is);
            }
            let targets = Entry::target_changes(&element_id, before.as_ref(), now.as_ref());
            let name = layout::name(Map::Targets, element_id.is_ipv4);
            gone.entry(name).or_default().extend(targets.ended);
            new.entry(name).or_default().extend(targets.added);
        }
        for (name, affinity) in &difference.affinities {
            transaction.make_set(&SetSpec {
                name,
                key: DataType::address(affinity.is_ipv4),
                dynamic: Some((affinity.timeout, CLIENTS_MAX)),
                ..SetSpec::default()
            });
        }
        difference.chains.keys().for_each(|name| transaction.make_chain(name));
        for (name, elements) in gone {
            let keys: Vec<Element> =
                elements.into_iter().map(|element| Element::member(element.key)).collect();
            transaction.remove(name, &keys);
        }
        difference.flushed.iter().for_each(|name| transaction.flush_chain(name));
        for (name, rules) in &difference.chains {
            rules.iter().for_each(|rule| transaction.rule(name, rule));
        }
        new.iter().for_each(|(name, elements)| transaction.add(name, elements));
        difference.ended_chains.iter().for_each(|name| transaction.delete_chain(name));
        difference.ended_affinities.iter().for_each(|name| transaction.delete_set(name));
        difference.flows
    }

    /// The session affinity clients in the kernel's table, by set. Empty without a table.
    fn clients(&mut self) -> HashMap<String, Vec<Element>> {
        let table = self.table.clone();
        match coracle_nft::dynamic_elements(&mut self.channel, &table) {
            Ok(clients) => clients,
            Err(error) if error.kind() == io::ErrorKind::NotFound => HashMap::new(),
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot read the clients of session affinity, they may get other endpoints"
                );
                HashMap::new()
            }
        }
    }
}

/// Commits a transaction with a new socket. Returns the netlink port of the socket.
fn commit_once(table: &str, transaction: Transaction<'_>) -> Result<u32, TableError> {
    let mut channel = Channel::open().map_err(TableError::Socket)?;
    let committed = channel.commit(transaction.finish());
    committed.map_err(|source| TableError::Commit { table: table.to_owned(), source })?;
    Ok(channel.port())
}

fn owner(key: &Key, service: &Service) -> Owner {
    let created = service.metadata.creation_timestamp.as_ref();
    Owner { created: created.map_or(i64::MAX, |time| time.0.as_second()), key: key.clone() }
}

// === impl Difference ===

impl Difference {
    /// Adds the changed chains and affinity sets of a service.
    fn compare(&mut self, old: &AppliedProgram, new: &Program) {
        for (name, rules) in &new.chains {
            let before = old.chains.get(name);
            if before == Some(&hash(rules)) {
                continue;
            }
            if before.is_some() {
                self.flushed.insert(name.clone());
            }
            self.chains.insert(name.clone(), rules.clone());
        }
        let ended = old.chains.keys().filter(|name| !new.chains.contains_key(*name));
        for name in ended {
            self.flushed.insert(name.clone());
            self.ended_chains.insert(name.clone());
        }
        let added = new.affinities.iter().filter(|(name, _)| !old.affinities.contains(*name));
        self.affinities.extend(added.map(|(name, affinity)| (name.clone(), *affinity)));
        let ended = old.affinities.iter().filter(|name| !new.affinities.contains_key(*name));
        self.ended_affinities.extend(ended.cloned());
    }
}

#[cfg(test)]
mod tests;
