//! OpenAPI v3 documents: the definitions with their descriptions, and the paths with their operations.
//!
//! Generators of client code read both. kubectl finds a kind through a path whose operations have
//! `x-kubernetes-group-version-kind`. kubectl detects server-side field validation by the parameter `fieldValidation`
//! of the PATCH, and strategic merge by the PATCH's body types.
//!
//! A document is built when a client asks for it. The hash of a document is computed without a build (`fingerprint`).
//! The group version keeps the hash.

mod fingerprint;
mod list;
mod operation;
mod paths;
pub mod v2;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash as _;
use std::io;
use std::sync::Arc;

use coracle_values::CollectMap;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha512};

use self::fingerprint::Fingerprint;
use self::operation::PathItem;
use self::paths::{Form, Operations};
use crate::resource::{GroupVersion, Resource, Resources};
use crate::schema::model::{definitions_text, operations_text};

/// The subject of a document: a group version, or one other path of the server.
pub struct Subject<'a>(Scope<'a>);

enum Scope<'a> {
    Version(&'a GroupVersion),
    /// The path of a built-in group, or a path that does not depend on kinds, such as `/version/`.
    Path(PathItem<'static>),
}

/// The document `/openapi/v3`: URLs with hashes, by path. The hash of a group version is computed once after each
/// change.
pub fn root(set: &Resources) -> Value {
    let versions = set.group_versions().iter().map(|version| Subject::of(version));
    let subjects = versions.chain(common_paths(set).into_iter().map(|item| Subject(Scope::Path(item))));
    let paths: Map<String, Value> = subjects
        .map(|subject| {
            let path = subject.path();
            let url = format!("/openapi/v3/{path}?hash={}", subject.hash());
            (path, json!({"serverRelativeURL": url}))
        })
        .collect_map();
    json!({"paths": paths})
}

/// The subject of the document at a path below `/openapi/v3/`: `api/v1`, `apis/apps/v1`, `apis/apps`, `version`, …
pub fn find<'a>(set: &'a Resources, path: &str) -> Option<Subject<'a>> {
    let version = match path.split('/').collect::<Vec<_>>().as_slice() {
        ["api", version] => set.group_version("", version),
        ["apis", group, version] => set.group_version(group, version),
        _ => None,
    };
    version.map(|version| Subject::of(version)).or_else(|| {
        let item = common_paths(set).into_iter().find(|item| item.path.trim_matches('/') == path)?;
        Some(Subject(Scope::Path(item)))
    })
}

/// The paths of the server, and of the built-in groups.
fn common_paths(set: &Resources) -> Vec<PathItem<'static>> {
    let built_in = set.group_versions().iter().filter(|version| is_built_in(version));
    let mut groups: Vec<&str> = built_in.map(|version| &*version.group).collect();
    groups.retain(|group| !group.is_empty());
    groups.dedup();
    operation::of_server().into_iter().chain(groups.into_iter().map(operation::of_group)).collect()
}

/// Whether a group version has a built-in kind.
fn is_built_in(version: &GroupVersion) -> bool {
    version.resources.iter().any(|kind| kind.is_built_in())
}

/// The content hash of a text.
#[must_use]
pub fn hash(text: &[u8]) -> String {
    hex::encode_upper(Sha512::digest(text))
}

// === impl Subject ===

impl<'a> Subject<'a> {
    fn of(version: &'a GroupVersion) -> Subject<'a> {
        Subject(Scope::Version(version))
    }

    /// `api/v1`, `apis/apps/v1`, `apis/apps`, `version`, …
    fn path(&self) -> String {
        match &self.0 {
            Scope::Version(version) if version.group.is_empty() => format!("api/{}", version.version),
            Scope::Version(version) => format!("apis/{}/{}", version.group, version.version),
            Scope::Path(item) => item.path.trim_matches('/').to_owned(),
        }
    }

    /// The group version. `None` for a path.
    fn version(&self) -> Option<&'a GroupVersion> {
        match self.0 {
            Scope::Version(version) => Some(version),
            Scope::Path(_) => None,
        }
    }

