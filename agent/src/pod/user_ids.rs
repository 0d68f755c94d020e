//! Ids of pods with user namespaces (`hostUsers: false`).
//!
//! As in the kubelet, a block has 65536 ids for users and groups. The first block is the node's. A block is recorded in
//! the pod's directory before it is used. No two pods share a block, so an escaped process has no rights in other pods.
//! No pod gets [subordinate ids](subordinate) of local users.

mod subordinate;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use coracle_proto::cri;
use serde::{Deserialize, Serialize};

use super::config::POD_UID;
use crate::bounded;
use crate::runtime::{Runtime, RuntimeError};

/// Size of a pod's block: all 16-bit ids.
const BLOCK: u32 = 1 << 16;
/// File name of the record in a pod's directory, as in the kubelet.
const FILE: &str = "userns";
/// Maximum size in bytes of that record.
const RECORD_MAX: u64 = 4 << 10;

/// Errors of the allocation of a block.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UserIdsError {
    #[error(
        "cannot allocate ids of a user namespace: all blocks of {BLOCK} ids are in use, or have subordinate ids of local \
         users; see /etc/subuid and /etc/subgid"
    )]
    Exhausted,
    #[error(
        "cannot allocate ids of a user namespace: cannot read the subordinate ids of local users in {path}"
    )]
    Subordinate {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot record the ids of the pod's user namespace in {path}")]
    Record {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot allocate ids of a user namespace: cannot list {path}, which records the ids in use")]
    List {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot restore the ids of pod {uid}: its record is unreadable, and the runtime does not return its sandboxes"
    )]
    Runtime {
        uid: String,
        #[source]
        source: RuntimeError,
    },
    #[error("cannot allocate ids of a user namespace: the ids of another pod are not restored yet")]
    Unknown,
}

/// The blocks in use.
#[derive(Debug)]
pub(crate) struct UserIds {
    pods_dir: PathBuf,
    /// Files with the subordinate ids of local users.
    subordinate_files: Vec<PathBuf>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// First id of each pod's block, by pod uid. No two pods have the same first id.
    blocks: HashMap<String, u32>,
    /// Pods whose records are unreadable. Each of them may use any block.
    unread: BTreeSet<String>,
    /// Whether the pods could not be listed.
    is_unlisted: bool,
}

/// Content of a pod's record, in the kubelet's format.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    uid_mappings: Vec<Range>,
    gid_mappings: Vec<Range>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Range {
    host_id: u32,
    container_id: u32,
    length: u32,
}

// === impl UserIds ===

impl UserIds {
    /// Reads the records of earlier agents. While a record is unreadable, no block can be allocated: see
    /// [`UserIds::restore`].
    pub(crate) fn open(pods_dir: &Path) -> Self {
        let ids =
            Self { pods_dir: pods_dir.to_owned(), subordinate_files: Vec::new(), state: Mutex::default() };
        match ids.list() {
            Ok(found) => *ids.state() = found,
            Err(error) => {
                tracing::warn!(%error, path = %pods_dir.display(), "cannot list the ids of user namespaces");
                ids.state().is_unlisted = true;
            }
        }
        ids
    }

    /// Returns these allocations with a restriction: new blocks contain no subordinate ids of local users. If a local
    /// user later gets an id in a block, the pod keeps the block.
    pub(crate) fn without_subordinate_ids(self) -> Self {
        Self { subordinate_files: Vec::from(subordinate::FILES.map(PathBuf::from)), ..self }
    }

    /// Allocates a block to the pod and records it: the block that is already recorded, or else the lowest free block.
    pub(crate) async fn allocate(&self, uid: &str, runtime: &dyn Runtime) -> Result<(), UserIdsError> {
        self.restore(runtime).await?;
        self.take(uid)
    }

    /// Finds the blocks of pods with unreadable records: the runtime reports the block of a sandbox. A pod without a
    /// sandbox gets a new block with its next sandbox. Does nothing if all records were read.
    ///
    /// # Errors
    /// When the pods cannot be listed, or the runtime does not respond. The next call resumes with the other pods.
    pub(crate) async fn restore(&self, runtime: &dyn Runtime) -> Result<(), UserIdsError> {
        for uid in self.unresolved()? {
            let first = of_sandboxes(runtime, &uid).await;
            let first = first.map_err(|source| UserIdsError::Runtime { uid: uid.clone(), source })?;
            tracing::info!(uid, first, "restored the ids of a user namespace from the runtime");
            self.adopt(&uid, first);
        }
        Ok(())
    }

    /// The id mapping of a pod. None if the pod has no block.
    pub(crate) fn mapping(&self, uid: &str) -> Option<cri::IdMapping> {
        let state = self.state();
        state.blocks.get(uid).map(|first| cri::IdMapping { container_id: 0, host_id: *first, length: BLOCK })
    }

