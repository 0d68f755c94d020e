//! One webhook of a configuration, and which requests it is for. Pure.

use std::{sync::Arc, time::Duration};

use coracle_kinds::{Resource, selector::LabelSelector};
use serde_json::Value;

use super::super::Operation;

/// Default port of a service.
const PORT: u16 = 443;

/// One webhook, parsed.
#[expect(clippy::struct_excessive_bools, reason = "independent properties of a webhook")]
pub(crate) struct Hook {
    pub(crate) name: String,
    pub(crate) rules: Vec<Rule>,
    /// Whether a request for another version of the resource matches, too.
    pub(crate) equivalent: bool,
    pub(crate) namespaces: LabelSelector,
    pub(crate) objects: LabelSelector,
    pub(crate) target: Target,
    /// The TLS configuration, or why there is none.
    pub(crate) tls: Result<Arc<rustls::ClientConfig>, String>,
    pub(crate) timeout: Duration,
    /// Whether a failed call fails the request.
    pub(crate) fails: bool,
    /// Whether it may be called for a dry run.
    pub(crate) dry_run: bool,
    /// Whether it is called again when a later webhook has changed the object.
    pub(crate) again: bool,
    /// Version of the AdmissionReview.
    pub(crate) version: &'static str,
}

/// Where a webhook listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Url { host: String, port: u16, path: String },
    Service { namespace: String, name: String, port: u16, path: String },
}

/// `rules` of a webhook.
pub(crate) struct Rule {
    operations: Vec<String>,
    groups: Vec<String>,
    versions: Vec<String>,
    resources: Vec<String>,
    scope: String,
}

/// What rules are compared with.
#[derive(Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) operation: Operation,
    pub(crate) kind: &'a Resource,
    /// Empty for cluster-scoped objects.
    pub(crate) namespace: &'a str,
    pub(crate) subresource: &'a str,
}

// === impl Hook ===

impl Hook {
    /// Reads a webhook of a configuration, which is validated and has its defaults.
    pub(crate) fn read(hook: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let seconds = hook["timeoutSeconds"].as_u64().unwrap_or(10);
        let selector = |field: &str| LabelSelector::from_object(&hook[field]).unwrap_or_default();
        let versions = hook["admissionReviewVersions"].as_array().into_iter().flatten();
        let version = versions.filter_map(Value::as_str).find(|version| matches!(*version, "v1" | "v1beta1"));
        Self {
            name: text(&hook["name"]),
            rules: hook["rules"].as_array().into_iter().flatten().map(Rule::read).collect(),
            equivalent: hook["matchPolicy"] != "Exact",
            namespaces: selector("namespaceSelector"),
            objects: selector("objectSelector"),
            target: Target::read(&hook["clientConfig"]),
            tls: super::client::tls(&text(&hook["clientConfig"]["caBundle"])),
            timeout: Duration::from_secs(seconds),
            fails: hook["failurePolicy"] != "Ignore",
            dry_run: matches!(hook["sideEffects"].as_str(), Some("None" | "NoneOnDryRun")),
            again: hook["reinvocationPolicy"] == "IfNeeded",
            version: if version == Some("v1beta1") { "v1beta1" } else { "v1" },
        }
    }

    pub(crate) fn has_rule_for(&self, subject: Subject<'_>) -> bool {
        self.rules.iter().any(|rule| rule.matches(subject))
    }
}

// === impl Target ===

impl Target {
    fn read(config: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let service = &config["service"];
        if service.is_object() {
            let path = text(&service["path"]);
            let port = service["port"].as_u64().and_then(|port| u16::try_from(port).ok());
            return Self::Service {
                namespace: text(&service["namespace"]),
                name: text(&service["name"]),
                port: port.unwrap_or(PORT),
                path: if path.is_empty() { "/".to_owned() } else { path },
            };
        }
        let uri: http::Uri = text(&config["url"]).parse().unwrap_or_default();
        Self::Url {
            host: uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(PORT),
            path: uri.path().to_owned(),
        }
    }

    /// The URL in messages.
    pub(crate) fn url(&self, seconds: u64) -> String {
        match self {
            Self::Url { host, port, path } => format!("https://{host}:{port}{path}?timeout={seconds}s"),
            Self::Service { namespace, name, port, path } => {
                format!("https://{name}.{namespace}.svc:{port}{path}?timeout={seconds}s")
            }
        }
    }

