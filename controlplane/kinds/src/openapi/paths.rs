//! The paths of a kind: its collections, its objects and their subresources.

use coracle_values::CollectMap;
use serde_json::{Map, Value, json};

use super::list::{self, reference};
use crate::kind;
use crate::resource::{Resource, Subresource};

/// The media types of patches. The last one needs a built-in definition.
const PATCHES: [&str; 4] = [
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/apply-patch+yaml",
    "application/strategic-merge-patch+json",
];
const LIST_PARAMETERS: &[&str] = &[
    "allowWatchBookmarks",
    "continue",
    "fieldSelector",
    "labelSelector",
    "limit",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "timeoutSeconds",
    "watch",
];
const WRITE_PARAMETERS: &[&str] = &["dryRun", "fieldManager", "fieldValidation"];
const PATCH_PARAMETERS: &[&str] = &["dryRun", "fieldManager", "fieldValidation", "force"];
const DELETE_PARAMETERS: &[&str] = &["dryRun", "gracePeriodSeconds", "orphanDependents", "propagationPolicy"];

/// The kind, the subresource and the scope of a path.
#[derive(Clone, Copy)]
struct Place<'a> {
    kind: &'a Resource,
    sub: Option<&'a Subresource>,
    /// Name of the definition of the bodies.
    schema: &'a str,
    /// Whether the path covers all namespaces.
    is_everywhere: bool,
}

/// Adds the paths of a kind.
pub(super) fn add(kind: &Resource, paths: &mut Map<String, Value>) {
    let root = match &*kind.group {
        "" => format!("/api/{}", kind.version),
        group => format!("/apis/{group}/{}", kind.version),
    };
    let mut collection = format!("{root}/{}", kind.plural);
    let place = Place { kind, sub: None, schema: &kind.schema, is_everywhere: false };
    if kind.namespaced {
        place.everywhere().insert(paths, &collection, &["list"]);
        collection = format!("{root}/namespaces/{{namespace}}/{}", kind.plural);
    }
    place.insert(paths, &collection, &["list", "create", "deletecollection"]);
    let object = format!("{collection}/{{name}}");
    place.insert(paths, &object, &["get", "update", "patch", "delete"]);
    for sub in &kind.subresources {
        if let Some(schema) = body_of(kind, sub) {
            let path = format!("{object}/{}", sub.name);
            let verbs = ["get", "update", "patch", "create", "delete"];
            Place { sub: Some(sub), schema, ..place }.insert(paths, &path, &verbs);
        }
    }
}

/// Name of the definition of a subresource's bodies. `None` if the bodies are streams or text.
pub(super) fn body_of<'a>(kind: &'a Resource, sub: &Subresource) -> Option<&'a str> {
    if sub.name == "log" {
        return None;
    }
    if (&sub.group, &sub.version, &sub.kind) == (&kind.group, &kind.version, &kind.kind) {
        return Some(&kind.schema);
    }
    kind::schema_of(&sub.api_version(), &sub.kind)
}

/// The extension `x-kubernetes-group-version-kind` of an operation. For a subresource of a custom resource it is the
/// kind of the resource, as upstream.
pub(super) fn type_of(kind: &Resource, sub: Option<&Subresource>) -> Value {
    match sub.filter(|_| kind.is_built_in()) {
        Some(sub) => json!({"group": sub.group, "kind": sub.kind, "version": sub.version}),
        None => json!({"group": kind.group, "kind": kind.kind, "version": kind.version}),
    }
}

// === impl Place ===

