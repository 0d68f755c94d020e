//! Writes the policies to their nftables table.

use std::collections::BTreeSet;
use std::net::IpAddr;

use coracle_nft::{Attributes, Channel, Element, INET, TableError, Transaction, Verb};

use crate::layout::{self, OwnNode};
use crate::model::{Model, enforced_key};
use crate::program::{Changes, Set};
use crate::rules::{Direction, Tier};

/// Effect of a change on open connections, with the addresses of the affected connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// No connection gets another verdict.
    None,
    /// The change can only allow more connections.
    Allows(BTreeSet<IpAddr>),
    /// Open connections may be forbidden now.
    MayForbid(BTreeSet<IpAddr>),
}

/// Writes a model to its table.
#[derive(Debug)]
pub struct Enforcer {
    table: String,
    channel: Channel,
    /// Whether the table in the kernel has the chains of the policies of administrators.
    is_tiered: bool,
    own_node: OwnNode,
}

// === impl Enforcer ===

impl Enforcer {
    /// An enforcer of this table. Nothing is changed before the first [`replace`](Self::replace).
    ///
    /// # Errors
    /// When a netfilter netlink socket cannot be opened.
    pub fn open(table: &str) -> Result<Self, TableError> {
        let channel = Channel::open().map_err(TableError::Socket)?;
        Ok(Self { table: table.to_owned(), channel, is_tiered: false, own_node: OwnNode::default() })
    }

    /// Sets the node whose pods' packets are filtered.
    #[must_use]
    pub fn at(self, own_node: OwnNode) -> Self {
        Self { own_node, ..self }
    }

    /// The netlink port that identifies the enforcer's own changes in notifications.
    #[must_use]
    pub fn author(&self) -> u32 {
        self.channel.port()
    }

    /// Whether the kernel has the table with its rules: another process may have flushed it.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn is_intact(&mut self) -> Result<bool, TableError> {
        let rules = Attributes::default()
            .text(1, &self.table)
            .text(2, layout::base(Tier::Namespaced, Direction::Ingress));
        let listed = self.channel.has_any(Verb::GetRule, INET, &rules);
        listed.map_err(|source| TableError::Commit { table: self.table.clone(), source })
    }

    /// Whether the table in the kernel has the policies of a pod at all of these addresses. The table may have been
    /// written by an earlier agent.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn enforces(&mut self, uid: &str, ips: &[IpAddr]) -> Result<bool, TableError> {
        // A flush of the table removes the rules, but no elements. So elements alone do not prove that the policies are
        // in force.
        if ips.is_empty() || !self.is_intact()? {
            return Ok(false);
        }
        for ip in ips {
            let Some(key) = enforced_key(uid, *ip) else { return Ok(false) };
            let key = Attributes::default().nest(1, Attributes::default().bytes(1, key.as_bytes()));
            let named = Attributes::default()
                .text(1, &self.table)
                .text(2, &layout::set_name(Set::Enforced(ip.is_ipv4())))
                .nest(3, Attributes::default().nest(1, key));
            let has = self.channel.has(Verb::GetElements, INET, &named);
            if !has.map_err(|source| TableError::Commit { table: self.table.clone(), source })? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether the model needs other base chains than the table has: the first policy of administrators was added, or
    /// the last one was removed. Then [`replace`](Self::replace) must follow.
    #[must_use]
    pub fn must_replace(&self, model: &Model) -> bool {
        model.is_tiered() != self.is_tiered
    }

    /// Replaces the whole table in one transaction.
    ///
    /// # Errors
    /// When the kernel rejects the transaction. The table is unchanged then.
    pub fn replace(&mut self, model: &mut Model) -> Result<(), TableError> {
        let changes = model.program.all();
        let table = self.table.clone();
        let mut transaction = Transaction::new(&table);
        transaction.delete_table();
        transaction.make_table();
        layout::make(&mut transaction, model.is_tiered(), &self.own_node);
        write(&mut transaction, model, changes);
        self.commit(transaction)?;
        self.is_tiered = model.is_tiered();
        Ok(())
    }

    /// Writes the changes of the model since the last call in one transaction.
    ///
    /// # Errors
    /// When the kernel rejects the transaction. The table must be replaced then.
    pub fn change(&mut self, model: &mut Model) -> Result<Effect, TableError> {
        let changes = model.program.changes();
        if changes.is_empty() {
            return Ok(Effect::None);
        }
        let addresses = changes.addresses();
        let effect = match model.is_tiered() || changes.may_forbid() {
            _ if addresses.is_empty() => Effect::None,
            true => Effect::MayForbid(addresses),
            false => Effect::Allows(addresses),
        };
        let table = self.table.clone();
        let mut transaction = Transaction::new(&table);
        write(&mut transaction, model, changes);
        self.commit(transaction)?;
        Ok(effect)
    }

    /// Removes the table, if it exists.
    ///
    /// # Errors
    /// When the kernel rejects the removal.
    pub fn remove(&mut self) -> Result<(), TableError> {
        let table = self.table.clone();
        let mut transaction = Transaction::new(&table);
        transaction.delete_table();
        self.commit(transaction)
    }

    fn commit(&mut self, transaction: Transaction<'_>) -> Result<(), TableError> {
        let committed = self.channel.commit(transaction.finish());
        committed.map_err(|source| TableError::Commit { table: self.table.clone(), source })?;
        coracle_fault::point("policies.committed");
        Ok(())
    }
}

/// Writes changes in the order that the kernel requires: an object is added before its references and removed after
/// them.
fn write(transaction: &mut Transaction<'_>, model: &Model, changes: Changes) {
    let program = &model.program;
    changes.new_sets.iter().for_each(|set| layout::add_set(transaction, *set, program));
    changes.new_chains.iter().for_each(|chain| transaction.make_chain(&layout::chain_name(*chain)));
    for (set, keys) in changes.ended_elements {
        let elements: Vec<Element> = keys.into_iter().map(Element::member).collect();
        transaction.remove(&layout::set_name(set), &elements);
    }
    // A packet reads the generation of the rules once for each base chain and uses it in all chains (`nft_do_chain` of
    // the kernel). So the packet meets either the former rules of these chains or the new rules. Only look-ups of
    // elements read the generation again: during a commit, a packet may meet former rules and new elements. The check
    // of open connections after the commit includes the connection of such a packet.
    changes.changed_chains.iter().for_each(|chain| transaction.flush_chain(&layout::chain_name(*chain)));
    for chain in changes.new_chains.iter().chain(&changes.changed_chains) {
        let Some(lines) = program.chains.get(chain) else { continue };
        for line in &lines.lines {
            transaction.rule(&layout::chain_name(*chain), &layout::rule(line, lines));
        }
    }
    for (set, elements) in changes.new_elements {
        let elements: Vec<Element> =
            elements.into_iter().map(|(key, group)| layout::element(key, group)).collect();
        transaction.add(&layout::set_name(set), &elements);
    }
    changes.ended_chains.iter().for_each(|chain| transaction.flush_chain(&layout::chain_name(*chain)));
    changes.ended_chains.iter().for_each(|chain| transaction.delete_chain(&layout::chain_name(*chain)));
    changes.ended_sets.iter().for_each(|set| transaction.delete_set(&layout::set_name(*set)));
}
