//! Triggers of image garbage collection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Triggers image garbage collection. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trigger {
    pub(crate) check: Arc<Notify>,
    pub(crate) no_room: Arc<AtomicBool>,
    pub(crate) pods_known: Arc<Notify>,
}

impl Trigger {
    /// Requests a check of the disk. Its free space may have changed: a pull has ended, or a container was removed.
    pub(crate) fn check_disk(&self) {
        self.check.notify_one();
    }

    /// Requests the removal of images even if disk usage is below the high threshold. The caller has found the disk
    /// full or short of space.
    pub(crate) fn no_room(&self) {
        self.no_room.store(true, Ordering::Release);
        self.check.notify_one();
    }

    /// Reports that all pods of this node are known, and so are the images in use.
    pub(crate) fn pods_are_known(&self) {
        self.pods_known.notify_one();
    }
}
