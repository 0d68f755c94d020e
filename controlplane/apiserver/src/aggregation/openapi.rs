//! OpenAPI documents of aggregated servers.
//!
//! - Version 2: the paths of the group version, and the definitions that they refer to, are merged into this server's
//!   document.
//! - Version 3: this server's root document links to the aggregated server's document. Requests for that document are
//!   forwarded. If the aggregated server does not have version 3, the part of version 2 is converted.
//!
//! Both documents are read again every minute while the server is available. As upstream, the last documents stay if a
//! read fails, or if a new document is too large or invalid. The documents are dropped when the APIService is deleted,
//! or when it refers to another Service.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use coracle_kinds::openapi::{self, v2};
use coracle_values::CollectMap;
use http::{StatusCode, header};
use serde_json::{Map, Value, json, value::to_raw_value};

use super::{
    Remote, Remotes,
    forward::{DocumentRequest, FetchError, Forwarder, JSON},
    v3_conversion,
};
use crate::offload;

/// Time between two reads, as upstream.
const READ_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum duration of a read.
const READ_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum bytes of the version 2 document. The document of Kubernetes itself has 4 MB.
const MAX_V2: usize = 8 << 20;
/// Maximum bytes of a part of version 2 that is converted to version 3.
const MAX_CONVERTED: usize = 2 << 20;
/// Maximum bytes of the version 3 root document.
const MAX_V3_ROOT: usize = 1 << 20;
/// Maximum characters of the hash in a URL.
const MAX_HASH: usize = 256;
/// Sections of a document that `$ref` can refer to.
const SECTIONS: [&str; 2] = ["definitions", "parameters"];
const KINDS: &str = "x-kubernetes-group-version-kind";

/// The last documents that a server returned.
#[derive(Default)]
pub(super) struct Documents(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    read_at: Option<Instant>,
    /// ETag of the version 2 document.
    tag: Option<String>,
    /// The part of the version 2 document, as JSON text.
    v2: Option<Part>,
    v3: Option<Document>,
}

/// The version 3 document of a server.
#[derive(Clone)]
enum Document {
    /// The URL from which the server serves it.
    Forwarded(String),
    /// Converted from version 2. `part` is the hash of the converted part. `hash` is the hash of the result.
    Converted { part: Arc<str>, hash: String },
}

/// A version 3 document that was converted from version 2.
pub(crate) struct Converted {
    pub(crate) hash: String,
    /// JSON text.
    pub(crate) text: String,
}

/// The part of a version 2 document that belongs to one group version.
#[derive(Clone)]
pub(crate) struct Part {
    text: Arc<str>,
    /// Content hash.
    hash: Arc<str>,
}

// === impl Inner ===

impl Inner {
    /// The hash of the converted document, if the part of version 2 has not changed since the conversion.
    fn converted_hash(&self) -> Option<&str> {
        match (&self.v3, &self.v2) {
            (Some(Document::Converted { part, hash }), Some(v2)) if *part == v2.hash => Some(hash),
            _ => None,
        }
    }
}

// === impl Documents ===

impl Documents {
    fn with<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether a read is due. If so, later calls return false until the next interval.
    fn take_turn(&self, now: Instant) -> bool {
        self.with(|inner| {
            let is_due = inner.read_at.is_none_or(|read| now.duration_since(read) >= READ_INTERVAL);
            if is_due {
                inner.read_at = Some(now);
            }
            is_due
        })
    }
}

/// Starts a task that reads the documents of a server, if a read is due.
pub(crate) fn refresh(forwarder: &Forwarder, remote: &Arc<Remote>) {
    if !remote.documents.take_turn(Instant::now()) {
        return;
    }
    let (forwarder, remote) = (forwarder.clone(), remote.clone());
    coracle_threads::spawn(async move {
        let read = async {
            let second = read_v2(&forwarder, &remote).await;
            read_v3_root(&forwarder, &remote).await.and(second)
        };
        let read = tokio::time::timeout(READ_TIMEOUT, read).await;
        if let Err(reason) =
            read.unwrap_or_else(|_elapsed| Err("the server does not respond within 20 s".to_owned()))
        {
            let (group, version) = (&remote.group, &remote.version);
            tracing::warn!(group, version, reason, "cannot read the OpenAPI documents of an APIService");
        }
    });
}