    /// Frees the block of a removed pod. Its record is removed with its directory.
    pub(crate) fn release(&self, uid: &str) {
        let mut state = self.state();
        state.blocks.remove(uid);
        state.unread.remove(uid);
    }

    fn take(&self, uid: &str) -> Result<(), UserIdsError> {
        let mut state = self.state();
        if state.blocks.contains_key(uid) {
            return Ok(());
        }
        if state.is_unlisted || !state.unread.is_empty() {
            return Err(UserIdsError::Unknown);
        }
        let of_users = self.subordinate_blocks()?;
        let free =
            |first: &u32| !of_users.contains(first) && !state.blocks.values().any(|other| other == first);
        let first = (1..u32::MAX / BLOCK).map(|block| block * BLOCK).find(free);
        let first = first.ok_or(UserIdsError::Exhausted)?;
        let dir = self.pods_dir.join(uid);
        let path = dir.join(FILE);
        record(&dir, first).map_err(|source| UserIdsError::Record { path, source })?;
        state.blocks.insert(uid.to_owned(), first);
        Ok(())
    }

    /// The first ids of the blocks with subordinate ids. The files are read at each allocation, because tools such as
    /// useradd(8) change them. Pods with a user namespace start rarely.
    fn subordinate_blocks(&self) -> Result<HashSet<u32>, UserIdsError> {
        let mut all = HashSet::new();
        for path in &self.subordinate_files {
            let failed = |source| UserIdsError::Subordinate { path: path.clone(), source };
            all.extend(subordinate::blocks(path).map_err(failed)?);
        }
        Ok(all)
    }

