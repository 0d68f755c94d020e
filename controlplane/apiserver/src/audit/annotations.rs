//! Annotations of audit events.

use std::sync::atomic::Ordering;

use super::{Record, TRUNCATED};

/// Maximum bytes of names and values of the annotations that webhooks and policies add to one event.
const MAX_ANNOTATION_BYTES: usize = 256 << 10;

// === impl Record ===

impl Record {
    /// Adds an annotation. As upstream, the first value of a key is kept.
    pub(crate) fn annotate(&self, key: &str, value: impl Into<String>) {
        self.event().annotations.entry(key.to_owned()).or_insert_with(|| value.into());
    }

    /// Adds an annotation of a webhook or a policy. The first value of a key is kept: a request can call a webhook for
    /// each of many objects. All of these annotations share a limit. Above this limit, the event is marked as
    /// truncated.
    pub(crate) fn annotate_limited(&self, key: &str, value: &str) {
        let mut event = self.event();
        let former = self.annotated.load(Ordering::Relaxed);
        let fits = former + key.len() + value.len() <= MAX_ANNOTATION_BYTES;
        let is_kept = fits || event.annotations.contains_key(key);
        let (key, value) = if is_kept { (key, value) } else { (TRUNCATED, "true") };
        event.annotations.entry(key.to_owned()).or_insert_with(|| {
            self.annotated.store(former + key.len() + value.len(), Ordering::Relaxed);
            value.to_owned()
        });
    }
}
