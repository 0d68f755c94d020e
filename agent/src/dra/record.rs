//! Durable records of the claims that pods on this node use: one file for each claim,
//! `<state>/agent/claims/<uid>.json`.
//!
//! A record is written before its claim is prepared, and removed after the claim is unprepared. So a claim that a
//! driver may have prepared always has a record.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::{bounded, private_file};

/// Maximum size of a record in bytes.
const RECORD_MAX: u64 = 4 << 20;

/// Namespace and name of a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub(super) namespace: String,
    pub(super) name: String,
}

/// A claim that pods on this node use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
    /// The uids of its pods on this node.
    pub(super) pods: BTreeSet<String>,
    /// The drivers of its devices, with the devices that they have prepared.
    pub(super) drivers: BTreeMap<String, Vec<Device>>,
    /// Drivers that are not called when the claim is unprepared.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) skips_unprepare: BTreeSet<String>,
    /// The boot in which all drivers have prepared the claim. CDI files do not survive a reboot.
    pub(super) prepared: Option<String>,
}

/// A prepared device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Device {
    /// Requests of the claim that got the device. Empty means all requests.
    pub(super) requests: Vec<String>,
    pub(super) pool: String,
    pub(super) device: String,
    /// CDI ids.
    pub(super) cdi: Vec<String>,
}

/// All records, in memory and on disk.
#[derive(Debug)]
pub(super) struct Records {
    dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    claims: BTreeMap<Key, Record>,
    /// The claims of each pod, by the pod's uid.
    pods: HashMap<String, BTreeSet<Key>>,
    /// Records that could not be read, for example for lack of descriptors. The pods of their claims are unknown.
    unread: BTreeSet<PathBuf>,
    /// Whether the records could not be listed.
    is_unlisted: bool,
}

// === impl Key ===

impl Key {
    pub(super) fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

// === impl Record ===

impl Record {
    pub(super) fn key(&self) -> Key {
        Key::new(&self.namespace, &self.name)
    }
}

// === impl Records ===

impl Records {
    /// Reads all records. A damaged record is renamed to `*.bad`: its claim stays prepared in its driver, until a pod
    /// of the claim prepares it again. A record that cannot be read now is read later: see [`Records::reread`].
    pub(super) fn open(dir: PathBuf) -> Self {
        let mut state = State::default();
        match entries(&dir) {
            Ok(paths) => state.unread.extend(paths),
            Err(error) => {
                tracing::warn!(%error, path = %dir.display(), "cannot list the records of claims");
                state.is_unlisted = true;
            }
        }
        for path in state.unread.clone() {
            if let Err(error) = state.read(&path) {
                tracing::warn!(%error, path = %path.display(), "cannot read the record of a claim");
            }
        }
        Self { dir, state: Mutex::new(state) }
    }

    /// Whether all records were read.
    pub(super) fn is_complete(&self) -> bool {
        let state = self.state();
        !state.is_unlisted && state.unread.is_empty()
    }

    /// Reads the record of a claim again, if it could not be read before.
    ///
    /// # Errors
    /// When the record still cannot be read. Other pods may use the claim.
    pub(super) fn reread(&self, uid: &str) -> io::Result<()> {
        let path = self.path(uid);
        // The lock is held while the file is read, so that no newer record is replaced.
        let mut state = self.state();
        let is_unlisted = state.is_unlisted && state.claims.values().all(|record| record.uid != uid);
        if is_unlisted || state.unread.contains(&path) { state.read(&path) } else { Ok(()) }
    }

    /// Like [`Records::reread`] for all claims. Records that still cannot be read are left for a later call.
    pub(super) fn reread_all(&self) {
        let mut state = self.state();
        if state.is_unlisted
            && let Ok(mut paths) = entries(&self.dir)
        {
            let known: BTreeSet<PathBuf> =
                state.claims.values().map(|record| self.path(&record.uid)).collect();
            paths.retain(|path| !known.contains(path));
            state.unread.extend(paths);
            state.is_unlisted = false;
        }
        for path in state.unread.clone() {
            // The first error was logged.
            let _ = state.read(&path);
        }
    }

    pub(super) fn get(&self, key: &Key) -> Option<Record> {
        self.state().claims.get(key).cloned()
    }

