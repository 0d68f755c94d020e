//! What every attachment wants of the firewall, a small file each, and the one nftables table that follows
//! from all of them: derived, so that a flushed or foreign-changed table is made again at any time.
//!
//! Several processes may share a directory (plugin executables): they take turns by a lock and each reads
//! what the others wrote, and whether one was killed between its claim and the table. One process alone (the node) keeps
//! all in memory.

mod claim;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::fcntl::{Flock, FlockArg};
use tracing::warn;

pub(crate) use self::claim::Claim;
use self::claim::{check_ports, plan};
use crate::conntrack;
use crate::error::Error;
use crate::nft::{self, Batch, Channel, Mapping, Plan};
use crate::spec::request::Request;
use crate::sysctl;

/// The file that is there while claims are not yet what the table says.
const MARK: &str = "changing";

/// The table, and what it follows from.
pub(crate) struct Firewall {
    table: String,
    dir: PathBuf,
    shared: bool,
    state: Mutex<State>,
}

struct State {
    claims: BTreeMap<String, Claim>,
    /// What the table says; none when that is not known.
    applied: Option<Plan>,
    /// The ways in that conntrack leads datagrams by.
    led: BTreeSet<Mapping>,
    /// Claims that are gone and whose files are still there: the next process would take them for claims.
    gone: BTreeSet<String>,
    /// Opened when the kernel is first spoken to: most of what plugins do needs no word of it, and closing the socket
    /// waits for the kernel to be done with what anybody has removed of nftables.
    channel: Option<Channel>,
}

// === impl State ===

impl State {
    fn channel(&mut self) -> Result<&mut Channel, Error> {
        match &mut self.channel {
            Some(channel) => Ok(channel),
            none => {
                let wrong = |source| Error::Socket { action: "open an nftables socket", source };
                Ok(none.insert(Channel::open().map_err(wrong)?))
            }
        }
    }
}

// === impl Firewall ===

impl Firewall {
    /// Opens the claims below `dir`. With `shared`, other processes have them open, too.
    pub(crate) fn open(table: &str, dir: &Path, shared: bool) -> Result<Self, Error> {
        let dir = dir.join("firewall");
        fs::create_dir_all(&dir).map_err(failed("create", &dir))?;
        let claims = if shared { BTreeMap::new() } else { read_all(&dir)? };
        let led = plan(claims.values()).connectionless();
        let state = Mutex::new(State { claims, applied: None, led, gone: BTreeSet::new(), channel: None });
        Ok(Self { table: table.to_owned(), dir, shared, state })
    }

    /// Adds or replaces a claim, and makes the table follow. When it cannot, what was on file is on file again.
    pub(crate) fn put(&self, claim: &Claim) -> Result<(), Error> {
        let key = claim.key();
        let (mut state, _lock) = self.lock()?;
        check_ports(claim, state.claims.iter().filter(|(other, _)| **other != key).map(|(_, claim)| claim))?;
        let before = state.claims.get(&key).cloned();
        let is_new = before.as_ref() != Some(claim);
        if is_new {
            self.mark()?;
            self.write(&key, claim)?;
            state.claims.insert(key.clone(), claim.clone());
        }
        let followed = self.look(&mut state).and_then(|()| self.follow(&mut state));
        if followed.is_err() && is_new {
            match before {
                Some(before) => {
                    self.write(&key, &before)?;
                    state.claims.insert(key, before);
                }
                None => {
                    state.claims.remove(&key);
                    state.gone.insert(key);
                    self.unfile(&mut state)?;
                }
            }
        }
        followed
    }

    /// Adds or replaces all of these, and makes the table follow, if it is not known to: once for all. Those that can
    /// be had are, whatever becomes of the others; the first failure is returned.
    pub(crate) fn ensure(&self, claims: Vec<Claim>) -> Result<(), Error> {
        let (mut state, _lock) = self.lock()?;
        let mut first = Ok(());
        for claim in claims {
            let key = claim.key();
            if state.claims.get(&key) == Some(&claim) {
                continue;
            }
            let others = state.claims.iter().filter(|(other, _)| **other != key).map(|(_, claim)| claim);
            let can_be = check_ports(&claim, others).and_then(|()| self.write(&key, &claim));
            if can_be.is_ok() {
                state.claims.insert(key, claim);
            }
            first = first.and(can_be);
        }
        first.and(self.follow(&mut state))
    }

