//! Image records: one small file per image, written atomically.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// The record of an image. New versions only add fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) version: u32,
    pub(crate) id: Digest,
    pub(crate) tags: Vec<String>,
    pub(crate) digests: Vec<String>,
    /// Diff ids, lowest first, each once.
    pub(crate) layers: Vec<Digest>,
    pub(crate) size: u64,
    /// The configuration, byte for byte; its digest is the id.
    pub(crate) config: String,
    /// Whether the image was removed while containers still used its layers.
    #[serde(default)]
    pub(crate) removed: bool,
    /// Generation of the record, which grows with every write. If two records have the same tag, the greater generation
    /// wins.
    #[serde(default)]
    pub(crate) generation: u64,
    /// Time of the last pull or import, in seconds since 1970.
    #[serde(default)]
    pub(crate) pulled: u64,
    /// The owner of the pull that added the image, for the limits of owners. Empty for an import.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) owner: String,
    /// Time of the last use, in seconds since 1970. Stored as the file's modification time, so that the file
    /// is not rewritten.
    #[serde(skip)]
    pub(crate) used: u64,
}

/// The record version that this code writes.
pub(crate) const VERSION: u32 = 1;

/// Error of reading or writing records.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} the image record {}", path.display())]
pub(crate) struct RecordError {
    verb: &'static str,
    path: PathBuf,
    #[source]
    pub(crate) source: io::Error,
}

/// The part of a record that all versions have in common.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

/// Reads all records. A damaged record is renamed, with a warning.
///
/// # Errors
/// If a record has a later version, or if the kernel refuses to read a record. If the record were skipped, layers of
/// running containers would be removed.
pub(crate) fn load(directory: &Path) -> Result<Vec<Record>, RecordError> {
    load_by(directory, bytes)
}

fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    std::fs::read(path)
}

fn load_by(
    directory: &Path,
    bytes_of: impl Fn(&Path) -> io::Result<Vec<u8>>,
) -> Result<Vec<Record>, RecordError> {
    let error = |verb| move |source| RecordError { verb, path: directory.to_owned(), source };
    let mut records = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(error("list"))? {
        let entry = entry.map_err(error("list"))?;
        let path = entry.path();
        match path.extension().and_then(|e| e.to_str()) {
            Some("json") if !entry.metadata().is_ok_and(|metadata| metadata.len() == 0) => {}
            // An interrupted write left the file.
            Some("json" | "new") => {
                std::fs::remove_file(&path).map_err(error("remove the remains of"))?;
                continue;
            }
            _ => continue,
        }
        if let Some(version) = later_version(&path) {
            // If the record were set aside, layers of running containers would be removed.
            let why = format!(
                "the record is of a later version ({version}; this release supports {VERSION}); start the later release again"
            );
            return Err(RecordError { verb: "use", path, source: io::Error::other(why) });
        }
        match bytes_of(&path).and_then(|text| read(&path, &text)) {
            Ok(record) => records.push(record),
            Err(source) if coracle_tree::is_refusal(&source) => {
                return Err(RecordError { verb: "read", path, source });
            }
            Err(unreadable) => {
                let aside = path.with_extension("unreadable");
                tracing::warn!(path = %path.display(), aside = %aside.display(), error = %unreadable, "renaming an unreadable image record");
                std::fs::rename(&path, &aside).map_err(error("set aside"))?;
            }
        }
    }
    Ok(records)
}

