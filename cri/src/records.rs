//! Durable records: one JSON file per object in the state directory, a tmpfs on a node. A reboot removes them together with
//! the objects that they describe.
//!
//! A record is written to a temporary name and renamed, so that a reader sees the old or the new record. New fields
//! need no new version. Any other change needs a higher version. An older runtime then refuses to start, because it
//! would take an unreadable record for an incompletely created object. `recorded` has records of each version, which
//! all later versions must read.

#[cfg(test)]
mod recorded;
mod removed;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use coracle_proto::cri;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use crate::config::RuntimeConfig;
use crate::error::Error;
use crate::selinux::Labels;

pub(crate) use removed::{Removed, Subject, remove_record};

const VERSION: u32 = 1;
const FILE: &str = "record.json";
/// Number of parts of the disk over which writable layers are spread.
const PARTS: u8 = 16;

/// Phase of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum SandboxPhase {
    /// Being created. Undone if found after a restart.
    Creating,
    /// The shim is running.
    Ready,
    /// Stopped, or the shim died.
    NotReady,
}

/// A transition of a pod or container, with its event number. Numbers increase in the order of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Transition {
    pub(crate) number: u64,
    /// A value of the CRI's `ContainerEventType`.
    pub(crate) what: i32,
    pub(crate) at: i64,
}

/// The record of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxRecord {
    pub(crate) version: u32,
    pub(crate) id: String,
    pub(crate) phase: SandboxPhase,
    pub(crate) runtime_handler: String,
    pub(crate) created_at: i64,
    #[serde(with = "message")]
    pub(crate) config: cri::PodSandboxConfig,
    /// Addresses of the pod, the primary address first.
    #[serde(default)]
    pub(crate) addresses: Vec<String>,
    /// SELinux labels, if any.
    #[serde(default)]
    pub(crate) selinux: Option<Labels>,
    /// Whether a restore from a checkpoint is in progress. A restart of the runtime undoes such a restore.
    #[serde(default)]
    pub(crate) restoring: bool,
    /// Whether a stop is in progress. A restart of the runtime completes such a stop.
    #[serde(default)]
    pub(crate) stopping: bool,
    /// Transitions with an event number. The next runtime sends the events that are not delivered yet.
    #[serde(default)]
    pub(crate) transitions: Vec<Transition>,
}

/// Phase of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum ContainerPhase {
    /// Being created. Undone if found after a restart.
    Creating,
    /// Created and not started.
    Created,
    /// Running.
    #[serde(rename_all = "camelCase")]
    Running { started_at: i64 },
    /// Exited.
    Exited(ExitRecord),
}

/// The exit of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ExitRecord {
    pub(crate) started_at: i64,
    pub(crate) finished_at: i64,
    pub(crate) code: i32,
    /// `Completed`, `Error`, `OOMKilled`, …
    pub(crate) reason: String,
    #[serde(default)]
    pub(crate) message: String,
}

/// The record of a container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContainerRecord {
    pub(crate) version: u32,
    pub(crate) id: String,
    pub(crate) sandbox_id: String,
    pub(crate) phase: ContainerPhase,
    pub(crate) created_at: i64,
    #[serde(with = "message")]
    pub(crate) config: cri::ContainerConfig,
    pub(crate) image_id: String,
    /// Name and digest of the image at its registry; empty for an image without a registry.
    #[serde(default)]
    pub(crate) image_digest: String,
    pub(crate) log_path: String,
    pub(crate) cgroup: String,
    pub(crate) stop_signal: i32,
    pub(crate) uid: i64,
    pub(crate) gid: i64,
    #[serde(default)]
    pub(crate) groups: Vec<i64>,
    /// Whether the spec has poststart or poststop hooks, which the runtime itself runs.
    #[serde(default)]
    pub(crate) late_hooks: bool,
    /// SELinux labels, if any.
    #[serde(default)]
    pub(crate) selinux: Option<Labels>,
    /// Pid of the first process, 0 before the creation.
    #[serde(default)]
    pub(crate) pid: i32,
    /// Data to restore the processes at the start. `None` for a container that starts its command.
    #[serde(default)]
    pub(crate) restore: Option<Box<RestoreRecord>>,
    /// Transitions with an event number. The next runtime sends the events that are not delivered yet.
    #[serde(default)]
    pub(crate) transitions: Vec<Transition>,
}

