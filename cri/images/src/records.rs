//! One small file per image, written whole or not at all.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// What is remembered of an image. Fields are only ever added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) version: u32,
    pub(crate) id: Digest,
    pub(crate) tags: Vec<String>,
    pub(crate) digests: Vec<String>,
    /// Diff ids, lowest first, each once.
    pub(crate) layers: Vec<Digest>,
    pub(crate) size: u64,
    /// The configuration as it came; its digest is the id.
    pub(crate) config: String,
    /// Removed by the user, but containers still use its layers.
    #[serde(default)]
    pub(crate) removed: bool,
    /// Grows with every write: where two records claim one tag, the greater is right.
    #[serde(default)]
    pub(crate) generation: u64,
    /// When it was last pulled or imported, in seconds since 1970.
    #[serde(default)]
    pub(crate) pulled: u64,
    /// When it was last of use, likewise. On disk this is the file's time of modification: nothing is written anew for it.
    #[serde(skip)]
    pub(crate) used: u64,
}

/// The version that this code writes.
pub(crate) const VERSION: u32 = 1;

/// Why records cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} the image record {}", path.display())]
pub(crate) struct RecordError {
    verb: &'static str,
    path: PathBuf,
    #[source]
    pub(crate) source: io::Error,
}

/// What every version's records say of themselves.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

/// Reads all records. One that cannot be read is set aside under another name, and said so; but one of a later version is
/// an error.
pub(crate) fn load(directory: &Path) -> Result<Vec<Record>, RecordError> {
    let error = |verb| move |source| RecordError { verb, path: directory.to_owned(), source };
    let mut records = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(error("list"))? {
        let entry = entry.map_err(error("list"))?;
        let path = entry.path();
        match path.extension().and_then(|e| e.to_str()) {
            Some("json") if !entry.metadata().is_ok_and(|metadata| metadata.len() == 0) => {}
            // Left by a write that was cut off.
            Some("json" | "new") => {
                std::fs::remove_file(&path).map_err(error("remove the remains of"))?;
                continue;
            }
            _ => continue,
        }
        if let Some(version) = later(&path) {
            // To set it aside would be to remove layers that run.
            let why =
                format!("it is of a later version of this program ({version}; {VERSION} is known here)");
            return Err(RecordError { verb: "understand", path, source: io::Error::other(why) });
        }
        match read(&path) {
            Ok(record) => records.push(record),
            Err(reason) => {
                let aside = path.with_extension("unreadable");
                tracing::warn!(path = %path.display(), aside = %aside.display(), reason, "setting an image record aside");
                std::fs::rename(&path, &aside).map_err(error("set aside"))?;
            }
        }
    }
    Ok(records)
}

/// Writes a record so that after a power cut either the old one or the new one is there, and where there was none either
/// none or the new one.
pub(crate) fn write(directory: &Path, record: &Record) -> Result<(), RecordError> {
    let path = path(directory, &record.id);
    let write = || {
        let text = serde_json::to_vec(record)?;
        match File::create_new(&path) {
            // Half of it would be no record (`read`), and nothing was there to be kept. So name and content are of one
            // commit of the file system's journal, for which the next pull waits.
            Ok(file) => {
                put(file, &text, record.used).inspect_err(|_failed| drop(std::fs::remove_file(&path)))?
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let temporary = path.with_extension("new");
                put(File::create(&temporary)?, &text, record.used)?;
                std::fs::rename(&temporary, &path)?;
            }
            Err(error) => return Err(error),
        }
        coracle_fault::point("pull.recorded");
        File::open(directory)?.sync_all()
    };
    write().map_err(|source| RecordError { verb: "write", path: path.clone(), source })
}

fn put(mut file: File, text: &[u8], used: u64) -> io::Result<()> {
    file.write_all(text)?;
    file.set_modified(time(used))?;
    coracle_fault::point("pull.record-written");
    file.sync_all()
}

/// Notes when an image was last of use. Nothing is synced: what a power cut takes of it is an order.
pub(crate) fn note_use(directory: &Path, id: &Digest, used: u64) -> Result<(), RecordError> {
    let path = path(directory, id);
    let noted = File::options().write(true).open(&path).and_then(|file| file.set_modified(time(used)));
    match noted {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(RecordError { verb: "note a use in", path, source })
        }
        _ => Ok(()),
    }
}

/// Seconds since 1970.
pub(crate) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |passed| passed.as_secs())
}

pub(crate) fn time(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

/// Removes a record; one that is not there is removed already. Nothing is synced: one that a power cut brings back is
/// that of an image which is still whole, or is dropped by [`Images::open`](crate::Images::open) since it misses a
/// layer (`layers/rubbish.rs` sees to it that there is nothing between). The next record that is written makes it last.
pub(crate) fn remove(directory: &Path, id: &Digest) -> Result<(), RecordError> {
    let path = path(directory, id);
    match std::fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(RecordError { verb: "remove", path, source })
        }
        _ => Ok(()),
    }
}

