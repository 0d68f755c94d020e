//! Records of attachments, one file each. DEL, CHECK and GC read these records, so they also work after a crash.
//!
//! A record is written before the first plugin runs, and again with the result. Records are on a tmpfs (`/run`). A
//! reboot removes them and the objects that they describe. Records of lists with executables are kept across boots, and
//! the next start runs DEL: an executable may keep its data on disk, as host-local does below `/var/lib`.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::warn;

use crate::address_store::{DirVersion, Owner};
use crate::error::Error;
use crate::file::{failed, remove_file, replace};
use crate::link::parse_mac;
use crate::parameters::Parameters;
use crate::spec::Version;
use crate::spec::list::{Capabilities, List};
use crate::spec::result::Answer;

/// One attachment, with the configuration list that made it. The network may have another list now.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Shared: most attachments of a node are made by one list.
    pub(crate) list: Arc<List>,
    pub(crate) at: Parameters,
    /// Inode number of the network namespace, because the path may be reused.
    pub(crate) netns_id: Option<u64>,
    /// `None` while ADD runs, and after an interrupted ADD.
    pub(crate) result: Option<Answer>,
    /// Whether the DEL of the attachment has begun. The resources of the attachment may then already belong to another
    /// attachment.
    releasing: bool,
}

/// The record of an attachment as JSON, similar to other runtimes' records.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    kind: String,
    container_id: String,
    if_name: String,
    network_name: String,
    netns: Option<PathBuf>,
    netns_id: Option<u64>,
    /// Boot ID: inodes of namespaces are reused after a boot.
    #[serde(default)]
    boot: Option<String>,
    cni_args: String,
    capability_args: Capabilities,
    config: Value,
    result: Option<Value>,
}

/// Value of `kind` in our records.
const KIND: &str = "coracleCacheV1";

/// An attachment in memory. The capabilities are text: as parsed JSON they would take ten times the memory.
struct Known {
    /// The attachment without its capabilities.
    entry: Entry,
    /// The capabilities as JSON.
    capabilities: Box<[u8]>,
    /// The hardware address that the capabilities request.
    requested_mac: Option<[u8; 6]>,
}

/// All attachments, in memory and on disk.
pub(crate) struct Cache {
    /// Directories: one for records that a reboot removes, one for records that are kept.
    volatile: PathBuf,
    lasting: PathBuf,
    boot: String,
    known: Mutex<BTreeMap<String, Known>>,
    /// Directories of host-local that have a file for each address of the attachments, with the version that was
    /// checked.
    complete: Mutex<BTreeMap<PathBuf, DirVersion>>,
}

// === impl Cache ===

impl Cache {
    pub(crate) fn open(state_dir: &Path, root_dir: &Path) -> Result<Self, Error> {
        let path = Path::new("/proc/sys/kernel/random/boot_id");
        let boot = fs::read_to_string(path).map_err(failed("read", path))?.trim().to_owned();
        let [volatile, lasting] = [state_dir, root_dir].map(|dir| dir.join("results"));
        fs::create_dir_all(&volatile).map_err(failed("create", &volatile))?;
        let mut known: BTreeMap<String, Known> = BTreeMap::new();
        let mut lists: Vec<Arc<List>> = Vec::new();
        for dir in [&volatile, &lasting].into_iter().filter(|dir| dir.is_dir()) {
            for entry in fs::read_dir(dir).map_err(failed("read", dir))? {
                let path = entry.map_err(failed("read", dir))?.path();
                match read(&path, &boot).map_err(failed("read", &path))? {
                    Some(mut entry) => {
                        match lists.iter().find(|list| **list == entry.list) {
                            Some(list) => entry.list = Arc::clone(list),
                            None => lists.push(Arc::clone(&entry.list)),
                        }
                        known.insert(entry.at.container_id.clone(), Known::of(entry));
                    }
                    None => remove_damaged(&path)?,
                }
            }
        }
        Ok(Self { volatile, lasting, boot, known: Mutex::new(known), complete: Mutex::default() })
    }

    pub(crate) fn get(&self, id: &str) -> Option<Entry> {
        self.lock().get(id).map(Known::entry)
    }

    pub(crate) fn all(&self) -> Vec<Entry> {
        self.lock().values().map(Known::entry).collect()
    }

    /// Marks an attachment whose DEL begins.
    pub(crate) fn mark_releasing(&self, id: &str) {
        if let Some(known) = self.lock().get_mut(id) {
            known.entry.releasing = true;
        }
    }

