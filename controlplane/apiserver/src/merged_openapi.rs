//! The OpenAPI v2 document of all served resources, including the parts of aggregated servers.
//!
//! The ETag is computed from the resources and the parts, so it does not need the document. The document is built when
//! a client asks for it. The server keeps the document compressed, and for a short time only: it is large, and clients
//! cache it.

mod base;
mod packed;
mod versions;

use std::{
    io::{self, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use coracle_kinds::{Resources, openapi};

use self::base::Base;
pub(crate) use self::packed::Packed;
pub(crate) use self::versions::{VersionDocument, VersionDocuments};
use crate::{
    aggregation::{Remotes, openapi as remote},
    offload,
};

/// Maximum time that the server keeps a document.
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
    base: Base,
    /// The OpenAPI v3 documents.
    pub(crate) versions: Arc<VersionDocuments>,
}

/// A document in one form.
#[derive(Default)]
struct CachedDocument {
    /// The newest document. `None` after [`BODY_LIFETIME`].
    built: Mutex<Option<Built>>,
    /// The number of builds. Locked while the document is built, so that concurrent requests share the build.
    builds: Mutex<u64>,
}

struct Built {
    /// The number of the build.
    number: u64,
    tag: String,
    body: Packed,
}

/// A document for a client. `body` is `None` if the client already has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) tag: String,
    pub(crate) body: Option<Packed>,
}

/// The ETag of a document.
pub(crate) fn tag(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    format!("\"{}\"", hex::encode_upper(sha2::Sha256::digest(bytes)))
}

// === impl Merged ===

impl Merged {
    /// The document, without its bytes if `is_known` accepts its tag. `None` if the build fails.
    pub(crate) fn find(
        self: &Arc<Self>,
        resources: &Resources,
        remotes: &Remotes,
        form: Form,
        is_known: impl Fn(&str) -> bool,
    ) -> Option<Document> {
        let parts = remote::v2_parts(remotes);
        // The hash of a new or changed custom resource is computed from its whole schema.
        let is_heavy = resources.group_versions().iter().any(|version| version.openapi_hash().is_none());
        let tag = tag_of(form, &offload::run(is_heavy, || openapi::v2::hash(resources)), &parts);
        if is_known(&tag) {
            return Some(Document { tag, body: None });
        }
        let cached = self.cached(form);
        if let Some(body) = cached.get(&tag) {
            return Some(Document { tag, body: Some(body) });
        }
        // If a document with another tag is cached, the resources or the parts have changed recently. They may change
        // again soon.
        let is_changing = cached.built().is_some();
        let write = |out: &mut dyn Write| {
            let mut document = self.base.document(resources, is_changing);
            document.add_custom(resources);
            remote::add_v2(&parts, &mut document);
            match form {
                Form::Json => serde_json::to_writer(out, &document).map_err(io::Error::from),
                Form::Protobuf => out.write_all(&openapi::v2::protobuf(&document)),
            }
        };
        let (body, new) = offload::run(true, || cached.build(&tag, write)).ok()?;
        if let Some(number) = new {
            let merged = Arc::downgrade(self);
            coracle_threads::spawn(async move {
                tokio::time::sleep(BODY_LIFETIME).await;
                if let Some(merged) = merged.upgrade() {
                    merged.release(form, number);
                }
            });
        }
        Some(Document { tag, body: Some(body) })
    }

    /// Drops the document of a build, and the base if no document is left. A document of a later build stays.
    fn release(&self, form: Form, number: u64) {
        self.cached(form).release(number);
        if [&self.json, &self.protobuf].into_iter().all(|cached| cached.built().is_none()) {
            self.base.release();
        }
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

    /// The document with this tag, if it is kept.
    fn get(&self, tag: &str) -> Option<Packed> {
        self.built().as_ref().filter(|built| built.tag == tag).map(|built| built.body.clone())
    }

    /// Drops the document of a build, if it is the newest document.
    fn release(&self, number: u64) {
        let mut built = self.built();
        if built.as_ref().is_some_and(|built| built.number == number) {
            *built = None;
        }
    }

    /// Builds the document, unless another request did so meanwhile. Returns the number of the build if this call built
    /// it.
    fn build(
        &self,
        tag: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<(Packed, Option<u64>)> {
        let mut number = self.builds.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.get(tag) {
            return Ok((found, None));
        }
        let body = Packed::new(write)?;
        *number += 1;
        *self.built() = Some(Built { number: *number, tag: tag.to_owned(), body: body.clone() });
        Ok((body, Some(*number)))
    }
}

/// The ETag of a document with these parts of aggregated servers. `own` is the hash of the document without the parts.
fn tag_of(form: Form, own: &str, parts: &[remote::Part]) -> String {
    let mut text = format!("{form:?} {own}");
    for part in parts {
        text.push(' ');
        text.push_str(part.hash());
    }
    tag(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_is_built_once_while_it_is_kept() {
        let cached = CachedDocument::default();
        let ask = |tag: &str, text: &'static str| {
            cached.get(tag).map_or_else(
                || cached.build(tag, |out| out.write_all(text.as_bytes())).unwrap(),
                |found| (found, None),
            )
        };
        let (first, number) = ask("1", "one");
        assert_eq!(number, Some(1));
        assert_eq!(ask("1", "never built"), (first.clone(), None));
        assert_eq!(cached.build("1", |_| panic!("built again")).unwrap(), (first.clone(), None));
        let (second, number) = ask("2", "two");
        assert!(number == Some(2) && second != first);
        assert_eq!(cached.get("1"), None, "one document is kept");
        cached.release(1);
        assert_eq!(cached.get("2"), Some(second.clone()), "the end of an older document");
        cached.release(2);
        assert_eq!(ask("2", "two"), (second.clone(), Some(3)));
        assert!(cached.build("3", |_| Err(io::ErrorKind::Other.into())).is_err());
        assert_eq!(cached.get("2"), Some(second));
    }

    #[test]
    fn the_tag_changes_with_the_form_and_each_part() {
        let part = |text: &str| remote::Part::new(text);
        let tags = [
            tag_of(Form::Json, "a", &[]),
            tag_of(Form::Protobuf, "a", &[]),
            tag_of(Form::Json, "b", &[]),
            tag_of(Form::Json, "a", &[part("1")]),
            tag_of(Form::Json, "a", &[part("1"), part("2")]),
            tag_of(Form::Json, "a", &[part("2"), part("1")]),
        ];
        assert_eq!(tag_of(Form::Json, "a", &[part("1")]), tags[3], "other processes have the same tags");
        assert_eq!(std::collections::HashSet::from(tags).len(), 6);
    }
}
