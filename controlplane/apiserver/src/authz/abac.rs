//! The mode `ABAC`: a file with one policy in JSON per line. The file is read at the start.
//!
//! Source: `k8s.io/kubernetes/pkg/auth/authorizer/abac`.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::{AccessAttributes, Authorizer, Deciding, Decision, RulesScope, UserRules, rbac::rule::Rule};
use crate::{authn::User, bounded_file};

/// Maximum bytes of the file.
const LIMIT: u64 = 4 << 20;
const AUTHENTICATED: &str = "system:authenticated";

/// The policies of a file.
#[derive(Debug)]
pub(super) struct Abac(Vec<Policy>);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Line {
    api_version: String,
    kind: String,
    spec: Policy,
}

/// A line without a version. Source: `k8s.io/kubernetes/pkg/apis/abac/v0`.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct OldLine {
    user: String,
    group: String,
    readonly: bool,
    resource: String,
    namespace: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Policy {
    user: String,
    group: String,
    readonly: bool,
    api_group: String,
    resource: String,
    namespace: String,
    non_resource_path: String,
}

// === impl Abac ===

impl Abac {
    /// Reads a file of policies.
    ///
    /// # Errors
    /// The file cannot be read, or a line is not a policy.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        Self::parse(&bounded_file::read_text(path, LIMIT)?)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut policies = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let policy = Policy::parse(line).map_err(|reason| format!("line {}: {reason}", index + 1))?;
            policies.push(policy);
        }
        Ok(Self(policies))
    }
}

impl Authorizer for Abac {
    fn authorize<'a>(&'a self, attributes: &'a AccessAttributes<'a>) -> Deciding<'a> {
        if self.0.iter().any(|policy| policy.allows(attributes)) {
            return Decision::allow_if(true, "").ready();
        }
        Decision::no_opinion("No policy matched.").ready()
    }

    fn add_rules(&self, of: &RulesScope<'_>, found: &mut UserRules) {
        let of_user = self.0.iter().filter(|policy| policy.is_for(of.user));
        let here = of_user.filter(|policy| {
            matches!(policy.namespace.as_str(), "*" | "") || policy.namespace == of.namespace
        });
        found.rules.extend(here.flat_map(Policy::rules));
    }
}

// === impl OldLine ===

impl From<OldLine> for Policy {
    /// An absent field matches everything, and the policy applies to all API groups.
    fn from(old: OldLine) -> Self {
        let or_all = |text: String| if text.is_empty() { "*".to_owned() } else { text };
        let names_nothing = old.namespace.is_empty() && old.resource.is_empty();
        let is_for_all = old.user.is_empty() && old.group.is_empty();
        let policy = Self {
            group: if is_for_all { AUTHENTICATED.to_owned() } else { old.group },
            user: old.user,
            readonly: old.readonly,
            api_group: "*".to_owned(),
            resource: or_all(old.resource),
            namespace: or_all(old.namespace),
            non_resource_path: if names_nothing { "*".to_owned() } else { String::new() },
        };
        policy.with_wildcard()
    }
}

// === impl Policy ===

impl Policy {
    fn parse(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
        if value.is_object() && value.get("apiVersion").is_none() && value.get("kind").is_none() {
            let old: OldLine = serde_json::from_value(value).map_err(|error| error.to_string())?;
            return Ok(old.into());
        }
        let line: Line = serde_json::from_value(value).map_err(|error| error.to_string())?;
        if line.api_version != "abac.authorization.kubernetes.io/v1beta1" || line.kind != "Policy" {
            return Err(format!(
                "expected a Policy of abac.authorization.kubernetes.io/v1beta1, found {:?} of {:?}",
                line.kind, line.api_version
            ));
        }
        Ok(line.spec.with_wildcard())
    }

    /// The policy with its user wildcard restricted to authenticated users.
    fn with_wildcard(mut self) -> Self {
        if self.user == "*" || self.group == "*" {
            self.user.clear();
            AUTHENTICATED.clone_into(&mut self.group);
        }
        self
    }

