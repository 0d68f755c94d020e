//! The part of the OpenAPI v2 document that does not change while the server runs.

use std::{
    io,
    sync::{Mutex, PoisonError},
};

use coracle_kinds::{Resources, openapi::v2};

use super::packed::Packed;

/// The document of the built-in kinds. The server keeps it while custom resources change often. Then each new document
/// needs a build of the custom resources only.
#[derive(Default)]
pub(super) struct Base(Mutex<Option<Packed>>);

// === impl Base ===

impl Base {
    /// The document of the built-in kinds. If `is_kept`, it is kept for later calls.
    pub(super) fn document(&self, resources: &Resources, is_kept: bool) -> v2::Document {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(document) = kept.as_ref().and_then(unpacked) {
            return document;
        }
        let document = v2::of_built_in(resources);
        if is_kept {
            *kept = Packed::new(|out| serde_json::to_writer(out, &document).map_err(io::Error::from)).ok();
        }
        document
    }

    pub(super) fn release(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

fn unpacked(packed: &Packed) -> Option<v2::Document> {
    serde_json::from_slice(&packed.unpacked().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::RuntimeConfig;

    use super::*;

    #[test]
    fn the_kept_document_equals_the_built_one() {
        let resources = crate::registry::Registry::new(&RuntimeConfig::default()).load();
        let base = Base::default();
        let text = |is_kept| serde_json::to_vec(&base.document(&resources, is_kept)).unwrap();
        let has_document = || base.0.lock().unwrap().is_some();
        let built = text(false);
        assert!(!has_document());
        assert!(text(true) == built && has_document());
        // The document is read, not built: no resource is served here.
        let read = serde_json::to_vec(&base.document(&Resources::default(), false)).unwrap();
        assert!(read == built);
        base.release();
        assert!(!has_document());
    }
}
