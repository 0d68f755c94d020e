//! The paths of OpenAPI documents as JSON.

use std::collections::{BTreeMap, HashMap};

use coracle_values::CollectMap;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use super::DELETE_OPTIONS;
use super::operation::{Operation, PathItem};

/// Start of a reference to a definition in version 2.
pub(super) const V2: &str = "#/definitions/";
/// Start of a reference to a definition in version 3.
pub(super) const V3: &str = "#/components/schemas/";

/// Version of the OpenAPI specification.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    V2,
    V3,
}

/// The generated file about operations.
#[derive(Default, serde::Deserialize)]
pub(super) struct Operations<'a> {
    /// Further definitions for documents, such as those of lists. No kind refers to them.
    #[serde(borrow)]
    pub(super) definitions: HashMap<&'a str, &'a RawValue>,
    /// Parameters in the form of version 2, by key. The key of a shared parameter has a hash at its end.
    parameters: BTreeMap<String, Value>,
    /// Keys of parameters by action. For streams and logs, by resource and subresource.
    actions: HashMap<String, Vec<String>>,
}

// === impl Operations ===

impl<'a> Operations<'a> {
    pub(super) fn read(text: &'a str) -> Operations<'a> {
        // An error is not possible: the text is part of the program, and the unit tests read it.
        serde_json::from_str(text).unwrap_or_default()
    }

    /// The shared parameters as JSON text. Operations of version 2 refer to them.
    pub(super) fn shared(&self) -> BTreeMap<String, Box<RawValue>> {
        let shared = self.parameters.iter().filter(|(key, _)| is_shared(key));
        shared.filter_map(|(key, parameter)| Some((key.clone(), to_raw_value(parameter).ok()?))).collect_map()
    }

    /// Paths with their items as JSON text, which takes less memory than trees.
    pub(super) fn texts(&self, items: Vec<PathItem<'_>>, form: Form) -> Vec<(String, Box<RawValue>)> {
        let text = |item: PathItem<'_>| Some((to_raw_value(&self.item(&item, form)).ok()?, item.path));
        items.into_iter().filter_map(text).map(|(text, path)| (path, text)).collect()
    }

    /// A path item. Parameters that all its operations have are parameters of the path.
    fn item(&self, item: &PathItem<'_>, form: Form) -> Value {
        let keys: Vec<&[String]> = item.operations.iter().map(|one| self.keys(&one.parameters)).collect();
        let is_common = |key: &String| keys.iter().all(|list| list.contains(key));
        let mut members = Map::new();
        for (operation, own) in item.operations.iter().zip(&keys) {
            let own = own.iter().filter(|key| !is_common(key));
            let parameters = own.filter_map(|key| self.parameter(key, form)).collect();
            members.insert(operation.method.to_owned(), self.operation(operation, parameters, form));
        }
        let common = keys.first().into_iter().flat_map(|list| list.iter()).filter(|key| is_common(key));
        let keys = self.keys_of_path(item).into_iter().chain(common.map(String::as_str));
        let mut parameters: Vec<_> = keys.filter_map(|key| self.parameter(key, form)).collect();
        if item.path.contains("{name}") {
            parameters.push(("name".to_owned(), name_parameter(item.kind, form)));
        }
        add_parameters(&mut members, parameters);
        members.into()
    }

    /// The keys of an action's parameters.
    fn keys(&self, action: &str) -> &[String] {
        self.actions.get(action).map(Vec::as_slice).unwrap_or_default()
    }

    /// The keys of the parameters that a path determines, such as `namespace` and `pretty`.
    fn keys_of_path(&self, item: &PathItem<'_>) -> Vec<&str> {
        let has_objects = item.operations.iter().any(|one| !matches!(one.action, "" | "connect"));
        let wanted = [
            ("query", "pretty", has_objects),
            ("path", "namespace", item.path.contains("{namespace}")),
            ("path", "path", item.path.contains("{path}")),
        ];
        let wanted = wanted.into_iter().filter(|(.., is_wanted)| *is_wanted);
        wanted
            .filter_map(|(place, name, _)| self.key(|one| one["in"] == place && one["name"] == name))
            .collect()
    }

    /// The key of the first parameter that `is_wanted` accepts.
    fn key(&self, is_wanted: impl Fn(&Value) -> bool) -> Option<&str> {
        self.parameters.iter().find(|(_, parameter)| is_wanted(parameter)).map(|(key, _)| key.as_str())
    }

    /// The name of a parameter, and the parameter.
    fn parameter(&self, key: &str, form: Form) -> Option<(String, Value)> {
        let parameter = self.parameters.get(key)?;
        let name = parameter["name"].as_str()?.to_owned();
        let value = match form {
            Form::V2 if is_shared(key) => json!({"$ref": format!("#/parameters/{key}")}),
            Form::V2 => parameter.clone(),
            Form::V3 => with_schema(parameter),
        };
        Some((name, value))
    }

    fn operation(&self, one: &Operation<'_>, mut parameters: Vec<(String, Value)>, form: Form) -> Value {
        let mut members = Map::new();
        let mut add = |name: &str, value: Value| members.insert(name.to_owned(), value);
        add("description", one.description.as_str().into());
        add("operationId", one.id.as_str().into());
        add("tags", json!([one.tag]));
        add("responses", responses(one, form));
        if !one.action.is_empty() {
            add("x-kubernetes-action", one.action.into());
            add("x-kubernetes-group-version-kind", one.group_version_kind.clone());
        }
        match (form, one.body) {
            (Form::V2, body) => {
                add("schemes", json!(["https"]));
                add("produces", json!(one.produces));
                if !one.consumes.is_empty() {
                    add("consumes", json!(one.consumes));
                }
                parameters.extend(body.map(|name| ("body".to_owned(), self.body_parameter(name))));
            }
            (Form::V3, Some(name)) => {
                add("requestBody", request_body(name, one.consumes));
            }
            (Form::V3, None) => {}
        }
        add_parameters(&mut members, parameters);
        members.into()
    }

    /// The body as a parameter of version 2. `name` is the definition of the body.
    fn body_parameter(&self, name: &str) -> Value {
        let schema = reference(name, Form::V2);
        match self.key(|one| one["schema"] == schema) {
            Some(key) => json!({"$ref": format!("#/parameters/{key}")}),
            None => json!({"in": "body", "name": "body", "required": true, "schema": schema}),
        }
    }
}

/// Whether operations of version 2 refer to a parameter. Only the keys of such parameters have a hyphen and a hash.
fn is_shared(key: &str) -> bool {
    key.contains('-')
}

/// Adds parameters in the order of their names.
fn add_parameters(members: &mut Map<String, Value>, mut parameters: Vec<(String, Value)>) {
    if !parameters.is_empty() {
        parameters.sort_by(|(one, _), (other, _)| one.cmp(other));
        let values = parameters.into_iter().map(|(_, value)| value);
        members.insert("parameters".to_owned(), values.collect());
    }
}

fn name_parameter(kind: &str, form: Form) -> Value {
    let description = format!("name of the {kind}");
    let parameter = json!({"description": description, "in": "path", "name": "name", "required": true,
        "type": "string", "uniqueItems": true});
    if form == Form::V3 { with_schema(&parameter) } else { parameter }
}

/// A parameter in the form of version 3. In this version, the type is in the schema of the parameter.
fn with_schema(parameter: &Value) -> Value {
    let (mut members, mut schema) = (Map::new(), Map::new());
    for (name, value) in parameter.as_object().into_iter().flatten() {
        let of_schema = matches!(&**name, "type" | "uniqueItems");
        let place = if of_schema { &mut schema } else { &mut members };
        place.insert(name.clone(), value.clone());
    }
    members.insert("schema".to_owned(), schema.into());
    members.into()
}

fn request_body(name: &str, media: &[&str]) -> Value {
    let mut body = json!({"content": content(&reference(name, Form::V3), media)});
    if name != DELETE_OPTIONS {
        body["required"] = true.into();
    }
    body
}

fn responses(one: &Operation<'_>, form: Form) -> Value {
    let schema = if one.result.is_empty() { json!({"type": "string"}) } else { reference(&one.result, form) };
    let mut found = json!({"401": {"description": "Unauthorized"}});
    for code in one.codes {
        let description = match code {
            201 => "Created",
            202 => "Accepted",
            _ => "OK",
        };
        found[code.to_string()] = match form {
            Form::V2 => json!({"description": description, "schema": schema}),
            Form::V3 => json!({"description": description, "content": content(&schema, one.produces)}),
        };
    }
    found
}

/// The same schema for several media types.
fn content(schema: &Value, media: &[&str]) -> Value {
    let media: Map<String, Value> =
        media.iter().map(|name| ((*name).to_owned(), json!({"schema": schema}))).collect_map();
    media.into()
}

/// A reference to a definition.
fn reference(name: &str, form: Form) -> Value {
    let section = if form == Form::V2 { V2 } else { V3 };
    json!({"$ref": format!("{section}{name}")})
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::kind::built_in;
    use crate::openapi::{tests::read, v2};

    fn paths_of(path: &str) -> Map<String, Value> {
        let mut document = read(path);
        let Value::Object(paths) = document["paths"].take() else { panic!("{path} has no paths") };
        paths
    }

    fn methods(item: &Value) -> Vec<&str> {
        let mut found: Vec<&str> = item.as_object().unwrap().keys().map(String::as_str).collect();
        found.retain(|name| *name != "parameters");
        found.sort_unstable();
        found
    }

    /// The names of the parameters of a path or an operation.
    fn names(item: &Value) -> Vec<&str> {
        let parameters = item["parameters"].as_array().into_iter().flatten();
        parameters.map(|one| one["name"].as_str().unwrap_or_default()).collect()
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
            assert_eq!(names(item), ["name", "namespace", "pretty"], "{sub}");
        }
        let core = paths_of("api/v1");
        let pod = "/api/v1/namespaces/{namespace}/pods/{name}";
        assert_eq!(methods(&core[&format!("{pod}/eviction")]), ["post"]);
        assert!(core.contains_key("/api/v1/nodes/{name}/status"));
        for path in ["/api/v1/watch/nodes/{name}", "/api/v1/watch/pods", "/api/v1/"] {
            assert_eq!(methods(&core[path]), ["get"], "{path}");
        }
        assert!(!core.contains_key("/api/v1/watch/namespaces/{namespace}/bindings"));
    }

