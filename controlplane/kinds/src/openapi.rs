//! OpenAPI v3 documents: the definitions with their descriptions, and the paths with their operations.
//!
//! Generators of clients read both. kubectl finds a kind through a path whose operations have
//! `x-kubernetes-group-version-kind`. kubectl detects server-side field validation by the parameter `fieldValidation`
//! of the PATCH, and strategic merge by the PATCH's body types. A document is built when a client asks for it. Its
//! content hash is kept with its group version.

mod list;
mod operation;
mod paths;
pub mod v2;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, LazyLock};

use coracle_values::CollectMap;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha512};

use self::paths::{Form, Operations};
use crate::resource::{GroupVersion, Resource, Resources};
use crate::schema::model::{definitions_text, operations_text};

/// The document of one group version.
#[derive(Clone, Debug)]
pub struct Document {
    /// JSON text.
    pub body: Vec<u8>,
    /// Content hash, upper-case hexadecimal.
    pub hash: String,
}

/// `/openapi/v3`: URLs with content hash, by path. Hashes are computed once for each change of a group version.
pub fn root(set: &Resources) -> Value {
    // The texts are decompressed only if a hash is missing.
    let texts = LazyLock::new(Texts::load);
    let mut definitions = None;
    let mut paths = Map::new();
    for version in set.group_versions() {
        let hash = match version.openapi_hash.get() {
            Some(hash) => hash,
            None => {
                let definitions = definitions.get_or_insert_with(|| Definitions::read(&texts));
                version.openapi_hash.get_or_init(|| hash(&definitions.document(version)))
            }
        };
        let path = path_of(&version.group, &version.version);
        let url = json!({"serverRelativeURL": format!("/openapi/v3/{path}?hash={hash}")});
        paths.insert(path, url);
    }
    json!({"paths": paths})
}

/// The group version whose document is at `api/v1`, `apis/apps/v1`, …
pub fn group_version<'a>(set: &'a Resources, path: &str) -> Option<&'a Arc<GroupVersion>> {
    match path.split('/').collect::<Vec<_>>().as_slice() {
        ["api", version] => set.group_version("", version),
        ["apis", group, version] => set.group_version(group, version),
        _ => None,
    }
}

/// Builds the document of a group version.
pub fn document(version: &GroupVersion) -> Document {
    let texts = Texts::load();
    let body = Definitions::read(&texts).document(version);
    let hash = version.openapi_hash.get_or_init(|| hash(&body)).clone();
    Document { body, hash }
}

fn path_of(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

/// The content hash of a document.
#[must_use]
pub fn hash(body: &[u8]) -> String {
    hex::encode_upper(Sha512::digest(body))
}

/// The decompressed texts.
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

    fn document(&self, version: &GroupVersion) -> Vec<u8> {
        let mut items: Vec<_> = version.resources.iter().flat_map(|kind| operation::of_kind(kind)).collect();
        let mut security_schemes = Map::new();
        if version.resources.iter().any(|kind| kind.is_built_in()) {
            items.push(operation::of_group_version(version));
            security_schemes.insert("BearerToken".to_owned(), security_scheme());
        }
        let paths: BTreeMap<_, _> = self.operations.texts(items, Form::V3).into_iter().collect_map();
        let components = Components { schemas: self.reachable(version, &paths), security_schemes };
        let info = json!({"title": "Kubernetes", "version": self.version});
        serde_json::to_vec(&Page { openapi: "3.0.0", info, paths: &paths, components }).unwrap_or_default()
    }

    /// The definitions of the kinds, those that the paths refer to, and all that these definitions refer to.
    fn reachable<'b>(
        &'b self,
        version: &'b GroupVersion,
        paths: &BTreeMap<String, Box<RawValue>>,
    ) -> BTreeMap<Cow<'b, str>, Cow<'b, RawValue>> {
        let kinds = &version.resources;
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
                let definition = match name {
                    DELETE_OPTIONS | WATCH_EVENT => with_kinds(text, version),
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

    /// The definitions of the lists of custom resources.
    fn custom_lists(&self, kinds: &[Arc<Resource>]) -> Vec<(String, Box<RawValue>)> {
        let mut custom = kinds.iter().filter(|kind| kind.definition.is_some()).peekable();
        if custom.peek().is_none() {
            return Vec::new();
        }
        let typed = self.texts.get(DELETE_OPTIONS).and_then(|text| serde_json::from_str(text.get()).ok());
        let typed: Value = typed.unwrap_or_default();
        let lists = custom.filter_map(|kind| list::custom(kind, &typed));
        lists
            .filter_map(|(name, schema)| Some((name, serde_json::value::to_raw_value(&schema).ok()?)))
            .collect()
    }
}

const DELETE_OPTIONS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions";
const WATCH_EVENT: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.WatchEvent";
const KINDS: &str = "x-kubernetes-group-version-kind";

/// A definition that is in all group versions, with the kinds that a document lists: `v1` of the core group, and the
/// document's own group version.
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

/// The authentication that documents describe, as upstream.
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

    fn read(path: &str) -> Value {
        serde_json::from_slice(&document(group_version(built_in(), path).unwrap()).body).unwrap()
    }

    #[test]
    fn the_root_names_every_document_by_its_hash() {
        let root = root(built_in());
        for (path, entry) in root["paths"].as_object().unwrap() {
            let hash = document(group_version(built_in(), path).unwrap()).hash;
            assert_eq!(entry["serverRelativeURL"], format!("/openapi/v3/{path}?hash={hash}"));
        }
        assert!(root["paths"].get("api/v1").is_some());
        assert!(root["paths"].get("apis/apps/v1").is_some());
        for absent in ["apis/apps/v9", "apis/apps", "api/v1/", ""] {
            assert!(group_version(built_in(), absent).is_none(), "{absent}");
        }
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
            let schemas = document["components"]["schemas"].as_object().unwrap();
            let text = document.to_string();
            for name in references(&text) {
                assert!(schemas.contains_key(name), "{name} in {path}");
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
