//! What was given to which sandbox, a small file each, so that it can be taken back after a crash.
//!
//! The directory lies on a tmpfs (`/run`): records go with the boot, as what they describe does.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ipnetwork::IpNetwork;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::error::Error;
use crate::network::PortMapping;

/// One attachment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: String,
    pub(crate) host_interface: String,
    pub(crate) addresses: Vec<IpNetwork>,
    #[serde(default)]
    pub(crate) ports: Vec<PortMapping>,
}

/// All attachments, in memory and on disk.
pub(crate) struct Records {
    dir: PathBuf,
    known: Mutex<BTreeMap<String, Record>>,
}

impl Records {
    pub(crate) fn open(state_dir: &Path) -> Result<Self, Error> {
        let dir = state_dir.join("attachments");
        fs::create_dir_all(&dir).map_err(failed("create", &dir))?;
        let mut known = BTreeMap::new();
        for entry in fs::read_dir(&dir).map_err(failed("read", &dir))? {
            let path = entry.map_err(failed("read", &dir))?.path();
            match read(&path) {
                Some(record) => {
                    known.insert(record.id.clone(), record);
                }
                None => set_aside(&path)?,
            }
        }
        Ok(Self { dir, known: Mutex::new(known) })
    }

    pub(crate) fn get(&self, id: &str) -> Option<Record> {
        self.lock().get(id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Record> {
        self.lock().values().cloned().collect()
    }

    pub(crate) fn put(&self, record: &Record) -> Result<(), Error> {
        let path = self.path(&record.id);
        let temporary = path.with_extension("new");
        let text =
            serde_json::to_vec(record).map_err(std::io::Error::from).map_err(failed("write", &path))?;
        fs::write(&temporary, text).map_err(failed("write", &temporary))?;
        fs::rename(&temporary, &path).map_err(failed("write", &path))?;
        self.lock().insert(record.id.clone(), record.clone());
        Ok(())
    }

    pub(crate) fn remove(&self, id: &str) -> Result<(), Error> {
        remove_file(&self.path(id))?;
        self.lock().remove(id);
        Ok(())
    }

    pub(crate) fn remove_all(&self) -> Result<(), Error> {
        let ids: Vec<String> = self.lock().keys().cloned().collect();
        ids.iter().try_for_each(|id| self.remove(id))
    }

    fn path(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Record>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(path: &Path) -> Option<Record> {
    if path.extension().is_none_or(|e| e != "json") {
        return None;
    }
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// A torn record is no reason not to start: what it described is found by `reconcile`.
fn set_aside(path: &Path) -> Result<(), Error> {
    warn!(path = %path.display(), "removing a network record that cannot be read");
    remove_file(path)
}

fn remove_file(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::File { action: "remove", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

fn failed(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path: path.clone(), source }
}
