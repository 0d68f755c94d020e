//! Flow schemas: select the priority level and the flow of a request. No I/O.
//!
//! Source: `k8s.io/apiserver/pkg/util/flowcontrol/rule.go`.

use serde_json::Value;

use crate::{authn::User, request::RequestInfo};

/// A flow schema, compiled for matching.
#[derive(Clone, Debug)]
pub(crate) struct Schema {
    pub(crate) name: String,
    pub(crate) uid: String,
    /// Name of the priority level.
    pub(crate) level: String,
    /// The matching schema with the lowest value is used; if the values are equal, the first schema by name is used.
    pub(crate) precedence: i64,
    distinguisher: Distinguisher,
    rules: Vec<Rule>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Distinguisher {
    None,
    User,
    Namespace,
}

#[derive(Clone, Debug)]
struct Rule {
    subjects: Vec<Subject>,
    resources: Vec<ResourceRule>,
    paths: Vec<PathRule>,
}

#[derive(Clone, Debug)]
enum Subject {
    /// A name, or `*`.
    User(String),
    /// A name, or `*`.
    Group(String),
    /// Namespace and name; the name may be `*`.
    Account(String, String),
}

#[derive(Clone, Debug)]
struct ResourceRule {
    verbs: Vec<String>,
    groups: Vec<String>,
    resources: Vec<String>,
    cluster_scope: bool,
    namespaces: Vec<String>,
}

#[derive(Clone, Debug)]
struct PathRule {
    verbs: Vec<String>,
    urls: Vec<String>,
}

// === impl Schema ===

impl Schema {
    /// Reads a stored FlowSchema.
    pub(crate) fn read(object: &Value) -> Self {
        let spec = &object["spec"];
        let distinguisher = match spec["distinguisherMethod"]["type"].as_str() {
            Some("ByUser") => Distinguisher::User,
            Some("ByNamespace") => Distinguisher::Namespace,
            _ => Distinguisher::None,
        };
        Self {
            name: text(&object["metadata"]["name"]),
            uid: text(&object["metadata"]["uid"]),
            level: text(&spec["priorityLevelConfiguration"]["name"]),
            precedence: spec["matchingPrecedence"].as_i64().unwrap_or(1000),
            distinguisher,
            rules: items(&spec["rules"]).map(Rule::read).collect(),
        }
    }

    pub(crate) fn matches(&self, user: &User, info: &RequestInfo) -> bool {
        self.rules.iter().any(|rule| rule.matches(user, info))
    }

    /// The flow distinguisher of a request: its user or its namespace. Empty if the schema does not distinguish flows.
    pub(crate) fn flow<'a>(&self, user: &'a User, info: &'a RequestInfo) -> &'a str {
        match self.distinguisher {
            Distinguisher::None => "",
            Distinguisher::User => &user.name,
            Distinguisher::Namespace => info.resource.as_ref().map_or("", |path| &path.namespace),
        }
    }
}

// === impl Rule ===

impl Rule {
    fn read(rule: &Value) -> Self {
        Self {
            subjects: items(&rule["subjects"]).filter_map(Subject::read).collect(),
            resources: items(&rule["resourceRules"]).map(ResourceRule::read).collect(),
            paths: items(&rule["nonResourceRules"]).map(PathRule::read).collect(),
        }
    }

    fn matches(&self, user: &User, info: &RequestInfo) -> bool {
        self.subjects.iter().any(|subject| subject.matches(user))
            && match &info.resource {
                Some(_) => self.resources.iter().any(|rule| rule.matches(info)),
                None => self.paths.iter().any(|rule| rule.matches(info)),
            }
    }
}

// === impl Subject ===

impl Subject {
    fn read(subject: &Value) -> Option<Self> {
        match subject["kind"].as_str()? {
            "User" => Some(Self::User(text(&subject["user"]["name"]))),
            "Group" => Some(Self::Group(text(&subject["group"]["name"]))),
            "ServiceAccount" => {
                let account = &subject["serviceAccount"];
                Some(Self::Account(text(&account["namespace"]), text(&account["name"])))
            }
            _ => None,
        }
    }

    fn matches(&self, user: &User) -> bool {
        match self {
            Self::User(name) => name == "*" || *name == user.name,
            Self::Group(name) => name == "*" || user.is_in(name),
            Self::Account(namespace, name) => {
                let account = user.name.strip_prefix("system:serviceaccount:");
                account.and_then(|account| account.split_once(':')).is_some_and(|(own, account)| {
                    own == namespace && !account.is_empty() && (name == "*" || name == account)
                })
            }
        }
    }
}

// === impl ResourceRule ===

impl ResourceRule {
    fn read(rule: &Value) -> Self {
        Self {
            verbs: texts(&rule["verbs"]),
            groups: texts(&rule["apiGroups"]),
            resources: texts(&rule["resources"]),
            cluster_scope: rule["clusterScope"] == true,
            namespaces: texts(&rule["namespaces"]),
        }
    }

