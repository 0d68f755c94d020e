//! Users of an image, and the time of its last use.

use super::{Images, now};
use crate::digest::Digest;
use crate::error::Error;
use crate::image::Image;
use crate::records;
use crate::table::Entry;

/// A reference that keeps an image's layers on disk until it is dropped, even if the image is removed.
#[must_use]
pub struct ImageHold {
    images: Images,
    image: Image,
}

/// The last use of an image, to be written to the disk.
pub(super) struct ImageUse {
    id: Digest,
    /// Unix time in seconds.
    time: u64,
}

// === impl Images ===

impl Images {
    /// Keeps an image's layers while a container uses them. An image that was removed while it was in use can still be
    /// found by its id after a restart.
    ///
    /// # Errors
    /// If there is no such image.
    pub fn hold(&self, id: &str) -> Result<ImageHold, Error> {
        let mut table = self.table_mut();
        let id_digest = match id.parse::<Digest>() {
            Ok(digest) => Some(digest),
            Err(_a_name) => table.find(id).map(|entry| entry.record.id),
        };
        let unknown = || Error::UnknownImage { name: id.to_owned() };
        let entry = id_digest.and_then(|digest| table.entry_mut(&digest)).ok_or_else(unknown)?;
        entry.held += 1;
        let held = ImageHold { images: self.clone(), image: entry.image.clone() };
        let last_use = mark_used(entry);
        drop(table);
        self.record_use(last_use);
        Ok(held)
    }

    /// Writes the time of use to the disk in the background.
    pub(super) fn record_use(&self, last_use: Option<ImageUse>) {
        let Some(ImageUse { id, time }) = last_use else { return };
        let records = self.inner.records.clone();
        // The task is not awaited, because it may wait for the journal of a busy file system.
        drop(self.inner.runtime.spawn_blocking(move || {
            if let Err(error) = records::record_use(&records, &id, time) {
                tracing::debug!(error = crate::error::report(&error), "cannot record the use of an image");
            }
        }));
    }
}

// === impl ImageHold ===

impl ImageHold {
    /// The image that is held.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }
}

impl Drop for ImageHold {
    fn drop(&mut self) {
        let (abandoned, last_use) = {
            let mut table = self.images.table_mut();
            let Ok(id) = self.image.id.parse::<Digest>() else { return };
            let Some(entry) = table.entry_mut(&id) else { return };
            entry.held = entry.held.saturating_sub(1);
            (entry.held == 0 && entry.record.removed, mark_used(entry))
        };
        if !abandoned {
            self.images.record_use(last_use);
        } else {
            let images = self.images.clone();
            self.images.inner.runtime.spawn(async move {
                if let Err(error) = images.collect_now().await {
                    tracing::warn!(error = crate::error::report(&error), "cannot remove a released image");
                }
            });
        }
    }
}

impl std::fmt::Debug for ImageHold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ImageHold").field(&self.image.id).finish()
    }
}

/// Marks an image as used. Returns the use if it must be written to the disk.
pub(super) fn mark_used(entry: &mut Entry) -> Option<ImageUse> {
    let time = now();
    entry.mark_used(time).then_some(ImageUse { id: entry.record.id, time })
}