async fn read_v2(forwarder: &Forwarder, remote: &Remote) -> Result<(), String> {
    let tag = remote.documents.with(|inner| inner.tag.clone().filter(|_| inner.v2.is_some()));
    let wanted = DocumentRequest { path: "/openapi/v2", media: JSON, tag: tag.as_deref(), max: MAX_V2 };
    let found = forwarder.fetch(remote, wanted).await.map_err(|error| error.to_string());
    let found = found.and_then(|found| {
        let Some(found) = found else { return Ok(None) };
        let is_large = found.body.len() > offload::MIN_OFFLOADED_BYTES;
        let part = offload::run(is_large, || -> Result<_, serde_json::Error> {
            let document: Value = serde_json::from_slice(&found.body)?;
            Ok(Part::new(&part_of(&document, &remote.group, &remote.version).to_string()))
        });
        let part = part.map_err(|error| format!("/openapi/v2 is not JSON: {error}"))?;
        let tag = found.headers.get(header::ETAG).and_then(|tag| tag.to_str().ok()).map(str::to_owned);
        Ok(Some((tag, part)))
    });
    keep_v2(remote, found)
}

/// Stores the ETag and the part of version 2. If the read failed or the document is not modified, the last values stay.
fn keep_v2(remote: &Remote, found: Result<Option<(Option<String>, Part)>, String>) -> Result<(), String> {
    if let Some((tag, part)) = found? {
        remote.documents.with(|inner| {
            inner.tag = tag;
            inner.v2 = Some(part);
        });
    }
    Ok(())
}

impl Part {
    pub(crate) fn new(text: &str) -> Self {
        Self { text: text.into(), hash: openapi::hash(text.as_bytes()).into() }
    }

    /// The content hash.
    pub(crate) fn hash(&self) -> &str {
        &self.hash
    }
}

async fn read_v3_root(forwarder: &Forwarder, remote: &Remote) -> Result<(), String> {
    let wanted = DocumentRequest { path: "/openapi/v3", media: JSON, tag: None, max: MAX_V3_ROOT };
    let found = forwarder.fetch(remote, wanted).await.and_then(|found| {
        let Some(found) = found else { return Ok(Value::Null) };
        let root = serde_json::from_slice(&found.body);
        root.map_err(|error| FetchError::Other(format!("/openapi/v3 is not JSON: {error}")))
    });
    keep_v3(remote, found)
}

/// Stores a reference to the version 3 document of the group version. For a server with version 3, the root document
/// has its URL. For a server without version 3, the document is converted. After another error, the last reference
/// stays.
fn keep_v3(remote: &Remote, found: Result<Value, FetchError>) -> Result<(), String> {
    let url = found.as_ref().ok().and_then(|root| v3_url(root, &remote.group, &remote.version));
    let is_absent = matches!(found, Err(FetchError::Status { code: StatusCode::NOT_FOUND, .. }));
    let link = || link_to_converted(remote);
    let document = url.map(Document::Forwarded).or_else(|| is_absent.then(link).flatten());
    if is_absent || found.is_ok() {
        remote.documents.with(|inner| inner.v3 = document);
    }
    if is_absent { Ok(()) } else { found.map(drop).map_err(|error| error.to_string()) }
}

/// A link to the converted document. The hash is computed only if the part of version 2 has changed.
fn link_to_converted(remote: &Remote) -> Option<Document> {
    let known = remote.documents.with(|inner| inner.converted_hash().and(inner.v3.clone()));
    known.or_else(|| {
        let (part, document) = converted(remote)?;
        Some(Document::Converted { part, hash: document.hash })
    })
}

/// Converts the part of version 2, and returns the hash of the part.
fn converted(remote: &Remote) -> Option<(Arc<str>, Converted)> {
    let part = remote.documents.with(|inner| inner.v2.clone())?;
    (part.text.len() <= MAX_CONVERTED).then_some(())?;
    let is_large = part.text.len() > offload::MIN_OFFLOADED_BYTES;
    offload::run(is_large, || {
        let value: Value = serde_json::from_str(&part.text).ok()?;
        let text = v3_conversion::document(&value, &remote.group, &remote.version).to_string();
        Some((part.hash, Converted { hash: openapi::hash(text.as_bytes()), text }))
    })
}

/// The hash of the converted document of a server without version 3. `None` if it was not computed from the current
/// part of version 2.
pub(crate) fn converted_hash(remote: &Remote) -> Option<String> {
    remote.documents.with(|inner| inner.converted_hash().map(str::to_owned))
}

/// Converts the document of a server without version 3. `None` for a server with version 3, or if the conversion fails.
pub(crate) fn converted_v3(remote: &Remote) -> Option<Converted> {
    if !has_converted_v3(remote) {
        return None;
    }
    converted(remote).map(|(_, document)| document)
}

