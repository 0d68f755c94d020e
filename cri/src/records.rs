//! Durable records, one small JSON file an object, under the state directory (a tmpfs on a node, gone
//! with the boot as what it describes is). Written to a temporary name and renamed, so that a reader
//! sees the old or the new one. Fields are only ever added, which no version minds. Whoever has to change what is there
//! writes a greater version: a runtime that is older than that does not start, since what it cannot read it would take
//! for half-made. `recorded` beside this crate's sources holds some of each version, for all later ones to read.

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

pub(crate) use removed::{Removed, Subject, forget};

const VERSION: u32 = 1;
const FILE: &str = "record.json";
/// Parts of the disk that writable layers are scattered over.
const PARTS: u8 = 16;

/// How far a sandbox has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum SandboxPhase {
    /// Being made: undone when found after a restart.
    Creating,
    /// Its shim runs.
    Ready,
    /// Stopped, or its shim died.
    NotReady,
}

/// What became of a pod or a container, and the number under which listeners are told: the next one is told after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Transition {
    pub(crate) number: u64,
    /// A value of the CRI's `ContainerEventType`.
    pub(crate) what: i32,
    pub(crate) at: i64,
}

/// What is remembered of a sandbox.
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
    /// The pod's addresses, the first one first.
    #[serde(default)]
    pub(crate) addresses: Vec<String>,
    /// Its SELinux labels, where it has any.
    #[serde(default)]
    pub(crate) selinux: Option<Labels>,
    /// Made for a checkpoint whose containers are not all there yet: undone when found after a restart.
    #[serde(default)]
    pub(crate) restoring: bool,
    /// Being stopped: found ready after a restart, that is brought to its end.
    #[serde(default)]
    pub(crate) stopping: bool,
    /// What became of it while somebody was there to be told, or could yet come.
    #[serde(default)]
    pub(crate) transitions: Vec<Transition>,
}

/// How far a container has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum ContainerPhase {
    /// Being made: undone when found after a restart.
    Creating,
    /// Waits to be started.
    Created,
    /// Runs.
    #[serde(rename_all = "camelCase")]
    Running { started_at: i64 },
    /// Ended.
    Exited(ExitRecord),
}

/// How a container ended.
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

/// What is remembered of a container.
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
    /// Under which name and digest a registry had it; empty when it came from none.
    #[serde(default)]
    pub(crate) image_digest: String,
    pub(crate) log_path: String,
    pub(crate) cgroup: String,
    pub(crate) stop_signal: i32,
    pub(crate) uid: i64,
    pub(crate) gid: i64,
    #[serde(default)]
    pub(crate) groups: Vec<i64>,
    /// Whether its spec has hooks that the runtime itself runs: after its start and after its end.
    #[serde(default)]
    pub(crate) late_hooks: bool,
    /// Its SELinux labels, where it has any.
    #[serde(default)]
    pub(crate) selinux: Option<Labels>,
    /// Pid of its first process, 0 before it was created.
    #[serde(default)]
    pub(crate) pid: i32,
    /// What its processes are restored from when it is started, if not made from its command.
    #[serde(default)]
    pub(crate) restore: Option<RestoreRecord>,
    /// What became of it while somebody was there to be told, or could yet come.
    #[serde(default)]
    pub(crate) transitions: Vec<Transition>,
}

/// What a container's images, in its layer's directory, need beside themselves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RestoreRecord {
    /// Where file systems were mounted that are not in the images.
    pub(crate) external: Vec<String>,
    /// Which of its pipes, as the kernel names them, were its standard streams.
    pub(crate) streams: BTreeMap<String, u32>,
}

/// The directories of all records.
#[derive(Debug, Clone)]
pub(crate) struct Records {
    sandboxes: PathBuf,
    containers: PathBuf,
    layers: PathBuf,
    /// Where writable layers are born.
    parts: Option<PathBuf>,
    /// Records of what is gone, while nobody was told so.
    removed: PathBuf,
    /// How far listeners were told.
    delivered: PathBuf,
}

/// What every version's records say of themselves.
#[derive(Debug, Deserialize)]
struct Head {
    version: u32,
}

/// All records of one kind, as found.
#[derive(Debug)]
pub(crate) struct Found<T> {
    pub(crate) readable: Vec<T>,
    /// Ids of directories without a record that can be read.
    pub(crate) lost: Vec<String>,
}

// === impl Records ===