/// Writes a record. After a power failure the file has the old or the new content. A file that did not exist before is
/// absent or complete.
pub(crate) fn write(directory: &Path, record: &Record) -> Result<(), RecordError> {
    let path = path(directory, &record.id);
    let write = || {
        let text = serde_json::to_vec(record)?;
        match File::create_new(&path) {
            // The new file is written in place: there is no old record to lose, and `read` refuses a partly written
            // file. Name and content are in one commit of the file system's journal, so the pull waits for only one
            // commit.
            Ok(file) => {
                put(file, &text, record.used).inspect_err(|_failed| drop(std::fs::remove_file(&path)))?
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let temporary = path.with_extension("new");
                let written = File::create(&temporary).and_then(|file| put(file, &text, record.used));
                let replaced = written.and_then(|()| std::fs::rename(&temporary, &path));
                // On a full disk the incomplete file would occupy the space that other writes need.
                replaced.inspect_err(|_failed| drop(std::fs::remove_file(&temporary)))?;
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

/// Sets the time of the last use. The time is not synced: a power failure only makes it less exact.
pub(crate) fn record_use(directory: &Path, id: &Digest, used: u64) -> Result<(), RecordError> {
    let path = path(directory, id);
    let noted = File::options().write(true).open(&path).and_then(|file| file.set_modified(time(used)));
    match noted {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(RecordError { verb: "set the time of use of", path, source })
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

/// Removes a record. An absent record is not an error. The removal is not synced: a power failure can restore the
/// record. Then its image is still complete, or [`Images::open`](crate::Images::open) drops the image because a layer
/// is missing. `layers/trash.rs` excludes other states. The next written record makes the removal durable.
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

/// The version of a record, if it is later than [`VERSION`].
fn later_version(path: &Path) -> Option<u32> {
    let head: Head = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    Some(head.version).filter(|version| *version > VERSION)
}

/// The record in a file with this text.
fn read(path: &Path, text: &[u8]) -> io::Result<Record> {
    let mut record: Record = serde_json::from_slice(text)?;
    let modified = std::fs::metadata(path).and_then(|metadata| metadata.modified());
    record.used = modified.map_or(0, seconds);
    if record.pulled == 0 {
        // An earlier version did not record the time of the pull. The modification time is an upper bound.
        record.pulled = record.used;
    }
    if Digest::by(record.id.algorithm(), record.config.as_bytes()) != record.id {
        let why = "its configuration does not match its id";
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::{Record, VERSION, load, load_by, record_use, remove, write};
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
            owner: "team".into(),
            used: 1_700_000_007,
        }
    }

    #[test]
    fn a_record_that_the_kernel_refuses_to_read_stays() {
        let directory = tempfile::tempdir().unwrap();
        let record = record("{}");
        write(directory.path(), &record).unwrap();
        let fails_with =
            |errno: i32| load_by(directory.path(), |_| Err(std::io::Error::from_raw_os_error(errno)));
        assert!(fails_with(libc::EMFILE).is_err() && fails_with(libc::EACCES).is_err());
        assert_eq!(load(directory.path()).unwrap(), std::slice::from_ref(&record));
        assert!(fails_with(libc::EIO).unwrap().is_empty(), "renamed");
    }

    #[test]
    fn a_failed_replacement_leaves_no_temporary_file() {
        let directory = tempfile::tempdir().unwrap();
        let record = record("{}");
        let path = directory.path().join(format!("{}.json", record.id.hex()));
        std::fs::create_dir(&path).unwrap();
        assert!(write(directory.path(), &record).is_err(), "a directory is not replaced by a file");
        assert!(!path.with_extension("new").exists());
    }

    #[test]
    fn records_are_read_back_and_incomplete_records_are_set_aside() {
        let directory = tempfile::tempdir().unwrap();
        let (good, incomplete) = (record("{}"), record("{ }"));
        write(directory.path(), &good).unwrap();
        write(directory.path(), &incomplete).unwrap();
        let path = directory.path().join(format!("{}.json", incomplete.id.hex()));
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
        // The time of the last use is kept, even when another record is written.
        record_use(directory.path(), &good.id, 1_700_003_600).unwrap();
        let noted = load(directory.path()).unwrap().remove(0);
        assert_eq!((noted.pulled, noted.used, noted.generation), (1_700_000_000, 1_700_003_600, 4));
        write(directory.path(), &noted).unwrap();
        assert_eq!(load(directory.path()).unwrap(), [noted]);
        record_use(directory.path(), &incomplete.id, 1).unwrap();
        remove(directory.path(), &good.id).unwrap();
        remove(directory.path(), &good.id).unwrap();
        assert_eq!(load(directory.path()).unwrap(), []);
    }

    /// A record of an earlier version. Never changed, because stores exist for years.
    const RECORDED: &str = r#"{"version":1,"id":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "tags":["a.b/c:d"],"digests":["a.b/c@sha256:00"],"layers":["sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"],
        "size":7,"config":"{}","removed":true,"generation":3,"pulled":1700000000}"#;

    #[test]
    fn earlier_record_versions_are_read_and_later_versions_are_not_changed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        std::fs::write(&path, RECORDED).unwrap();
        let read = load(directory.path()).unwrap().remove(0);
        let expected = Record {
            digests: vec!["a.b/c@sha256:00".into()],
            layers: vec![Digest::of(b"{}")],
            removed: true,
            owner: String::new(),
            used: read.used,
            ..record("{}")
        };
        assert_eq!(read, expected);
        let recorded: serde_json::Value = serde_json::from_str(RECORDED).unwrap();
        let today = serde_json::to_value(&read).unwrap();
        for (field, value) in recorded.as_object().unwrap() {
            assert_eq!(today.get(field), Some(value), "{field} is written in another way");
        }
        // A later version may add fields and change other fields.
        std::fs::write(&path, RECORDED.replacen('{', r#"{"new":[1],"#, 1)).unwrap();
        assert_eq!(load(directory.path()).unwrap().len(), 1);
        std::fs::write(&path, r#"{"version":2,"id":{"sha256":"00"}}"#).unwrap();
        let refused = load(directory.path()).unwrap_err();
        assert!(refused.source.to_string().contains("of a later version"), "{refused}");
        assert!(path.exists());
    }
}
