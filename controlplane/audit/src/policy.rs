//! The audit policy: rules in order; the first rule that matches a request decides.
//!
//! Source: `k8s.io/apiserver/pkg/audit/policy/checker.go` and `pkg/apis/audit/validation`.

use serde::{Deserialize, Serialize};

/// The level of detail with which a request is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Level {
    /// Nothing is recorded.
    #[default]
    None,
    /// User, time, resource and verb.
    Metadata,
    /// The metadata and the request's object.
    Request,
    /// The metadata, the request's object and the response's object.
    RequestResponse,
}

/// A stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// The request is authenticated, and not yet handled.
    RequestReceived,
    /// The headers of a long-running response are sent, and its body is not sent yet.
    ResponseStarted,
    /// The response is complete.
    ResponseComplete,
    /// The handler panicked. This server never reports this stage, but a policy may contain it.
    Panic,
}

/// The rules.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Policy {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    /// The metadata of the policy. As upstream, it is accepted and not used.
    #[serde(default, rename = "metadata")]
    _metadata: serde_json::Value,
    #[serde(default)]
    rules: Vec<Rule>,
    #[serde(default)]
    omit_stages: Vec<Stage>,
    #[serde(default)]
    omit_managed_fields: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Rule {
    level: Level,
    #[serde(default)]
    users: Vec<String>,
    #[serde(default)]
    user_groups: Vec<String>,
    #[serde(default)]
    verbs: Vec<String>,
    #[serde(default)]
    resources: Vec<GroupResources>,
    #[serde(default)]
    namespaces: Vec<String>,
    #[serde(default, rename = "nonResourceURLs")]
    non_resource_urls: Vec<String>,
    #[serde(default)]
    omit_stages: Vec<Stage>,
    #[serde(default)]
    omit_managed_fields: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GroupResources {
    #[serde(default)]
    group: String,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    resource_names: Vec<String>,
}

/// The attributes of a request for the policy.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a> {
    /// Name of the user; `None` if authentication failed.
    pub user: Option<&'a str>,
    /// The user's groups.
    pub groups: &'a [String],
    /// The verb, such as `get` or `list`. For paths without a resource, the method in lower case.
    pub verb: &'a str,
    /// The path.
    pub path: &'a str,
    /// The resource, if the path has one.
    pub resource: Option<ResourceAttributes<'a>>,
}

/// The resource of a request.
#[derive(Clone, Copy, Debug)]
pub struct ResourceAttributes<'a> {
    /// API group; empty for core.
    pub group: &'a str,
    /// Plural name: `pods`.
    pub resource: &'a str,
    /// Name of the subresource. Empty for the object itself.
    pub subresource: &'a str,
    /// Namespace of the request. Empty for all namespaces and for cluster-scoped resources.
    pub namespace: &'a str,
    /// Name of the object. Empty for the collection.
    pub name: &'a str,
}

/// The decision of the policy about a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// The level of detail.
    pub level: Level,
    /// Stages for which no event is recorded.
    pub omit_stages: Vec<Stage>,
    /// Whether `metadata.managedFields` is removed from recorded objects.
    pub omit_managed_fields: bool,
}

/// The policy is invalid.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The text is not YAML, or has an unknown field or value.
    #[error("cannot decode the audit policy")]
    Decode(#[from] serde_yaml_ng::Error),
    /// A field has an invalid value.
    #[error("{0}")]
    Invalid(String),
}

// === impl Policy ===