    fn is_built_in(&self) -> bool {
        self.version().is_none_or(is_built_in)
    }

    /// The paths of the document.
    fn items(&self) -> Vec<PathItem<'a>> {
        let version = match &self.0 {
            Scope::Version(version) => *version,
            Scope::Path(item) => return vec![item.clone()],
        };
        let mut items: Vec<_> = version.resources.iter().flat_map(|kind| operation::of_kind(kind)).collect();
        if is_built_in(version) {
            items.push(operation::of_group_version(version));
        }
        items
    }

    /// Whether the hash is known. Otherwise [`Subject::hash`] reads all schemas of the group version's custom
    /// resources.
    pub fn has_hash(&self) -> bool {
        self.version().is_none_or(|version| version.openapi_hash().is_some())
    }

    /// The hash of the document, in upper-case hexadecimal. A changed document has another hash. Another version of
    /// this program can have another hash for the same document.
    pub fn hash(&self) -> String {
        let compute = || {
            let mut hash = Fingerprint::new();
            self.items().hash(&mut hash);
            for kind in self.version().into_iter().flat_map(|version| &version.resources) {
                (&kind.group, &kind.version, &kind.kind, &kind.plural).hash(&mut hash);
                (&kind.list_kind, &kind.schema, &kind.definition, &kind.definition_v2).hash(&mut hash);
            }
            hash.text()
        };
        match self.version() {
            Some(version) => version.openapi_hash.get_or_init(compute).clone(),
            None => compute(),
        }
    }

    /// Writes the document as JSON text.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn write(&self, out: impl io::Write) -> io::Result<()> {
        let texts = Texts::load();
        Definitions::read(&texts).write(self, out)
    }
}

/// The decompressed texts of the generated files.
struct Texts {
    definitions: String,
    operations: String,
}

impl Texts {
    fn load() -> Texts {
        Texts { definitions: definitions_text(), operations: operations_text() }
    }
}

/// The definitions and the operations in the decompressed texts.
struct Definitions<'a> {
    version: &'a str,
    texts: HashMap<&'a str, &'a RawValue>,
    operations: Operations<'a>,
}

#[derive(serde::Deserialize)]
struct File<'a> {
    version: &'a str,
    #[serde(borrow)]
    definitions: HashMap<&'a str, &'a RawValue>,
}

impl<'a> Definitions<'a> {
    fn read(texts: &'a Texts) -> Definitions<'a> {
        let operations = Operations::read(&texts.operations);
        match serde_json::from_str::<File<'_>>(&texts.definitions) {
            Ok(File { version, definitions: mut texts }) => {
                texts.extend(&operations.definitions);
                Definitions { version, texts, operations }
            }
            // Unreachable: the text is part of the program, and the unit tests read it.
            Err(_) => Definitions { version: "", texts: HashMap::new(), operations },
        }
    }

    fn write(&self, subject: &Subject<'_>, out: impl io::Write) -> io::Result<()> {
        // Documents of custom resources have other values, as upstream.
        let (title, version, security_schemes) = match subject.is_built_in() {
            true => {
                ("Kubernetes", self.version, Map::from_iter([("BearerToken".to_owned(), security_scheme())]))
            }
            false => ("Kubernetes CRD Swagger", "v0.1.0", Map::new()),
        };
        let paths: BTreeMap<_, _> =
            self.operations.texts(subject.items(), Form::V3).into_iter().collect_map();
        let components = Components { schemas: self.reachable(subject.version(), &paths), security_schemes };
        let info = json!({"title": title, "version": version});
        serde_json::to_writer(out, &Page { openapi: "3.0.0", info, paths: &paths, components })?;
        Ok(())
    }