/// Data for a restore that is not in the container's CRIU images.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RestoreRecord {
    /// Mount points of external file systems, which are not in the images.
    pub(crate) external: Vec<String>,
    /// Pipes that were standard streams of the container: the stream's descriptor number by the kernel's name of the
    /// pipe.
    pub(crate) streams: BTreeMap<String, u32>,
}

/// The directories of all records.
#[derive(Debug, Clone)]
pub(crate) struct Records {
    sandboxes: PathBuf,
    containers: PathBuf,
    layers: PathBuf,
    /// Directory in which writable layers are created.
    parts: Option<PathBuf>,
    /// Directory with records of removed objects whose deletion is not yet delivered.
    removed: PathBuf,
    /// File with the number of the last delivered event.
    delivered: PathBuf,
}

/// The fields that records of every version have.
#[derive(Debug, Deserialize)]
struct Head {
    version: u32,
}

/// All records of one kind.
#[derive(Debug)]
pub(crate) struct Found<T> {
    pub(crate) readable: Vec<T>,
    /// Ids of directories without a readable record.
    pub(crate) lost: Vec<String>,
}

// === impl Records ===

impl Records {
    /// Opens the records and creates their directories.
    pub(crate) fn open(config: &RuntimeConfig) -> Result<Self, Error> {
        let records = Self {
            sandboxes: config.state.join("sandboxes"),
            containers: config.state.join("containers"),
            layers: config.root.join("containers"),
            parts: None,
            removed: config.state.join("removed"),
            delivered: config.state.join("told"),
        };
        for dir in [&records.sandboxes, &records.containers, &records.layers, &records.removed] {
            std::fs::create_dir_all(dir).map_err(Error::file("create directory", dir))?;
        }
        Ok(Self { parts: scattered(config.root.join("parts")), ..records })
    }

    /// The file with the number of the last delivered event.
    pub(crate) fn delivered_file(&self) -> &Path {
        &self.delivered
    }

    /// The directory of all sandboxes.
    pub(crate) fn sandboxes_dir(&self) -> &Path {
        &self.sandboxes
    }

    pub(crate) fn sandbox_dir(&self, id: &str) -> PathBuf {
        self.sandboxes.join(id)
    }

    /// The bundle of a container.
    pub(crate) fn container_dir(&self, id: &str) -> PathBuf {
        self.containers.join(id)
    }

    /// The directory of all writable layers.
    pub(crate) fn layers_dir(&self) -> &Path {
        &self.layers
    }

    /// The directory of a container's writable layer.
    pub(crate) fn layer_dir(&self, id: &str) -> PathBuf {
        self.layers.join(id)
    }

    /// Creates the directory of a container's writable layer.
    pub(crate) fn make_layer(&self, id: &str) -> Result<PathBuf, Error> {
        let layer = self.layer_dir(id);
        let Some(parts) = &self.parts else {
            std::fs::create_dir_all(&layer).map_err(Error::file("create directory", &layer))?;
            return Ok(layer);
        };
        let number = id.bytes().fold(0, u8::wrapping_add) % PARTS;
        let created = parts.join(number.to_string()).join(id);
        std::fs::create_dir_all(&created).map_err(Error::file("create directory", &created))?;
        let Err(error) = std::fs::rename(&created, &layer) else { return Ok(layer) };
        let _next_start_removes_it = std::fs::remove_dir(&created);
        if error.kind() != ErrorKind::CrossesDevices {
            return Err(Error::file("rename into", &layer)(error));
        }
        // The layers are on another file system than the parts.
        std::fs::create_dir_all(&layer).map_err(Error::file("create directory", &layer))?;
        Ok(layer)
    }

