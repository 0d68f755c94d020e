//! Durable records of the claims that pods on this node use: one file for each claim, `<state>/agent/claims/<uid>.json`.
//!
//! A record is written before its claim is prepared, and removed after the claim is unprepared. So a claim that a driver
//! may have prepared always has a record.

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
    /// The boot in which all drivers have prepared the claim. CDI files do not survive a reboot.
    pub(super) prepared: Option<String>,
}

/// A prepared device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Device {
    /// Requests of the claim that got the device. Empty: all.
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
    /// Reads all records. A damaged one is renamed to `*.bad`: its claim stays prepared in its driver, until a pod of the
    /// claim prepares it again. One that cannot be read now stays for the next start.
    pub(super) fn open(dir: PathBuf) -> Self {
        let mut state = State::default();
        for path in entries(&dir) {
            match read(&path) {
                Ok(record) => state.insert(record),
                Err(error) if bounded::is_damage(&error) => {
                    tracing::warn!(%error, path = %path.display(), "renaming an unreadable record of a claim");
                    let _ = fs::rename(&path, path.with_extension("bad"));
                }
                Err(error) => {
                    tracing::warn!(%error, path = %path.display(), "cannot read the record of a claim");
                }
            }
        }
        Self { dir, state: Mutex::new(state) }
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

    /// Stores a record. In memory first: a pod's claims must be known even if the write fails. Writes of one record must
    /// not run at the same time.
    ///
    /// # Errors
    /// Also if the record is larger than one that can be read.
    pub(super) fn put(&self, record: &Record) -> io::Result<()> {
        self.state().insert(record.clone());
        fs::create_dir_all(&self.dir)?;
        let text = serde_json::to_vec(record)?;
        if text.len() as u64 > RECORD_MAX {
            let message = format!("{} bytes are too large for a record", text.len());
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
        }
        private_file::replace(&self.path(record), &text)
    }

    /// Removes a record.
    pub(super) fn remove(&self, record: &Record) -> io::Result<()> {
        match fs::remove_file(self.path(record)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) => fs::File::open(&self.dir)?.sync_all()?,
            Err(_absent) => {}
        }
        self.state().remove(&record.key());
        Ok(())
    }

    fn path(&self, record: &Record) -> PathBuf {
        self.dir.join(format!("{}.json", record.uid))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
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

/// Paths of complete records. Temporary files are of interrupted writes. An error is logged.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let listed = fs::read_dir(dir).and_then(|entries| {
        for entry in entries {
            paths.push(entry?.path());
        }
        Ok(())
    });
    if let Err(error) = listed
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, path = %dir.display(), "cannot list the records of claims");
    }
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths
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
            prepared: Some("boot".to_owned()),
        }
    }

    #[test]
    fn a_record_that_cannot_be_read_now_stays() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("uid-a.json");
        fs::write(&path, serde_json::to_vec(&record("a", &["p"])).unwrap()).unwrap();
        for (path, mode) in [(dir.path(), 0o777), (path.as_path(), 0)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Only this thread. Root could read the file.
                nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
                assert!(Records::open(dir.path().to_owned()).pods().is_empty());
            });
        });
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(Records::open(dir.path().to_owned()).pods(), ["p"]);
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
