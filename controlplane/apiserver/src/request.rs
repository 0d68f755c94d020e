//! Request attributes, parsed from method, path and query.

use std::{borrow::Cow, collections::HashMap, sync::Arc};

use coracle_kinds::{Resource, Resources};
use coracle_values::{field_selector, names::path_segment};
use http::Method;

use crate::error::{ApiError, Result};

/// The path of the backup of a running control plane.
pub const BACKUP_PATH: &str = "/coracle/backup";

/// The attributes of a request.
#[derive(Clone, Debug)]
pub(crate) struct RequestInfo {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`. For non-resource paths the
    /// method in lower case. Empty for all other methods.
    pub(crate) verb: &'static str,
    /// The path in the client's encoding.
    pub(crate) path: String,
    pub(crate) query: Query,
    /// The resource of the path. `None` for a non-resource path.
    pub(crate) resource: Option<ResourceInfo>,
}

/// The resource in a path. As upstream, the path is decoded before it is split: a server that gets the forwarded path
/// may split the decoded path. Source: `RequestInfoFactory`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct ResourceInfo {
    pub(crate) group: String,
    pub(crate) version: String,
    /// Namespace of the path. Empty for all namespaces and for cluster-scoped kinds.
    pub(crate) namespace: String,
    /// Whether the path is below `namespaces/<name>/`. The paths of a Namespace itself do not count.
    pub(crate) below_namespace: bool,
    pub(crate) resource: String,
    /// Name of the object. Empty for the collection.
    pub(crate) name: String,
    /// Name of the subresource. Empty for the object itself.
    pub(crate) subresource: String,
    /// The path after `proxy/` in the client's encoding. `None` if the path ends before this slash.
    pub(crate) proxy_path: Option<String>,
    /// Whether a deprecated path of a watch names an object. Then the name is in the field selector.
    pub(crate) is_watched_object: bool,
}

/// Query parameters. Repeated parameters keep all values in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Query {
    values: HashMap<String, Vec<String>>,
    /// The raw query, for forwarding.
    pub(crate) raw: String,
}

/// Whether a path is below one of the health checks.
pub(crate) fn is_probe(path: &str) -> bool {
    matches!(path.trim_matches('/').split('/').next(), Some("healthz" | "livez" | "readyz"))
}

/// The `resourceVersion` of a query. `None` if it is empty.
///
/// # Errors
/// The text is not a number.
pub(crate) fn parse_revision(text: &str) -> Result<Option<u64>> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_not_a_number| {
        ApiError::bad_request(format!(
            "invalid resource version: resourceVersion: Invalid value: \"{text}\": strconv.ParseUint: parsing \"{text}\": \
             invalid syntax"
        ))
    })
}

// === impl RequestInfo ===

impl RequestInfo {
    pub(crate) fn parse(method: &Method, uri: &http::Uri) -> Self {
        let mut query = Query::parse(uri.query().unwrap_or_default());
        let path = uri.path().to_owned();
        if *method == Method::GET
            && let Some(resource) = watched(&path, &mut query)
        {
            return Self { verb: "watch", path, query, resource: Some(resource) };
        }
        let resource = ResourceInfo::parse(&path);
        let verb = match &resource {
            Some(resource) => resource_verb(method, resource, &query),
            None => path_verb(method),
        };
        Self { verb, path, query, resource }
    }

    /// The name of the requested object. Lists and watches of one object name it in their field selector. Empty for
    /// requests that select several objects.
    pub(crate) fn object_name(&self) -> Cow<'_, str> {
        let Some(resource) = &self.resource else { return Cow::Borrowed("") };
        if !resource.name.is_empty() || !matches!(self.verb, "list" | "watch" | "deletecollection") {
            return Cow::Borrowed(&resource.name);
        }
        let requirements = field_selector::parse(self.query.get("fieldSelector")).unwrap_or_default();
        let mut named = requirements.into_iter().filter(|one| one.equal && one.field == "metadata.name");
        let name = named.next().map(|one| one.value).filter(|name| path_segment(name).is_empty());
        Cow::Owned(name.unwrap_or_default())
    }
}

/// The resource of a deprecated path of a watch: `/api/v1/watch/pods` stands for `/api/v1/pods?watch=1`. The name of an
/// object becomes a field selector. Source: `RequestInfoFactory`.
fn watched(path: &str, query: &mut Query) -> Option<ResourceInfo> {
    let path = decoded(path);
    let mut parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let at = if *parts.first()? == "api" { 2 } else { 3 };
    // A path that ends with `watch` is a collection of this name.
    if parts.get(at) != Some(&"watch") || parts.len() == at + 1 {
        return None;
    }
    parts.remove(at);
    let mut resource = ResourceInfo::of_segments(parts.into_iter())?;
    let name = std::mem::take(&mut resource.name);
    if !resource.subresource.is_empty() || name.contains(['=', ',', '!', '\\']) {
        return None;
    }
    if !name.is_empty() {
        query.add_field(format!("metadata.name={name}"));
        resource.is_watched_object = true;
        if !resource.below_namespace {
            resource.namespace.clear();
        }
    }
    Some(resource)
}

fn resource_verb(method: &Method, resource: &ResourceInfo, query: &Query) -> &'static str {
    let collection = resource.name.is_empty();
    match *method {
        // A GET of a named object is a get even with the parameter `watch`, as upstream.
        Method::GET | Method::HEAD if collection && query.flag("watch") => "watch",
        Method::GET | Method::HEAD if collection => "list",
        Method::GET | Method::HEAD => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE if collection => "deletecollection",
        Method::DELETE => "delete",
        _ => "",
    }
}

fn path_verb(method: &Method) -> &'static str {
    match *method {
        Method::GET => "get",
        Method::HEAD => "head",
        Method::POST => "post",
        Method::PUT => "put",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        Method::OPTIONS => "options",
        _ => "",
    }
}

// === impl ResourceInfo ===

impl ResourceInfo {
    /// `/api/v1/…` and `/apis/<group>/<version>/…` with at least a resource name.
    pub(crate) fn parse(path: &str) -> Option<Self> {
        let decoded = decoded(path);
        let mut resource = Self::of_segments(decoded.trim_matches('/').split('/'))?;
        if resource.subresource == "proxy" || resource.subresource.starts_with("proxy/") {
            "proxy".clone_into(&mut resource.subresource);
            let leading = decoded.len() - decoded.trim_start_matches('/').len();
            // Number of segments before the proxied path: the group version, the namespace, and `resource/name/proxy`.
            let group_version = if resource.group.is_empty() { 2 } else { 3 };
            let before = group_version + if resource.below_namespace { 2 } else { 0 } + 3;
            resource.proxy_path = after_slashes(path, leading + before).map(str::to_owned);
        }
        Some(resource)
    }

    /// The resource of the segments of a decoded path, with the path after `proxy/` in the subresource.
    fn of_segments<'a>(parts: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut parts = parts.map(str::to_owned);
        let group = match parts.next()?.as_str() {
            "api" => String::new(),
            "apis" => parts.next()?,
            _ => return None,
        };
        let version = parts.next()?;
        let mut rest: Vec<String> = parts.collect();
        if rest.is_empty() {
            return None;
        }
        let mut namespace = String::new();
        // `namespaces/x/status` and `namespaces/x/finalize` are subresources of the namespace itself.
        let below_namespace =
            rest.len() > 2 && rest[0] == "namespaces" && rest[2] != "status" && rest[2] != "finalize";
        if below_namespace {
            namespace = rest.remove(1);
            rest.remove(0);
        }
        let mut rest = rest.into_iter();
        let resource = rest.next()?;
        let name = rest.next().unwrap_or_default();
        let subresource = rest.collect::<Vec<_>>().join("/");
        if !below_namespace && group.is_empty() && resource == "namespaces" {
            namespace.clone_from(&name);
        }
        Some(Self {
            group,
            version,
            namespace,
            below_namespace,
            resource,
            name,
            subresource,
            proxy_path: None,
            is_watched_object: false,
        })
    }

    /// Whether the path is valid for a kind of this scope. Other paths are not served: authorization uses the namespace
    /// in the path, which has no meaning for a cluster-scoped object.
    pub(crate) fn has_path(&self, namespaced: bool) -> bool {
        match (namespaced, self.below_namespace) {
            (true, true) => !self.namespace.is_empty(),
            (true, false) => self.name.is_empty() && !self.is_watched_object,
            (false, below) => !below,
        }
    }

    /// The resource, if it is served.
    pub(crate) fn find<'a>(&self, resources: &'a Resources) -> Option<&'a Arc<Resource>> {
        resources.find(&self.group, &self.version, &self.resource)
    }
}

fn decoded(path: &str) -> Cow<'_, str> {
    percent_encoding::percent_decode_str(path).decode_utf8_lossy()
}

/// The part of a path after this number of slashes, at least one. A slash may be percent-encoded.
fn after_slashes(path: &str, count: usize) -> Option<&str> {
    let lower = path.to_ascii_lowercase();
    let plain = lower.match_indices('/').map(|(at, _)| at + 1);
    let encoded = lower.match_indices("%2f").map(|(at, _)| at + 3);
    let mut ends: Vec<usize> = plain.chain(encoded).collect();
    ends.sort_unstable();
    path.get(*ends.get(count.checked_sub(1)?)?..)
}

// === impl Query ===

impl Query {
    pub(crate) fn parse(raw: &str) -> Self {
        let mut values: HashMap<String, Vec<String>> = HashMap::new();
        for (key, value) in form_urlencoded::parse(raw.as_bytes()) {
            values.entry(key.into_owned()).or_default().push(value.into_owned());
        }
        Self { values, raw: raw.to_owned() }
    }

    /// A query with selectors only. An empty selector is omitted.
    pub(crate) fn of_selectors(fields: String, labels: String) -> Self {
        let selectors = [("fieldSelector", fields), ("labelSelector", labels)];
        let selectors = selectors.into_iter().filter(|(_, text)| !text.is_empty());
        Self {
            values: selectors.map(|(name, text)| (name.to_owned(), vec![text])).collect(),
            raw: String::new(),
        }
    }

    /// Adds a requirement to the field selector.
    fn add_field(&mut self, requirement: String) {
        let known = match self.get("fieldSelector") {
            "" => requirement,
            known => format!("{known},{requirement}"),
        };
        self.values.insert("fieldSelector".to_owned(), vec![known]);
    }

    /// The first value of a parameter.
    pub(crate) fn get(&self, key: &str) -> &str {
        self.values.get(key).and_then(|all| all.first()).map_or("", String::as_str)
    }

    pub(crate) fn all(&self, key: &str) -> &[String] {
        self.values.get(key).map_or(&[], Vec::as_slice)
    }

    /// Whether a flag is set. As upstream, any value except `0` and `false` sets it, also an empty value.
    pub(crate) fn flag(&self, key: &str) -> bool {
        self.has(key) && self.get(key) != "0" && !self.get(key).eq_ignore_ascii_case("false")
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        self.get(key).parse().ok()
    }

    /// Maximum number of objects of a page. A list at `resourceVersion=0` without a continue token has no limit.
    /// Source: `computeListLimit` of the cacher.
    pub(crate) fn page_limit(&self) -> usize {
        if self.get("resourceVersion") == "0" && self.get("continue").is_empty() {
            return usize::MAX;
        }
        let limit = self.number("limit").filter(|limit| *limit > 0);
        limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
    }

    /// Refuses a parameter that is present and not an integer.
    pub(crate) fn check_number(&self, key: &str) -> Result<()> {
        let Some(text) = self.values.get(key).and_then(|all| all.first()) else { return Ok(()) };
        let parsed = text.parse::<i64>().map(drop);
        parsed.map_err(|_not_a_number| {
            ApiError::bad_request(format!("strconv.ParseInt: parsing {text:?}: invalid syntax"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Group, namespace, resource, name and subresource of a path.
    fn parsed(path: &str) -> [String; 5] {
        let info = ResourceInfo::parse(path).unwrap();
        [info.group, info.namespace, info.resource, info.name, info.subresource]
    }

    #[test]
    fn paths_name_resources() {
        for (path, expected) in [
            ("/api/v1/pods", ["", "", "pods", "", ""]),
            ("/api/v1/nodes/n/status", ["", "", "nodes", "n", "status"]),
            ("/api/v1/namespaces", ["", "", "namespaces", "", ""]),
            ("/api/v1/namespaces/x", ["", "x", "namespaces", "x", ""]),
            ("/api/v1/namespaces/x/finalize", ["", "x", "namespaces", "x", "finalize"]),
            ("/api/v1/namespaces/x/pods", ["", "x", "pods", "", ""]),
            ("/api/v1/namespaces/x/pods/p", ["", "x", "pods", "p", ""]),
            ("/api/v1/namespaces/x/pods/p/exec", ["", "x", "pods", "p", "exec"]),
            ("/apis/apps/v1/namespaces/x/deployments/d/scale", ["apps", "x", "deployments", "d", "scale"]),
            ("/api/v1/namespaces/x/services/s/proxy/a/b", ["", "x", "services", "s", "proxy"]),
        ] {
            assert_eq!(parsed(path), expected, "{path}");
        }
    }

    #[test]
    fn an_encoded_slash_separates_segments() {
        for (path, expected) in [
            ("/apis/far.io/v1/namespaces/x/things/a%2Fstatus", ["far.io", "x", "things", "a", "status"]),
            ("/apis/far.io/v1/namespaces/x/things%2fa", ["far.io", "x", "things", "a", ""]),
            ("/api/v1/namespaces/x%2Fsecrets", ["", "x", "secrets", "", ""]),
            // A path is decoded once.
            ("/api/v1/nodes/a%252Fstatus", ["", "", "nodes", "a%2Fstatus", ""]),
            // As upstream, an empty segment is a part of the path.
            ("/apis/far.io/v1/namespaces/x/things//status", ["far.io", "x", "things", "", "status"]),
            ("/apis/far.io/v1//things/a", ["far.io", "", "", "things", "a"]),
        ] {
            assert_eq!(parsed(path), expected, "{path}");
        }
        let info = RequestInfo::parse(&Method::GET, &"/api/v1/watch%2Fnodes/n".parse().unwrap());
        assert_eq!((info.verb, &*info.object_name()), ("watch", "n"));
    }

    #[test]
    fn the_path_behind_proxy_is_kept_as_it_is() {
        let proxy_path = |path: &str| ResourceInfo::parse(path).unwrap().proxy_path;
        for (path, expect) in [
            ("/api/v1/namespaces/x/pods/p/proxy", None),
            ("/api/v1/namespaces/x/pods/p/proxy/", Some("")),
            ("/api/v1/namespaces/x/pods/https:p:1/proxy/a%2Fb//c/", Some("a%2Fb//c/")),
            ("/api/v1/nodes/n/proxy/metrics", Some("metrics")),
            ("//api/v1/nodes/n/proxy//metrics", Some("/metrics")),
            ("/api/v1/namespaces/x%2Fpods/p%2fproxy/a/b%2Fc", Some("a/b%2Fc")),
            ("/api/v1/nodes/n/proxy%2Fmetrics", Some("metrics")),
            ("/api/v1/namespaces/x/pods/p/log/proxy", None),
        ] {
            assert_eq!(proxy_path(path).as_deref(), expect, "{path}");
        }
    }

    #[test]
    fn a_path_fits_the_scope_of_the_kind() {
        for (path, namespaced, cluster) in [
            ("/api/v1/x", true, true),
            ("/api/v1/x/a", false, true),
            ("/api/v1/x/a/status", false, true),
            ("/api/v1/namespaces/a", false, true),
            ("/api/v1/namespaces/a/finalize", false, true),
            ("/api/v1/namespaces/a/x", true, false),
            ("/api/v1/namespaces/a/x/b/status", true, false),
            ("/api/v1/namespaces/a/namespaces", true, false),
            ("/api/v1/namespaces/a/namespaces/a", true, false),
            ("/api/v1/namespaces/a/namespaces/a/finalize", true, false),
            ("/api/v1/namespaces//x/b", false, false),
        ] {
            let info = ResourceInfo::parse(path).unwrap();
            assert_eq!((info.has_path(true), info.has_path(false)), (namespaced, cluster), "{path}");
        }
        // A custom resource with this name has no namespace in its path.
        assert_eq!(ResourceInfo::parse("/apis/example.com/v1/namespaces/a").unwrap().namespace, "");
    }

    #[test]
    fn other_paths_have_no_resource() {
        for path in ["/", "/api", "/api/v1", "/apis/apps", "/apis/apps/v1", "/healthz", "/openapi/v3/api/v1"]
        {
            assert_eq!(ResourceInfo::parse(path), None, "{path}");
        }
    }

    #[test]
    fn deprecated_paths_of_watches_are_watches() {
        let parse = |uri: &str| RequestInfo::parse(&Method::GET, &uri.parse().unwrap());
        for (uri, namespace, resource, fields) in [
            ("/api/v1/watch/pods", "", "pods", ""),
            ("/api/v1/watch/namespaces/x/pods?fieldSelector=a%3Db", "x", "pods", "a=b"),
            ("/api/v1/watch/namespaces/x/pods/p", "x", "pods", "metadata.name=p"),
            ("/api/v1/watch/namespaces/x?fieldSelector=a%3Db", "", "namespaces", "a=b,metadata.name=x"),
            ("/apis/apps/v1/watch/deployments", "", "deployments", ""),
        ] {
            let info = parse(uri);
            let found = info.resource.clone().unwrap();
            assert_eq!(
                (info.verb, &*found.namespace, &*found.resource),
                ("watch", namespace, resource),
                "{uri}"
            );
            assert_eq!((info.query.get("fieldSelector"), &*found.name), (fields, ""), "{uri}");
        }
        assert_eq!(parse("/api/v1/watch/namespaces/x/pods/p").object_name(), "p");
        for (path, namespaced, cluster) in [
            ("/api/v1/watch/pods", true, true),
            // An object of a namespaced kind has no path without its namespace.
            ("/api/v1/watch/pods/p", false, true),
            ("/api/v1/watch/namespaces/x/pods/p", true, false),
        ] {
            let found = parse(path).resource.unwrap();
            assert_eq!((found.has_path(true), found.has_path(false)), (namespaced, cluster), "{path}");
        }
        for other in
            ["/apis/example.com/v1/watch", "/api/v1/watch/pods/p/status", "/api/v1/watch/nodes/a%2Cb"]
        {
            assert_ne!(parse(other).verb, "watch", "{other}");
        }
        let info = RequestInfo::parse(&Method::DELETE, &"/api/v1/watch/pods".parse().unwrap());
        assert_ne!(info.verb, "watch");
    }

    #[test]
    fn verbs_follow_method_and_query() {
        let verb = |method: Method, uri: &str| RequestInfo::parse(&method, &uri.parse().unwrap()).verb;
        assert_eq!(verb(Method::GET, "/api/v1/pods"), "list");
        for yes in ["watch=1", "watch=yes", "watch", "watch=", "watch=t"] {
            assert_eq!(verb(Method::GET, &format!("/api/v1/pods?{yes}")), "watch", "{yes}");
        }
        for no in ["watch=0", "watch=false", "watch=False", "watched=1"] {
            assert_eq!(verb(Method::GET, &format!("/api/v1/pods?{no}")), "list", "{no}");
        }
        assert_eq!(verb(Method::GET, "/api/v1/namespaces/a/pods/b"), "get");
        assert_eq!(verb(Method::GET, "/api/v1/namespaces/a/pods/b?watch=1"), "get");
        assert_eq!(verb(Method::DELETE, "/api/v1/namespaces/a/pods"), "deletecollection");
        assert_eq!(verb(Method::GET, "/healthz"), "get");
    }
}