    /// Whether the DEL of an attachment has begun, or the attachment has no record.
    pub(crate) fn is_releasing(&self, id: &str) -> bool {
        self.lock().get(id).is_none_or(|known| known.entry.releasing)
    }

    /// Whether this version of host-local's directory has a file for each address of the attachments.
    pub(crate) fn is_complete(&self, dir: &Path, version: Option<DirVersion>) -> bool {
        let complete = self.complete.lock().unwrap_or_else(PoisonError::into_inner);
        version.is_some_and(|version| complete.get(dir) == Some(&version))
    }

    /// Records that this version of host-local's directory has a file for each address of the attachments.
    pub(crate) fn completed(&self, dir: &Path, version: Option<DirVersion>) {
        let mut complete = self.complete.lock().unwrap_or_else(PoisonError::into_inner);
        match version {
            Some(version) => drop(complete.insert(dir.to_owned(), version)),
            None => drop(complete.remove(dir)),
        }
    }

    /// Addresses of the network's attachments that are not in `present`, with their owners.
    pub(crate) fn missing(&self, network: &str, present: &HashSet<IpAddr>) -> Vec<(IpAddr, Owner)> {
        let known = self.lock();
        let entries = known.values().map(|known| &known.entry);
        let of_network = entries.filter(|entry| entry.list.name == network && !entry.releasing);
        let addresses = of_network.flat_map(|Entry { at, result, .. }| {
            let ips = result.iter().flat_map(|result| result.addresses_of(&at.ifname));
            ips.map(move |ip| (ip.address.ip(), at))
        });
        let owner = |at: &Parameters| Owner { id: at.container_id.clone(), ifname: at.ifname.clone() };
        addresses.filter(|(ip, _)| !present.contains(ip)).map(|(ip, at)| (ip, owner(at))).collect()
    }

    /// The attachment of the network that has or requests this hardware address.
    pub(crate) fn owner_of_mac(&self, network: &str, mac: [u8; 6]) -> Option<String> {
        let known = self.lock();
        let mut of_network = known.values().filter(|known| known.entry.list.name == network);
        let has = |known: &&Known| {
            let Entry { at, result, .. } = &known.entry;
            let inside = result.iter().find_map(|result| result.inside(&at.ifname));
            known.requested_mac == Some(mac)
                || inside.is_some_and(|inside| parse_mac(&inside.mac) == Some(mac))
        };
        of_network.find(has).map(|known| known.entry.at.container_id.clone())
    }

    /// Records an entry. A record that is kept across boots is synced to disk, in a blocking thread.
    pub(crate) async fn keep(self: &Arc<Self>, entry: Entry) -> Result<(), Error> {
        if !may_keep_data_across_boots(&entry.list) {
            return self.put(entry);
        }
        let (cache, path) = (Arc::clone(self), file(&self.lasting, &entry.at.container_id));
        let kept = tokio::task::spawn_blocking(move || cache.put(entry)).await;
        kept.unwrap_or_else(|error| Err(failed("write", &path)(std::io::Error::other(error))))
    }

    /// Records an entry. If a release has begun since the caller read the entry, the entry stays marked as releasing.
    pub(crate) fn put(&self, mut entry: Entry) -> Result<(), Error> {
        let lasts = may_keep_data_across_boots(&entry.list);
        let dir = if lasts { &self.lasting } else { &self.volatile };
        let path = file(dir, &entry.at.container_id);
        let text = serde_json::to_vec(&entry.to_file(&self.boot)).map_err(std::io::Error::from);
        let written = text.and_then(|text| write(dir, &path, &text, lasts));
        written.map_err(failed("write", &path))?;
        let mut known = self.lock();
        let earlier = known.get(&entry.at.container_id);
        entry.releasing |= earlier.is_some_and(|earlier| earlier.entry.releasing);
        known.insert(entry.at.container_id.clone(), Known::of(entry));
        Ok(())
    }