    /// The definitions of the kinds, the definitions that the paths refer to, and all definitions that these refer to.
    fn reachable<'b>(
        &'b self,
        version: Option<&'b GroupVersion>,
        paths: &BTreeMap<String, Box<RawValue>>,
    ) -> BTreeMap<Cow<'b, str>, Cow<'b, RawValue>> {
        let kinds: &'b [Arc<Resource>] = version.map_or(&[], |version| version.resources.as_slice());
        let mut waiting: Vec<&str> = paths.values().flat_map(|item| self.known(item.get())).collect();
        let mut found = BTreeMap::new();
        for (kind, definition) in kinds.iter().filter_map(|kind| Some((kind, kind.definition.as_ref()?))) {
            // A custom schema refers to built-in definitions only, such as ObjectMeta.
            let Ok(text) = serde_json::value::to_raw_value(&**definition) else { continue };
            waiting.extend(self.known(text.get()));
            found.insert(Cow::Borrowed(&*kind.schema), Cow::Owned(text));
        }
        for (name, definition) in self.custom_lists(kinds) {
            waiting.extend(self.known(definition.get()));
            found.entry(name.into()).or_insert(Cow::Owned(definition));
        }
        let mut seen = BTreeSet::new();
        while let Some(name) = waiting.pop() {
            let Some(text) = self.texts.get(name) else { continue };
            if seen.insert(name) {
                let definition = match (name, version) {
                    (DELETE_OPTIONS | WATCH_EVENT, Some(version)) => with_kinds(text, version),
                    _ => Cow::Borrowed(*text),
                };
                found.insert(Cow::Borrowed(name), definition);
                waiting.extend(self.known(text.get()));
            }
        }
        found
    }

    /// The built-in definitions that a text refers to.
    fn known(&self, text: &str) -> Vec<&'a str> {
        references(text).filter_map(|name| Some(*self.texts.get_key_value(name)?.0)).collect()
    }

    /// A definition with the properties `apiVersion` and `kind`.
    fn typed(&self) -> Value {
        let typed = self.texts.get(DELETE_OPTIONS).and_then(|text| serde_json::from_str(text.get()).ok());
        typed.unwrap_or_default()
    }

    /// The definitions of the lists of custom resources.
    fn custom_lists(&self, kinds: &[Arc<Resource>]) -> Vec<(String, Box<RawValue>)> {
        let mut custom = kinds.iter().filter(|kind| kind.definition.is_some()).peekable();
        if custom.peek().is_none() {
            return Vec::new();
        }
        let typed = self.typed();
        let lists = custom.filter_map(|kind| list::custom(kind, &typed));
        lists
            .filter_map(|(name, schema)| Some((name, serde_json::value::to_raw_value(&schema).ok()?)))
            .collect()
    }
}

const DELETE_OPTIONS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions";
const WATCH_EVENT: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.WatchEvent";
const KINDS: &str = "x-kubernetes-group-version-kind";

/// A definition that all group versions share, with the list of its kinds. The list has `v1` of the core group, and the
/// group version of the document.
fn with_kinds<'a>(text: &'a RawValue, version: &GroupVersion) -> Cow<'a, RawValue> {
    let Ok(mut schema) = serde_json::from_str::<Value>(text.get()) else { return Cow::Borrowed(text) };
    let kind = schema[KINDS][0]["kind"].clone();
    let mut kinds = vec![json!({"group": "", "kind": kind, "version": "v1"})];
    if !version.group.is_empty() {
        kinds.push(json!({"group": version.group, "kind": kind, "version": version.version}));
    }
    schema[KINDS] = kinds.into();
    serde_json::value::to_raw_value(&schema).map_or(Cow::Borrowed(text), Cow::Owned)
}

/// The authentication in the documents, as upstream.
fn security_scheme() -> Value {
    json!({"description": "Bearer Token authentication", "in": "header", "name": "authorization", "type": "apiKey"})
}

#[derive(serde::Serialize)]
struct Page<'a> {
    openapi: &'a str,
    info: Value,
    paths: &'a BTreeMap<String, Box<RawValue>>,
    components: Components<'a>,
}