impl Policy {
    /// Reads a policy from YAML or JSON.
    ///
    /// # Errors
    /// [`PolicyError`] with the first problem.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let policy: Self = serde_yaml_ng::from_str(text)?;
        if (policy.api_version.as_str(), policy.kind.as_str()) != ("audit.k8s.io/v1", "Policy") {
            return Err(PolicyError::Invalid(format!(
                "expected a Policy of audit.k8s.io/v1, found {:?} of {:?}",
                policy.kind, policy.api_version
            )));
        }
        if policy.rules.is_empty() {
            return Err(PolicyError::Invalid("the audit policy has no rules".to_owned()));
        }
        for (index, rule) in policy.rules.iter().enumerate() {
            rule.check().map_err(|reason| PolicyError::Invalid(format!("rules[{index}].{reason}")))?;
        }
        Ok(policy)
    }

    /// The decision of the first rule that matches. If no rule matches, nothing is recorded.
    #[must_use]
    pub fn decide(&self, attributes: &Attributes<'_>) -> Decision {
        let Some(rule) = self.rules.iter().find(|rule| rule.matches(attributes)) else {
            return Decision::default();
        };
        Decision {
            level: rule.level,
            omit_stages: [&self.omit_stages[..], &rule.omit_stages].concat(),
            omit_managed_fields: rule.omit_managed_fields.unwrap_or(self.omit_managed_fields),
        }
    }
}

// === impl Rule ===

impl Rule {
    fn check(&self) -> Result<(), String> {
        let of_resources = !self.resources.is_empty() || !self.namespaces.is_empty();
        if of_resources && !self.non_resource_urls.is_empty() {
            return Err(
                "nonResourceURLs: a rule applies to resources or to other paths, not to both".to_owned()
            );
        }
        for (index, url) in self.non_resource_urls.iter().enumerate() {
            let is_path = url == "*" || url.starts_with('/');
            if !is_path || url.trim_end_matches('*').contains('*') {
                return Err(format!(
                    "nonResourceURLs[{index}]: {url:?} must begin with \"/\" and have \"*\" at its end only"
                ));
            }
        }
        for (index, group) in self.resources.iter().enumerate() {
            if group.group.contains('/') {
                return Err(format!("resources[{index}].group: {:?} must have no version", group.group));
            }
            if !group.resource_names.is_empty() && group.resources.is_empty() {
                return Err(format!("resources[{index}].resourceNames: needs at least one resource"));
            }
        }
        Ok(())
    }

    fn matches(&self, attributes: &Attributes<'_>) -> bool {
        let allows = |list: &[String], value: &str| list.is_empty() || list.iter().any(|one| one == value);
        let has_user = self.users.is_empty() || attributes.user.is_some_and(|user| allows(&self.users, user));
        let in_group = self.user_groups.is_empty()
            || attributes.groups.iter().any(|group| self.user_groups.contains(group));
        if !has_user || !in_group || !allows(&self.verbs, attributes.verb) {
            return false;
        }
        if !self.namespaces.is_empty() || !self.resources.is_empty() {
            return attributes.resource.as_ref().is_some_and(|resource| {
                allows(&self.namespaces, resource.namespace)
                    && (self.resources.is_empty() || self.resources.iter().any(|group| group.has(resource)))
            });
        }
        if !self.non_resource_urls.is_empty() {
            return attributes.resource.is_none()
                && self.non_resource_urls.iter().any(|url| covers(url, attributes.path));
        }
        true
    }
}

/// Whether a pattern, which may end with `*`, covers a path.
fn covers(pattern: &str, path: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => path.starts_with(prefix),
        None => path == pattern,
    }
}

// === impl GroupResources ===

impl GroupResources {
    fn has(&self, wanted: &ResourceAttributes<'_>) -> bool {
        if self.group != wanted.group {
            return false;
        }
        if self.resources.is_empty() {
            return true;
        }
        let named =
            self.resource_names.is_empty() || self.resource_names.iter().any(|name| name == wanted.name);
        named && self.resources.iter().any(|pattern| covers_resource(pattern, wanted))
    }
}

