//! Who uses an image, and when it was used last.

use super::{Images, now};
use crate::digest::Digest;
use crate::error::Error;
use crate::image::Image;
use crate::records;
use crate::table::Entry;

/// Keeps the layers of an image on disk, whoever removes the image meanwhile, until it is dropped.
#[must_use]
pub struct Held {
    images: Images,
    image: Image,
}

// === impl Images ===

impl Images {
    /// Keeps an image's layers while a container uses them. Also finds, by id, an image that was removed while it
    /// was held before a restart.
    ///
    /// # Errors
    /// When there is no such image.
    pub fn hold(&self, id: &str) -> Result<Held, Error> {
        let mut table = self.table_mut();
        let id_digest = match id.parse::<Digest>() {
            Ok(digest) => Some(digest),
            Err(_a_name) => table.find(id).map(|entry| entry.record.id),
        };
        let unknown = || Error::UnknownImage { name: id.to_owned() };
        let entry = id_digest.and_then(|digest| table.entry_mut(&digest)).ok_or_else(unknown)?;
        entry.held += 1;
        let held = Held { images: self.clone(), image: entry.image.clone() };
        let noted = note(entry);
        drop(table);
        self.note_use(noted);
        Ok(held)
    }

    /// Tells the disk of a use, in its own time.
    pub(super) fn note_use(&self, noted: Option<(Digest, u64)>) {
        let Some((id, used)) = noted else { return };
        let records = self.inner.records.clone();
        // Nobody waits for it: the journal of a busy file system may.
        drop(self.inner.runtime.spawn_blocking(move || {
            if let Err(error) = records::note_use(&records, &id, used) {
                tracing::debug!(error = crate::error::report(&error), "an image's use is not noted");
            }
        }));
    }
}

// === impl Held ===

impl Held {
    /// The image that is held.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let (abandoned, noted) = {
            let mut table = self.images.table_mut();
            let Ok(id) = self.image.id.parse::<Digest>() else { return };
            let Some(entry) = table.entry_mut(&id) else { return };
            entry.held = entry.held.saturating_sub(1);
            (entry.held == 0 && entry.record.removed, note(entry))
        };
        if !abandoned {
            self.images.note_use(noted);
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

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Held").field(&self.image.id).finish()
    }
}

/// Takes note of a use; what the disk should be told of it.
pub(super) fn note(entry: &mut Entry) -> Option<(Digest, u64)> {
    let now = now();
    entry.is_used(now).then_some((entry.record.id, now))
}
