//! Durable records: the devices of each pod (`<state>/agent/devices/<uid>.json`), and the names of the resources
//! (`<state>/agent/device-resources.json`).
//!
//! A record is written before the pod's containers start. So a restarted agent knows which devices are in use before
//! the plugins have registered again.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::table::PodDevices;
use crate::{bounded, private_file};

/// Maximum bytes of a record.
const RECORD_MAX: u64 = 16 << 20;
/// Maximum length of a pod's uid, which is the name of its record's file.
const UID_MAX: usize = 64;

/// The records on disk.
#[derive(Debug)]
pub(super) struct Records {
    dir: PathBuf,
    /// The names of the resources that the record on disk has. The lock is held during each write of any record, so
    /// that the last write has the newest state.
    writing: Mutex<Vec<String>>,
}

// === impl Records ===

impl Records {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { dir, writing: Mutex::default() }
    }

    /// Reads the devices of all pods. A damaged record is renamed to `*.bad`. Temporary files of interrupted writes are
    /// removed.
    pub(super) fn pods(&self) -> Vec<PodDevices> {
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => {
                tracing::warn!(%error, path = %self.dir.display(), "cannot list the records of devices");
                return Vec::new();
            }
        };
        let has = |path: &Path, extension: &str| path.extension().is_some_and(|found| found == extension);
        let paths = entries.flatten().map(|entry| entry.path());
        let (records, others): (Vec<_>, Vec<_>) = paths.partition(|path| has(path, "json"));
        for path in others.iter().filter(|path| has(path, "tmp")) {
            let _ = fs::remove_file(path);
        }
        records.iter().filter_map(|path| self.read(path)).collect()
    }

    fn read(&self, path: &Path) -> Option<PodDevices> {
        let parse = |text: Vec<u8>| serde_json::from_slice::<PodDevices>(&text).map_err(io::Error::from);
        match bounded::read(path, RECORD_MAX).and_then(parse) {
            Ok(pod) if self.path(&pod.uid).as_deref() == Some(path) => return Some(pod),
            Ok(_) => tracing::warn!(path = %path.display(), "ignoring a record of devices with another uid"),
            Err(error) if bounded::is_damage(&error) => {
                tracing::warn!(%error, path = %path.display(), "renaming an unreadable record of devices");
                let _ = fs::rename(path, path.with_extension("bad"));
            }
            Err(error) => tracing::warn!(%error, path = %path.display(), "cannot read a record of devices"),
        }
        None
    }

    /// Writes the record of a pod as `current` returns it. If it returns `None`, removes the record.
    ///
    /// # Errors
    /// Returns an error if the record cannot be written, or is larger than the maximum that can be read.
    pub(super) fn save(&self, uid: &str, current: impl FnOnce() -> Option<PodDevices>) -> io::Result<()> {
        let _one_at_a_time = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(path) = self.path(uid) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the uid of the pod is not a file name"));
        };
        match current() {
            Some(pod) => write(&path, &serde_json::to_vec(&pod)?),
            None => coracle_tree::remove_file(&path),
        }
    }

    /// The names of the resources of an earlier agent.
    pub(super) fn resources(&self) -> Vec<String> {
        let found = bounded::read(&self.resources_path(), RECORD_MAX);
        let names = found.map(|text| serde_json::from_slice(&text).unwrap_or_default());
        let names: Vec<String> = names.unwrap_or_default();
        self.writing.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&names);
        names
    }

    /// Writes the names of the resources as `current` returns them, unless the record already has these names.
    pub(super) fn save_resources(&self, current: impl FnOnce() -> Vec<String>) -> io::Result<()> {
        let mut written = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let names = current();
        if *written != names {
            write(&self.resources_path(), &serde_json::to_vec(&names)?)?;
            *written = names;
        }
        Ok(())
    }

    fn path(&self, uid: &str) -> Option<PathBuf> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        let is_valid = !uid.is_empty() && uid.len() <= UID_MAX && uid.bytes().all(is_plain);
        is_valid.then(|| self.dir.join(format!("{uid}.json")))
    }

    fn resources_path(&self) -> PathBuf {
        self.dir.parent().unwrap_or(&self.dir).join("device-resources.json")
    }
}

fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    if text.len() as u64 > RECORD_MAX {
        let message = format!("{} bytes are too large for a record", text.len());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    private_file::replace(path, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str) -> PodDevices {
        PodDevices { uid: uid.to_owned(), ..PodDevices::default() }
    }

    #[test]
    fn records_survive_a_restart_and_damaged_ones_are_renamed() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Records::new(dir.path().join("devices"));
        assert!(open().pods().is_empty() && open().resources().is_empty());
        open().save("p", || Some(pod("p"))).unwrap();
        open().save("q", || Some(pod("q"))).unwrap();
        open().save("q", || None).unwrap();
        open().save("q", || None).unwrap();
        for (name, text) in
            [("empty", ""), ("half", "{\"uid\": \"ha"), ("other", "{\"uid\":\"p\",\"containers\":{}}")]
        {
            fs::write(dir.path().join(format!("devices/{name}.json")), text).unwrap();
        }
        let temporary = dir.path().join("devices/interrupted.tmp");
        fs::write(&temporary, "").unwrap();
        assert_eq!(open().pods(), [pod("p")]);
        assert!(!temporary.exists());
        assert!(
            dir.path().join("devices/half.bad").exists() && dir.path().join("devices/empty.bad").exists()
        );
        open().save_resources(|| vec!["x.io/a".to_owned()]).unwrap();
        assert_eq!(open().resources(), ["x.io/a"]);
        assert!(open().save("../x", || Some(pod("../x"))).is_err());
    }

    #[test]
    fn a_record_that_is_too_large_is_neither_written_nor_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.json");
        let padded = |length: usize| {
            let mut text = serde_json::to_vec(&pod("p")).unwrap();
            text.resize(length, b' ');
            text
        };
        let max = usize::try_from(RECORD_MAX).unwrap();
        assert_eq!(write(&path, &padded(max + 1)).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert!(!path.exists());
        let records = Records::new(dir.path().to_owned());
        write(&path, &padded(max)).unwrap();
        assert_eq!(records.pods(), [pod("p")]);
        fs::write(&path, padded(max + 1)).unwrap();
        assert!(records.pods().is_empty());
    }

    #[test]
    fn names_of_resources_are_written_only_when_they_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device-resources.json");
        let save = |records: &Records, names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            records.save_resources(|| names).unwrap();
        };
        let records = Records::new(dir.path().join("devices"));
        save(&records, &["x.io/a"]);
        // A write would create the file again.
        fs::remove_file(&path).unwrap();
        save(&records, &["x.io/a"]);
        assert!(!path.exists());
        save(&records, &["x.io/a", "x.io/b"]);
        // The next agent reads the names in the record, so it does not write the same names again.
        let next = Records::new(dir.path().join("devices"));
        assert_eq!(next.resources().len(), 2);
        fs::remove_file(&path).unwrap();
        save(&next, &["x.io/a", "x.io/b"]);
        assert!(!path.exists());
        save(&next, &[]);
        assert!(path.exists());
    }
}