/// Whether this server serves the version 3 document of another server.
pub(crate) fn has_converted_v3(remote: &Remote) -> bool {
    remote.documents.with(|inner| matches!(inner.v3, Some(Document::Converted { .. })))
}

/// The URL of the group version's document, with the hash from the root document of the server.
fn v3_url(root: &Value, group: &str, version: &str) -> Option<String> {
    let path = format!("apis/{group}/{version}");
    let url = root["paths"].get(&path)?["serverRelativeURL"].as_str()?;
    let hash = url.split_once("?hash=").map(|(_, hash)| hash);
    let is_hash = |hash: &&str| {
        (1..=MAX_HASH).contains(&hash.len()) && hash.bytes().all(|byte| byte.is_ascii_alphanumeric())
    };
    Some(match hash.filter(is_hash) {
        Some(hash) => format!("/openapi/v3/{path}?hash={hash}"),
        None => format!("/openapi/v3/{path}"),
    })
}

/// Adds the documents of other servers to the root document of version 3.
pub(crate) fn add_v3(remotes: &Remotes, root: &mut Value) {
    let Some(paths) = root.get_mut("paths").and_then(Value::as_object_mut) else { return };
    for remote in &remotes.all() {
        let Some(document) = remote.documents.with(|inner| inner.v3.clone()) else { continue };
        let path = format!("apis/{}/{}", remote.group, remote.version);
        let url = match document {
            Document::Forwarded(url) => url,
            Document::Converted { hash, .. } => format!("/openapi/v3/{path}?hash={hash}"),
        };
        paths.entry(path).or_insert_with(|| json!({"serverRelativeURL": url}));
    }
}

/// Adds the parts of other servers to the document of version 2.
pub(crate) fn add_v2(parts: &[Part], document: &mut v2::Document) {
    for part in parts {
        if let Ok(part) = serde_json::from_str(&part.text) {
            merge(document, part);
        }
    }
}

/// The parts of all servers, in a fixed order.
pub(crate) fn v2_parts(remotes: &Remotes) -> Vec<Part> {
    remotes.all().iter().filter_map(|remote| remote.documents.with(|inner| inner.v2.clone())).collect()
}

/// The paths of a group version, and all definitions that they refer to.
fn part_of(document: &Value, group: &str, version: &str) -> Value {
    let (root, below) = (format!("/apis/{group}/{version}"), format!("/apis/{group}/{version}/"));
    let all = document["paths"].as_object().into_iter().flatten();
    let paths: Map<String, Value> = all
        .filter(|(path, _)| path.trim_end_matches('/') == root || path.starts_with(&below))
        .map(|(path, item)| (path.clone(), item.clone()))
        .collect_map();
    let mut part = json!({});
    if let Some(info) = document.get("info") {
        part["info"] = json!({"title": info["title"], "version": info["version"]});
    }
    let mut waiting: Vec<&Value> = document["paths"].as_object().map_or_else(Vec::new, |all| {
        all.iter().filter(|(path, _)| paths.contains_key(*path)).map(|(_, item)| item).collect()
    });
    // Clients look up a kind by its definition, even if no path refers to the definition.
    let definitions = document["definitions"].as_object().into_iter().flatten();
    let is_own = |schema: &Value| {
        let kinds = schema[KINDS].as_array();
        kinds.is_some_and(|kinds| {
            kinds.len() == 1 && kinds[0]["group"] == group && kinds[0]["version"] == version
        })
    };
    let mut found: BTreeSet<(&str, &str)> = definitions
        .filter(|(_, schema)| is_own(schema))
        .map(|(name, _)| (SECTIONS[0], name.as_str()))
        .collect();
    waiting.extend(found.iter().map(|(section, name)| &document[*section][*name]));
    while let Some(value) = waiting.pop() {
        for target in references(value) {
            if let Some(value) = document[target.0].get(target.1)
                && found.insert(target)
            {
                waiting.push(value);
            }
        }
    }
    for (section, name) in found {
        part[section][name] = document[section][name].clone();
    }
    part["paths"] = paths.into();
    part
}

/// Section and name of each `$ref` in a value.
fn references(value: &Value) -> Vec<(&str, &str)> {
    let (mut found, mut waiting) = (Vec::new(), vec![value]);
    while let Some(value) = waiting.pop() {
        match value {
            Value::Object(map) => {
                found.extend(map.get("$ref").and_then(Value::as_str).and_then(target));
                waiting.extend(map.values());
            }
            Value::Array(list) => waiting.extend(list),
            _ => {}
        }
    }
    found
}

