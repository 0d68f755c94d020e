//! Firewall claims of attachments, one file each, and the nftables table that is derived from them. A table that was
//! flushed or changed by another program can be rebuilt at any time.
//!
//! Several processes may share a directory (plugin executables). Only one process at a time can hold the lock. Each
//! process reads the claims of the other processes. It also detects whether another process was killed between the
//! write of a claim and the update of the table. A single process (the node) keeps all claims in memory.

mod claim;
mod index;
mod ledger;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use coracle_nft::{Batch, Channel};
use nix::fcntl::{Flock, FlockArg};
use tracing::warn;

pub(crate) use self::claim::Claim;
use self::index::{Index, content};
use crate::conntrack;
use crate::error::Error;
use crate::file::{failed, remove_file, replace};
use crate::nft::{self, Mapping};
use crate::ports::Protocol;
use crate::spec::request::Request;
use crate::sysctl;

/// Name of the file that exists while the table does not match the claims.
const MARK: &str = "changing";

/// The table and its claims.
pub(crate) struct Firewall {
    table: String,
    dir: PathBuf,
    shared: bool,
    /// Addresses that the node serves itself.
    served: Vec<IpAddr>,
    state: Mutex<State>,
}

struct State {
    claims: Index,
    /// Whether the table has the content that was applied last. Otherwise its content is unknown.
    is_known: bool,
    /// Host ports whose conntrack entries may exist: datagrams to them may be forwarded to former targets.
    redirected: BTreeSet<Mapping>,
    /// Keys of removed claims whose files still exist. Another process would read these files as claims.
    gone: BTreeSet<String>,
    /// The socket, opened at first use, because most requests to plugins need no nftables. Its close takes time: the
    /// kernel first frees everything that any process has removed from nftables.
    channel: Option<Channel>,
}

// === impl State ===

impl State {
    /// Whether the table is known to have the content of the claims.
    fn is_current(&self) -> bool {
        self.is_known && !self.claims.ledger.is_changed()
    }

    /// Host ports of connectionless protocols whose mapping was added or removed since `redirected` was recorded.
    fn redirected_port_changes(&self) -> Vec<Mapping> {
        if !self.is_known {
            let wanted = self.claims.ledger.full_plan().connectionless();
            return self.redirected.symmetric_difference(&wanted).cloned().collect();
        }
        let changed = self.claims.ledger.changed_ports().into_iter();
        let connectionless = changed.filter(|(mapping, _)| mapping.protocol != Protocol::Tcp);
        let redirected =
            connectionless.filter(|(mapping, is_now)| self.redirected.contains(mapping) != *is_now);
        redirected.map(|(mapping, _)| mapping).collect()
    }

    fn channel(&mut self) -> Result<&mut Channel, Error> {
        nft::open_once(&mut self.channel)
    }
}

// === impl Firewall ===

impl Firewall {
    /// Opens the claims below `dir`. With `shared`, other processes use the claims, too.
    pub(crate) fn open(table: &str, dir: &Path, shared: bool) -> Result<Self, Error> {
        let dir = dir.join("firewall");
        fs::create_dir_all(&dir).map_err(failed("create", &dir))?;
        let claims = if shared { BTreeMap::new() } else { read_all(&dir)? };
        let claims = Index::committed(claims);
        let redirected = claims.ledger.full_plan().connectionless();
        let (gone, channel) = (BTreeSet::new(), None);
        let state = Mutex::new(State { claims, is_known: false, redirected, gone, channel });
        Ok(Self { table: table.to_owned(), dir, shared, served: Vec::new(), state })
    }

    /// Sets the addresses that the node serves itself. Host ports do not apply to them.
    pub(crate) fn serving(mut self, served: &[IpAddr]) -> Self {
        self.served = served.to_vec();
        self
    }

    /// Adds or replaces a claim, and updates the table. On a failure, the previous claim is restored.
    pub(crate) fn put(&self, claim: &Claim) -> Result<(), Error> {
        let key = claim.key();
        let (mut state, _lock) = self.lock()?;
        state.claims.check_ports(&key, claim)?;
        let is_new = state.claims.get(&key) != Some(claim);
        let mut before = None;
        if is_new {
            self.mark()?;
            self.write(&key, claim)?;
            before = state.claims.put(key.clone(), claim.clone());
        }
        let applied = self.check_table(&mut state).and_then(|()| self.apply(&mut state));
        if applied.is_err() && is_new {
            match before {
                Some(before) => {
                    self.write(&key, &before)?;
                    state.claims.put(key, before);
                }
                None => {
                    state.claims.remove(&key);
                    state.gone.insert(key);
                    self.remove_files(&mut state)?;
                }
            }
        }
        applied
    }