#[derive(serde::Serialize)]
struct Components<'a> {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    schemas: BTreeMap<Cow<'a, str>, Cow<'a, RawValue>>,
    #[serde(rename = "securitySchemes", skip_serializing_if = "Map::is_empty")]
    security_schemes: Map<String, Value>,
}

/// The names of the definitions that a text refers to.
fn references(text: &str) -> impl Iterator<Item = &str> {
    text.split("\"$ref\":\"#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::built_in;
    use crate::resource::ResourceNames;
    use crate::resource::tests::Free;

    fn text(set: &Resources, path: &str) -> Vec<u8> {
        let mut text = Vec::new();
        find(set, path).unwrap().write(&mut text).unwrap();
        text
    }

    pub(super) fn read(path: &str) -> Value {
        serde_json::from_slice(&text(built_in(), path)).unwrap()
    }

    fn hash_of(set: &Resources, path: &str) -> String {
        find(set, path).unwrap().hash()
    }

    #[test]
    fn the_root_names_every_document_by_its_hash() {
        let root = root(built_in());
        for (path, entry) in root["paths"].as_object().unwrap() {
            let hash = hash_of(built_in(), path);
            assert_eq!(entry["serverRelativeURL"], format!("/openapi/v3/{path}?hash={hash}"));
        }
        for path in ["api/v1", "apis/apps/v1", "apis/apps", "api", "apis", "version", "openid/v1/jwks"] {
            assert!(root["paths"].get(path).is_some(), "{path}");
        }
        for absent in ["apis/apps/v9", "apis/none", "api/v1/", "apis/apps/", "apis/", "openid", ""] {
            assert!(find(built_in(), absent).is_none(), "{absent}");
        }
    }

    #[test]
    fn a_hash_needs_no_document_and_changes_with_the_document() {
        let with = |description: &str, change: fn(&mut Resource)| {
            let mut set = Resources::new(built_in().iter().cloned().collect());
            for kind in ["Cup", "Mug"] {
                set = set.with(&[Arc::new(custom(kind, description, change))]).unwrap();
            }
            set
        };
        let same = |_: &mut Resource| {};
        let (path, first) = ("apis/a.example/v1", with("A cup.", same));
        let mut seen = vec![(hash_of(&first, path), text(&first, path))];
        type Change = fn(&mut Resource);
        let changes: [(&str, Change); 7] = [
            ("A cup.", same),
            ("A mug.", same),
            ("A cup.", |kind| kind.namespaced = false),
            ("A cup.", |kind| kind.verbs.retain(|verb| verb != "patch")),
            ("A cup.", |kind| kind.list_kind = "Cups".into()),
            ("A cup.", |kind| kind.short_names = vec!["c".into()]),
            ("A cup.", |kind| kind.deprecation = Some("Use mugs.".into())),
        ];
        for (number, (description, change)) in changes.into_iter().enumerate() {
            let set = with(description, change);
            assert!(!find(&set, path).unwrap().has_hash(), "{number}");
            let (hash, text) = (hash_of(&set, path), text(&set, path));
            assert!(find(&set, path).unwrap().has_hash());
            let known = seen.iter().find(|(_, known)| *known == text);
            assert_eq!(known.is_some(), seen.iter().any(|(known, _)| *known == hash), "{number}");
            assert!(known.is_none_or(|(known, _)| *known == hash), "{number}");
            assert_eq!(hash_of(&set, "apis/apps/v1"), hash_of(&first, "apis/apps/v1"));
            seen.push((hash, text));
        }
        let mut hashes: Vec<_> = seen.into_iter().map(|(hash, _)| hash).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 5);
    }

    /// A custom resource.
    pub(super) fn custom(kind: &str, description: &str, change: fn(&mut Resource)) -> Resource {
        let names = ResourceNames {
            group: "a.example".into(),
            version: "v1".into(),
            kind: kind.to_owned().into(),
            plural: format!("{}s", kind.to_lowercase()).into(),
        };
        let mut resource = Resource::new(names, format!("example.a.v1.{kind}"), Arc::new(Free));
        resource.definition = Some(Arc::new(json!({"type": "object", "description": description})));
        change(&mut resource);
        resource
    }

    #[test]
    fn groups_and_paths_of_the_server_have_documents() {
        let info = json!({"title": "Kubernetes", "version": "1.36"});
        for (path, operation, definitions) in [
            ("api", "getCoreAPIVersions", "APIVersions ServerAddressByClientCIDR"),
            ("apis/apps", "getAppsAPIGroup", "APIGroup GroupVersionForDiscovery ServerAddressByClientCIDR"),
            ("version", "getCodeVersion", "Info"),
        ] {
            let document = read(path);
            assert_eq!(document["info"], info);
            assert_eq!(document["paths"].as_object().unwrap().len(), 1, "{path}");
            assert_eq!(document["paths"][format!("/{path}/")]["get"]["operationId"], operation);
            let schemas = document["components"]["schemas"].as_object().unwrap();
            let names: Vec<_> = schemas.keys().filter_map(|name| name.rsplit('.').next()).collect();
            assert_eq!(names.join(" "), definitions, "{path}");
        }
        let schemas = &read("apis/apps")["components"]["schemas"];
        let kinds = &schemas["io.k8s.apimachinery.pkg.apis.meta.v1.APIGroup"][KINDS];
        assert_eq!(*kinds, json!([{"group": "", "kind": "APIGroup", "version": "v1"}]));
        for path in [".well-known/openid-configuration", "openid/v1/jwks"] {
            let components = &read(path)["components"];
            assert_eq!(*components, json!({"securitySchemes": {"BearerToken": security_scheme()}}), "{path}");
        }
        let hashes: BTreeSet<_> =
            ["api", "apis", "apis/apps", "apis/batch"].map(|path| hash_of(built_in(), path)).into();
        assert_eq!(hashes.len(), 4);
    }

    #[test]
    fn documents_of_custom_resources_have_a_title_of_their_own() {
        let set = Resources::new(vec![Arc::new(custom("Cup", "A cup.", |_| {}))]);
        let document: Value = serde_json::from_slice(&text(&set, "apis/a.example/v1")).unwrap();
        assert_eq!(document["info"], json!({"title": "Kubernetes CRD Swagger", "version": "v0.1.0"}));
        assert_eq!(document["components"].get("securitySchemes"), None);
        assert!(find(&set, "apis/a.example").is_none(), "only built-in groups have a document");
        let info = json!({"title": "Kubernetes", "version": "1.36"});
        assert_eq!(read("apis/apps/v1")["info"], info);
    }

    #[test]
    fn patch_operations_have_the_extensions_that_kubectl_reads() {
        let apps = read("apis/apps/v1");
        let patch = &apps["paths"]["/apis/apps/v1/namespaces/{namespace}/deployments/{name}"]["patch"];
        assert_eq!(patch["x-kubernetes-group-version-kind"]["kind"], "Deployment");
        assert!(patch["requestBody"]["content"].get("application/strategic-merge-patch+json").is_some());
        assert!(patch["parameters"].as_array().unwrap().iter().any(|p| p["name"] == "fieldValidation"));
    }

    #[test]
    fn no_reference_dangles_and_descriptions_are_there() {
        let (root, mut count) = (root(built_in()), 0);
        for path in root["paths"].as_object().unwrap().keys() {
            let document = read(path);
            // Some documents, such as those of discovery, have no schemas.
            let schemas = document["components"]["schemas"].as_object();
            let text = document.to_string();
            for name in references(&text) {
                assert!(schemas.is_some_and(|schemas| schemas.contains_key(name)), "{name} in {path}");
                count += 1;
            }
        }
        assert!(count > 100, "{count} references");
        let core = read("api/v1");
        let image = &core["components"]["schemas"]["io.k8s.api.core.v1.Container"]["properties"]["image"];
        assert!(image["description"].as_str().unwrap().contains("image name"));
    }

    #[test]
    fn fields_have_their_values_and_scalars_their_types() {
        let schemas = &read("api/v1")["components"]["schemas"];
        let policy = &schemas["io.k8s.api.core.v1.Container"]["properties"]["imagePullPolicy"];
        assert_eq!(policy["enum"], json!(["Always", "IfNotPresent", "Never"]));
        assert!(policy["description"].as_str().unwrap().contains("Possible enum values"));
        let scalars = &schemas["io.k8s.apimachinery.pkg.util.intstr.IntOrString"];
        assert_eq!(scalars["oneOf"], json!([{"type": "integer"}, {"type": "string"}]));
    }

    #[test]
    fn fields_and_descriptions_belong_to_one_version() {
        let core = read("api/v1");
        assert_eq!(core["info"]["version"], "1.36");
        let properties = |name: &str| core["components"]["schemas"][name]["properties"].clone();
        // Only Kubernetes 1.37 has these fields.
        assert_eq!(properties("io.k8s.api.core.v1.PodSpec").get("evictionResponders"), None);
        assert_eq!(properties("io.k8s.api.core.v1.VolumeMount").get("bindMountOptions"), None);
        // Only 1.36 has this field, and this description.
        let status = properties("io.k8s.api.core.v1.NodeAllocatableResourceClaimStatus");
        assert_eq!(status["resources"]["type"], "object");
        let reference = &read("apis/rbac.authorization.k8s.io/v1")["components"]["schemas"];
        let group = &reference["io.k8s.api.rbac.v1.RoleRef"]["properties"]["apiGroup"]["description"];
        assert_eq!(group, "APIGroup is the group for the resource being referenced");
    }

    #[test]
    fn conditions_have_required_fields_and_values_have_defaults() {
        let schemas = &read("apis/apps/v1")["components"]["schemas"];
        let condition = &schemas["io.k8s.api.apps.v1.DeploymentCondition"];
        assert_eq!(condition["required"], json!(["type", "status"]));
        assert_eq!(condition["properties"]["type"]["default"], "");
        let conditions = &schemas["io.k8s.api.apps.v1.DeploymentStatus"]["properties"]["conditions"]["items"];
        let reference = "#/components/schemas/io.k8s.api.apps.v1.DeploymentCondition";
        assert_eq!(*conditions, json!({"allOf": [{"$ref": reference}], "default": {}}));
        let args = &schemas["io.k8s.api.core.v1.Container"]["properties"]["args"]["items"];
        assert_eq!(*args, json!({"type": "string", "default": ""}));
    }

    #[test]
    fn definitions_of_all_versions_have_the_kinds_of_their_document() {
        for (name, kind) in [(DELETE_OPTIONS, "DeleteOptions"), (WATCH_EVENT, "WatchEvent")] {
            let kinds = |path: &str| read(path)["components"]["schemas"][name][KINDS].clone();
            let core = json!({"group": "", "kind": kind, "version": "v1"});
            let apps = json!({"group": "apps", "kind": kind, "version": "v1"});
            assert_eq!(kinds("api/v1"), json!([core]));
            assert_eq!(kinds("apis/apps/v1"), json!([core, apps]));
        }
    }

    #[test]
    fn documents_have_the_definitions_that_their_paths_refer_to() {
        let schemas = |path: &str| read(path)["components"]["schemas"].clone();
        let core = schemas("api/v1");
        let items = &core["io.k8s.api.core.v1.PodList"]["properties"]["items"];
        assert_eq!(items["items"]["allOf"][0]["$ref"], "#/components/schemas/io.k8s.api.core.v1.Pod");
        assert!(core.get("io.k8s.apimachinery.pkg.apis.meta.v1.APIResourceList").is_some());
        // Reviews are not deleted.
        assert_eq!(schemas("apis/authorization.k8s.io/v1").get(DELETE_OPTIONS), None);
        assert_eq!(read("api/v1")["components"]["securitySchemes"]["BearerToken"]["in"], "header");
    }
}
