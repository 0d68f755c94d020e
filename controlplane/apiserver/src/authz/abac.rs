//! The mode `ABAC`: a file in which each line is one policy in JSON. The file is read at the start.
//!
//! Source: `k8s.io/kubernetes/pkg/auth/authorizer/abac`.

use std::{io::Read as _, path::Path};

use serde::Deserialize;

use super::{AccessAttributes, Authorizer, Deciding, Decision};

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
    /// # Errors
    /// The file cannot be read, or a line is not a policy.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let mut text = String::new();
        let read = std::fs::File::open(path).and_then(|file| file.take(LIMIT + 1).read_to_string(&mut text));
        read.map_err(|error| error.to_string())?;
        match text.len() as u64 > LIMIT {
            true => Err(format!("it is larger than {LIMIT} bytes")),
            false => Self::parse(&text),
        }
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
}

// === impl Policy ===

impl Policy {
    fn parse(line: &str) -> Result<Self, String> {
        let line: Line = serde_json::from_str(line).map_err(|error| error.to_string())?;
        if line.api_version != "abac.authorization.kubernetes.io/v1beta1" || line.kind != "Policy" {
            return Err(format!(
                "expected a Policy of abac.authorization.kubernetes.io/v1beta1, found {:?} of {:?}",
                line.kind, line.api_version
            ));
        }
        let mut policy = line.spec;
        // A wildcard matches authenticated users only.
        if policy.user == "*" || policy.group == "*" {
            policy.user.clear();
            AUTHENTICATED.clone_into(&mut policy.group);
        }
        Ok(policy)
    }

    fn allows(&self, attributes: &AccessAttributes<'_>) -> bool {
        self.is_for(attributes) && self.has_verb(attributes.verb) && self.names(attributes)
    }

    fn is_for(&self, attributes: &AccessAttributes<'_>) -> bool {
        let user = attributes.user;
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

    use super::*;
    use crate::{authn::User, cache::Cache, request::RequestInfo};

    const HEAD: &str =
        r#"{"apiVersion": "abac.authorization.kubernetes.io/v1beta1", "kind": "Policy", "spec": "#;

    fn allows(spec: &str, user: &User, method: Method, uri: &str) -> bool {
        let policies = Abac::parse(&format!("# comment\n\n{HEAD}{spec}}}\n")).unwrap();
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
    fn a_line_that_is_no_policy_is_refused_with_its_number() {
        for line in [r#"{"user": "ann"}"#, "x", &format!("{HEAD}{{\"usr\": \"a\"}}}}")] {
            assert!(Abac::parse(&format!("\n{line}")).unwrap_err().starts_with("line 2: "), "{line}");
        }
    }
}