    pub(crate) fn write_sandbox(&self, record: &SandboxRecord) -> Result<(), Error> {
        let dir = self.sandbox_dir(&record.id);
        if record.phase == SandboxPhase::Creating {
            make_dir(&dir)?;
        }
        write(&dir, record)
    }

    pub(crate) fn write_container(&self, record: &ContainerRecord) -> Result<(), Error> {
        let dir = self.container_dir(&record.id);
        if record.phase == ContainerPhase::Creating {
            make_dir(&dir)?;
        }
        write(&dir, record)
    }

    pub(crate) fn remove_sandbox(&self, id: &str) -> Result<(), Error> {
        remove(&self.sandbox_dir(id))
    }

    /// Removes a container's layer, then its bundle and record. After a crash between the two steps, the next start
    /// finds the record.
    pub(crate) fn remove_container(&self, id: &str) -> Result<(), Error> {
        self.remove_layer(id)?;
        self.forget_container(id)
    }

    /// Removes a container's bundle and record. The next start removes a layer without a record.
    pub(crate) fn forget_container(&self, id: &str) -> Result<(), Error> {
        remove(&self.container_dir(id))
    }

    pub(crate) fn remove_layer(&self, id: &str) -> Result<(), Error> {
        remove(&self.layer_dir(id))
    }

    /// The records of all sandboxes. Fails if a record is of a later version ([`Error::Later`]), or if the kernel refuses to
    /// read a record.
    pub(crate) fn sandboxes(&self) -> Result<Found<SandboxRecord>, Error> {
        load(&self.sandboxes, read)
    }

    /// The records of all containers. Fails if a record is of a later version ([`Error::Later`]), or if the kernel refuses to
    /// read a record.
    pub(crate) fn containers(&self) -> Result<Found<ContainerRecord>, Error> {
        load(&self.containers, read)
    }

    /// Ids of the existing writable layers.
    pub(crate) fn layers(&self) -> Result<Vec<String>, Error> {
        names(&self.layers)
    }
}

impl SandboxRecord {
    pub(crate) fn new(
        id: &str,
        config: cri::PodSandboxConfig,
        runtime_handler: String,
        created_at: i64,
    ) -> Self {
        Self {
            version: VERSION,
            id: id.to_owned(),
            phase: SandboxPhase::Creating,
            runtime_handler,
            created_at,
            config,
            addresses: Vec::new(),
            selinux: None,
            restoring: false,
            stopping: false,
            transitions: Vec::new(),
        }
    }
}

impl ContainerRecord {
    pub(crate) const VERSION: u32 = VERSION;
}

/// Replaces a file: a reader sees the old or the new contents.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let temporary = path.with_extension("new");
    let written = crate::shim_client::file::write_private(&temporary, bytes);
    let written = written.map_err(Error::file("write", &temporary));
    let replaced =
        written.and_then(|()| std::fs::rename(&temporary, path).map_err(Error::file("rename into", path)));
    if replaced.is_err() {
        // On a full disk the incomplete file would occupy the space that other writes need.
        let _ = std::fs::remove_file(&temporary);
    }
    replaced
}

fn write<T: Serialize>(dir: &Path, record: &T) -> Result<(), Error> {
    let path = dir.join(FILE);
    let bytes = encode(&path, record)?;
    match replace(&path, &bytes) {
        Err(Error::File { source, .. }) if source.kind() == ErrorKind::NotFound => {
            make_dir(dir)?;
            replace(&path, &bytes)
        }
        other => other,
    }
}

fn make_dir(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(Error::file("create directory", dir))
}