    pub(crate) fn path(&self) -> &str {
        match self {
            Self::Url { path, .. } | Self::Service { path, .. } => path,
        }
    }
}

// === impl Rule ===

impl Rule {
    fn read(rule: &Value) -> Self {
        let texts = |field: &str| {
            let list = rule[field].as_array().into_iter().flatten().filter_map(Value::as_str);
            list.map(str::to_owned).collect()
        };
        Self {
            operations: texts("operations"),
            groups: texts("apiGroups"),
            versions: texts("apiVersions"),
            resources: texts("resources"),
            scope: rule["scope"].as_str().unwrap_or("*").to_owned(),
        }
    }

    fn matches(&self, subject: Subject<'_>) -> bool {
        let has = |list: &[String], wanted: &str| list.iter().any(|one| one == "*" || one == wanted);
        let operation = match subject.operation {
            Operation::Create => "CREATE",
            Operation::Update => "UPDATE",
            Operation::Delete => "DELETE",
        };
        // A namespace is cluster-scoped, although requests for it have its name as their namespace.
        let is_cluster_scoped = subject.namespace.is_empty() || subject.kind.is("", "Namespace");
        let in_scope = match self.scope.as_str() {
            "Namespaced" => !is_cluster_scoped,
            "Cluster" => is_cluster_scoped,
            _ => true,
        };
        let of_resource = |one: &String| {
            let (resource, subresource) = one.split_once('/').unwrap_or((one, ""));
            (resource == "*" || resource == subject.kind.plural)
                && (subresource == "*" || subresource == subject.subresource)
        };
        in_scope
            && has(&self.operations, operation)
            && has(&self.groups, &subject.kind.group)
            && has(&self.versions, &subject.kind.version)
            && self.resources.iter().any(of_resource)
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_resource;
    use serde_json::json;

    use super::*;

    fn matches(rule: Value, plural: &str, namespace: &str, subresource: &str) -> bool {
        let kind = by_resource("", "v1", plural).unwrap();
        let mut hook = json!({"name": "a.b.c", "rules": [rule]});
        for (field, value) in
            [("operations", json!(["CREATE"])), ("apiGroups", json!([""])), ("apiVersions", json!(["v1"]))]
        {
            if hook["rules"][0][field].is_null() {
                hook["rules"][0][field] = value;
            }
        }
        let subject = Subject { operation: Operation::Create, kind, namespace, subresource };
        Hook::read(&hook).has_rule_for(subject)
    }

    #[test]
    fn rules_select_operations_resources_and_scopes() {
        assert!(matches(json!({"resources": ["pods"]}), "pods", "ns", ""));
        assert!(!matches(json!({"resources": ["pods"]}), "pods", "ns", "status"));
        assert!(matches(json!({"resources": ["pods/*"]}), "pods", "ns", "status"));
        assert!(matches(json!({"resources": ["*/status"]}), "pods", "ns", "status"));
        assert!(matches(json!({"resources": ["*/*"]}), "pods", "ns", ""));
        assert!(!matches(json!({"resources": ["*"], "operations": ["DELETE"]}), "pods", "ns", ""));
        assert!(matches(json!({"resources": ["*"], "operations": ["*"]}), "pods", "ns", ""));
        assert!(!matches(json!({"resources": ["*"], "apiGroups": ["apps"]}), "pods", "ns", ""));
        assert!(!matches(json!({"resources": ["*"], "scope": "Cluster"}), "pods", "ns", ""));
        assert!(matches(json!({"resources": ["*"], "scope": "Cluster"}), "namespaces", "ns", ""));
        assert!(!matches(json!({"resources": ["*"], "scope": "Namespaced"}), "namespaces", "ns", ""));
    }

    #[test]
    fn a_target_is_a_service_or_a_url() {
        let url = Target::read(&json!({"url": "https://[2001:db8::1]:8443/hook"}));
        assert_eq!(url, Target::Url { host: "2001:db8::1".into(), port: 8443, path: "/hook".into() });
        let service = Target::read(&json!({"service": {"namespace": "n", "name": "s", "port": 443}}));
        assert_eq!(service.url(5), "https://s.n.svc:443/?timeout=5s");
    }
}
