//! Ids of pods with user namespaces (`hostUsers: false`).
//!
//! As in the kubelet: blocks of 65536 ids for users and groups, starting with the second block (the first one is the
//! node's), recorded in the pod's directory before use. No two pods share a block, so an escaped process has no
//! rights in others.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use coracle_proto::cri;
use serde::{Deserialize, Serialize};

use crate::bounded;

/// Size of a pod's block: all 16-bit ids.
const BLOCK: u32 = 1 << 16;
/// File name of the record in a pod's directory, as in the kubelet.
const FILE: &str = "userns";
/// Maximum size in bytes of that record.
const RECORD_MAX: u64 = 4 << 10;

/// Why a pod cannot get a block.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UserIdsError {
    #[error("no block of {BLOCK} ids is free for the pod's user namespace")]
    Exhausted,
    #[error("cannot record the pod's ids in {path}")]
    Record {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The blocks in use.
#[derive(Debug)]
pub(crate) struct UserIds {
    pods_dir: PathBuf,
    /// First ids, by pod; unique.
    blocks: Mutex<HashMap<String, u32>>,
}

/// The kubelet's format.
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
    /// Reads the records of earlier agents. An invalid record reserves no block; its pod gets a new one with its next
    /// sandbox.
    pub(crate) fn open(pods_dir: &Path) -> Self {
        let entries = std::fs::read_dir(pods_dir).into_iter().flatten().flatten();
        let blocks = entries.filter_map(|entry| {
            let text = bounded::read(&entry.path().join(FILE), RECORD_MAX).ok()?;
            Some((entry.file_name().into_string().ok()?, first_id(&text)?))
        });
        Self { pods_dir: pods_dir.to_owned(), blocks: Mutex::new(blocks.collect()) }
    }

    /// Allocates a block to the pod, the recorded one or the lowest free one, and records it.
    pub(crate) fn allocate(&self, uid: &str) -> Result<(), UserIdsError> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if blocks.contains_key(uid) {
            return Ok(());
        }
        let free = |first: &u32| !blocks.values().any(|other| other == first);
        let first = (1..u32::MAX / BLOCK).map(|block| block * BLOCK).find(free);
        let first = first.ok_or(UserIdsError::Exhausted)?;
        let dir = self.pods_dir.join(uid);
        let path = dir.join(FILE);
        record(&dir, first).map_err(|source| UserIdsError::Record { path, source })?;
        blocks.insert(uid.to_owned(), first);
        Ok(())
    }

    /// The id mapping of a pod. None if the pod has no block.
    pub(crate) fn mapping(&self, uid: &str) -> Option<cri::IdMapping> {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.get(uid).map(|first| cri::IdMapping { container_id: 0, host_id: *first, length: BLOCK })
    }

    /// Frees the block of a removed pod. Its record is removed with its directory.
    pub(crate) fn release(&self, uid: &str) {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }
}

/// Writes the record of a block that starts with this id.
fn record(dir: &Path, first: u32) -> io::Result<()> {
    let ranges = vec![Range { host_id: first, container_id: 0, length: BLOCK }];
    let record = Record { uid_mappings: ranges.clone(), gid_mappings: ranges };
    let text = serde_json::to_vec(&record)?;
    crate::volume::make_private(dir)?;
    // Durable: after a power failure the pod's volumes contain files with these ids.
    crate::private_file::replace(&dir.join(FILE), &text)
}

fn first_id(text: &[u8]) -> Option<u32> {
    let record: Record = serde_json::from_slice(text).ok()?;
    let [range] = record.uid_mappings.as_slice() else { return None };
    let sensible = range.container_id == 0
        && range.length == BLOCK
        && range.host_id >= BLOCK
        && range.host_id.is_multiple_of(BLOCK);
    sensible.then_some(range.host_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_given_once_recorded_and_given_again() {
        let dir = std::env::temp_dir().join(format!("coracle-user-ids-{}", std::process::id()));
        let ids = UserIds::open(&dir);
        let first = |ids: &UserIds, uid: &str| ids.mapping(uid).map(|mapping| mapping.host_id);
        for uid in ["a", "b", "a"] {
            ids.allocate(uid).unwrap();
        }
        assert_eq!((first(&ids, "a"), first(&ids, "b")), (Some(65536), Some(131_072)));
        assert_eq!(ids.mapping("c"), None);
        // A later agent reads them.
        let again = UserIds::open(&dir);
        again.allocate("c").unwrap();
        assert_eq!((first(&again, "b"), first(&again, "c")), (Some(131_072), Some(196_608)));
        std::fs::remove_dir_all(dir.join("a")).unwrap();
        again.release("a");
        again.allocate("d").unwrap();
        assert_eq!(first(&again, "d"), Some(65536));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_record_that_makes_no_sense_is_no_block() {
        let range = |host: u32, length: u32| {
            let range = format!(r#"[{{"hostId":{host},"containerId":0,"length":{length}}}]"#);
            format!(r#"{{"uidMappings":{range},"gidMappings":{range}}}"#)
        };
        assert_eq!(first_id(range(131_072, 65536).as_bytes()), Some(131_072));
        for wrong in [range(0, 65536), range(65537, 65536), range(65536, 1), "{".to_owned()] {
            assert_eq!(first_id(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