fn target(reference: &str) -> Option<(&str, &str)> {
    let (section, name) = reference.strip_prefix("#/")?.split_once('/')?;
    SECTIONS.contains(&section).then_some((section, name))
}

/// Merges a part into a document. A definition is renamed if the document has a definition with the same name and
/// other content.
fn merge(document: &mut v2::Document, mut part: Value) {
    let mut renamed: BTreeMap<(String, String), String> = BTreeMap::new();
    for section in SECTIONS {
        let Some(Value::Object(entries)) = part.get(section) else { continue };
        let ours = section_of(document, section);
        for (name, content) in entries {
            if member(ours, name).is_some_and(|known| !is_same(&known, content)) {
                let mut free = (2_u64..).map(|number| format!("{name}_v{number}"));
                let is_free = |new: &String| !ours.contains_key(new) && !entries.contains_key(new);
                let new = free.find(is_free).unwrap_or_default();
                renamed.insert((section.to_owned(), name.clone()), new);
            }
        }
    }
    rename(&mut part, &renamed);
    for section in SECTIONS {
        let Some(Value::Object(entries)) = part.get_mut(section).map(Value::take) else { continue };
        let ours = section_of(document, section);
        for (name, mut content) in entries {
            let name = renamed.get(&(section.to_owned(), name.clone())).cloned().unwrap_or(name);
            if let Some(mut known) = member(ours, &name) {
                add_kinds(&mut known, &content);
                content = known;
            }
            if let Ok(text) = to_raw_value(&content) {
                ours.insert(name, text);
            }
        }
    }
    if let Some(Value::Object(items)) = part.get_mut("paths").map(Value::take) {
        for (path, item) in items {
            if let Entry::Vacant(free) = document.paths.entry(path)
                && let Ok(text) = to_raw_value(&item)
            {
                free.insert(text);
            }
        }
    }
}

fn section_of<'a>(document: &'a mut v2::Document, name: &str) -> &'a mut v2::Section {
    if name == SECTIONS[0] { &mut document.definitions } else { &mut document.parameters }
}

/// A member of a section as a tree.
fn member(section: &v2::Section, name: &str) -> Option<Value> {
    serde_json::from_str(section.get(name)?.get()).ok()
}

/// Whether two definitions have the same content. Their kinds may differ: the kinds of DeleteOptions, for example,
/// depend on the server.
fn is_same(one: &Value, other: &Value) -> bool {
    let without = |value: &Value| match value {
        Value::Object(map) => map.iter().filter(|(key, _)| *key != KINDS).count(),
        _ => 0,
    };
    let (Some(left), Some(right)) = (one.as_object(), other.as_object()) else { return one == other };
    without(one) == without(other)
        && left.iter().filter(|(key, _)| *key != KINDS).all(|(key, value)| right.get(key) == Some(value))
}

/// Adds the group version kinds of a definition to an equal definition.
fn add_kinds(known: &mut Value, content: &Value) {
    let (Some(kinds), Some(own)) =
        (known.get_mut(KINDS).and_then(Value::as_array_mut), content[KINDS].as_array())
    else {
        return;
    };
    for kind in own {
        if !kinds.contains(kind) {
            kinds.push(kind.clone());
        }
    }
}

