//! The OpenAPI v3 documents of the group versions that this server serves.
//!
//! The bytes of a document are kept for a short time by their hash. A client that has the current document causes no
//! build.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use coracle_kinds::{Resources, openapi, resource::GroupVersion};

use super::BODY_LIFETIME;
use crate::offload;

/// Maximum bytes of all kept documents. Custom resources can have many large documents.
const MAX_KEPT: usize = 16 << 20;

/// The documents of a server.
#[derive(Default)]
pub(crate) struct VersionDocuments {
    /// Bytes by hash.
    kept: Mutex<HashMap<String, Bytes>>,
    /// Locked while a document is built, so that concurrent requests share the build.
    building: Mutex<()>,
}

/// A document for a client. `body` is `None` if the client already has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VersionDocument {
    pub(crate) hash: String,
    pub(crate) body: Option<Bytes>,
}

// === impl VersionDocuments ===

impl VersionDocuments {
    /// The document of `api/v1`, `apis/apps/v1`, …, without its bytes if `is_known` accepts its hash.
    pub(crate) fn find(
        self: &Arc<Self>,
        resources: &Resources,
        path: &str,
        is_known: impl Fn(&str) -> bool,
    ) -> Option<VersionDocument> {
        let version = openapi::group_version(resources, path)?;
        if let Some(found) = self.get(version, &is_known) {
            return Some(found);
        }
        let (document, is_kept) = offload::run(true, || self.build(version, &is_known));
        if is_kept {
            let (documents, hash) = (Arc::downgrade(self), document.hash.clone());
            coracle_threads::spawn(async move {
                tokio::time::sleep(BODY_LIFETIME).await;
                if let Some(documents) = documents.upgrade() {
                    documents.kept().remove(&hash);
                }
            });
        }
        Some(document)
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<String, Bytes>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The document, if it can be returned without a build.
    fn get(&self, version: &GroupVersion, is_known: impl Fn(&str) -> bool) -> Option<VersionDocument> {
        let hash = version.openapi_hash()?;
        if is_known(hash) {
            return Some(VersionDocument { hash: hash.to_owned(), body: None });
        }
        let body = self.kept().get(hash)?.clone();
        Some(VersionDocument { hash: hash.to_owned(), body: Some(body) })
    }

    /// Builds the document, unless another request did so meanwhile. Returns whether this call keeps its bytes.
    fn build(&self, version: &GroupVersion, is_known: impl Fn(&str) -> bool) -> (VersionDocument, bool) {
        let _alone = self.building.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.get(version, &is_known) {
            return (found, false);
        }
        let openapi::Document { body, hash } = openapi::document(version);
        let body = Bytes::from(body.into_boxed_slice());
        let is_kept = self.keep(&hash, &body);
        let body = Some(body).filter(|_| !is_known(&hash));
        (VersionDocument { hash, body }, is_kept)
    }

    /// Keeps the bytes of a document, unless the total would exceed the limit. Returns whether the bytes are kept.
    fn keep(&self, hash: &str, body: &Bytes) -> bool {
        let mut kept = self.kept();
        let size: usize = kept.values().map(Bytes::len).sum();
        let fits = size + body.len() <= MAX_KEPT;
        if fits {
            kept.insert(hash.to_owned(), body.clone());
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::RuntimeConfig;

    use super::*;

    #[test]
    fn a_document_is_built_once_while_its_bytes_are_kept() {
        let resources = crate::registry::Registry::new(&RuntimeConfig::default()).load();
        let version = openapi::group_version(&resources, "apis/apps/v1").unwrap();
        let documents = VersionDocuments::default();
        let (built, is_kept) = documents.build(version, |_| false);
        let body = built.body.clone().unwrap();
        assert!(is_kept && built.hash == openapi::hash(&body));
        let (again, is_kept) = documents.build(version, |_| false);
        assert!(!is_kept && again == built);
        assert_eq!(again.body.unwrap().as_ptr(), body.as_ptr(), "the bytes are shared");
        // A client that has the document causes no build, even if the server no longer has the bytes.
        documents.kept().clear();
        let known = documents.get(version, |hash| hash == built.hash);
        assert_eq!(known, Some(VersionDocument { body: None, ..built }));
        assert_eq!(documents.get(version, |_| false), None);
    }

    #[test]
    fn documents_beyond_the_limit_are_not_kept() {
        let documents = VersionDocuments::default();
        assert!(documents.keep("a", &Bytes::from(vec![0; MAX_KEPT - 1])));
        assert!(!documents.keep("b", &Bytes::from_static(b"xx")));
        assert!(documents.keep("c", &Bytes::from_static(b"x")));
    }
}
