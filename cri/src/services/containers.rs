//! The container service: create, start, stop, update, remove, list.

mod bundle;
pub(crate) mod check;
mod create;
mod log;
mod pid_namespace;
mod remove;
mod restore;
mod spec;
mod start;
mod status;
mod stop;
mod update;
mod volumes;

use std::sync::Arc;

use coracle_images::Images;

pub(crate) use self::bundle::{PROCESS_FILE, read_process};
pub(crate) use self::create::{ContainerRequest, Origin};
use crate::config::RuntimeConfig;
use crate::services::shared::{Machine, Objects, Transitions};
use crate::undo::UndoContext;

/// Creates, runs and removes containers.
#[derive(Clone)]
pub(crate) struct ContainerService {
    pub(crate) config: Arc<RuntimeConfig>,
    pub(crate) images: Images,
    pub(crate) objects: Objects,
    pub(crate) machine: Machine,
    pub(crate) transitions: Transitions,
    pub(crate) undo: Arc<UndoContext>,
    /// Writable layers are removed one at a time.
    pub(crate) layer_removal: Arc<tokio::sync::Mutex<()>>,
}