    /// Calls a function with a look-up of records.
    pub(super) fn with<T>(&self, look_up: impl FnOnce(&BTreeMap<Key, Record>) -> T) -> T {
        look_up(&self.state().claims)
    }

    /// Whether the pod uses a claim.
    pub(super) fn has_pod(&self, uid: &str) -> bool {
        self.state().pods.contains_key(uid)
    }

    /// The claims of a pod.
    pub(super) fn of_pod(&self, uid: &str) -> Vec<Key> {
        self.state().pods.get(uid).into_iter().flatten().cloned().collect()
    }

    /// The uids of all pods with claims.
    pub(super) fn pods(&self) -> Vec<String> {
        self.state().pods.keys().cloned().collect()
    }

    /// Stores a record. It is stored in memory first, because a pod's claims must be known even if the write fails.
    /// Writes of one record must not run at the same time.
    ///
    /// # Errors
    /// If the record cannot be written, or is larger than the maximum that can be read.
    pub(super) fn put(&self, record: &Record) -> io::Result<()> {
        self.state().insert(record.clone());
        fs::create_dir_all(&self.dir)?;
        let text = serde_json::to_vec(record)?;
        if text.len() as u64 > RECORD_MAX {
            let message = format!("{} bytes are too large for a record", text.len());
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
        }
        private_file::replace(&self.path(&record.uid), &text)
    }

    /// Removes a record.
    pub(super) fn remove(&self, record: &Record) -> io::Result<()> {
        match fs::remove_file(self.path(&record.uid)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) => fs::File::open(&self.dir)?.sync_all()?,
            Err(_absent) => {}
        }
        self.state().remove(&record.key());
        Ok(())
    }

    /// The path of the record of a claim.
    fn path(&self, uid: &str) -> PathBuf {
        self.dir.join(format!("{uid}.json"))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    /// Reads a record, and removes it from the unread records. A damaged record is renamed to `*.bad`. A record of a
    /// deleted claim stays unread as long as a new claim has its name.
    ///
    /// # Errors
    /// When the record cannot be read now.
    fn read(&mut self, path: &Path) -> io::Result<()> {
        match read(path) {
            Ok(record) if self.claims.get(&record.key()).is_some_and(|known| known.uid != record.uid) => {
                return Ok(());
            }
            Ok(record) => self.insert(record),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if bounded::is_damage(&error) => {
                tracing::warn!(%error, path = %path.display(), "renaming an unreadable record of a claim");
                let _ = fs::rename(path, path.with_extension("bad"));
            }
            Err(error) => {
                self.unread.insert(path.to_owned());
                return Err(error);
            }
        }
        self.unread.remove(path);
        Ok(())
    }

    fn insert(&mut self, record: Record) {
        let key = record.key();
        self.remove(&key);
        for pod in &record.pods {
            self.pods.entry(pod.clone()).or_default().insert(key.clone());
        }
        self.claims.insert(key, record);
    }

    fn remove(&mut self, key: &Key) {
        let Some(old) = self.claims.remove(key) else { return };
        for pod in &old.pods {
            if let Some(keys) = self.pods.get_mut(pod) {
                keys.remove(key);
                if keys.is_empty() {
                    self.pods.remove(pod);
                }
            }
        }
    }
}

/// Paths of complete records. Temporary files of interrupted writes are left out. An absent directory has no records.
fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let found = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => found?,
    };
    let mut paths = found.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    Ok(paths)
}