fn rename(value: &mut Value, renamed: &BTreeMap<(String, String), String>) {
    if renamed.is_empty() {
        return;
    }
    let mut waiting = vec![value];
    while let Some(value) = waiting.pop() {
        match value {
            Value::Object(map) => {
                if let Some(Value::String(reference)) = map.get_mut("$ref")
                    && let Some((section, name)) = target(reference)
                    && let Some(new) = renamed.get(&(section.to_owned(), name.to_owned()))
                {
                    *reference = format!("#/{section}/{new}");
                }
                waiting.extend(map.values_mut());
            }
            Value::Array(list) => waiting.extend(list),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregation::{Discovered, FrontProxy};

    fn theirs() -> Value {
        let kind = json!([{"group": "far.io", "version": "v1", "kind": "Thing"}]);
        json!({
            "paths": {
                "/apis/far.io/v1/things": {"get": {"parameters": [{"$ref": "#/parameters/limit"}],
                    "responses": {"200": {"schema": {"$ref": "#/definitions/ThingList"}}}}},
                "/apis/far.io/v2/things": {"get": {"$ref": "#/definitions/Later"}},
                "/api/v1/pods": {"get": {}},
            },
            "parameters": {"limit": {"name": "limit"}, "other": {"name": "other"}},
            "definitions": {
                "Thing": {KINDS: kind, "properties": {"metadata": {"$ref": "#/definitions/Meta"}}},
                "ThingList": {"properties": {"items": {"items": {"$ref": "#/definitions/Thing"}}}},
                "Meta": {"description": "theirs", "properties": {"self": {"$ref": "#/definitions/Meta"}}},
                "Options": {"type": "object", KINDS: kind}, "Later": {}, "Pod": {},
            },
        })
    }

    #[test]
    fn a_part_has_the_paths_of_its_group_version_and_what_they_refer_to() {
        let part = part_of(&theirs(), "far.io", "v1");
        let names = |section: &str| part[section].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(names("paths"), ["/apis/far.io/v1/things"]);
        assert_eq!(names("definitions"), ["Meta", "Options", "Thing", "ThingList"]);
        assert_eq!(names("parameters"), ["limit"]);
    }

    /// A document with these sections.
    fn of(value: &Value) -> v2::Document {
        let mut document = v2::Document::default();
        let add = |section: &mut v2::Section, name: &str| {
            for (name, content) in value[name].as_object().into_iter().flatten() {
                section.insert(name.clone(), to_raw_value(content).unwrap());
            }
        };
        add(&mut document.paths, "paths");
        add(&mut document.definitions, "definitions");
        add(&mut document.parameters, "parameters");
        document
    }

    fn tree(document: &v2::Document) -> Value {
        serde_json::from_slice(&serde_json::to_vec(document).unwrap()).unwrap()
    }

    #[test]
    fn parts_cannot_change_what_other_servers_publish() {
        let ours = json!({"paths": {"/apis/far.io/v1/things": {"ours": true}}, "definitions": {
            "Meta": {"description": "ours"}, "Meta_v2": {}, "Options": {"type": "object", KINDS: []}}});
        let mut document = of(&ours);
        let mut theirs = theirs();
        theirs["paths"]["/apis/far.io/v1/"] = json!({"get": {}});
        merge(&mut document, part_of(&theirs, "far.io", "v1"));
        let merged = tree(&document);
        let wanted = json!({"/apis/far.io/v1/": {"get": {}}, "/apis/far.io/v1/things": {"ours": true}});
        assert_eq!(merged["paths"], wanted);
        assert_eq!(merged["definitions"]["Meta"], ours["definitions"]["Meta"]);
        assert_eq!(merged["definitions"]["Meta_v3"]["description"], "theirs");
        for reference in ["/Meta_v3/properties/self/$ref", "/Thing/properties/metadata/$ref"] {
            assert_eq!(merged["definitions"].pointer(reference).unwrap(), "#/definitions/Meta_v3");
        }
        assert_eq!(merged["definitions"]["Options"][KINDS][0]["kind"], "Thing");
        assert_eq!(merged["parameters"]["limit"]["name"], "limit");
    }

    #[test]
    fn invalid_documents_are_empty_parts() {
        for document in [json!(null), json!([1]), json!({"paths": 3, "definitions": "x", "info": 1})] {
            let mut ours = of(&json!({"paths": {"/api": {}}, "definitions": {"A": {}}}));
            let before = tree(&ours);
            merge(&mut ours, part_of(&document, "far.io", "v1"));
            assert_eq!(tree(&ours), before);
        }
    }

    #[test]
    fn only_the_documents_of_the_group_version_are_named_by_the_root() {
        let root = |url: &str| json!({"paths": {"apis/far.io/v1": {"serverRelativeURL": url}, "api/v1": {}}});
        let url = |text: &str| v3_url(&root(text), "far.io", "v1");
        assert_eq!(
            url("/openapi/v3/apis/far.io/v1?hash=AB12").unwrap(),
            "/openapi/v3/apis/far.io/v1?hash=AB12"
        );
        assert_eq!(url("http://elsewhere/?hash=a/../b").unwrap(), "/openapi/v3/apis/far.io/v1");
        let long = |length: usize| url(&format!("/?hash={}", "a".repeat(length))).unwrap();
        assert_eq!([long(256).len(), long(257).len()], [26 + 6 + 256, 26]);
        assert_eq!(v3_url(&root(""), "far.io", "v2"), None);
        assert_eq!(v3_url(&json!([]), "far.io", "v1"), None);
    }

    #[test]
    fn a_server_without_version_3_gets_the_converted_document_under_its_hash() {
        let object = json!({"spec": {"group": "far.io", "version": "v1"}});
        let remote = Arc::new(Remote::read(&FrontProxy::default(), &object));
        remote.observe(Some(Some(Discovered::default())));
        let part = part_of(&theirs(), "far.io", "v1").to_string();
        remote.documents.with(|inner| inner.v2 = Some(Part::new(&part)));
        let remotes = Remotes::default();
        remotes.replace([(("far.io".to_owned(), "v1".to_owned()), remote.clone())].into());
        let link = || {
            let mut root = json!({"paths": {}});
            add_v3(&remotes, &mut root);
            root["paths"]["apis/far.io/v1"]["serverRelativeURL"].clone()
        };
        let status = |code| Err(FetchError::Status { url: "https://far.io/openapi/v3".to_owned(), code });
        assert!(keep_v3(&remote, status(StatusCode::NOT_FOUND)).is_ok());
        let document = converted_v3(&remote).unwrap();
        assert_eq!(link(), format!("/openapi/v3/apis/far.io/v1?hash={}", document.hash));
        assert_eq!(converted_hash(&remote).as_ref(), Some(&document.hash));
        let body: Value = serde_json::from_str(&document.text).unwrap();
        assert!(body["components"]["schemas"]["Thing"].is_object(), "{body}");
        // This text cannot be converted. But the hash of the part is the same, so the part is not converted again.
        remote.documents.with(|inner| inner.v2.as_mut().unwrap().text = "broken".into());
        assert!(keep_v3(&remote, status(StatusCode::NOT_FOUND)).is_ok());
        assert_eq!(link(), format!("/openapi/v3/apis/far.io/v1?hash={}", document.hash));
        assert_eq!(converted_hash(&remote).as_ref(), Some(&document.hash));
        assert!(converted_v3(&remote).is_none());
        remote.documents.with(|inner| inner.v2 = Some(Part::new("{}")));
        assert_eq!(converted_hash(&remote), None, "the known hash is that of another part");
        let next = converted_v3(&remote).unwrap();
        assert!(next.hash != document.hash && !next.text.is_empty());
        // Another error does not show whether the server has version 3. The last document stays.
        assert!(keep_v3(&remote, status(StatusCode::INTERNAL_SERVER_ERROR)).is_err());
        assert!(
            keep_v3(&remote, Err(FetchError::Other("cannot connect to far.io: 404".to_owned()))).is_err()
        );
        assert_eq!(link(), format!("/openapi/v3/apis/far.io/v1?hash={}", document.hash));
        let root =
            json!({"paths": {"apis/far.io/v1": {"serverRelativeURL": "/openapi/v3/apis/far.io/v1?hash=A"}}});
        assert!(keep_v3(&remote, Ok(root)).is_ok());
        assert!(converted_v3(&remote).is_none());
        assert_eq!(link(), "/openapi/v3/apis/far.io/v1?hash=A");
    }

    #[test]
    fn a_part_has_another_hash_if_its_content_changes() {
        assert_eq!(Part::new("{}").hash(), Part::new("{}").hash());
        assert_ne!(Part::new("{}").hash(), Part::new("[]").hash());
    }

    #[test]
    fn a_server_that_fails_keeps_its_last_documents() {
        let remote = Arc::new(Remote::read(
            &FrontProxy::default(),
            &json!({"spec": {"group": "far.io", "version": "v1"}}),
        ));
        let remotes = Remotes::default();
        remotes.replace([(("far.io".to_owned(), "v1".to_owned()), remote.clone())].into());
        let part = Part::new(&part_of(&theirs(), "far.io", "v1").to_string());
        assert!(keep_v2(&remote, Ok(Some((Some("\"1\"".to_owned()), part.clone())))).is_ok());
        assert!(keep_v2(&remote, Ok(None)).is_ok() && keep_v2(&remote, Err("it hangs".to_owned())).is_err());
        // An unavailable server keeps its documents, too. Otherwise each outage would change the merged documents.
        remote.observe(None);
        let known = v2_parts(&remotes);
        assert!(known[0].text.contains("/apis/far.io/v1/things"));
        assert_eq!((known[0].hash(), known.len()), (part.hash(), 1));
    }

    #[test]
    fn documents_are_read_once_a_minute() {
        let (documents, now) = (Documents::default(), Instant::now());
        assert!(documents.take_turn(now));
        assert!(!documents.take_turn(now + READ_INTERVAL / 2));
        assert!(documents.take_turn(now + READ_INTERVAL));
    }
}
