//! Triggers of image garbage collection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Triggers image garbage collection. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trigger {
    pub(super) happened: Arc<Notify>,
    pub(super) no_room: Arc<AtomicBool>,
    pub(super) pods_known: Arc<Notify>,
}

impl Trigger {
    /// A pull has ended or a container was removed: the disk is checked.
    pub(crate) fn look(&self) {
        self.happened.notify_one();
    }

    /// A pull failed on a full disk.
    pub(crate) fn no_room(&self) {
        self.no_room.store(true, Ordering::Release);
        self.happened.notify_one();
    }

    /// All pods of this node are known, and so are the images in use.
    pub(crate) fn pods_are_known(&self) {
        self.pods_known.notify_one();
    }
}