    pub(crate) fn remove(&self, id: &str) -> Result<(), Error> {
        for dir in [&self.volatile, &self.lasting] {
            remove_file(&file(dir, id))?;
        }
        self.lock().remove(id);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Known ===

impl Known {
    fn of(mut entry: Entry) -> Self {
        let capabilities = std::mem::take(&mut entry.at.capabilities);
        // Capabilities can always be written as JSON, because their map has string keys.
        let requested_mac = capabilities.get("mac").and_then(Value::as_str).and_then(parse_mac);
        let capabilities = serde_json::to_vec(&capabilities).unwrap_or_default().into();
        if let Some(result) = &mut entry.result {
            result.shrink_to_fit();
        }
        Self { entry, capabilities, requested_mac }
    }

    fn capabilities(&self) -> Capabilities {
        serde_json::from_slice(&self.capabilities).unwrap_or_default()
    }

    /// The whole entry.
    fn entry(&self) -> Entry {
        let mut entry = self.entry.clone();
        entry.at.capabilities = self.capabilities();
        entry
    }
}

// === impl Entry ===

impl Entry {
    /// Record of an attachment before its ADD.
    pub(crate) fn new(list: Arc<List>, at: Parameters, netns_id: Option<u64>) -> Self {
        Self { list, at, netns_id, result: None, releasing: false }
    }

    /// Whether the DEL of the attachment has begun, or the attachment was released.
    pub(crate) fn is_releasing(&self) -> bool {
        self.releasing
    }

    fn to_file(&self, boot: &str) -> File {
        File {
            kind: KIND.to_owned(),
            container_id: self.at.container_id.clone(),
            if_name: self.at.ifname.clone(),
            network_name: self.list.name.clone(),
            netns: self.at.netns.clone(),
            netns_id: self.netns_id,
            boot: Some(boot.to_owned()),
            cni_args: self.at.args.clone(),
            capability_args: self.at.capabilities.clone(),
            config: self.list.to_value(),
            result: self.result.as_ref().map(|answer| answer.to_value(Version::NEWEST)),
        }
    }

    fn of_file(file: File, boot: &str) -> Option<Self> {
        let result = file.result.map(|value| Answer::parse(value, Version::NEWEST)).transpose().ok()?;
        let at = Parameters {
            container_id: file.container_id,
            netns: file.netns,
            ifname: file.if_name,
            args: file.cni_args,
            capabilities: file.capability_args,
        };
        (file.kind == KIND).then_some(())?;
        // An earlier version wrote records without a boot ID. It kept no record across boots.
        let netns_id = file.netns_id.filter(|_| file.boot.is_none_or(|of| of == boot));
        Some(Self { result, ..Self::new(List::parse(file.config).ok()?.into(), at, netns_id) })
    }
}

/// Whether plugins may keep data of the attachment across boots, which only a DEL removes.
fn may_keep_data_across_boots(list: &List) -> bool {
    !list.is_in_process() || list.disable_gc
}

fn file(dir: &Path, id: &str) -> PathBuf {
    dir.join(format!("{id}.json"))
}

/// Writes a temporary file and renames it, so that no reader finds an incomplete record. A record that is kept across
/// boots is synced.
fn write(dir: &Path, path: &Path, text: &[u8], lasts: bool) -> std::io::Result<()> {
    let prepare = |temporary: &Path| -> std::io::Result<()> {
        if lasts {
            fs::File::open(temporary)?.sync_all()?;
        }
        coracle_fault::point("network.record-written");
        Ok(())
    };
    match replace(path, text, prepare) {
        // The directory is absent before the first record, or was deleted.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            fs::create_dir_all(dir)?;
            replace(path, text, prepare)?;
        }
        written => written?,
    }
    if lasts { fs::File::open(dir)?.sync_all() } else { Ok(()) }
}

/// The entry of a file. `None` if it is not a complete record.
fn read(path: &Path, boot: &str) -> std::io::Result<Option<Entry>> {
    if path.extension().is_none_or(|e| e != "json") {
        return Ok(None);
    }
    let text = fs::read(path)?;
    Ok(serde_json::from_slice(&text).ok().and_then(|file| Entry::of_file(file, boot)))
}

/// Removes a record that cannot be parsed: `reconcile` finds the objects that it described.
fn remove_damaged(path: &Path) -> Result<(), Error> {
    warn!(path = %path.display(), "removing a network record that cannot be parsed");
    remove_file(path)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(id: &str) -> Entry {
        let list = json!({"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "bridge", "x": [1]}]});
        let at = Parameters {
            container_id: id.to_owned(),
            netns: Some("/proc/1/ns/net".into()),
            ifname: "eth0".to_owned(),
            args: "A=b".to_owned(),
            capabilities: Capabilities::from([("mac".to_owned(), json!("m"))]),
        };
        let result = Answer::parse(json!({"ips": [{"address": "10.0.0.2/8"}]}), Version::V1_0_0).unwrap();
        Entry { result: Some(result), ..Entry::new(List::parse(list).unwrap().into(), at, Some(7)) }
    }

    fn open(dir: &Path) -> Cache {
        Cache::open(dir, &dir.join("root")).unwrap()
    }

    #[test]
    fn records_of_foreign_plugins_are_kept_across_boots_without_the_namespace() {
        let dir = tempfile::tempdir().unwrap();
        let mut foreign = entry("b");
        Arc::make_mut(&mut foreign.list).plugins[0].insert("type".to_owned(), json!("ptp"));
        for entry in [entry("a"), foreign] {
            open(dir.path()).put(entry).unwrap();
        }
        let path = dir.path().join("root/results/b.json");
        fs::remove_dir_all(dir.path().join("results")).unwrap();
        assert_eq!(open(dir.path()).all().iter().map(|e| e.netns_id).collect::<Vec<_>>(), [Some(7)]);
        let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        file["boot"] = json!("another");
        fs::write(&path, file.to_string()).unwrap();
        let cache = open(dir.path());
        assert_eq!(cache.all().iter().map(|e| e.netns_id).collect::<Vec<_>>(), [None]);
        cache.remove("b").unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_record_that_cannot_be_read_is_an_error_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        open(dir.path());
        // A link to itself: reading it fails with ELOOP.
        let path = dir.path().join("results/a.json");
        std::os::unix::fs::symlink("a.json", &path).unwrap();
        assert!(Cache::open(dir.path(), &dir.path().join("root")).is_err());
        assert!(fs::symlink_metadata(&path).is_ok());
    }

    #[test]
    fn records_are_found_by_the_next_process_and_incomplete_records_are_not() {
        let dir = tempfile::tempdir().unwrap();
        open(dir.path()).put(entry("a")).unwrap();
        fs::write(dir.path().join("results/b.json"), "{").unwrap();
        fs::write(dir.path().join("results/c.new"), "").unwrap();
        let cache = open(dir.path());
        let found = cache.all();
        assert_eq!(found.len(), 1);
        assert_eq!((&found[0].list, &found[0].result), (&entry("a").list, &entry("a").result));
        assert_eq!(found[0].at.capabilities, entry("a").at.capabilities);
        cache.remove("a").unwrap();
        cache.remove("a").unwrap();
        assert_eq!(fs::read_dir(dir.path().join("results")).unwrap().count(), 0);
    }

    #[test]
    fn a_change_of_an_entry_does_not_undo_its_release() {
        let dir = tempfile::tempdir().unwrap();
        let cache = open(dir.path());
        assert!(cache.is_releasing("a"), "no record");
        cache.put(entry("a")).unwrap();
        let mut changed = cache.get("a").unwrap();
        cache.mark_releasing("a");
        changed.result = None;
        cache.put(changed).unwrap();
        assert!(cache.is_releasing("a") && cache.get("a").unwrap().result.is_none());
        cache.remove("a").unwrap();
        cache.put(entry("a")).unwrap();
        assert!(!cache.is_releasing("a"), "the next attachment with this id");
    }

    #[test]
    fn capabilities_are_kept_as_text_and_vectors_without_spare_capacity() {
        let dir = tempfile::tempdir().unwrap();
        let cache = open(dir.path());
        let mut whole = entry("a");
        whole.at.capabilities.insert("mac".to_owned(), json!("02:00:00:00:00:07"));
        whole.at.capabilities.insert("dns".to_owned(), json!({"servers": ["10.0.0.10"], "options": []}));
        whole.result.as_mut().unwrap().ips.reserve_exact(3);
        cache.put(whole.clone()).unwrap();
        assert_eq!(cache.get("a").unwrap().at.capabilities, whole.at.capabilities);
        assert_eq!(cache.owner_of_mac("n", [2, 0, 0, 0, 0, 7]).as_deref(), Some("a"));
        assert_eq!(cache.owner_of_mac("n", [2, 0, 0, 0, 0, 8]), None);
        let known = cache.lock();
        let Entry { at, result, .. } = &known["a"].entry;
        assert!(at.capabilities.is_empty());
        assert_eq!(result.as_ref().unwrap().ips.capacity(), 1);
    }
}