impl Records {
    /// Makes the directories.
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
            std::fs::create_dir_all(dir).map_err(Error::file("make directory", dir))?;
        }
        Ok(Self { parts: scattered(config.root.join("parts")), ..records })
    }

    /// The file that says how far listeners were told.
    pub(crate) fn delivered_file(&self) -> &Path {
        &self.delivered
    }

    pub(crate) fn sandbox_dir(&self, id: &str) -> PathBuf {
        self.sandboxes.join(id)
    }

    /// A container's bundle.
    pub(crate) fn container_dir(&self, id: &str) -> PathBuf {
        self.containers.join(id)
    }

    /// Where all writable layers are.
    pub(crate) fn layers_dir(&self) -> &Path {
        &self.layers
    }

    /// Where a container's writable layer is.
    pub(crate) fn layer_dir(&self, id: &str) -> PathBuf {
        self.layers.join(id)
    }

    /// Makes the directory of a container's writable layer.
    pub(crate) fn make_layer(&self, id: &str) -> Result<PathBuf, Error> {
        let layer = self.layer_dir(id);
        let Some(parts) = &self.parts else {
            std::fs::create_dir_all(&layer).map_err(Error::file("make directory", &layer))?;
            return Ok(layer);
        };
        let number = id.bytes().fold(0, u8::wrapping_add) % PARTS;
        let born = parts.join(number.to_string()).join(id);
        std::fs::create_dir_all(&born).map_err(Error::file("make directory", &born))?;
        let Err(error) = std::fs::rename(&born, &layer) else { return Ok(layer) };
        let _stays_until_the_next_start = std::fs::remove_dir(&born);
        if error.kind() != ErrorKind::CrossesDevices {
            return Err(Error::file("rename into", &layer)(error));
        }
        // Another file system is mounted where layers are: this one's parts are not its.
        std::fs::create_dir_all(&layer).map_err(Error::file("make directory", &layer))?;
        Ok(layer)
    }

    pub(crate) fn write_sandbox(&self, record: &SandboxRecord) -> Result<(), Error> {
        write(&self.sandbox_dir(&record.id), record)
    }

    pub(crate) fn write_container(&self, record: &ContainerRecord) -> Result<(), Error> {
        write(&self.container_dir(&record.id), record)
    }

    pub(crate) fn remove_sandbox(&self, id: &str) -> Result<(), Error> {
        remove(&self.sandbox_dir(id))
    }

    /// Removes a container's layer, then its bundle and record, so that a crash between the two is
    /// found again.
    pub(crate) fn remove_container(&self, id: &str) -> Result<(), Error> {
        self.remove_layer(id)?;
        self.forget_container(id)
    }

    /// Removes a container's bundle and record. A layer that is left without them is nobody's, and
    /// removed by the next start at the latest.
    pub(crate) fn forget_container(&self, id: &str) -> Result<(), Error> {
        remove(&self.container_dir(id))
    }

    pub(crate) fn remove_layer(&self, id: &str) -> Result<(), Error> {
        remove(&self.layer_dir(id))
    }

    /// # Errors
    /// [`Error::Later`] when one is of a later version.
    pub(crate) fn sandboxes(&self) -> Result<Found<SandboxRecord>, Error> {
        load(&self.sandboxes)
    }

    /// # Errors
    /// [`Error::Later`] when one is of a later version.
    pub(crate) fn containers(&self) -> Result<Found<ContainerRecord>, Error> {
        load(&self.containers)
    }

    /// Ids of the writable layers that are there.
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

/// Writes `bytes` so that a reader sees the old file or the new one.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let temporary = path.with_extension("new");
    crate::shim_client::file::write_private(&temporary, bytes).map_err(Error::file("write", &temporary))?;
    std::fs::rename(&temporary, path).map_err(Error::file("rename into", path))
}

fn write<T: Serialize>(dir: &Path, record: &T) -> Result<(), Error> {
    let path = dir.join(FILE);
    match write_at(&path, record) {
        Err(Error::File { source, .. }) if source.kind() == ErrorKind::NotFound => {
            std::fs::create_dir_all(dir).map_err(Error::file("make directory", dir))?;
            write_at(&path, record)
        }
        other => other,
    }
}

/// Directories in as many parts of the disk, where ext4 lets us have that (chattr(1), `T`). What a container writes
/// stays in the part where its layer was born, whatever that is renamed to. Beside the others' it would wait for a
/// search past every inode that was freed in the last five seconds; in a part of its own, for a disk that was not read.
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
            // What a crash left between the two steps.
            std::fs::read_dir(&part)?.try_for_each(|left| std::fs::remove_dir(left?.path()))?;
        }
        Ok(())
    };
    let made = make();
    made.inspect_err(|error| debug!(%error, "writable layers stay close together on the disk")).ok()?;
    Some(parts)
}

fn write_at<T: Serialize>(path: &Path, record: &T) -> Result<(), Error> {
    let bytes = serde_json::to_vec(record).map_err(|source| Error::Format {
        doing: "encode",
        path: path.to_owned(),
        source,
    })?;
    replace(path, &bytes)
}

fn remove(dir: &Path) -> Result<(), Error> {
    coracle_tree::remove(dir).map_err(Error::file("remove", dir))
}

fn names(dir: &Path) -> Result<Vec<String>, Error> {
    let entries = std::fs::read_dir(dir).map_err(Error::file("list", dir))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

fn load<T: DeserializeOwned>(dir: &Path) -> Result<Found<T>, Error> {
    let mut found = Found { readable: Vec::new(), lost: Vec::new() };
    for id in names(dir)? {
        let path = dir.join(&id).join(FILE);
        let record = std::fs::read(&path).map_err(Error::file("read", &path)).and_then(|bytes| {
            if let Some(version) = later(&bytes) {
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
                warn!(id, error = error.chain(), "set a record aside that cannot be read");
                found.lost.push(id);
            }
        }
    }
    Ok(found)
}

/// The version of a record that a later version of this program wrote.
fn later(record: &[u8]) -> Option<u32> {
    let head: Head = serde_json::from_slice(record).ok()?;
    Some(head.version).filter(|version| *version > VERSION)
}

/// A protobuf message inside a record: base64 of its wire form, which old and new versions read alike.
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

/// Any bytes where a record should be: what can be read can be written, and is the same then.
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
    fn a_record_comes_back_as_it_was_and_a_torn_one_is_reported() {
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
    fn removing_the_absent_succeeds() {
        let dir = tempfile::tempdir().expect("directory");
        let records = records(dir.path());
        records.remove_sandbox("x").expect("remove");
        records.remove_container("x").expect("remove");
    }

    #[test]
    fn layers_are_scattered_where_the_file_system_can() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        // EXT4_SUPER_MAGIC, which ext2 and ext3 have too.
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
    fn layers_on_another_file_system_are_born_there() {
        let dir = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir_in("/dev/shm").unwrap();
        let device = |path: &Path| std::os::unix::fs::MetadataExt::dev(&path.metadata().unwrap());
        if device(dir.path()) == device(other.path()) {
            return println!("there is one file system only");
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
