//! The container service: its configuration and the services that it uses. Each call is in a module of its own.

use std::sync::Arc;

use coracle_images::Images;

use crate::config::RuntimeConfig;
use crate::image_files::ImageFiles;
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
    pub(crate) image_files: Arc<ImageFiles>,
    /// Writable layers are removed one at a time.
    pub(crate) layer_removal: Arc<tokio::sync::Mutex<()>>,
}