    #[test]
    fn streams_and_logs_have_their_parameters() {
        let core = paths_of("api/v1");
        let pod = "/api/v1/namespaces/{namespace}/pods/{name}";
        let exec = &core[&format!("{pod}/exec")];
        assert_eq!(methods(exec), ["get", "post"]);
        let wanted = ["command", "container", "name", "namespace", "stderr", "stdin", "stdout", "tty"];
        assert_eq!(names(exec), wanted);
        let get = &exec["get"];
        assert_eq!(get["operationId"], "connectCoreV1GetNamespacedPodExec");
        assert_eq!(get["x-kubernetes-action"], "connect");
        assert_eq!(get["responses"]["200"]["content"], json!({"*/*": {"schema": {"type": "string"}}}));
        let log = &core[&format!("{pod}/log")];
        assert!(names(log).contains(&"tailLines"));
        assert!(log["get"]["responses"]["200"]["content"].get("text/plain").is_some());
        let proxy = &core["/api/v1/nodes/{name}/proxy/{path}"];
        assert_eq!(methods(proxy), ["delete", "get", "head", "options", "patch", "post", "put"]);
        assert_eq!(proxy["head"]["operationId"], "connectCoreV1HeadNodeProxyWithPath");
        assert_eq!(names(proxy), ["name", "path", "path"]);
    }