impl Place<'_> {
    fn everywhere(self) -> Self {
        Self { is_everywhere: true, ..self }
    }

    /// Adds a path with the operations of those verbs that are served. Without operations there is no path.
    fn insert(&self, paths: &mut Map<String, Value>, path: &str, verbs: &[&str]) {
        let served = verbs.iter().filter(|verb| self.has_verb(verb));
        let mut item: Map<String, Value> = served.filter_map(|verb| self.operation(verb)).collect_map();
        if item.is_empty() {
            return;
        }
        let names = ["name", "namespace"].into_iter().filter(|name| path.contains(&format!("{{{name}}}")));
        let parameters: Vec<Value> = names
            .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
            .collect();
        if !parameters.is_empty() {
            item.insert("parameters".to_owned(), parameters.into());
        }
        paths.insert(path.to_owned(), item.into());
    }

    fn has_verb(&self, verb: &str) -> bool {
        let verbs = self.sub.map_or(&self.kind.verbs, |sub| &sub.verbs);
        verbs.iter().any(|known| known == verb)
    }

    /// The HTTP method and the operation of a verb.
    fn operation(&self, verb: &str) -> Option<(String, Value)> {
        let (method, action, prefix, parameters) = match verb {
            "list" => ("get", "list", "list", LIST_PARAMETERS),
            "create" => ("post", "post", "create", WRITE_PARAMETERS),
            "deletecollection" => ("delete", "deletecollection", "delete", DELETE_PARAMETERS),
            "get" => ("get", "get", "read", &[][..]),
            "update" => ("put", "put", "replace", WRITE_PARAMETERS),
            "patch" => ("patch", "patch", "patch", PATCH_PARAMETERS),
            "delete" => ("delete", "delete", "delete", DELETE_PARAMETERS),
            _ => return None,
        };
        let status = || kind::schema_of("v1", "Status").map(reference);
        let schema = match verb {
            "list" => list::response(self.kind),
            "delete" | "deletecollection" => status()?,
            _ => reference(self.schema),
        };
        let mut operation = json!({
            "operationId": self.id(prefix, verb == "deletecollection"),
            "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": schema}}}},
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": type_of(self.kind, self.sub),
        });
        if !parameters.is_empty() {
            let of = |name: &&str| {
                let schema = json!({"type": parameter_type(name), "uniqueItems": true});
                json!({"name": name, "in": "query", "schema": schema})
            };
            operation["parameters"] = parameters.iter().map(of).collect();
        }
        if let Some(body) = self.body(verb) {
            operation["requestBody"] = body;
        }
        Some((method.to_owned(), operation))
    }

    fn body(&self, verb: &str) -> Option<Value> {
        let patches = if self.kind.patch_definition().is_some() { &PATCHES[..] } else { &PATCHES[..3] };
        let (types, name) = match verb {
            "create" | "update" => (&["application/json"][..], self.schema),
            "patch" => (patches, self.schema),
            "delete" | "deletecollection" => {
                (&["application/json"][..], kind::schema_of("v1", "DeleteOptions")?)
            }
            _ => return None,
        };
        let content: Map<String, Value> =
            types.iter().map(|media| ((*media).to_owned(), json!({"schema": reference(name)}))).collect_map();
        Some(match verb {
            "delete" | "deletecollection" => json!({"content": content}),
            _ => json!({"content": content, "required": true}),
        })
    }

    /// A unique name of the operation: `listAppsV1NamespacedDeployment`, `readAppsV1NamespacedDeploymentStatus`.
    /// Source: `GetOperationIDAndTags` of `k8s.io/apiserver`.
    fn id(&self, prefix: &str, is_collection: bool) -> String {
        let kind = self.kind;
        let group = if kind.group.is_empty() { "core" } else { &*kind.group };
        let group: String =
            group.trim_end_matches(".k8s.io").split(['.', '-']).map(capitalized).collect::<Vec<_>>().concat();
        let version = capitalized(&kind.version);
        let collection = if is_collection { "Collection" } else { "" };
        let scope = if kind.namespaced && !self.is_everywhere { "Namespaced" } else { "" };
        let sub = self.sub.map(|sub| capitalized(&sub.name)).unwrap_or_default();
        let end = if self.is_everywhere { "ForAllNamespaces" } else { "" };
        format!("{prefix}{group}{version}{collection}{scope}{}{sub}{end}", kind.kind)
    }
}

fn parameter_type(name: &str) -> &'static str {
    match name {
        "allowWatchBookmarks" | "force" | "orphanDependents" | "sendInitialEvents" | "watch" => "boolean",
        "gracePeriodSeconds" | "limit" | "timeoutSeconds" => "integer",
        _ => "string",
    }
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::kind::built_in;
    use crate::openapi::{document, group_version};

    fn paths_of(path: &str) -> Map<String, Value> {
        let document = document(group_version(built_in(), path).unwrap());
        let mut document: Value = serde_json::from_slice(&document.body).unwrap();
        let Value::Object(paths) = document["paths"].take() else { panic!("{path} has no paths") };
        paths
    }

    fn methods(item: &Value) -> Vec<&str> {
        let mut found: Vec<&str> = item.as_object().unwrap().keys().map(String::as_str).collect();
        found.retain(|name| *name != "parameters");
        found.sort_unstable();
        found
    }

    #[test]
    fn collections_objects_and_subresources_have_paths() {
        let apps = paths_of("apis/apps/v1");
        let base = "/apis/apps/v1/namespaces/{namespace}/deployments";
        assert_eq!(methods(&apps["/apis/apps/v1/deployments"]), ["get"]);
        assert_eq!(methods(&apps[base]), ["delete", "get", "post"]);
        assert_eq!(methods(&apps[&format!("{base}/{{name}}")]), ["delete", "get", "patch", "put"]);
        for (sub, kind) in [("status", "Deployment"), ("scale", "Scale")] {
            let item = &apps[&format!("{base}/{{name}}/{sub}")];
            assert_eq!(methods(item), ["get", "patch", "put"], "{sub}");
            assert_eq!(item["put"]["x-kubernetes-group-version-kind"]["kind"], kind);
            assert_eq!(item["parameters"].as_array().unwrap().len(), 2, "{sub}");
        }
        let core = paths_of("api/v1");
        let pod = "/api/v1/namespaces/{namespace}/pods/{name}";
        assert_eq!(methods(&core[&format!("{pod}/eviction")]), ["post"]);
        assert!(!core.contains_key(&format!("{pod}/log")) && !core.contains_key(&format!("{pod}/exec")));
        assert!(core.contains_key("/api/v1/nodes/{name}/status"));
    }

    #[test]
    fn operations_have_unique_names_of_upstreams_form() {
        let apps = paths_of("apis/apps/v1");
        let name = |path: &str, method: &str| apps[path][method]["operationId"].clone();
        let base = "/apis/apps/v1/namespaces/{namespace}/deployments";
        assert_eq!(name("/apis/apps/v1/deployments", "get"), "listAppsV1DeploymentForAllNamespaces");
        assert_eq!(name(base, "delete"), "deleteAppsV1CollectionNamespacedDeployment");
        assert_eq!(name(&format!("{base}/{{name}}/scale"), "get"), "readAppsV1NamespacedDeploymentScale");
        let operations = apps.values().filter_map(Value::as_object).flat_map(Map::values);
        let names: Vec<&str> = operations.filter_map(|one| one["operationId"].as_str()).collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
    }
}