    fn allows(&self, attributes: &AccessAttributes<'_>) -> bool {
        self.is_for(attributes.user) && self.has_verb(attributes.verb) && self.names(attributes)
    }

    /// The policy as rules: one for resources, one for non-resource paths.
    fn rules(&self) -> Vec<Rule> {
        let one = |text: &str| vec![text.to_owned()];
        let verbs = if self.readonly { &["get", "list", "watch"][..] } else { &["*"] };
        let verbs = || verbs.iter().map(|&verb| verb.to_owned()).collect();
        let resources = (!self.resource.is_empty() && !self.namespace.is_empty()).then(|| Rule {
            verbs: verbs(),
            groups: one(&self.api_group),
            resources: one(&self.resource),
            ..Rule::default()
        });
        let paths = (!self.non_resource_path.is_empty()).then(|| Rule {
            verbs: verbs(),
            urls: one(&self.non_resource_path),
            ..Rule::default()
        });
        resources.into_iter().chain(paths).collect()
    }

    fn is_for(&self, user: &User) -> bool {
        let is_empty = self.user.is_empty() && self.group.is_empty();
        !is_empty
            && (self.user.is_empty() || self.user == user.name)
            && (self.group.is_empty() || user.is_in(&self.group))
    }

    fn has_verb(&self, verb: &str) -> bool {
        !self.readonly || matches!(verb, "get" | "list" | "watch")
    }