    #[test]
    fn operations_have_unique_names_of_upstreams_form() {
        let apps = paths_of("apis/apps/v1");
        let name = |path: &str, method: &str| apps[path][method]["operationId"].clone();
        let base = "/apis/apps/v1/namespaces/{namespace}/deployments";
        assert_eq!(name("/apis/apps/v1/deployments", "get"), "listAppsV1DeploymentForAllNamespaces");
        assert_eq!(name(base, "delete"), "deleteAppsV1CollectionNamespacedDeployment");
        assert_eq!(name(&format!("{base}/{{name}}/scale"), "get"), "readAppsV1NamespacedDeploymentScale");
        let watch = "/apis/apps/v1/watch/deployments";
        assert_eq!(name(watch, "get"), "watchAppsV1DeploymentListForAllNamespaces");
        assert_eq!(apps[base]["get"]["tags"], json!(["apps_v1"]));
        let operations = apps.values().filter_map(Value::as_object).flat_map(Map::values);
        let names: Vec<&str> = operations.filter_map(|one| one["operationId"].as_str()).collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
        let access = paths_of("apis/rbac.authorization.k8s.io/v1");
        let roles = &access["/apis/rbac.authorization.k8s.io/v1/clusterroles"]["post"];
        assert_eq!(roles["operationId"], "createRbacAuthorizationV1ClusterRole");
        assert_eq!(roles["tags"], json!(["rbacAuthorization_v1"]));
    }