fn read(path: &Path) -> io::Result<Record> {
    Ok(serde_json::from_slice(&bounded::read(path, RECORD_MAX)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str, pods: &[&str]) -> Record {
        Record {
            namespace: "ns".to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            pods: pods.iter().map(|pod| (*pod).to_owned()).collect(),
            drivers: BTreeMap::from([("d".to_owned(), vec![Device::default()])]),
            skips_unprepare: BTreeSet::new(),
            prepared: Some("boot".to_owned()),
        }
    }

    fn set_mode(path: &Path, mode: u32) {
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Calls a function without the rights of root, which could read every file.
    fn without_rights<T: Send>(call: impl FnOnce() -> T + Send) -> T {
        let called = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // This changes the user of only this thread.
                nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
                call()
            });
            thread.join()
        });
        called.unwrap()
    }

    #[test]
    fn a_record_that_cannot_be_read_now_stays_and_is_read_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("uid-a.json");
        fs::write(&path, serde_json::to_vec(&record("a", &["p"])).unwrap()).unwrap();
        set_mode(dir.path(), 0o777);
        set_mode(&path, 0);
        let records = without_rights(|| {
            let records = Records::open(dir.path().to_owned());
            assert!(records.reread("uid-a").is_err());
            records.reread_all();
            records
        });
        assert!(records.pods().is_empty() && !records.is_complete() && records.reread("uid-b").is_ok());
        set_mode(&path, 0o600);
        assert_eq!(Records::open(dir.path().to_owned()).pods(), ["p"]);
        records.reread("uid-a").unwrap();
        assert_eq!(records.pods(), ["p"]);
        // The record is read only once, because the record in memory is newer.
        assert!(records.is_complete());
        fs::write(&path, "{").unwrap();
        records.reread("uid-a").unwrap();
        assert_eq!(records.pods(), ["p"]);
    }

    #[test]
    fn records_that_cannot_be_listed_are_read_later() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b"] {
            let text = serde_json::to_vec(&record(name, &[name])).unwrap();
            fs::write(dir.path().join(format!("uid-{name}.json")), text).unwrap();
        }
        set_mode(dir.path(), 0);
        let records = without_rights(|| Records::open(dir.path().to_owned()));
        set_mode(dir.path(), 0o700);
        assert!(records.pods().is_empty() && !records.is_complete());
        records.reread("uid-a").unwrap();
        assert_eq!(records.pods(), ["a"]);
        records.put(&record("a", &["a", "c"])).unwrap();
        // The unread record is of an earlier claim with the same name.
        records.put(&Record { uid: "new".to_owned(), ..record("b", &["d"]) }).unwrap();
        records.reread_all();
        assert_eq!(records.of_pod("c"), [Key::new("ns", "a")]);
        assert_eq!(records.get(&Key::new("ns", "b")).unwrap().uid, "new");
    }

    #[test]
    fn damaged_records_are_renamed_whatever_a_power_failure_left() {
        let dir = tempfile::tempdir().unwrap();
        let whole = serde_json::to_vec(&record("a", &["p"])).unwrap();
        for (name, text) in
            [("empty", &b""[..]), ("zeros", &[0_u8; 64][..]), ("half", &whole[..whole.len() / 2])]
        {
            fs::write(dir.path().join(format!("{name}.json")), text).unwrap();
        }
        fs::write(dir.path().join("whole.json"), &whole).unwrap();
        assert_eq!(Records::open(dir.path().to_owned()).pods(), ["p"]);
        for name in ["empty", "zeros", "half"] {
            assert!(dir.path().join(format!("{name}.bad")).exists(), "{name}");
        }
    }

    #[test]
    fn records_survive_a_restart_and_list_the_claims_of_each_pod() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Records::open(dir.path().join("claims"));
        let records = open();
        records.put(&record("a", &["p", "q"])).unwrap();
        records.put(&record("b", &["p"])).unwrap();
        records.put(&record("a", &["p"])).unwrap();
        fs::write(dir.path().join("claims/uid-c.tmp"), "{").unwrap();
        fs::write(dir.path().join("claims/uid-d.json"), "{").unwrap();
        for records in [&records, &open()] {
            assert_eq!(records.get(&Key::new("ns", "a")), Some(record("a", &["p"])));
            assert_eq!((records.of_pod("p").len(), records.has_pod("q")), (2, false));
            assert_eq!(records.pods(), ["p"]);
        }
        assert!(dir.path().join("claims/uid-d.bad").exists(), "an unreadable record is kept");
        let mut large = record("a", &["p"]);
        large
            .drivers
            .insert("d".to_owned(), vec![Device { cdi: vec!["x".repeat(5 << 20)], ..Device::default() }]);
        assert!(records.put(&large).is_err());
        assert_eq!(open().get(&Key::new("ns", "a")), Some(record("a", &["p"])), "the readable record stays");
        records.put(&record("a", &["p"])).unwrap();
        records.remove(&record("a", &["p"])).unwrap();
        records.remove(&record("a", &["p"])).unwrap();
        records.remove(&record("b", &["p"])).unwrap();
        assert!(!records.has_pod("p") && open().pods().is_empty());
    }
}
