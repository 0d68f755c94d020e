//! The paths and operations of a kind, independent of the version of OpenAPI.
//!
//! Sources: `registerResourceHandlers` of `k8s.io/apiserver`, and `generateBuilder` of
//! `k8s.io/apiextensions-apiserver` for custom resources.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::{DELETE_OPTIONS, WATCH_EVENT, list};
use crate::kind;
use crate::resource::{GroupVersion, Resource, Subresource};

const MEDIA: &[&str] = &["application/json", "application/yaml", "application/vnd.kubernetes.protobuf"];
/// Media types of lists and watches.
const STREAMED: &[&str] = &[
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
    "application/json;stream=watch",
    "application/vnd.kubernetes.protobuf;stream=watch",
];
const LOG: &[&str] =
    &["text/plain", "application/json", "application/yaml", "application/vnd.kubernetes.protobuf"];
const ANY: &[&str] = &["*/*"];
const JSON: &[&str] = &["application/json"];
/// Media types of custom resources.
const CUSTOM: &[&str] = &["application/json", "application/yaml"];
const PATCHES: &[&str] = &[
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
];
const CUSTOM_PATCHES: &[&str] =
    &["application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml"];

const PATCH_BODY: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.Patch";
const STATUS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.Status";
const RESOURCE_LIST: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.APIResourceList";
const API_GROUP: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.APIGroup";
const GROUP_LIST: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.APIGroupList";
const API_VERSIONS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.APIVersions";
const VERSION_INFO: &str = "io.k8s.apimachinery.pkg.version.Info";

const OK: &[u16] = &[200];
const STREAM_METHODS: &[&str] = &["get", "post"];
const PROXY_METHODS: &[&str] = &["delete", "get", "head", "options", "patch", "post", "put"];

/// A path and its operations.
#[derive(Clone, Hash)]
pub(super) struct PathItem<'a> {
    pub(super) path: String,
    /// The kind that the description of the parameter `name` mentions.
    pub(super) kind: &'a str,
    pub(super) operations: Vec<Operation<'a>>,
}

/// An operation.
#[derive(Clone, Hash)]
pub(super) struct Operation<'a> {
    /// HTTP method in lower case.
    pub(super) method: &'static str,
    /// `x-kubernetes-action`. Empty for discovery.
    pub(super) action: &'static str,
    /// `operationId`: a unique name.
    pub(super) id: String,
    pub(super) description: String,
    /// The tag. For most operations it names the group version. Generators of client code make one class for each tag.
    pub(super) tag: String,
    /// Key of the list of parameters in the generated file. Empty if the operation has no parameters.
    pub(super) parameters: Cow<'static, str>,
    /// Name of the definition of the body. The body is required, except DeleteOptions.
    pub(super) body: Option<&'a str>,
    /// Media types of bodies.
    pub(super) consumes: &'static [&'static str],
    /// Media types of responses.
    pub(super) produces: &'static [&'static str],
    /// Status codes of responses. 401 is not listed here.
    pub(super) codes: &'static [u16],
    /// Name of the definition of the responses. Empty if the response is text.
    pub(super) result: Cow<'a, str>,
    /// `x-kubernetes-group-version-kind`.
    pub(super) group_version_kind: Value,
}

/// A verb and its operation.
struct Verb {
    /// The verb in discovery.
    name: &'static str,
    method: &'static str,
    action: &'static str,
    /// Start of `operationId`.
    prefix: &'static str,
    parameters: &'static str,
    codes: &'static [u16],
}

