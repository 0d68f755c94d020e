//! The OpenAPI v3 documents that this server builds. They describe its group versions and groups, or are converted for
//! aggregated servers.
//!
//! The server keeps a document compressed for a short time, by its hash. A client that has the current document causes
//! no build.

use std::{
    collections::HashMap,
    io::{self, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use coracle_kinds::{Resources, openapi};

use super::{BODY_LIFETIME, packed::Packed};
use crate::offload;

/// Maximum compressed bytes of all kept documents. There can be many large documents of custom resources.
const MAX_KEPT: usize = 4 << 20;

/// The documents of a server.
#[derive(Default)]
pub(crate) struct VersionDocuments {
    /// Documents by hash.
    kept: Mutex<HashMap<String, Packed>>,
    /// Lock of the build of a document. Concurrent requests wait for the lock, so that they share one build.
    building: Mutex<()>,
}

/// A document for a client. `body` is `None` if the client already has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VersionDocument {
    pub(crate) hash: String,
    pub(crate) body: Option<Packed>,
}

// === impl VersionDocuments ===

impl VersionDocuments {
    /// The document of `api/v1`, `apis/apps/v1`, `version`, …, without its bytes if `is_known` accepts its hash.
    /// `None` if there is no such document.
    ///
    /// # Errors
    /// The document cannot be written.
    pub(crate) fn find(
        self: &Arc<Self>,
        resources: &Resources,
        path: &str,
        is_known: impl Fn(&str) -> bool,
    ) -> io::Result<Option<VersionDocument>> {
        let Some(subject) = openapi::find(resources, path) else { return Ok(None) };
        let hash = offload::run(!subject.has_hash(), || subject.hash());
        if is_known(&hash) {
            return Ok(Some(VersionDocument { hash, body: None }));
        }
        let body = self.with_hash(&hash, |out| subject.write(out))?;
        Ok(Some(VersionDocument { hash, body: Some(body) }))
    }

    /// The document with this hash. `write` writes it, if it is not kept.
    ///
    /// # Errors
    /// The error of `write`.
    pub(crate) fn with_hash(
        self: &Arc<Self>,
        hash: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<Packed> {
        if let Some(found) = self.get(hash) {
            return Ok(found);
        }
        let (body, is_kept) = offload::run(true, || self.build(hash, write))?;
        if is_kept {
            let (documents, hash) = (Arc::downgrade(self), hash.to_owned());
            coracle_threads::spawn(async move {
                tokio::time::sleep(BODY_LIFETIME).await;
                if let Some(documents) = documents.upgrade() {
                    documents.kept().remove(&hash);
                }
            });
        }
        Ok(body)
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<String, Packed>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, hash: &str) -> Option<Packed> {
        self.kept().get(hash).cloned()
    }

    /// Builds the document, unless another request did so meanwhile. Returns whether this call keeps it.
    fn build(
        &self,
        hash: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<(Packed, bool)> {
        let _alone = self.building.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.get(hash) {
            return Ok((found, false));
        }
        let body = Packed::new(write)?;
        let is_kept = self.keep(hash, &body);
        Ok((body, is_kept))
    }

    /// Keeps a document, unless the total would exceed the limit. Returns whether the document is kept.
    fn keep(&self, hash: &str, body: &Packed) -> bool {
        let mut kept = self.kept();
        let size: usize = kept.values().map(Packed::len).sum();
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

    #[tokio::test]
    async fn a_document_is_built_once_while_it_is_kept() {
        let resources = crate::registry::Registry::new(&RuntimeConfig::default()).load();
        let documents = Arc::new(VersionDocuments::default());
        let find = |known: &str| {
            let found = documents.find(&resources, "apis/apps/v1", |hash| hash == known);
            found.unwrap().unwrap()
        };
        let built = find("");
        let body = built.body.clone().unwrap();
        // The bytes are shared.
        let again = documents.with_hash(&built.hash, |_| panic!("the document is built again")).unwrap();
        assert_eq!(again.gzip().unwrap().as_ptr(), body.gzip().unwrap().as_ptr());
        // A client that has the document causes no build, even if the server no longer has the bytes.
        documents.kept().clear();
        assert_eq!(find(&built.hash), VersionDocument { body: None, ..built.clone() });
        assert!(documents.kept().is_empty());
        assert_eq!(find(""), built);
        assert_eq!(documents.find(&resources, "apis/none/v1", |_| false).unwrap(), None);
        let failed = documents.with_hash("other", |_| Err(io::ErrorKind::Other.into()));
        assert!(failed.is_err() && documents.get("other").is_none());
    }

    #[test]
    fn concurrent_requests_share_a_build() {
        let documents = VersionDocuments::default();
        let builds = Mutex::new(0);
        let write = |out: &mut dyn Write| {
            *builds.lock().unwrap() += 1;
            out.write_all(b"text")
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| documents.build("a", write).unwrap());
            }
        });
        assert_eq!(*builds.lock().unwrap(), 1);
    }

    #[test]
    fn documents_beyond_the_limit_are_not_kept() {
        let documents = VersionDocuments::default();
        // Bytes of a linear congruential generator, which gzip does not make shorter.
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_be_bytes()[0]
        };
        let bytes: Vec<u8> = std::iter::repeat_with(&mut next).take(MAX_KEPT / 20).collect();
        let document = Packed::new(|out| out.write_all(&bytes)).unwrap();
        let count = MAX_KEPT / document.len();
        assert!((10..=20).contains(&count), "{count}");
        for number in 0..count {
            assert!(documents.keep(&number.to_string(), &document));
        }
        assert!(!documents.keep("more", &document));
        documents.kept().remove("0");
        assert!(documents.keep("more", &document));
    }
}