    /// The claim on file of the same plugin, network and attachment.
    pub(crate) fn get(&self, claim: &Claim) -> Option<Claim> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.claims.get(&claim.key()).cloned()
    }

    /// Takes a claim back; one never made is no error.
    pub(crate) fn remove(&self, claim: &Claim) -> Result<(), Error> {
        let key = claim.key();
        self.retain(|other| other.key() != key)
    }

    /// Takes all claims back but those that are to stay.
    pub(crate) fn retain(&self, stays: impl Fn(&Claim) -> bool) -> Result<(), Error> {
        let (mut state, _lock) = self.lock()?;
        let gone: BTreeMap<String, Claim> = state.claims.extract_if(.., |_, claim| !stays(claim)).collect();
        if !gone.is_empty() {
            self.mark()?;
        }
        // Whoever made them may have been killed before it was known.
        state.led.extend(plan(gone.values()).connectionless());
        // Before the rules that guard them go, whatever the table is taken to be.
        let opened = plan(state.claims.values()).opened;
        for interface in gone.values().filter_map(|claim| claim.opened.as_ref()) {
            if !opened.contains(interface)
                && let Err(error) = sysctl::route_localnet(interface, false)
            {
                state.claims.extend(gone);
                return Err(error);
            }
        }
        // Also when nothing went: the table may not have followed the last time.
        let seen = match state.applied.as_ref() == Some(&plan(state.claims.values())) {
            true => Ok(()),
            false => self.look(&mut state),
        };
        if let Err(error) = seen.and_then(|()| self.turn_as_claimed(&mut state)) {
            state.claims.extend(gone);
            return Err(error);
        }
        // On file until nothing leads to them any more: whoever is killed on the way is told by them what is left.
        state.gone.extend(gone.into_keys());
        self.unfile(&mut state)?;
        self.unmark()
    }

    /// Removes the files of claims that are gone, those that could not be removed before, too.
    fn unfile(&self, state: &mut State) -> Result<(), Error> {
        let claims = &state.claims;
        state.gone.retain(|key| !claims.contains_key(key));
        while let Some(key) = state.gone.first() {
            remove(&self.path(key))?;
            state.gone.pop_first();
            coracle_fault::point("firewall.unclaimed");
        }
        Ok(())
    }

    /// Takes back the plugin's claims for the network whose attachments the runtime does not know any more (GC).
    pub(crate) fn keep_valid(&self, request: &Request) -> Result<(), Error> {
        let valid = request.valid_attachments()?;
        self.retain(|claim| {
            claim.plugin != request.kind()
                || claim.network != request.network()
                || valid.iter().any(|v| v.container_id == claim.id && v.ifname == claim.ifname)
        })
    }

    /// Whether the claim is on file and the table in the kernel, with rules.
    pub(crate) fn holds(&self, claim: &Claim) -> Result<bool, Error> {
        let (mut state, _lock) = self.lock()?;
        if state.claims.get(&claim.key()) != Some(claim) || (self.shared && state.applied.is_none()) {
            return Ok(false);
        }
        let empty = plan(std::iter::once(claim)) == Plan::default();
        Ok(empty || self.has_rules(&mut state)?)
    }

    /// Makes the table anew, whatever the kernel has of it.
    pub(crate) fn repair(&self) -> Result<(), Error> {
        let (mut state, _lock) = self.lock()?;
        state.applied = None;
        self.follow(&mut state)
    }

    /// Whether a claim wants the interface open for packets of 127.0.0.0/8.
    pub(crate) fn opens(&self, interface: &str) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.claims.values().any(|claim| claim.opened.as_deref() == Some(interface))
    }

    /// Removes the table and all claims.
    pub(crate) fn clear(&self) -> Result<(), Error> {
        let (mut state, _lock) = self.lock()?;
        for claim in state.claims.values() {
            claim.opened.iter().try_for_each(|interface| sysctl::route_localnet(interface, false))?;
        }
        state.applied = None;
        self.commit(&mut state, nft::remove(&self.table), "remove")?;
        state.applied = Some(Plan::default());
        self.redirect(&mut state);
        let gone = std::mem::take(&mut state.claims);
        state.gone.extend(gone.into_keys());
        self.unfile(&mut state)
    }

    /// Whether a chain of the machine's own drops what no rule accepts: packets to pods then, too.
    pub(crate) fn foreign_drop(&self) -> Result<bool, Error> {
        let (mut state, _lock) = self.lock()?;
        nft::forward_drops(state.channel()?).map_err(self.wrong("look up the policies beside"))
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
        state.claims = read_all(&self.dir)?;
        // What the last process applied, unless it was killed before the table followed.
        state.applied = (!self.dir.join(MARK).exists()).then(|| plan(state.claims.values()));
        state.led = state.applied.as_ref().map(Plan::connectionless).unwrap_or_default();
        Ok((state, Some(lock)))
    }

    /// Notes that the claims of several processes are about to change, until the table has followed.
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

    /// Takes nothing for applied that is shared and not there any more, or not all.
    fn look(&self, state: &mut State) -> Result<(), Error> {
        if self.shared && !self.has_rules(state)? {
            let exists = nft::exists(state.channel()?, &self.table).map_err(self.wrong("look up"))?;
            state.applied = (!exists).then(Plan::default);
        }
        Ok(())
    }

    fn has_rules(&self, state: &mut State) -> Result<bool, Error> {
        nft::has_rules(state.channel()?, &self.table).map_err(self.wrong("look up"))
    }

    /// Makes the table what the claims say, all of which are on file.
    fn follow(&self, state: &mut State) -> Result<(), Error> {
        self.turn_as_claimed(state)?;
        self.unmark()
    }

    /// Makes the table what the claims say, unless that is what was made last.
    fn turn_as_claimed(&self, state: &mut State) -> Result<(), Error> {
        let wanted = plan(state.claims.values());
        let opened = wanted.opened.clone();
        if state.applied.as_ref() != Some(&wanted) {
            // The rules that guard an open interface are there for longer than it is open.
            let before = state.applied.iter().flat_map(|applied| &applied.opened);
            for interface in before.filter(|interface| !opened.contains(*interface)) {
                sysctl::route_localnet(interface, false)?;
            }
            self.turn(state, wanted)?;
            coracle_fault::point("firewall.turned");
        }
        for interface in &opened {
            sysctl::route_localnet(interface, true)?;
        }
        self.redirect(state);
        Ok(())
    }

    /// Notes that the table says what is on file.
    fn unmark(&self) -> Result<(), Error> {
        if self.shared { remove(&self.dir.join(MARK)) } else { Ok(()) }
    }

    /// Turns the table into this. As much of it as can stay does, for the kernel takes its time with what is removed.
    fn turn(&self, state: &mut State, wanted: Plan) -> Result<(), Error> {
        let changed = state.applied.take().and_then(|applied| nft::change(&self.table, &applied, &wanted));
        let changed = changed.map(|batch| self.commit(state, batch, "change"));
        if !matches!(changed, Some(Ok(()))) {
            // Not all was there that should have been.
            let batch = match wanted == Plan::default() {
                true => nft::remove(&self.table),
                false => nft::replace(&self.table, &wanted),
            };
            self.commit(state, batch, "change")?;
        }
        state.applied = Some(wanted);
        Ok(())
    }

    /// Has datagrams that are under way to ports follow the table, too. They do in time if they cannot now.
    fn redirect(&self, state: &mut State) {
        let Some(wanted) = state.applied.as_ref().map(Plan::connectionless) else { return };
        let before = std::mem::replace(&mut state.led, wanted);
        let changed: Vec<Mapping> = before.symmetric_difference(&state.led).cloned().collect();
        if changed.is_empty() {
            return;
        }
        let forgotten = state.channel().and_then(|channel| {
            let wrong = |source| Error::Socket { action: "have datagrams follow their ports", source };
            conntrack::forget(channel, &changed).map_err(wrong)
        });
        if let Err(error) = forgotten {
            warn!(error = error.chain(), "datagrams may still be led to where a host port led before");
        }
        coracle_fault::point("firewall.redirected");
    }

    fn commit(&self, state: &mut State, batch: Batch, action: &'static str) -> Result<(), Error> {
        state.channel()?.commit(batch).map_err(self.wrong(action))
    }

    fn wrong(&self, action: &'static str) -> impl Fn(io::Error) -> Error {
        let table = self.table.clone();
        move |source| Error::Firewall { action, table: table.clone(), source }
    }

    /// Written under another name first: a reader sees all of it or nothing.
    fn write(&self, key: &str, claim: &Claim) -> Result<(), Error> {
        // Whoever deleted it, claims go on.
        fs::create_dir_all(&self.dir).map_err(failed("create", &self.dir))?;
        let path = self.path(key);
        let temporary = path.with_extension("new");
        let text = serde_json::to_vec(claim).map_err(io::Error::from).map_err(failed("write", &path))?;
        fs::write(&temporary, text).map_err(failed("write", &temporary))?;
        coracle_fault::point("firewall.written");
        fs::rename(&temporary, &path).map_err(failed("write", &path))?;
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
            // Of a process that was killed while it wrote: whoever comes here does it alone.
            Some("new") => {
                remove(&path)?;
                continue;
            }
            _ => continue,
        }
        match fs::read(&path).ok().and_then(|text| Claim::of_file(&text)) {
            Some(claim) => drop(claims.insert(claim.key(), claim)),
            // A torn record is no reason to fail: what it described is made again by its owner.
            None => remove(&path)?,
        }
    }
    Ok(claims)
}

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}

fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::File { action, path: path.clone(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::portmap::condition::Condition;
    use crate::ports::PortMapping;
    use crate::ports::Protocol;

    fn port(host_ip: Option<&str>, host_port: u16) -> PortMapping {
        let host_ip = host_ip.map(|ip| ip.parse().unwrap());
        PortMapping { host_ip, host_port, container_port: 80, protocol: Protocol::Tcp }
    }

    fn claim(id: &str, ports: Vec<PortMapping>) -> Claim {
        let to = ["10.1.0.5/16", "fd00::5/64"].map(|to| to.parse().unwrap()).to_vec();
        Claim { id: id.into(), ports, to, hairpin: true, ..Claim::default() }
    }

    #[test]
    fn ports_lead_to_addresses_of_their_family() {
        let wanted = claim("a", vec![port(None, 1), port(Some("192.0.2.1"), 2), port(Some("::"), 3)]);
        let plan = plan(std::iter::once(&wanted));
        let mapped: Vec<_> = plan.mappings.iter().map(|m| (m.host_port, m.host_ip, m.to.is_ipv4())).collect();
        let one = Some("192.0.2.1".parse().unwrap());
        assert_eq!(mapped, [(1, None, true), (1, None, false), (3, None, false), (2, one, true)]);
        let networks: Vec<_> = plan.hairpin.iter().map(ToString::to_string).collect();
        assert_eq!(networks, ["10.1.0.0/16", "fd00::/64"]);
    }

    #[test]
    fn ports_with_conditions_and_without_translation_of_senders_are_apart() {
        let condition =
            Condition { subject: crate::portmap::condition::Subject::By("eth0".into()), negated: false };
        let conditions = [vec![condition], Vec::new()];
        let wanted = Claim { hairpin: false, conditions, ..claim("a", vec![port(None, 1)]) };
        let plan = plan(std::iter::once(&wanted));
        assert!(plan.mappings.iter().all(|mapping| mapping.to.is_ipv6()) && plan.mappings.len() == 1);
        assert!(
            plan.conditional.iter().all(|(mapping, _)| mapping.to.is_ipv4()) && plan.conditional.len() == 1
        );
        assert!(plan.hairpin.is_empty() && !plan.loopback && plan.untouched.len() == 2);
    }

    #[test]
    fn a_port_is_given_once_for_each_address() {
        let held = claim("a", vec![port(Some("192.0.2.1"), 1)]);
        assert!(check_ports(&claim("b", vec![port(Some("192.0.2.2"), 1)]), [&held].into_iter()).is_ok());
        for ip in [None, Some("0.0.0.0"), Some("192.0.2.1")] {
            let error = check_ports(&claim("b", vec![port(ip, 1)]), [&held].into_iter()).unwrap_err();
            assert_eq!(error.to_string(), "host port 1/tcp is taken by sandbox a");
        }
    }

    #[test]
    fn networks_are_masqueraded_once_for_all_their_members() {
        let member = |id: &str| Claim {
            id: id.into(),
            masquerade: vec!["10.1.0.0/16".parse().unwrap()],
            ..Claim::default()
        };
        assert_eq!(plan([&member("a"), &member("b")].into_iter()).masquerade.len(), 1);
    }

    /// What the kernel has of a table, in a network namespace of this thread's own.
    fn listed(table: &str) -> String {
        let output =
            std::process::Command::new("nft").args(["list", "table", "inet", table]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn what_a_killed_process_left_half_done_is_done_by_the_next() {
        let thread = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
            let dir = tempfile::tempdir().unwrap();
            let process = || Firewall::open("t", dir.path(), true).unwrap();
            let of_network = |id: &str| Claim {
                masquerade: vec!["10.1.0.0/16".parse().unwrap()],
                ..claim(id, Vec::new())
            };
            process().put(&claim("a", vec![port(None, 1)])).unwrap();
            // Killed when its claim is written, it never comes to the table.
            let killed = process();
            let (state, lock) = killed.lock().unwrap();
            killed.mark().unwrap();
            killed.write(&of_network("b").key(), &of_network("b")).unwrap();
            drop((state, lock));
            assert!(!process().holds(&of_network("b")).unwrap());
            // Nor does the claim of the same network change what it says.
            process().put(&of_network("c")).unwrap();
            assert!(listed("t").contains("10.1.0.0/16 ip daddr"), "{}", listed("t"));
            assert!(process().holds(&of_network("b")).unwrap());
            // Killed when a claim is removed, it leaves the port behind.
            let (state, lock) = killed.lock().unwrap();
            killed.mark().unwrap();
            remove(&killed.path(&claim("a", Vec::new()).key())).unwrap();
            drop((state, lock));
            assert!(listed("t").contains("tcp . 1 : 10.1.0.5 . 80"));
            process().remove(&claim("a", Vec::new())).unwrap();
            assert!(!listed("t").contains("10.1.0.5"), "{}", listed("t"));
        });
        thread.join().unwrap();
    }

    #[test]
    fn a_claim_whose_file_cannot_be_removed_is_told_of_until_it_is() {
        let thread = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
            let dir = tempfile::tempdir().unwrap();
            let firewall = Firewall::open("t", dir.path(), false).unwrap();
            let claim = claim("a", vec![port(None, 1)]);
            firewall.put(&claim).unwrap();
            let path = firewall.path(&claim.key());
            fs::remove_file(&path).unwrap();
            fs::create_dir(&path).unwrap();
            for _ in 0..2 {
                assert!(firewall.remove(&claim).is_err());
            }
            assert!(!listed("t").contains("10.1.0.5"));
            fs::remove_dir(&path).unwrap();
            fs::write(&path, "{}").unwrap();
            firewall.remove(&claim).unwrap();
            assert!(!path.exists());
        });
        thread.join().unwrap();
    }

    #[test]
    fn a_bridge_that_an_earlier_version_opened_closes_with_its_last_claim() {
        let thread = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
            let ip = |line: &str| {
                assert!(std::process::Command::new("ip").args(line.split(' ')).status().unwrap().success());
            };
            ip("link add br0 type bridge");
            ip("addr add 10.1.0.1/16 dev br0");
            ip("link set br0 up");
            let opened = Path::new("/proc/sys/net/ipv4/conf/br0/route_localnet");
            let is_open = || fs::read_to_string(opened).unwrap().trim() == "1";
            for shared in [false, true] {
                let dir = tempfile::tempdir().unwrap();
                fs::create_dir(dir.path().join("firewall")).unwrap();
                for id in ["a", "b"] {
                    let claim = claim(id, vec![port(None, id.as_bytes()[0].into())]);
                    let mut text = serde_json::to_value(&claim).unwrap();
                    text.as_object_mut().unwrap().remove("opened");
                    let path = dir.path().join(format!("firewall/{}.json", claim.key()));
                    fs::write(path, text.to_string()).unwrap();
                }
                fs::write(opened, "1").unwrap();
                let firewall = Firewall::open("t", dir.path(), shared).unwrap();
                firewall.remove(&claim("a", Vec::new())).unwrap();
                assert!(is_open(), "the other one's port needs it");
                firewall.remove(&claim("b", Vec::new())).unwrap();
                assert!(!is_open(), "shared: {shared}");
            }
        });
        thread.join().unwrap();
    }

    #[test]
    fn a_claim_that_cannot_be_had_leaves_the_one_before() {
        let thread = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
            let dir = tempfile::tempdir().unwrap();
            let except = |ranges: &[&str]| Claim {
                masquerade: vec!["10.1.0.0/16".parse().unwrap()],
                except: ranges.iter().map(|range| range.parse().unwrap()).collect(),
                ..Claim::default()
            };
            // The kernel takes no name that is as long as this table's.
            let long = "t".repeat(70000);
            let firewall = Firewall::open(&long, dir.path(), false).unwrap();
            assert!(firewall.put(&except(&["10.2.0.0/16"])).is_err());
            assert_eq!(firewall.get(&Claim::default()), None);
            let first = except(&["10.2.0.0/16"]);
            Firewall::open("t", dir.path(), false).unwrap().put(&first).unwrap();
            let firewall = Firewall::open(&long, dir.path(), false).unwrap();
            assert!(firewall.put(&except(&["10.3.0.0/16"])).is_err());
            assert_eq!(firewall.get(&first), Some(first.clone()));
            let again = Firewall::open("t", dir.path(), false).unwrap();
            assert_eq!(again.get(&first), Some(first));
        });
        thread.join().unwrap();
    }
}