/// Whether a pattern of a rule covers a resource: `pods`, `pods/log`, `pods/*`, `*/log` or `*`.
fn covers_resource(pattern: &str, wanted: &ResourceAttributes<'_>) -> bool {
    match pattern.split_once('/') {
        None if pattern == "*" => true,
        None => wanted.subresource.is_empty() && pattern == wanted.resource,
        Some((resource, "*")) => resource == wanted.resource,
        Some(("*", subresource)) => !wanted.subresource.is_empty() && subresource == wanted.subresource,
        Some((resource, subresource)) => (resource, subresource) == (wanted.resource, wanted.subresource),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &str) -> Policy {
        Policy::parse(&format!("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: {rules}")).unwrap()
    }

    fn of<'a>(resource: &'a str, subresource: &'a str) -> Attributes<'a> {
        let resource = ResourceAttributes { group: "", resource, subresource, namespace: "a", name: "x" };
        Attributes { user: Some("ann"), groups: &[], verb: "get", path: "", resource: Some(resource) }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let policy = policy(
            "[{level: None, users: [bob]}, {level: Request, resources: [{resources: [pods, '*/status']}]},
              {level: RequestResponse, resources: [{resources: [secrets/*], resourceNames: [x]}]},
              {level: Metadata, omitStages: [RequestReceived], omitManagedFields: true}]",
        );
        for (resource, subresource, level) in [
            ("pods", "", Level::Request),
            ("pods", "log", Level::Metadata),
            ("nodes", "status", Level::Request),
            ("secrets", "", Level::RequestResponse),
            ("secrets", "y", Level::RequestResponse),
            ("configmaps", "", Level::Metadata),
        ] {
            assert_eq!(policy.decide(&of(resource, subresource)).level, level, "{resource}/{subresource}");
        }
        let bob = Attributes { user: Some("bob"), ..of("pods", "") };
        assert_eq!(policy.decide(&bob), Decision::default());
        let last = policy.decide(&of("nodes", ""));
        assert!(last.omit_managed_fields && last.omit_stages == [Stage::RequestReceived]);
    }

    #[test]
    fn rules_name_groups_verbs_namespaces_and_paths() {
        let policy = policy(
            "[{level: Metadata, userGroups: [dev], verbs: [create]}, {level: Request, namespaces: [b, '']},
              {level: RequestResponse, nonResourceURLs: ['/healthz*', /version]}]",
        );
        let groups = ["dev".to_owned()];
        let level = |attributes: &Attributes<'_>| policy.decide(attributes).level;
        let creates = Attributes { groups: &groups, verb: "create", ..of("pods", "") };
        assert_eq!(level(&creates), Level::Metadata);
        assert_eq!(level(&Attributes { verb: "get", ..creates }), Level::None);
        let node =
            ResourceAttributes { group: "", resource: "nodes", subresource: "", namespace: "", name: "n" };
        assert_eq!(level(&Attributes { resource: Some(node), ..of("pods", "") }), Level::Request);
        for (path, expected) in [
            ("/healthz/ping", Level::RequestResponse),
            ("/version", Level::RequestResponse),
            ("/version/x", Level::None),
        ] {
            assert_eq!(level(&Attributes { resource: None, path, ..of("", "") }), expected, "{path}");
        }
    }

    #[test]
    fn an_invalid_policy_names_the_rule() {
        for (rules, problem) in [
            ("[]", "no rules"),
            ("[{level: None, nonResourceURLs: [x]}]", "rules[0].nonResourceURLs[0]"),
            ("[{level: None, nonResourceURLs: ['/a*b']}]", "rules[0].nonResourceURLs[0]"),
            ("[{level: None, namespaces: [x], nonResourceURLs: [/x]}]", "rules[0].nonResourceURLs"),
            ("[{level: None, resources: [{group: apps/v1}]}]", "rules[0].resources[0].group"),
            ("[{level: None, resources: [{resourceNames: [x]}]}]", "rules[0].resources[0].resourceNames"),
        ] {
            let text = format!("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: {rules}");
            let error = Policy::parse(&text).unwrap_err().to_string();
            assert!(error.contains(problem), "{rules}: {error}");
        }
        for text in ["kind: Policy", "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: All}]"] {
            assert!(Policy::parse(text).is_err(), "{text}");
        }
    }
}