    fn matches(&self, info: &RequestInfo) -> bool {
        let Some(path) = &info.resource else { return false };
        let in_scope = match path.namespace.as_str() {
            "" => self.cluster_scope,
            namespace => has(&self.namespaces, namespace),
        };
        let is_named = has(&self.resources, "*")
            || match path.subresource.as_str() {
                "" => has(&self.resources, &path.resource),
                sub => self
                    .resources
                    .iter()
                    .any(|one| one.split_once('/') == Some((path.resource.as_str(), sub))),
            };
        in_scope && has(&self.verbs, info.verb) && has(&self.groups, &path.group) && is_named
    }
}

// === impl PathRule ===

impl PathRule {
    fn read(rule: &Value) -> Self {
        Self { verbs: texts(&rule["verbs"]), urls: texts(&rule["nonResourceURLs"]) }
    }

    fn matches(&self, info: &RequestInfo) -> bool {
        let is_path = |url: &String| match url.strip_suffix('*') {
            Some(start) => info.path.starts_with(start),
            None => *url == info.path,
        };
        has(&self.verbs, info.verb) && self.urls.iter().any(is_path)
    }
}

/// Whether a list contains a value or the wildcard.
fn has(list: &[String], value: &str) -> bool {
    list.iter().any(|one| one == value || one == "*")
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn texts(value: &Value) -> Vec<String> {
    items(value).map(text).collect()
}

#[cfg(test)]
mod tests {
    use http::Method;
    use serde_json::json;

    use super::*;

    fn info(method: &str, uri: &str) -> RequestInfo {
        RequestInfo::parse(&method.parse::<Method>().unwrap(), &uri.parse().unwrap())
    }

    fn schema(rule: Value) -> Schema {
        Schema::read(&json!({"metadata": {"name": "s"}, "spec": {"rules": [rule],
            "distinguisherMethod": {"type": "ByNamespace"}, "priorityLevelConfiguration": {"name": "l"}}}))
    }

    fn everything(subject: Value) -> Schema {
        schema(
            json!({"subjects": [subject], "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
            "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"],
                "clusterScope": true}]}),
        )
    }

    #[test]
    fn subjects_are_users_groups_and_service_accounts() {
        let account = User::new("system:serviceaccount:n:a", &["dev"]);
        let get = info("GET", "/api/v1/pods");
        for (subject, expected) in [
            (json!({"kind": "User", "user": {"name": "*"}}), true),
            (json!({"kind": "User", "user": {"name": "system:serviceaccount:n:a"}}), true),
            (json!({"kind": "User", "user": {"name": "ann"}}), false),
            (json!({"kind": "Group", "group": {"name": "dev"}}), true),
            (json!({"kind": "Group", "group": {"name": "ops"}}), false),
            (json!({"kind": "ServiceAccount", "serviceAccount": {"namespace": "n", "name": "*"}}), true),
            (json!({"kind": "ServiceAccount", "serviceAccount": {"namespace": "n", "name": "a"}}), true),
            (json!({"kind": "ServiceAccount", "serviceAccount": {"namespace": "n", "name": "b"}}), false),
            (json!({"kind": "ServiceAccount", "serviceAccount": {"namespace": "m", "name": "*"}}), false),
            (json!({"kind": "Other"}), false),
        ] {
            assert_eq!(everything(subject.clone()).matches(&account, &get), expected, "{subject}");
        }
    }

    #[test]
    fn rules_match_verbs_resources_namespaces_and_paths() {
        let subjects = json!([{"kind": "User", "user": {"name": "*"}}]);
        let rules = schema(json!({"subjects": subjects,
            "resourceRules": [
                {"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods", "pods/log"],
                    "namespaces": ["a"]},
                {"verbs": ["*"], "apiGroups": ["apps"], "resources": ["*"], "clusterScope": true}],
            "nonResourceRules": [{"verbs": ["get"], "nonResourceURLs": ["/healthz", "/logs/*"]}]}));
        let user = User::new("ann", &[]);
        for (method, uri, expected) in [
            ("GET", "/api/v1/namespaces/a/pods", true),
            ("GET", "/api/v1/namespaces/a/pods/p/log", true),
            ("GET", "/api/v1/namespaces/a/pods/p/exec", false),
            ("GET", "/api/v1/namespaces/b/pods", false),
            ("GET", "/api/v1/pods", false),
            ("POST", "/api/v1/namespaces/a/pods", false),
            ("DELETE", "/apis/apps/v1/deployments", true),
            ("GET", "/apis/apps/v1/namespaces/a/deployments", false),
            ("GET", "/healthz", true),
            ("GET", "/healthz/ping", false),
            ("GET", "/logs/a/b", true),
            ("POST", "/healthz", false),
        ] {
            assert_eq!(rules.matches(&user, &info(method, uri)), expected, "{method} {uri}");
        }
        let request = info("GET", "/api/v1/namespaces/a/pods");
        assert_eq!(rules.flow(&user, &request), "a");
    }
}