    /// Adds or replaces these claims, and updates the table once unless it is known to match. If a claim fails, the
    /// other claims are still added. Returns the first failure.
    pub(crate) fn ensure(&self, claims: Vec<Claim>) -> Result<(), Error> {
        let (mut state, _lock) = self.lock()?;
        let mut first = Ok(());
        for claim in claims {
            let key = claim.key();
            if state.claims.get(&key) == Some(&claim) {
                continue;
            }
            let recorded = state.claims.check_ports(&key, &claim).and_then(|()| self.write(&key, &claim));
            if recorded.is_ok() {
                state.claims.put(key, claim);
            }
            first = first.and(recorded);
        }
        first.and(self.apply(&mut state))
    }

    /// The recorded claim of the same plugin, network and attachment.
    pub(crate) fn get(&self, claim: &Claim) -> Option<Claim> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.claims.get(&claim.key()).cloned()
    }

    /// Removes a claim. A claim that does not exist is not an error.
    pub(crate) fn remove(&self, claim: &Claim) -> Result<(), Error> {
        let (state, lock) = self.lock()?;
        self.remove_keys(state, lock, vec![claim.key()])
    }

    /// Removes all claims of a sandbox.
    pub(crate) fn remove_sandbox(&self, id: &str) -> Result<(), Error> {
        let (state, lock) = self.lock()?;
        let keys = state.claims.of_sandbox(id);
        self.remove_keys(state, lock, keys)
    }

    /// Removes all claims for which `stays` is false.
    pub(crate) fn retain(&self, stays: impl Fn(&Claim) -> bool) -> Result<(), Error> {
        let (state, lock) = self.lock()?;
        let keys =
            state.claims.all().filter(|(_, claim)| !stays(claim)).map(|(key, _)| key.clone()).collect();
        self.remove_keys(state, lock, keys)
    }

    fn remove_keys(
        &self,
        mut state: MutexGuard<'_, State>,
        _lock: Option<Flock<fs::File>>,
        keys: Vec<String>,
    ) -> Result<(), Error> {
        let taken = keys.into_iter().filter_map(|key| state.claims.remove(&key).map(|claim| (key, claim)));
        let gone: Vec<(String, Claim)> = taken.collect();
        if let Err(error) = self.update_without(&mut state, &gone) {
            gone.into_iter().for_each(|(key, claim)| drop(state.claims.put(key, claim)));
            return Err(error);
        }
        // The files are removed last: after a crash, the next process finds the claims, and removes them too.
        state.gone.extend(gone.into_iter().map(|(key, _)| key));
        self.remove_files(&mut state)?;
        self.unmark()
    }

    /// Updates the table after the removal of these claims.
    fn update_without(&self, state: &mut State, gone: &[(String, Claim)]) -> Result<(), Error> {
        if !gone.is_empty() {
            self.mark()?;
        }
        // The process that made these claims may have been killed before it recorded their ports in `redirected`.
        for (_, claim) in gone {
            state.redirected.extend(content(claim).connectionless());
        }
        // Interfaces are closed before the rules that protect them are removed. The recorded state of the table does
        // not matter.
        for interface in gone.iter().filter_map(|(_, claim)| claim.opened.as_ref()) {
            if !state.claims.ledger.opens(interface) {
                sysctl::route_localnet(interface, false)?;
            }
        }
        // The table is also checked if no claim is removed, because its last update may have failed.
        if !state.is_current() {
            self.check_table(state)?;
        }
        self.update_table(state)
    }

    /// Removes the files of removed claims, including files that an earlier attempt could not remove.
    fn remove_files(&self, state: &mut State) -> Result<(), Error> {
        let claims = &state.claims;
        state.gone.retain(|key| claims.get(key).is_none());
        while let Some(key) = state.gone.first() {
            remove_file(&self.path(key))?;
            state.gone.pop_first();
            coracle_fault::point("firewall.unclaimed");
        }
        Ok(())
    }

    /// Removes the plugin's claims for attachments that the runtime does not know (GC).
    pub(crate) fn keep_valid(&self, request: &Request) -> Result<(), Error> {
        let valid = request.valid_attachments()?;
        self.retain(|claim| {
            claim.plugin != request.kind()
                || claim.network != request.network()
                || valid.iter().any(|v| v.container_id == claim.id && v.ifname == claim.ifname)
        })
    }

    /// Whether the claim is recorded, and the kernel has the table with rules.
    pub(crate) fn is_applied(&self, claim: &Claim) -> Result<bool, Error> {
        let (mut state, _lock) = self.lock()?;
        if state.claims.get(&claim.key()) != Some(claim) || (self.shared && !state.is_known) {
            return Ok(false);
        }
        let empty = content(claim) == nft::Plan::default();
        Ok(empty || self.has_rules(&mut state)?)
    }

    /// Replaces the table, independent of its state in the kernel.
    pub(crate) fn repair(&self) -> Result<(), Error> {
        let (mut state, _lock) = self.lock()?;
        state.is_known = false;
        self.apply(&mut state)
    }

    /// Whether a claim opens the interface for packets of 127.0.0.0/8.
    pub(crate) fn opens(&self, interface: &str) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.claims.ledger.opens(interface)
    }

    /// Removes the table and all claims.
    pub(crate) fn clear(&self) -> Result<(), Error> {
        let (mut state, _lock) = self.lock()?;
        for interface in state.claims.ledger.opened() {
            sysctl::route_localnet(interface, false)?;
        }
        state.is_known = false;
        self.commit(&mut state, nft::remove(&self.table), "remove")?;
        let claims = std::mem::take(&mut state.claims);
        state.is_known = true;
        let ended: Vec<Mapping> = state.redirected.iter().cloned().collect();
        self.delete_former_entries(&mut state, &ended);
        state.gone.extend(claims.all().map(|(key, _)| key.clone()));
        self.remove_files(&mut state)
    }

    /// Whether a chain outside our table drops by default: it would drop packets to pods.
    pub(crate) fn foreign_drop(&self) -> Result<bool, Error> {
        let (mut state, _lock) = self.lock()?;
        nft::forward_drops(state.channel()?)
            .map_err(self.error_of("look up the policies of other tables beside"))
    }

    fn lock(&self) -> Result<(MutexGuard<'_, State>, Option<Flock<fs::File>>), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.shared {
            return Ok((state, None));
        }
        let path = self.dir.join("lock");
        let file = fs::File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let lock = Flock::lock(file.map_err(failed("open", &path))?, FlockArg::LockExclusive);
        let lock = lock.map_err(|(_, errno)| failed("lock", &path)(errno.into()))?;
        state.claims = Index::committed(read_all(&self.dir)?);
        // The last process has applied these claims, unless it was killed before it updated the table.
        state.is_known = !self.dir.join(MARK).exists();
        state.redirected = match state.is_known {
            true => state.claims.ledger.full_plan().connectionless(),
            false => BTreeSet::new(),
        };
        Ok((state, Some(lock)))
    }

    /// Marks the shared claims as changing, until the table is updated.
    fn mark(&self) -> Result<(), Error> {
        if !self.shared {
            return Ok(());
        }
        fs::create_dir_all(&self.dir).map_err(failed("create", &self.dir))?;
        let path = self.dir.join(MARK);
        fs::write(&path, "").map_err(failed("write", &path))?;
        coracle_fault::point("firewall.marked");
        Ok(())
    }

    /// Checks the shared table in the kernel: another process may have removed it or its rules.
    fn check_table(&self, state: &mut State) -> Result<(), Error> {
        if self.shared && !self.has_rules(state)? {
            let exists = nft::exists(state.channel()?, &self.table).map_err(self.error_of("look up"))?;
            state.is_known = !exists && state.claims.ledger.is_empty();
            if state.is_known {
                state.claims.ledger.mark_committed();
            }
        }
        Ok(())
    }

    fn has_rules(&self, state: &mut State) -> Result<bool, Error> {
        nft::has_rules(state.channel()?, &self.table).map_err(self.error_of("look up"))
    }

    /// Updates the table from the claims, all of which are recorded, and removes the mark.
    fn apply(&self, state: &mut State) -> Result<(), Error> {
        self.update_table(state)?;
        self.unmark()
    }

    /// Updates the table from the claims, unless it already matches.
    fn update_table(&self, state: &mut State) -> Result<(), Error> {
        let mut ports = Vec::new();
        if !state.is_current() {
            // An interface is closed before the rules that protect it are removed.
            if state.is_known {
                for interface in state.claims.ledger.closed() {
                    sysctl::route_localnet(&interface, false)?;
                }
            }
            ports = state.redirected_port_changes();
            self.change_table(state)?;
            coracle_fault::point("firewall.turned");
        }
        for interface in state.claims.ledger.opened() {
            sysctl::route_localnet(interface, true)?;
        }
        self.delete_former_entries(state, &ports);
        Ok(())
    }

    /// Removes the mark: the table matches the claims.
    fn unmark(&self) -> Result<(), Error> {
        if self.shared { remove_file(&self.dir.join(MARK)) } else { Ok(()) }
    }

    /// Commits the difference to the table. If the commit fails, or the table's content is unknown, replaces the table.
    fn change_table(&self, state: &mut State) -> Result<(), Error> {
        let ledger = &state.claims.ledger;
        let (is_empty, had_content) = (ledger.is_empty(), ledger.had_rules());
        let mut is_changed = false;
        if std::mem::take(&mut state.is_known) && had_content && !is_empty {
            let [before, now] = ledger.change();
            let jumps = nft::HostPortJumps { ports: ledger.have_ports(), served: &self.served };
            let batch = nft::change(&self.table, &before, &now, &jumps);
            is_changed = self.commit(state, batch, "change").is_ok();
        }
        if !is_changed {
            // The table's content is unknown, the table or its new content is empty, or the change failed.
            let batch = match is_empty {
                true => nft::remove(&self.table),
                false => nft::replace(&self.table, &state.claims.ledger.full_plan(), &self.served),
            };
            self.commit(state, batch, "change")?;
        }
        state.claims.ledger.mark_committed();
        state.is_known = true;
        Ok(())
    }

    /// Removes conntrack entries of datagrams to changed ports. If that fails, the entries expire by themselves.
    fn delete_former_entries(&self, state: &mut State, changed: &[Mapping]) {
        for mapping in changed {
            if !state.redirected.remove(mapping) {
                state.redirected.insert(mapping.clone());
            }
        }
        if changed.is_empty() {
            return;
        }
        let deleted = state.channel().and_then(|channel| {
            let wrong = |source| Error::Socket { action: "remove conntrack entries of host ports", source };
            conntrack::delete_entries(channel, changed).map_err(wrong)
        });
        if let Err(error) = deleted {
            warn!(
                error = error.chain(),
                "cannot remove conntrack entries, datagrams may be forwarded to former targets of host ports"
            );
        }
        coracle_fault::point("firewall.redirected");
    }

    fn commit(&self, state: &mut State, batch: Batch, action: &'static str) -> Result<(), Error> {
        state.channel()?.commit(batch).map_err(self.error_of(action))
    }

    fn error_of(&self, action: &'static str) -> impl Fn(io::Error) -> Error {
        let table = self.table.clone();
        move |source| Error::Firewall { action, table: table.clone(), source }
    }

    /// Writes a temporary file and renames it, so that no reader finds an incomplete claim.
    fn write(&self, key: &str, claim: &Claim) -> Result<(), Error> {
        // The directory may have been deleted.
        fs::create_dir_all(&self.dir).map_err(failed("create", &self.dir))?;
        let path = self.path(key);
        let text = serde_json::to_vec(claim).map_err(io::Error::from);
        let written = text.and_then(|text| {
            replace(&path, &text, |_| {
                coracle_fault::point("firewall.written");
                Ok(())
            })
        });
        written.map_err(failed("write", &path))?;
        coracle_fault::point("firewall.claimed");
        Ok(())
    }

    fn path(&self, key: &str) -> PathBuf {
        self.dir.join(format!("{key}.json"))
    }
}

fn read_all(dir: &Path) -> Result<BTreeMap<String, Claim>, Error> {
    let mut claims = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(failed("read", dir))? {
        let path = entry.map_err(failed("read", dir))?.path();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => {}
            // The file of a writer that was killed: a running writer holds the lock that this process holds now.
            Some("new") => {
                remove_file(&path)?;
                continue;
            }
            _ => continue,
        }
        match Claim::of_file(&fs::read(&path).map_err(failed("read", &path))?) {
            Some(claim) => drop(claims.insert(claim.key(), claim)),
            // An incomplete claim is not an error: the ADD that was interrupted is repeated or undone.
            None => remove_file(&path)?,
        }
    }
    Ok(claims)
}

#[cfg(test)]
mod tests;