/// Directories in different parts of the disk, if ext4 supports it (chattr(1), `T`). A container's files stay in the
/// part where its layer was created, even after a rename. If all containers shared one part, each new file would cost a
/// search past every inode that was freed in the last five minutes. If each container had its own part, each new file
/// would cost reads of unused areas of the disk.
fn scattered(parts: PathBuf) -> Option<PathBuf> {
    let make = || -> std::io::Result<()> {
        std::fs::create_dir_all(&parts)?;
        let top = std::fs::File::open(&parts)?;
        let flags = ioctl_getflags(&top)?;
        if !flags.contains(IFlags::TOPDIR) {
            ioctl_setflags(&top, flags | IFlags::TOPDIR)?;
        }
        for part in (0..PARTS).map(|number| parts.join(number.to_string())) {
            std::fs::create_dir_all(&part)?;
            // These directories are left from a crash between creation and rename.
            std::fs::read_dir(&part)?.try_for_each(|left| std::fs::remove_dir(left?.path()))?;
        }
        Ok(())
    };
    let made = make();
    made.inspect_err(|error| debug!(%error, "cannot spread writable layers over the disk")).ok()?;
    Some(parts)
}

fn write_at<T: Serialize>(path: &Path, record: &T) -> Result<(), Error> {
    replace(path, &encode(path, record)?)
}

fn encode<T: Serialize>(path: &Path, record: &T) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(record).map_err(|source| Error::Format {
        doing: "encode",
        path: path.to_owned(),
        source,
    })
}

fn remove(dir: &Path) -> Result<(), Error> {
    coracle_tree::remove(dir).map_err(Error::file("remove", dir))
}

/// # Errors
/// If the directory cannot be read completely. An object that is missing in the list would be removed.
fn names(dir: &Path) -> Result<Vec<String>, Error> {
    let entries = std::fs::read_dir(dir).map_err(Error::file("list", dir))?;
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(Error::file("list", dir))?.file_name().into_string().ok());
    }
    Ok(names)
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    std::fs::read(path)
}

fn load<T: DeserializeOwned>(
    dir: &Path,
    read: impl Fn(&Path) -> std::io::Result<Vec<u8>>,
) -> Result<Found<T>, Error> {
    let mut found = Found { readable: Vec::new(), lost: Vec::new() };
    for id in names(dir)? {
        let path = dir.join(&id).join(FILE);
        let bytes = match read(&path) {
            // The record is not lost, and its pod runs. The next start can read it.
            Err(source) if coracle_tree::is_refusal(&source) => {
                return Err(Error::file("read", &path)(source));
            }
            bytes => bytes.map_err(Error::file("read", &path)),
        };
        let record = bytes.and_then(|bytes| {
            if let Some(version) = later_version(&bytes) {
                return Err(Error::Later { path: path.clone(), version, known: VERSION });
            }
            serde_json::from_slice(&bytes).map_err(|source| Error::Format {
                doing: "decode",
                path: path.clone(),
                source,
            })
        });
        match record {
            Ok(record) => found.readable.push(record),
            Err(error @ Error::Later { .. }) => return Err(error),
            Err(error) => {
                warn!(id, error = error.chain(), "ignoring an unreadable record");
                found.lost.push(id);
            }
        }
    }
    Ok(found)
}

/// The version of a record, if a later version of this program has written it.
fn later_version(record: &[u8]) -> Option<u32> {
    let head: Head = serde_json::from_slice(record).ok()?;
    Some(head.version).filter(|version| *version > VERSION)
}

/// A protobuf message in a record: base64 of its wire format, which all versions can read.
pub(crate) mod message {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use prost::Message;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<T: Message, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(value.encode_to_vec()))
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: Message + Default,
        D: Deserializer<'de>,
    {
        let text = String::deserialize(deserializer)?;
        let bytes = STANDARD.decode(text).map_err(Error::custom)?;
        T::decode(bytes.as_slice()).map_err(Error::custom)
    }
}

