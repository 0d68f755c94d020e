//! Limits on the memory of the files that the node writes for volumes: for one pod, and for the pods of one namespace.
//!
//! These files do not count for the memory limit of a container, and all pods share one tmpfs for them. Without limits,
//! the pods of one namespace could fill the tmpfs. Then no pod of another namespace would start.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

use rustix::fs::statvfs;

use super::error::SetUpError;
use super::lock;

/// Maximum pages of a pod that are not charged to its namespace. They suffice for a token, the cluster's certificate
/// and the name of the namespace, which almost every pod has.
const FREE_PAGES: usize = 16;

/// The memory of the files of all pods.
pub(super) struct FileMemory {
    /// Maximum bytes of all files.
    limit: usize,
    /// Maximum bytes of a pod that are not charged to its namespace.
    free: usize,
    /// Files of the pods, by uid.
    pods: Mutex<HashMap<String, PodFiles>>,
}

/// A volume of files that the node writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileVolume<'a> {
    pub(super) namespace: &'a str,
    /// Uid of the pod.
    pub(super) uid: &'a str,
    pub(super) name: &'a str,
}

struct PodFiles {
    namespace: String,
    /// Bytes by the name of the volume.
    volumes: Vec<(String, usize)>,
}

// === impl FileMemory ===

impl FileMemory {
    /// The limit is half of the file system of the directory. A replacement needs memory for the old and the new files.
    /// A link needs an inode, and a tmpfs has one inode for each page.
    pub(super) fn new(dir: &Path, page: usize) -> Self {
        let bytes = statvfs(dir).ok().map(|found| found.f_blocks.saturating_mul(found.f_frsize) / 2);
        let limit = bytes.filter(|bytes| *bytes > 0).and_then(|bytes| usize::try_from(bytes).ok());
        Self::with_limit(limit.unwrap_or(usize::MAX), page)
    }

    fn with_limit(limit: usize, page: usize) -> Self {
        Self { limit, free: FREE_PAGES * page, pods: Mutex::default() }
    }

    /// Bytes of the files in the pod's other volumes.
    pub(super) fn of_other_volumes(&self, volume: FileVolume<'_>) -> usize {
        lock(&self.pods).get(volume.uid).map_or(0, |pod| pod.bytes_without(volume.name))
    }

    /// Charges the files of a volume to its namespace before they are written. Until [`FileMemory::written`], the
    /// charge is the larger of the old and the new number of bytes. `exist` is true if the files exist already. Files
    /// of an earlier agent are charged and never refused.
    ///
    /// # Errors
    /// When the pods of the namespace would use more than three times the bytes that are left for other namespaces.
    pub(super) fn reserve(
        &self,
        volume: FileVolume<'_>,
        bytes: usize,
        exist: bool,
    ) -> Result<(), SetUpError> {
        let mut pods = lock(&self.pods);
        let held = pods.get(volume.uid).and_then(|pod| pod.of(volume.name));
        if held.is_some_and(|held| bytes <= held) {
            return Ok(());
        }
        let of_pod = pods.get(volume.uid).map_or(0, |pod| pod.bytes_without(volume.name));
        let needed = self.counted(of_pod.saturating_add(bytes));
        let is_adopted = exist && held.is_none();
        if needed > 0 && !is_adopted && !self.has_room(&pods, volume, needed) {
            return Err(SetUpError::NamespaceTooLarge);
        }
        let pod = pods
            .entry(volume.uid.to_owned())
            .or_insert_with(|| PodFiles { namespace: volume.namespace.to_owned(), volumes: Vec::new() });
        pod.set(volume.name, bytes);
        Ok(())
    }

    /// Charges the files of a volume after they have replaced the former files.
    pub(super) fn written(&self, volume: FileVolume<'_>, bytes: usize) {
        if let Some(pod) = lock(&self.pods).get_mut(volume.uid) {
            pod.set(volume.name, bytes);
        }
    }

    /// Removes the charges of a pod.
    pub(super) fn remove_pod(&self, uid: &str) {
        lock(&self.pods).remove(uid);
    }