const fn verb(names: [&'static str; 4], parameters: &'static str, codes: &'static [u16]) -> Verb {
    let [name, method, action, prefix] = names;
    Verb { name, method, action, prefix, parameters, codes }
}

const LIST: Verb = verb(["list", "get", "list", "list"], "list", OK);
const WATCH_LIST: Verb = verb(["watch", "get", "watchlist", "watch"], "list", OK);
const WATCH: Verb = verb(["watch", "get", "watch", "watch"], "list", OK);
const CREATE: Verb = verb(["create", "post", "post", "create"], "post", &[200, 201, 202]);
const DELETE_COLLECTION: Verb =
    verb(["deletecollection", "delete", "deletecollection", "delete"], "deletecollection", OK);
const GET: Verb = verb(["get", "get", "get", "read"], "get", OK);
const UPDATE: Verb = verb(["update", "put", "put", "replace"], "put", &[200, 201]);
const PATCH: Verb = verb(["patch", "patch", "patch", "patch"], "patch", &[200, 201]);
const DELETE: Verb = verb(["delete", "delete", "delete", "delete"], "delete", &[200, 202]);

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

/// The paths of a kind.
pub(super) fn of_kind(kind: &Resource) -> Vec<PathItem<'_>> {
    let root = root_of(&kind.group, &kind.version);
    let place = Place { kind, sub: None, schema: &kind.schema, is_everywhere: false };
    let scope = if kind.namespaced { "/namespaces/{namespace}" } else { "" };
    let collection = format!("{scope}/{}", kind.plural);
    let object = format!("{collection}/{{name}}");
    let mut found = Vec::new();
    if kind.namespaced {
        let all = Place { is_everywhere: true, ..place };
        found.push(all.item(format!("{root}/{}", kind.plural), &[LIST]));
        found.push(all.item(format!("{root}/watch/{}", kind.plural), &[WATCH_LIST]));
    }
    found.push(place.item(format!("{root}{collection}"), &[LIST, CREATE, DELETE_COLLECTION]));
    found.push(place.item(format!("{root}/watch{collection}"), &[WATCH_LIST]));
    found.push(place.item(format!("{root}{object}"), &[GET, UPDATE, PATCH, DELETE]));
    found.push(place.item(format!("{root}/watch{object}"), &[WATCH]));
    for sub in &kind.subresources {
        let place = Place { sub: Some(sub), ..place };
        found.extend(place.of_subresource(sub, &format!("{root}{object}/{}", sub.name)));
    }
    found.retain(|item| !item.operations.is_empty());
    found
}

/// The discovery path of a built-in group version.
pub(super) fn of_group_version(version: &GroupVersion) -> PathItem<'static> {
    let name = format!("{}{}", group_name(&version.group), capitalized(&version.version));
    PathItem {
        path: format!("{}/", root_of(&version.group, &version.version)),
        kind: "",
        operations: vec![Operation {
            id: format!("get{name}APIResources"),
            tag: tag(&version.group, &version.version),
            ..discovery("get available resources", RESOURCE_LIST)
        }],
    }
}

/// The discovery path of a built-in group.
pub(super) fn of_group(group: &str) -> PathItem<'static> {
    PathItem {
        path: format!("/apis/{group}/"),
        kind: "",
        operations: vec![Operation {
            id: format!("get{}APIGroup", group_name(group)),
            tag: group_tag(group),
            ..discovery("get information of a group", API_GROUP)
        }],
    }
}

/// The paths that do not depend on kinds.
pub(super) fn of_server() -> Vec<PathItem<'static>> {
    let of = |path: &str, id: &str, tag: &str, operation: Operation<'static>| PathItem {
        path: path.to_owned(),
        kind: "",
        operations: vec![Operation { id: id.to_owned(), tag: tag.to_owned(), ..operation }],
    };
    let versions = "get available API versions";
    let info = discovery("get the version information for this server", VERSION_INFO);
    let document = "get service account issuer OpenID configuration, also known as the 'OIDC discovery doc'";
    let keys = "get service account issuer OpenID JSON Web Key Set (contains public token verification keys)";
    vec![
        of("/api/", "getCoreAPIVersions", "core", discovery(versions, API_VERSIONS)),
        of("/apis/", "getAPIVersions", "apis", discovery(versions, GROUP_LIST)),
        of("/version/", "getCodeVersion", "version", Operation { consumes: JSON, produces: JSON, ..info }),
        of(
            "/.well-known/openid-configuration/",
            "getServiceAccountIssuerOpenIDConfiguration",
            "WellKnown",
            Operation { consumes: &[], produces: JSON, ..discovery(document, "") },
        ),
        of(
            "/openid/v1/jwks/",
            "getServiceAccountIssuerOpenIDKeyset",
            "openid",
            Operation { consumes: &[], produces: &["application/jwk-set+json"], ..discovery(keys, "") },
        ),
    ]
}