    /// Reads the records of all pods.
    fn list(&self) -> io::Result<State> {
        let entries = match std::fs::read_dir(&self.pods_dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            entries => Some(entries?),
        };
        let mut found = State::default();
        for entry in entries.into_iter().flatten() {
            let Ok(uid) = entry?.file_name().into_string() else { continue };
            match self.read(&uid) {
                Ok(Some(first)) => {
                    found.blocks.insert(uid, first);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, uid, "cannot read the ids of a pod's user namespace");
                    found.unread.insert(uid);
                }
            }
        }
        Ok(found)
    }

    /// The recorded block of a pod. None if it has no record.
    fn read(&self, uid: &str) -> io::Result<Option<u32>> {
        match bounded::read(&self.pods_dir.join(uid).join(FILE), RECORD_MAX) {
            Ok(text) => {
                let first = first_id(&text);
                first.map(Some).ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "the record is damaged"))
            }
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The pods whose records are still unreadable. Reads the records again, because the cause may be temporary.
    fn unresolved(&self) -> Result<Vec<String>, UserIdsError> {
        let mut unread: Vec<String> = {
            let mut state = self.state();
            if state.is_unlisted {
                // The lock is held while the pods are listed. Otherwise the list would overwrite a block that another
                // pod gets in the meantime.
                let path = self.pods_dir.clone();
                *state = self.list().map_err(|source| UserIdsError::List { path, source })?;
            }
            state.unread.iter().cloned().collect()
        };
        unread.retain(|uid| match self.read(uid) {
            Ok(first) => {
                self.resolve(uid, first);
                false
            }
            Err(_logged_before) => true,
        });
        Ok(unread)
    }

    /// Sets the block that the runtime returned for a pod, and replaces the pod's unreadable record. The record must be
    /// readable again, because a later agent may find volumes with these ids, but no sandbox.
    fn adopt(&self, uid: &str, first: Option<u32>) {
        self.resolve(uid, first);
        let state = self.state();
        let (dir, first) = (self.pods_dir.join(uid), state.blocks.get(uid));
        // The directory of a removed pod must not be created again.
        if let Some(first) = first.filter(|_| dir.join(FILE).symlink_metadata().is_ok())
            && let Err(error) = record(&dir, *first)
        {
            tracing::warn!(%error, uid, "cannot replace the record of the ids of a pod's user namespace");
        }
    }

    /// Sets the block of a pod with an unreadable record, unless the pod was removed in the meantime.
    fn resolve(&self, uid: &str, first: Option<u32>) {
        let mut state = self.state();
        if let (true, Some(first)) = (state.unread.remove(uid), first) {
            state.blocks.insert(uid.to_owned(), first);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The block of a pod's sandboxes. The block of a running sandbox has precedence. None if the sandboxes have no user
/// namespace.
async fn of_sandboxes(runtime: &dyn Runtime, uid: &str) -> Result<Option<u32>, RuntimeError> {
    let label_selector = [(POD_UID.to_owned(), uid.to_owned())].into();
    let filter = cri::PodSandboxFilter { label_selector, ..Default::default() };
    let listed = runtime.list_pod_sandbox(cri::ListPodSandboxRequest { filter: Some(filter) }).await?;
    let mut sandboxes = listed.items;
    sandboxes.sort_by_key(|sandbox| sandbox.state() != cri::PodSandboxState::SandboxReady);
    for sandbox in sandboxes {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.id, verbose: false };
        let status = match runtime.pod_sandbox_status(request).await {
            Ok(response) => response.status,
            Err(RuntimeError::NotFound(_)) => continue,
            Err(error) => return Err(error),
        };
        if let Some(first) = status.as_ref().and_then(first_of_sandbox) {
            return Ok(Some(first));
        }
    }
    Ok(None)
}

fn first_of_sandbox(status: &cri::PodSandboxStatus) -> Option<u32> {
    let options = status.linux.as_ref()?.namespaces.as_ref()?.options.as_ref()?;
    let [ids] = options.userns_options.as_ref()?.uids.as_slice() else { return None };
    first_of(&Range { host_id: ids.host_id, container_id: ids.container_id, length: ids.length })
}

/// Writes the record of a block that starts with this id.
fn record(dir: &Path, first: u32) -> io::Result<()> {
    let ranges = vec![Range { host_id: first, container_id: 0, length: BLOCK }];
    let record = Record { uid_mappings: ranges.clone(), gid_mappings: ranges };
    let text = serde_json::to_vec(&record)?;
    crate::volume::make_private(dir)?;
    // The record must be durable: after a power failure the pod's volumes contain files with these ids.
    crate::private_file::replace(&dir.join(FILE), &text)
}

fn first_id(text: &[u8]) -> Option<u32> {
    let record: Record = serde_json::from_slice(text).ok()?;
    let [range] = record.uid_mappings.as_slice() else { return None };
    first_of(range)
}

/// The first id of a range that is a block.
fn first_of(range: &Range) -> Option<u32> {
    let is_block = range.container_id == 0
        && range.length == BLOCK
        && range.host_id >= BLOCK
        && range.host_id.is_multiple_of(BLOCK);
    is_block.then_some(range.host_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(ids: &UserIds, uid: &str) -> Option<u32> {
        ids.mapping(uid).map(|mapping| mapping.host_id)
    }

    #[test]
    fn an_unreadable_record_keeps_its_block_from_other_pods() {
        let dir = tempfile::tempdir().unwrap();
        let ids = UserIds::open(dir.path());
        for uid in ["empty", "garbled", "other-type", "whole"] {
            ids.take(uid).unwrap();
        }
        let at = |uid: &str| dir.path().join(uid).join(FILE);
        std::fs::write(at("empty"), "").unwrap();
        std::fs::write(at("garbled"), "{").unwrap();
        std::fs::remove_file(at("other-type")).unwrap();
        std::fs::create_dir(at("other-type")).unwrap();
        let ids = UserIds::open(dir.path());
        assert_eq!(first(&ids, "whole"), Some(4 * BLOCK));
        assert!(ids.take("whole").is_ok(), "a pod with a block needs no other one");
        assert!(matches!(ids.take("new"), Err(UserIdsError::Unknown)));
        assert_eq!(ids.unresolved().unwrap(), ["empty", "garbled", "other-type"]);
        // One pod has a sandbox, one has none, and one was removed.
        ids.adopt("empty", Some(BLOCK));
        ids.adopt("garbled", None);
        ids.release("other-type");
        ids.adopt("other-type", Some(3 * BLOCK));
        ids.take("new").unwrap();
        assert_eq!((first(&ids, "empty"), first(&ids, "new")), (Some(BLOCK), Some(2 * BLOCK)));
        assert_eq!(first(&ids, "other-type"), None);
        assert_eq!(first(&UserIds::open(dir.path()), "empty"), Some(BLOCK), "the record was replaced");
    }

    #[test]
    fn a_pod_gets_no_subordinate_ids_of_local_users() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let files = vec![file("subuid", "alice:100000:65536\n"), file("subgid", "alice:262144:65536\n")];
        let ids = UserIds { subordinate_files: files, ..UserIds::open(&dir.path().join("pods")) };
        for (uid, block) in [("a", 3), ("b", 5)] {
            ids.take(uid).unwrap();
            assert_eq!(first(&ids, uid), Some(block * BLOCK));
        }
        std::fs::remove_file(dir.path().join("subuid")).unwrap();
        std::fs::create_dir(dir.path().join("subuid")).unwrap();
        assert!(matches!(ids.take("c"), Err(UserIdsError::Subordinate { .. })));
        assert!(ids.take("a").is_ok(), "a pod with a block needs no other one");
    }

    #[test]
    fn the_directory_of_a_removed_pod_is_not_created_again() {
        let dir = tempfile::tempdir().unwrap();
        let ids = UserIds::open(dir.path());
        ids.state().unread.insert("removed".to_owned());
        ids.adopt("removed", Some(BLOCK));
        assert_eq!(first(&ids, "removed"), Some(BLOCK));
        assert!(!dir.path().join("removed").exists());
    }

    #[test]
    fn pods_that_start_together_after_a_failed_list_have_different_blocks() {
        for _ in 0..20 {
            let dir = tempfile::tempdir().unwrap();
            let pods = dir.path().join("pods");
            std::fs::write(&pods, "").unwrap();
            let ids = UserIds::open(&pods);
            std::fs::remove_file(&pods).unwrap();
            std::thread::scope(|scope| {
                for uid in ["a", "b"] {
                    let ids = &ids;
                    scope.spawn(move || {
                        assert!(ids.unresolved().unwrap().is_empty());
                        ids.take(uid).unwrap();
                    });
                }
            });
            let (a, b) = (first(&ids, "a"), first(&ids, "b"));
            assert!(a.is_some() && b.is_some() && a != b, "{a:?} {b:?}");
        }
    }

    #[test]
    fn a_record_is_read_again_before_the_runtime_is_asked() {
        let dir = tempfile::tempdir().unwrap();
        UserIds::open(dir.path()).take("a").unwrap();
        let path = dir.path().join("a").join(FILE);
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        let ids = UserIds::open(dir.path());
        std::fs::write(&path, text).unwrap();
        assert!(ids.unresolved().unwrap().is_empty());
        assert_eq!(first(&ids, "a"), Some(BLOCK));
    }

    #[test]
    fn pods_that_cannot_be_listed_may_use_any_block() {
        let dir = tempfile::tempdir().unwrap();
        let pods = dir.path().join("pods");
        std::fs::write(&pods, "").unwrap();
        let ids = UserIds::open(&pods);
        assert!(matches!(ids.take("a"), Err(UserIdsError::Unknown)));
        assert!(matches!(ids.unresolved(), Err(UserIdsError::List { .. })));
        std::fs::remove_file(&pods).unwrap();
        assert!(ids.unresolved().unwrap().is_empty());
        ids.take("a").unwrap();
    }

    #[test]
    fn a_sandbox_has_the_block_of_its_pod() {
        let of = |uids: Vec<cri::IdMapping>| {
            let userns_options = Some(cri::UserNamespace { uids, ..Default::default() });
            let options = Some(cri::NamespaceOption { userns_options, ..Default::default() });
            let namespaces = Some(cri::Namespace { options });
            let linux = Some(cri::LinuxPodSandboxStatus { namespaces });
            first_of_sandbox(&cri::PodSandboxStatus { linux, ..Default::default() })
        };
        let mapping = |host_id: u32| cri::IdMapping { host_id, container_id: 0, length: BLOCK };
        assert_eq!(of(vec![mapping(2 * BLOCK)]), Some(2 * BLOCK));
        assert_eq!((of(vec![mapping(7)]), of(vec![])), (None, None));
        assert_eq!(first_of_sandbox(&cri::PodSandboxStatus::default()), None);
    }

    #[test]
    fn a_block_is_allocated_once_recorded_and_allocated_again_after_its_release() {
        let dir = std::env::temp_dir().join(format!("coracle-user-ids-{}", std::process::id()));
        let ids = UserIds::open(&dir);
        for uid in ["a", "b", "a"] {
            ids.take(uid).unwrap();
        }
        assert_eq!((first(&ids, "a"), first(&ids, "b")), (Some(65536), Some(131_072)));
        assert_eq!(ids.mapping("c"), None);
        // A later agent reads the records.
        let again = UserIds::open(&dir);
        again.take("c").unwrap();
        assert_eq!((first(&again, "b"), first(&again, "c")), (Some(131_072), Some(196_608)));
        std::fs::remove_dir_all(dir.join("a")).unwrap();
        again.release("a");
        again.take("d").unwrap();
        assert_eq!(first(&again, "d"), Some(65536));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn an_invalid_record_has_no_block() {
        let range = |host: u32, length: u32| {
            let range = format!(r#"[{{"hostId":{host},"containerId":0,"length":{length}}}]"#);
            format!(r#"{{"uidMappings":{range},"gidMappings":{range}}}"#)
        };
        assert_eq!(first_id(range(131_072, 65536).as_bytes()), Some(131_072));
        for wrong in [range(0, 65536), range(65537, 65536), range(65536, 1), "{".to_owned()] {
            assert_eq!(first_id(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn a_record_that_is_too_large_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        UserIds::open(dir.path()).take("a").unwrap();
        let path = dir.path().join("a").join(FILE);
        let mut text = std::fs::read(&path).unwrap();
        text.resize(1 << 13, b' ');
        std::fs::write(&path, text).unwrap();
        let ids = UserIds::open(dir.path());
        assert_eq!((first(&ids, "a"), ids.unresolved().unwrap()), (None, vec!["a".to_owned()]));
    }
}