    /// Whether the namespace of the pod has room for this number of charged bytes of the pod.
    fn has_room(&self, pods: &HashMap<String, PodFiles>, volume: FileVolume<'_>, needed: usize) -> bool {
        let (mut of_namespace, mut of_others) = (needed, 0_usize);
        for (_, pod) in pods.iter().filter(|(uid, _)| *uid != volume.uid) {
            let bytes = self.counted(pod.bytes_without(""));
            let sum = if pod.namespace == volume.namespace { &mut of_namespace } else { &mut of_others };
            *sum = sum.saturating_add(bytes);
        }
        let left = self.limit.saturating_sub(of_namespace.saturating_add(of_others));
        of_namespace <= left.saturating_mul(3)
    }

    /// The charged part of a pod's bytes: all bytes, or none up to the free maximum.
    fn counted(&self, bytes: usize) -> usize {
        if bytes <= self.free { 0 } else { bytes }
    }
}

// === impl PodFiles ===

impl PodFiles {
    fn of(&self, volume: &str) -> Option<usize> {
        self.volumes.iter().find(|(name, _)| name == volume).map(|(_, bytes)| *bytes)
    }

    /// The bytes of all volumes, except the volume of this name. No volume has an empty name.
    fn bytes_without(&self, volume: &str) -> usize {
        let others = self.volumes.iter().filter(|(name, _)| name != volume);
        others.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    fn set(&mut self, volume: &str, bytes: usize) {
        match self.volumes.iter_mut().find(|(name, _)| name == volume) {
            Some((_, held)) => *held = bytes,
            None => self.volumes.push((volume.to_owned(), bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn volume<'a>(namespace: &'a str, uid: &'a str) -> FileVolume<'a> {
        FileVolume { namespace, uid, name: "v" }
    }

    /// Starts pods of the namespace until one is refused. Returns their number.
    fn fill(memory: &FileMemory, namespace: &str, bytes: usize) -> usize {
        let start =
            |at: &usize| memory.reserve(volume(namespace, &format!("{namespace}{at}")), bytes, false).is_ok();
        (0..1000).take_while(start).count()
    }

    #[test]
    fn the_files_of_one_namespace_leave_memory_for_others() {
        let memory = FileMemory::with_limit(64 * MIB, 4096);
        let started = ["a", "b", "c"].map(|namespace| fill(&memory, namespace, MIB));
        assert_eq!(started, [48, 12, 3]);
        memory.reserve(volume("d", "d0"), MIB, false).expect_err("nothing is left");
        memory.remove_pod("a0");
        memory.reserve(volume("d", "d0"), MIB, false).expect("memory of a removed pod is free");
    }

    #[test]
    fn pods_with_small_files_start_in_a_namespace_without_room() {
        let memory = FileMemory::with_limit(64 * MIB, 4096);
        assert_eq!(fill(&memory, "a", MIB), 48);
        memory.reserve(volume("a", "small"), 16 * 4096, false).expect("a token and a certificate");
        let grown = memory.reserve(volume("a", "small"), 17 * 4096, false).expect_err("larger files");
        assert!(matches!(grown, SetUpError::NamespaceTooLarge), "{grown}");
    }

    #[test]
    fn files_of_an_earlier_agent_count_but_are_not_refused() {
        let memory = FileMemory::with_limit(64 * MIB, 4096);
        memory.reserve(volume("a", "old"), 60 * MIB, true).expect("the pod runs");
        memory.reserve(volume("a", "new"), MIB, false).expect_err("it counts");
        memory.reserve(volume("a", "old"), 61 * MIB, true).expect_err("it does not grow");
    }

    #[test]
    fn a_volume_counts_its_larger_content_until_the_smaller_one_is_written() {
        let memory = FileMemory::with_limit(64 * MIB, 4096);
        let other = FileVolume { name: "w", ..volume("a", "p") };
        memory.reserve(volume("a", "p"), 40 * MIB, false).expect("room");
        memory.reserve(volume("a", "p"), MIB, false).expect("less");
        assert_eq!(memory.of_other_volumes(other), 40 * MIB);
        memory.written(volume("a", "p"), MIB);
        assert_eq!((memory.of_other_volumes(other), memory.of_other_volumes(volume("a", "p"))), (MIB, 0));
    }

    #[test]
    fn half_of_the_file_system_is_for_files() {
        let found = statvfs("/").expect("a file system");
        let limit = FileMemory::new(Path::new("/"), 4096).limit;
        assert_eq!(u64::try_from(limit).expect("64 bits"), found.f_blocks * found.f_frsize / 2);
    }
}
