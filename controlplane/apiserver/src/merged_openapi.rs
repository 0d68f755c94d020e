//! The OpenAPI v2 document of all served resources, including the parts of aggregated servers.
//!
//! A document is built at the first request after a change of the resources or of a part. Its ETag is kept until the
//! next change. Its bytes are kept for a short time only: they are large, and clients cache them.

mod versions;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use bytes::Bytes;
use coracle_kinds::{Resources, openapi};

pub(crate) use self::versions::{VersionDocument, VersionDocuments};
use crate::{
    aggregation::{Remotes, openapi as remote},
    offload,
};

/// Time that the bytes of a document are kept.
const BODY_LIFETIME: Duration = Duration::from_secs(60);

/// Encoding of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Json,
    Protobuf,
}

/// The documents of a server.
#[derive(Default)]
pub(crate) struct Merged {
    json: CachedDocument,
    protobuf: CachedDocument,
    /// The OpenAPI v3 documents.
    pub(crate) versions: Arc<VersionDocuments>,
}

/// A document in one form.
#[derive(Default)]
struct CachedDocument {
    built: Mutex<Option<Built>>,
    /// Locked while the document is built, so that concurrent requests share the build.
    building: Mutex<()>,
}

struct Built {
    parts: Parts,
    tag: String,
    /// `None` after [`BODY_LIFETIME`].
    body: Option<Bytes>,
}

/// The parts that a document was built from.
#[derive(Clone)]
struct Parts {
    resources: Weak<Resources>,
    /// Versions of the parts of other servers, in a fixed order.
    remotes: Vec<u64>,
}

/// A document for a client. `body` is `None` if the client already has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) tag: String,
    pub(crate) body: Option<Bytes>,
}

/// The ETag of a document.
pub(crate) fn tag(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    format!("\"{}\"", hex::encode_upper(sha2::Sha256::digest(bytes)))
}

// === impl Merged ===

impl Merged {
    /// The document, without its bytes if `is_known` accepts its tag.
    pub(crate) fn find(
        self: &Arc<Self>,
        resources: &Arc<Resources>,
        remotes: &Remotes,
        form: Form,
        is_known: impl Fn(&str) -> bool,
    ) -> Document {
        // Versions are read before the parts: a part that changes in between leads to another build, not to a stale
        // document.
        let parts = Parts { resources: Arc::downgrade(resources), remotes: remote::v2_versions(remotes) };
        let cached = self.cached(form);
        if let Some(found) = cached.get(&parts, &is_known) {
            return found;
        }
        let build = || {
            let mut document = openapi::v2::json(resources);
            remote::add_v2(remotes, &mut document);
            match form {
                Form::Json => serde_json::to_vec(&document).unwrap_or_default(),
                Form::Protobuf => openapi::v2::protobuf(&document),
            }
        };
        let (document, is_new) = offload::run(true, || cached.build(parts, &is_known, build));
        if is_new {
            let merged = Arc::downgrade(self);
            coracle_threads::spawn(async move {
                tokio::time::sleep(BODY_LIFETIME).await;
                if let Some(merged) = merged.upgrade() {
                    merged.cached(form).release();
                }
            });
        }
        document
    }

    fn cached(&self, form: Form) -> &CachedDocument {
        match form {
            Form::Json => &self.json,
            Form::Protobuf => &self.protobuf,
        }
    }
}

// === impl CachedDocument ===

impl CachedDocument {
    fn built(&self) -> MutexGuard<'_, Option<Built>> {
        self.built.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The document of these parts, if it can be returned without a build.
    fn get(&self, parts: &Parts, is_known: impl Fn(&str) -> bool) -> Option<Document> {
        let built = self.built();
        let built = built.as_ref().filter(|built| built.parts == *parts)?;
        let tag = built.tag.clone();
        if is_known(&tag) {
            return Some(Document { tag, body: None });
        }
        built.body.clone().map(|body| Document { tag, body: Some(body) })
    }

    /// Builds the document, unless another request did so meanwhile. Returns whether this call built it.
    fn build(
        &self,
        parts: Parts,
        is_known: impl Fn(&str) -> bool,
        bytes: impl FnOnce() -> Vec<u8>,
    ) -> (Document, bool) {
        let _alone = self.building.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.get(&parts, &is_known) {
            return (found, false);
        }
        let body = Bytes::from(bytes());
        let tag = tag(&body);
        *self.built() = Some(Built { parts, tag: tag.clone(), body: Some(body.clone()) });
        let body = Some(body).filter(|_| !is_known(&tag));
        (Document { tag, body }, true)
    }

    fn release(&self) {
        if let Some(built) = &mut *self.built() {
            built.body = None;
        }
    }
}

// === impl Parts ===

impl PartialEq for Parts {
    fn eq(&self, other: &Self) -> bool {
        self.resources.ptr_eq(&other.resources) && self.remotes == other.remotes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_is_built_once_until_a_part_changes() {
        let cached = CachedDocument::default();
        let parts = |remotes: &[u64]| Parts { resources: Weak::new(), remotes: remotes.to_vec() };
        let ask = |parts: &Parts, known: &str, text: &'static str| {
            let found = cached.get(parts, |tag| tag == known);
            found.map_or_else(
                || cached.build(parts.clone(), |tag| tag == known, || text.into()),
                |found| (found, false),
            )
        };
        let (first, is_new) = ask(&parts(&[1]), "", "one");
        assert!(is_new && first.body.as_deref() == Some(&b"one"[..]));
        assert_eq!(ask(&parts(&[1]), "", "never built"), (first.clone(), false));
        assert_eq!(
            ask(&parts(&[1]), &first.tag, "never built"),
            (Document { body: None, ..first.clone() }, false)
        );
        // Without the bytes the tag is still known.
        cached.release();
        assert_eq!(ask(&parts(&[1]), &first.tag, "never built").0.body, None);
        assert_eq!(ask(&parts(&[1]), "", "one"), (first.clone(), true));
        for changed in [parts(&[2]), parts(&[2, 1]), Parts { resources: other(), remotes: vec![2, 1] }] {
            let (second, is_new) = ask(&changed, &first.tag, "two");
            assert!(is_new && second.tag != first.tag && second.body.as_deref() == Some(&b"two"[..]));
        }
        // A part changed, but not the document.
        let (second, _) = ask(&parts(&[3]), "", "two");
        assert_eq!(ask(&parts(&[4]), &second.tag, "two"), (Document { body: None, ..second }, true));
    }

    fn other() -> Weak<Resources> {
        Arc::downgrade(&crate::registry::Registry::new(&coracle_kinds::kind::RuntimeConfig::default()).load())
    }
}
