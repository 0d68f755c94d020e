//! Durable records: one JSON file per object in the state directory, a tmpfs on a node. A reboot removes them together with
//! the objects that they describe.
//!
//! A record is written to a temporary name and renamed, so that a reader sees the old or the new record. New fields
//! need no new version. Any other change needs a higher version. An older runtime then refuses to start, because it
//! would take an unreadable record for an incompletely created object. `recorded` has records of each version, which
//! all later versions must read.

mod file;
mod layers;
pub(crate) mod message;
#[cfg(test)]
mod recorded;
mod removed;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coracle_proto::cri;
use serde::{Deserialize, Serialize};

use crate::config::RuntimeConfig;
use crate::error::Error;
use crate::json_file::make_dir;
use crate::selinux::Labels;

pub(crate) use file::Found;
use file::{VERSION, load, read, remove, write};
use layers::make_parts;
pub(crate) use removed::{Removed, Subject, remove_record};

/// Name of the directory of all sandboxes in the state directory of the runtime.
pub(crate) const SANDBOXES: &str = "sandboxes";

/// Phase of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum SandboxPhase {
    /// Being created. Undone if found after a restart.
    Creating,
    /// The shim is running.
    Ready,
    /// Stopped, or the shim has exited.
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

// === impl Records ===

impl Records {
    /// Opens the records and creates their directories.
    pub(crate) fn open(config: &RuntimeConfig) -> Result<Self, Error> {
        let records = Self {
            sandboxes: config.state.join(SANDBOXES),
            containers: config.state.join("containers"),
            layers: config.root.join("containers"),
            parts: None,
            removed: config.state.join("removed"),
            delivered: config.state.join("told"),
        };
        for dir in [&records.sandboxes, &records.containers, &records.layers, &records.removed] {
            std::fs::create_dir_all(dir).map_err(Error::file("create directory", dir))?;
        }
        Ok(Self { parts: make_parts(config.root.join("parts")), ..records })
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

/// Fuzz target: bytes of a record. A record that can be read is equal after it is written and read again.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    fn same<T: serde::de::DeserializeOwned + Serialize + PartialEq>(data: &[u8]) {
        let Ok(read) = serde_json::from_slice::<T>(data) else { return };
        let again = serde_json::to_vec(&read).and_then(|written| serde_json::from_slice::<T>(&written));
        assert!(again.is_ok_and(|again| again == read));
    }
    same::<SandboxRecord>(data);
    same::<ContainerRecord>(data);
}

#[cfg(test)]
mod tests {
    use super::file::FILE;
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
    fn removing_absent_objects_succeeds() {
        let dir = tempfile::tempdir().expect("directory");
        let records = records(dir.path());
        records.remove_sandbox("x").expect("remove");
        records.remove_container("x").expect("remove");
    }
}