/// An operation that reads a document. The caller sets the name and the tag.
fn discovery(description: &str, result: &'static str) -> Operation<'static> {
    Operation {
        method: "get",
        action: "",
        id: String::new(),
        description: description.to_owned(),
        tag: String::new(),
        parameters: Cow::Borrowed(""),
        body: None,
        consumes: MEDIA,
        produces: MEDIA,
        codes: OK,
        result: Cow::Borrowed(result),
        group_version_kind: Value::Null,
    }
}

fn root_of(group: &str, version: &str) -> String {
    if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") }
}

/// Name of the definition of a subresource's bodies. `None` if the bodies are streams or text.
fn body_of<'a>(kind: &'a Resource, sub: &Subresource) -> Option<&'a str> {
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
fn type_of(kind: &Resource, sub: Option<&Subresource>) -> Value {
    match sub.filter(|_| kind.is_built_in()) {
        Some(sub) => json!({"group": sub.group, "kind": sub.kind, "version": sub.version}),
        None => json!({"group": kind.group, "kind": kind.kind, "version": kind.version}),
    }
}

/// The words of a group's name. For `rbac.authorization.k8s.io`: `rbac`, `authorization`.
fn words(group: &str) -> impl Iterator<Item = &str> {
    let group = if group.is_empty() { "core" } else { group };
    group.strip_suffix(".k8s.io").unwrap_or(group).split(['.', '-'])
}

/// The form of a group in the names of operations: `RbacAuthorization`.
fn group_name(group: &str) -> String {
    words(group).map(capitalized).collect()
}

/// The tag of a group: `rbacAuthorization`.
fn group_tag(group: &str) -> String {
    let mut words = words(group);
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |tag, word| tag + &capitalized(word))
}