fn path(directory: &Path, id: &Digest) -> PathBuf {
    directory.join(format!("{}.json", id.hex()))
}

/// The version of a record that a later version of this program wrote.
fn later(path: &Path) -> Option<u32> {
    let head: Head = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    Some(head.version).filter(|version| *version > VERSION)
}

fn read(path: &Path) -> Result<Record, String> {
    let text = std::fs::read(path).map_err(|e| e.to_string())?;
    let mut record: Record = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
    let modified = std::fs::metadata(path).and_then(|metadata| metadata.modified());
    record.used = modified.map_or(0, seconds);
    if record.pulled == 0 {
        // Of a version that did not say: no later than that.
        record.pulled = record.used;
    }
    if Digest::by(record.id.algorithm(), record.config.as_bytes()) != record.id {
        return Err("its configuration is not what its id says".into());
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::{Record, VERSION, load, note_use, remove, write};
    use crate::digest::Digest;

    fn record(config: &str) -> Record {
        Record {
            version: VERSION,
            id: Digest::of(config.as_bytes()),
            tags: vec!["a.b/c:d".into()],
            digests: vec![],
            layers: vec![Digest::of(b"layer")],
            size: 7,
            config: config.into(),
            removed: false,
            generation: 3,
            pulled: 1_700_000_000,
            used: 1_700_000_007,
        }
    }

    #[test]
    fn records_come_back_and_torn_ones_are_set_aside() {
        let directory = tempfile::tempdir().unwrap();
        let (good, torn) = (record("{}"), record("{ }"));
        write(directory.path(), &good).unwrap();
        write(directory.path(), &torn).unwrap();
        let path = directory.path().join(format!("{}.json", torn.id.hex()));
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, &text[..text.len() / 2]).unwrap();
        std::fs::write(directory.path().join("x.new"), "half").unwrap();
        std::fs::write(directory.path().join("y.json"), "").unwrap();
        assert_eq!(load(directory.path()).unwrap(), std::slice::from_ref(&good));
        assert!(path.with_extension("unreadable").exists());
        assert!(!directory.path().join("x.new").exists() && !directory.path().join("y.json").exists());
        write(directory.path(), &Record { generation: 4, ..good.clone() }).unwrap();
        assert_eq!(load(directory.path()).unwrap()[0].generation, 4);
        assert!(!path.with_extension("new").exists());
        // A use is remembered, and no other record of the image forgets it.
        note_use(directory.path(), &good.id, 1_700_003_600).unwrap();
        let noted = load(directory.path()).unwrap().remove(0);
        assert_eq!((noted.pulled, noted.used, noted.generation), (1_700_000_000, 1_700_003_600, 4));
        write(directory.path(), &noted).unwrap();
        assert_eq!(load(directory.path()).unwrap(), [noted]);
        note_use(directory.path(), &torn.id, 1).unwrap();
        remove(directory.path(), &good.id).unwrap();
        remove(directory.path(), &good.id).unwrap();
        assert_eq!(load(directory.path()).unwrap(), []);
    }

    /// As it was written by an earlier version: never changed, since images are on the disk for years.
    const RECORDED: &str = r#"{"version":1,"id":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "tags":["a.b/c:d"],"digests":["a.b/c@sha256:00"],"layers":["sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"],
        "size":7,"config":"{}","removed":true,"generation":3,"pulled":1700000000}"#;

    #[test]
    fn a_record_of_an_earlier_version_is_read_and_one_of_a_later_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        std::fs::write(&path, RECORDED).unwrap();
        let read = load(directory.path()).unwrap().remove(0);
        let expected = Record {
            digests: vec!["a.b/c@sha256:00".into()],
            layers: vec![Digest::of(b"{}")],
            removed: true,
            used: read.used,
            ..record("{}")
        };
        assert_eq!(read, expected);
        let recorded: serde_json::Value = serde_json::from_str(RECORDED).unwrap();
        let today = serde_json::to_value(&read).unwrap();
        for (field, value) in recorded.as_object().unwrap() {
            assert_eq!(today.get(field), Some(value), "{field} is written in another way");
        }
        // What a later version adds, and what it changes.
        std::fs::write(&path, RECORDED.replacen('{', r#"{"new":[1],"#, 1)).unwrap();
        assert_eq!(load(directory.path()).unwrap().len(), 1);
        std::fs::write(&path, r#"{"version":2,"id":{"sha256":"00"}}"#).unwrap();
        let refused = load(directory.path()).unwrap_err();
        assert!(refused.source.to_string().contains("of a later version"), "{refused}");
        assert!(path.exists());
    }
}