    fn names(&self, attributes: &AccessAttributes<'_>) -> bool {
        let is = |pattern: &str, value: &str| pattern == "*" || pattern == value;
        match &attributes.info.resource {
            Some(path) => {
                is(&self.namespace, &path.namespace)
                    && is(&self.resource, &path.resource)
                    && is(&self.api_group, &path.group)
            }
            None => match self.non_resource_path.strip_suffix('*') {
                Some(start) => attributes.info.path.starts_with(start),
                None => self.non_resource_path == attributes.info.path,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use http::Method;
    use serde_json::json;

    use super::*;
    use crate::{cache::Cache, request::RequestInfo};

    const HEAD: &str =
        r#"{"apiVersion": "abac.authorization.kubernetes.io/v1beta1", "kind": "Policy", "spec": "#;

    fn allows(spec: &str, user: &User, method: Method, uri: &str) -> bool {
        line_allows(&format!("{HEAD}{spec}}}"), user, method, uri)
    }

    fn line_allows(line: &str, user: &User, method: Method, uri: &str) -> bool {
        let policies = Abac::parse(&format!("# comment\n\n{line}\n")).unwrap();
        let info = RequestInfo::parse(&method, &uri.parse().unwrap());
        let cache = Cache::new(0);
        policies.0[0].allows(&AccessAttributes { user, verb: info.verb, info: &info, cache: &cache })
    }

    #[test]
    fn policies_name_subjects_verbs_and_objects() {
        let ann = User::new("ann", &["dev"]);
        let pods = "/api/v1/namespaces/a/pods";
        for (spec, method, uri, expected) in [
            (r#"{"user": "ann", "namespace": "a", "resource": "pods"}"#, Method::POST, pods, true),
            (
                r#"{"user": "ann", "namespace": "a", "resource": "pods", "readonly": true}"#,
                Method::GET,
                pods,
                true,
            ),
            (
                r#"{"user": "ann", "namespace": "a", "resource": "pods", "readonly": true}"#,
                Method::POST,
                pods,
                false,
            ),
            (r#"{"user": "bob", "namespace": "*", "resource": "*"}"#, Method::GET, pods, false),
            (r#"{"group": "dev", "namespace": "*", "resource": "*"}"#, Method::GET, pods, true),
            (
                r#"{"user": "ann", "group": "ops", "namespace": "*", "resource": "*"}"#,
                Method::GET,
                pods,
                false,
            ),
            (r#"{"namespace": "*", "resource": "*"}"#, Method::GET, pods, false),
            (r#"{"user": "ann", "namespace": "b", "resource": "*"}"#, Method::GET, pods, false),
            (
                r#"{"user": "*", "namespace": "*", "resource": "*"}"#,
                Method::GET,
                "/apis/apps/v1/deployments",
                false,
            ),
            (
                r#"{"user": "*", "namespace": "*", "resource": "*", "apiGroup": "*"}"#,
                Method::GET,
                "/apis/apps/v1/deployments",
                true,
            ),
            (r#"{"user": "ann", "nonResourcePath": "/version"}"#, Method::GET, "/version", true),
            (r#"{"user": "ann", "nonResourcePath": "/logs/*"}"#, Method::GET, "/logs/x", true),
            (r#"{"user": "ann", "nonResourcePath": "/logs/*"}"#, Method::GET, "/version", false),
            (r#"{"user": "ann", "nonResourcePath": "*"}"#, Method::GET, pods, false),
        ] {
            assert_eq!(allows(spec, &ann, method, uri), expected, "{spec} {uri}");
        }
        let anonymous = User { groups: vec!["system:unauthenticated".to_owned()], ..User::default() };
        let wildcard = r#"{"user": "*", "nonResourcePath": "*"}"#;
        assert!(!allows(wildcard, &anonymous, Method::GET, "/version"));
    }

    #[test]
    fn policies_are_listed_as_rules_of_their_users() {
        let lines = [
            r#"{"user": "ann", "namespace": "a", "resource": "pods", "apiGroup": "", "readonly": true}"#,
            r#"{"group": "dev", "nonResourcePath": "/version"}"#,
            r#"{"user": "bob", "namespace": "*", "resource": "*"}"#,
        ];
        let text: String = lines.iter().map(|spec| format!("{HEAD}{spec}}}\n")).collect();
        let (abac, ann, cache) = (Abac::parse(&text).unwrap(), User::new("ann", &["dev"]), Cache::new(0));
        let rules = |namespace: &str| {
            let mut found = UserRules::default();
            abac.add_rules(&RulesScope { user: &ann, namespace, cache: &cache }, &mut found);
            found.rules.iter().map(Rule::json).collect::<Vec<_>>()
        };
        let pods = json!({"verbs": ["get", "list", "watch"], "apiGroups": [""], "resources": ["pods"]});
        let version = json!({"verbs": ["*"], "nonResourceURLs": ["/version"]});
        assert_eq!(rules("a"), [pods, version.clone()]);
        assert_eq!(rules("b"), [version]);
    }

    #[test]
    fn absent_fields_of_a_line_without_version_match_everything() {
        let ann = User::new("ann", &["dev"]);
        let (pods, jobs) = ("/api/v1/namespaces/a/pods", "/apis/batch/v1/namespaces/b/jobs");
        for (line, method, uri, expected) in [
            ("{}", Method::POST, jobs, true),
            ("{}", Method::GET, "/version", true),
            (r#"{"user": "ann", "readonly": true}"#, Method::GET, pods, true),
            (r#"{"user": "ann", "readonly": true}"#, Method::POST, pods, false),
            (r#"{"user": "bob"}"#, Method::GET, pods, false),
            (r#"{"group": "dev", "namespace": "a"}"#, Method::POST, pods, true),
            (r#"{"group": "dev", "namespace": "a"}"#, Method::POST, jobs, false),
            (r#"{"group": "dev", "namespace": "a"}"#, Method::GET, "/version", false),
            (r#"{"user": "*", "resource": "jobs"}"#, Method::POST, jobs, true),
            (r#"{"user": "*", "resource": "jobs"}"#, Method::POST, pods, false),
        ] {
            assert_eq!(line_allows(line, &ann, method, uri), expected, "{line} {uri}");
        }
        let anonymous = User { groups: vec!["system:unauthenticated".to_owned()], ..User::default() };
        assert!(!line_allows("{}", &anonymous, Method::GET, "/version"));
    }

    #[test]
    fn a_line_that_is_not_a_policy_is_refused_with_its_number() {
        for line in
            [r#"{"usr": "ann"}"#, r#"{"kind": "Policy"}"#, "[]", "x", &format!("{HEAD}{{\"usr\": \"a\"}}}}")]
        {
            assert!(Abac::parse(&format!("\n{line}")).unwrap_err().starts_with("line 2: "), "{line}");
        }
    }
}