/// The tag of a group version: `rbacAuthorization_v1`.
fn tag(group: &str, version: &str) -> String {
    format!("{}_{version}", group_tag(group))
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

/// The noun with its article `a` or `an`. A plural has no article.
fn with_article(noun: &str) -> String {
    if noun.ends_with('s') && !noun.ends_with("ss") {
        return noun.to_owned();
    }
    let is_vowel = noun.starts_with(['A', 'E', 'I', 'O', 'U', 'a', 'e', 'i', 'o', 'u']);
    format!("{} {noun}", if is_vowel { "an" } else { "a" })
}

// === impl Place ===

impl<'a> Place<'a> {
    /// A path with the operations of the verbs, as far as the kind has these verbs.
    fn item(self, path: String, verbs: &[Verb]) -> PathItem<'a> {
        let served = verbs.iter().filter(|verb| self.serves(verb));
        let operations = served.map(|verb| self.operation(verb)).collect();
        PathItem { path, kind: self.named(), operations }
    }

    /// The paths of a subresource. Its bodies are objects, streams, or the text of a log.
    fn of_subresource(self, sub: &'a Subresource, path: &str) -> Vec<PathItem<'a>> {
        if let Some(schema) = body_of(self.kind, sub) {
            let place = Place { schema, ..self };
            return vec![place.item(path.to_owned(), &[GET, UPDATE, PATCH, CREATE])];
        }
        let parameters = format!("{}/{}", self.kind.plural, sub.name);
        if sub.name == "log" {
            let result = Cow::Borrowed("");
            let read =
                Operation { parameters: parameters.into(), produces: LOG, result, ..self.operation(&GET) };
            return vec![PathItem { path: path.to_owned(), kind: self.named(), operations: vec![read] }];
        }
        let of = |path: String, after: &str, methods: &'static [&'static str]| PathItem {
            path,
            kind: self.named(),
            operations: methods
                .iter()
                .map(|method| Operation {
                    parameters: parameters.clone().into(),
                    ..self.connect(method, after)
                })
                .collect(),
        };
        if sub.name == "proxy" {
            let below = of(format!("{path}/{{path}}"), "WithPath", PROXY_METHODS);
            return vec![of(path.to_owned(), "", PROXY_METHODS), below];
        }
        vec![of(path.to_owned(), "", STREAM_METHODS)]
    }

    /// An operation of a stream, such as `exec`. The caller sets the parameters.
    fn connect(&self, method: &'static str, after: &str) -> Operation<'a> {
        let (kind, sub) = (&self.kind.kind, self.sub.map_or("", |sub| &*sub.name));
        Operation {
            method,
            action: "connect",
            id: self.id("connect", &capitalized(method), after),
            description: format!("connect {} requests to {sub} of {kind}", method.to_ascii_uppercase()),
            consumes: ANY,
            produces: ANY,
            result: Cow::Borrowed(""),
            ..self.operation(&GET)
        }
    }

    /// The kind that the path names.
    fn named(&self) -> &'a str {
        self.sub.filter(|_| self.kind.is_built_in()).map_or(&*self.kind.kind, |sub| &*sub.kind)
    }

    fn serves(&self, verb: &Verb) -> bool {
        let verbs = self.sub.map_or(&self.kind.verbs, |sub| &sub.verbs);
        // As upstream, no document has the deprecated paths of watches of custom resources.
        (verb.name != "watch" || self.kind.is_built_in()) && verbs.iter().any(|known| known == verb.name)
    }

    fn operation(&self, verb: &Verb) -> Operation<'a> {
        let is_built_in = self.kind.is_built_in();
        let (before, after) = match verb.action {
            "deletecollection" => ("Collection", ""),
            "watchlist" => ("", "List"),
            _ => ("", ""),
        };
        let consumes = match (verb.action, is_built_in) {
            ("patch", true) => PATCHES,
            ("patch", false) => CUSTOM_PATCHES,
            (_, true) => ANY,
            (_, false) => CUSTOM,
        };
        let produces = match (verb.action, is_built_in) {
            (_, false) => CUSTOM,
            ("list" | "watch" | "watchlist", true) => STREAMED,
            (_, true) => MEDIA,
        };
        let parameters = match (verb.action, is_built_in) {
            ("get", true) => "",
            ("deletecollection", false) => "list",
            _ => verb.parameters,
        };
        Operation {
            method: verb.method,
            action: verb.action,
            id: self.id(verb.prefix, before, after),
            description: self.description(verb),
            tag: tag(&self.kind.group, &self.kind.version),
            parameters: Cow::Borrowed(parameters),
            body: self.body(verb),
            consumes,
            produces,
            codes: if verb.action == "patch" && !is_built_in { OK } else { verb.codes },
            result: self.result(verb),
            group_version_kind: type_of(self.kind, self.sub),
        }
    }

    fn body(&self, verb: &Verb) -> Option<&'a str> {
        match verb.action {
            "post" | "put" => Some(self.schema),
            "patch" => Some(PATCH_BODY),
            "delete" => Some(DELETE_OPTIONS),
            "deletecollection" if self.kind.is_built_in() => Some(DELETE_OPTIONS),
            _ => None,
        }
    }

    fn result(&self, verb: &Verb) -> Cow<'a, str> {
        match verb.action {
            "list" => list::name(self.kind).into(),
            "watch" | "watchlist" => WATCH_EVENT.into(),
            "deletecollection" => STATUS.into(),
            "delete" if !self.kind.returns_deleted() => STATUS.into(),
            _ => self.schema.into(),
        }
    }

    fn description(&self, verb: &Verb) -> String {
        let kind = &*self.kind.kind;
        let of = self.sub.map(|sub| format!("{} of ", sub.name)).unwrap_or_default();
        let instead = "deprecated: use the 'watch' parameter with a list operation instead";
        match verb.action {
            "list" if self.kind.is_built_in() && self.kind.has_verb("watch") => {
                format!("list or watch objects of kind {kind}")
            }
            "list" => format!("list objects of kind {kind}"),
            "watchlist" => format!("watch individual changes to a list of {kind}. {instead}."),
            "watch" => format!(
                "watch changes to an object of kind {kind}. {instead}, filtered to a single item with the \
                 'fieldSelector' parameter."
            ),
            "deletecollection" => format!("delete collection of {kind}"),
            "post" => format!("create {of}{}", with_article(kind)),
            "delete" => format!("delete {of}{}", with_article(kind)),
            "get" => format!("read {of}the specified {kind}"),
            "put" => format!("replace {of}the specified {kind}"),
            _ => format!("partially update {of}the specified {kind}"),
        }
    }

    /// A unique name of the operation: `listAppsV1NamespacedDeployment`, `readAppsV1NamespacedDeploymentStatus`.
    /// `before` and `after` are inserted before and after the kind. Source: `GetOperationIDAndTags` of
    /// `k8s.io/apiserver`.
    fn id(&self, prefix: &str, before: &str, after: &str) -> String {
        let kind = self.kind;
        let (group, version) = (group_name(&kind.group), capitalized(&kind.version));
        let scope = if kind.namespaced && !self.is_everywhere { "Namespaced" } else { "" };
        let sub = self.sub.map(|sub| capitalized(&sub.name)).unwrap_or_default();
        let end = if self.is_everywhere { "ForAllNamespaces" } else { "" };
        format!("{prefix}{group}{version}{before}{scope}{}{sub}{after}{end}", kind.kind)
    }
}