/// Fuzz target: bytes of a record. A record that can be read is equal after it is written and read again.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    fn same<T: DeserializeOwned + Serialize + PartialEq>(data: &[u8]) {
        let Ok(read) = serde_json::from_slice::<T>(data) else { return };
        let again = serde_json::to_vec(&read).and_then(|written| serde_json::from_slice::<T>(&written));
        assert!(again.is_ok_and(|again| again == read));
    }
    same::<SandboxRecord>(data);
    same::<ContainerRecord>(data);
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn records(dir: &Path) -> Records {
        let config = RuntimeConfig { root: dir.join("root"), state: dir.join("state"), ..Default::default() };
        Records::open(&config).expect("directories")
    }

    #[test]
    fn a_record_is_read_as_written_and_an_incomplete_record_is_reported() {
        let dir = tempfile::tempdir().expect("directory");
        let records = records(dir.path());
        let config = cri::PodSandboxConfig { hostname: "h".into(), ..Default::default() };
        let record = SandboxRecord::new("a", config, String::new(), 7);
        records.write_sandbox(&record).expect("write");
        std::fs::create_dir(records.sandbox_dir("torn")).expect("directory");
        std::fs::write(records.sandbox_dir("torn").join(FILE), "{").expect("write");
        let found = records.sandboxes().expect("load");
        assert_eq!(found.readable, [record]);
        assert_eq!(found.lost, ["torn"]);
    }

    #[test]
    fn a_record_that_the_kernel_refuses_to_read_is_not_lost() {
        let dir = tempfile::tempdir().expect("directory");
        let records = records(dir.path());
        let record = SandboxRecord::new("a", Default::default(), String::new(), 7);
        records.write_sandbox(&record).expect("write");
        let fails_with = |errno: i32| {
            load::<SandboxRecord>(&records.sandboxes, |_| Err(std::io::Error::from_raw_os_error(errno)))
        };
        for errno in [libc::EMFILE, libc::ENOMEM, libc::EACCES] {
            assert!(fails_with(errno).is_err(), "{errno}");
        }
        assert_eq!(fails_with(libc::EIO).expect("load").lost, ["a"]);
    }

    #[test]
    fn a_failed_write_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("record.json");
        std::fs::create_dir(&path).expect("a directory is not replaced by a file");
        assert!(replace(&path, b"{}").is_err());
        assert!(!path.with_extension("new").exists());
    }

    #[test]
    fn removing_absent_objects_succeeds() {
        let dir = tempfile::tempdir().expect("directory");
        let records = records(dir.path());
        records.remove_sandbox("x").expect("remove");
        records.remove_container("x").expect("remove");
    }

    #[test]
    fn layers_are_spread_on_supported_file_systems() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        // EXT4_SUPER_MAGIC. ext2 and ext3 have the same number.
        let can = rustix::fs::statfs(&records.layers).unwrap().f_type == 0xEF53;
        assert_eq!(records.parts.is_some(), can);
        for records in [Records { parts: None, ..records.clone() }, records] {
            let layer = records.make_layer("c1").unwrap();
            assert!(layer.is_dir() && layer == records.layer_dir("c1"));
            assert_eq!(records.layers().unwrap(), ["c1"]);
            records.remove_layer("c1").unwrap();
        }
    }

    #[test]
    fn layers_on_another_file_system_are_created_there() {
        let dir = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir_in("/dev/shm").unwrap();
        let device = |path: &Path| std::os::unix::fs::MetadataExt::dev(&path.metadata().unwrap());
        if device(dir.path()) == device(other.path()) {
            return println!("there is only one file system");
        }
        let records = records(dir.path());
        let records = Records { parts: Some(other.path().to_owned()), ..records };
        assert!(records.make_layer("c1").unwrap().is_dir());
        let left = std::fs::read_dir(other.path())
            .unwrap()
            .flatten()
            .flat_map(|part| std::fs::read_dir(part.path()));
        assert_eq!(left.flatten().count(), 0);
    }
}