    #[test]
    fn operations_have_bodies_parameters_and_responses() {
        let core = paths_of("api/v1");
        let base = "/api/v1/namespaces/{namespace}/configmaps";
        let create = &core[base]["post"];
        let reference = json!({"schema": {"$ref": "#/components/schemas/io.k8s.api.core.v1.ConfigMap"}});
        assert_eq!(create["requestBody"], json!({"content": {"*/*": reference}, "required": true}));
        assert_eq!(names(create), ["dryRun", "fieldManager", "fieldValidation"]);
        assert_eq!(create["responses"]["201"]["content"]["application/yaml"], reference);
        assert_eq!(create["responses"]["401"]["description"], "Unauthorized");
        let patch = &core[&format!("{base}/{{name}}")]["patch"];
        let bodies = patch["requestBody"]["content"].as_object().unwrap();
        let wanted =
            json!({"schema": {"$ref": "#/components/schemas/io.k8s.apimachinery.pkg.apis.meta.v1.Patch"}});
        assert!(bodies.len() == 4 && bodies.values().all(|body| *body == wanted), "{bodies:?}");
        let delete = &core[&format!("{base}/{{name}}")]["delete"];
        assert!(delete["requestBody"].get("required").is_none());
        let limit = names(&core["/api/v1/configmaps"]).contains(&"limit");
        assert!(limit && !names(&core["/api/v1/configmaps"]["get"]).contains(&"limit"));
        let result = |path: &str| {
            let item = &core[path]["delete"]["responses"]["200"]["content"]["application/json"];
            item["schema"]["$ref"].as_str().unwrap().rsplit('.').next().unwrap().to_owned()
        };
        assert_eq!(result(&format!("{base}/{{name}}")), "Status");
        assert_eq!(result("/api/v1/persistentvolumes/{name}"), "PersistentVolume");
    }

    #[test]
    fn both_versions_have_the_same_paths_and_operations() {
        let old = v2::of_built_in(built_in());
        let old = |path: &str| -> Value { serde_json::from_str(old.paths[path].get()).unwrap() };
        for path in ["api/v1", "apis/storage.k8s.io/v1", "apis/authorization.k8s.io/v1"] {
            for (path, new) in paths_of(path) {
                let old = old(&path);
                assert_eq!(methods(&old), methods(&new), "{path}");
                for method in methods(&old) {
                    for name in ["operationId", "description", "tags", "x-kubernetes-group-version-kind"] {
                        assert_eq!(old[method].get(name), new[method].get(name), "{path} {method}");
                    }
                }
            }
        }
        let path = "/api/v1/namespaces/{namespace}/configmaps";
        let item = old(path);
        let (get, post) = (&item["get"], &item["post"]);
        let list = "#/definitions/io.k8s.api.core.v1.ConfigMapList";
        assert_eq!(get["responses"]["200"]["schema"]["$ref"], list);
        assert_eq!((&post["consumes"], &post["schemes"]), (&json!(["*/*"]), &json!(["https"])));
        assert_eq!(names(post)[..2], ["body", "dryRun"]);
    }
}
