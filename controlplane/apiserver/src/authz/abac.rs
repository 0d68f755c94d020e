//! The mode `ABAC`: a file with one policy in JSON per line. The file is read at the start.
//!
//! Source: `k8s.io/kubernetes/pkg/auth/authorizer/abac`.

use std::path::Path;

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::{AccessAttributes, Authorizer, Deciding, Decision, RulesScope, UserRules, rbac::rule::Rule};
use crate::{authn::User, bounded_file};

/// Maximum bytes of the file.
const LIMIT: u64 = 4 << 20;
/// A line with at least this number of bytes is refused, as upstream (`bufio.MaxScanTokenSize`).
const LINE_LIMIT: usize = 64 << 10;
/// Maximum number of characters of a line in an error.
const SHOWN: usize = 200;
/// Versions of policies.
const V0: &str = "abac.authorization.kubernetes.io/v0";
const V1BETA1: &str = "abac.authorization.kubernetes.io/v1beta1";
/// Fields of a line in the version v0, and of a spec in the version v1beta1.
const OLD_FIELDS: &[&str] = &["apiVersion", "kind", "user", "group", "readonly", "resource", "namespace"];
const LINE_FIELDS: &[&str] = &["apiVersion", "kind", "spec"];
const SPEC_FIELDS: &[&str] =
    &["user", "group", "readonly", "apiGroup", "resource", "namespace", "nonResourcePath"];
const AUTHENTICATED: &str = "system:authenticated";

/// The policies of a file.
#[derive(Debug)]
pub(super) struct Abac(Vec<Policy>);

/// A policy in the version v0. Lines without a version also have this version. Source:
/// `k8s.io/kubernetes/pkg/apis/abac/v0`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct OldPolicy {
    user: String,
    group: String,
    readonly: bool,
    resource: String,
    namespace: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
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
        let mut unversioned = 0_usize;
        let mut for_everyone = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let number = index + 1;
            if line.len() >= LINE_LIMIT {
                return Err(format!("line {number}: it has {LINE_LIMIT} bytes or more"));
            }
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let shown = || line.chars().take(SHOWN).collect::<String>();
            let parsed =
                Parsed::of(line).map_err(|reason| format!("line {number}: {}: {reason}", shown()))?;
            unversioned += usize::from(parsed.is_unversioned);
            for_everyone.extend(parsed.is_for_everyone.then_some(number));
            if !parsed.unknown.is_empty() {
                let fields = parsed.unknown.join(" ");
                tracing::error!(
                    line = number,
                    fields,
                    "ignoring unknown fields of an ABAC policy, which may allow more than intended"
                );
            }
            policies.push(parsed.policy);
        }
        if let Some(first_line) = for_everyone.first() {
            tracing::error!(
                first_line,
                policies = for_everyone.len(),
                "ABAC policies without user and group apply to every authenticated user and service account"
            );
        }
        if unversioned > 0 {
            tracing::warn!(lines = unversioned, "ABAC policies have no version");
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

/// A line with a policy.
struct Parsed {
    policy: Policy,
    /// Whether version or kind are missing.
    is_unversioned: bool,
    /// Whether the policy applies to all authenticated users, because the line names no subject.
    is_for_everyone: bool,
    /// Names of fields that have no effect.
    unknown: Vec<String>,
}

// === impl Parsed ===

impl Parsed {
    /// Parses a line. As upstream, unknown fields have no effect, and a line without a version has the version v0.
    fn of(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
        if value.is_null() {
            // Upstream reads null as a policy without fields, which allows everything.
            return Err("it is not an object".to_owned());
        }
        let mut fields = object(value)?;
        let (version, kind) = (text(&fields, "apiVersion")?, text(&fields, "kind")?);
        let is_unversioned = version.is_empty() || kind.is_empty();
        match (&*version, &*kind) {
            ("" | V0, "" | "Policy") => {
                let unknown = unknown(&fields, OLD_FIELDS);
                let old: OldPolicy = decode(fields)?;
                let is_for_everyone = old.user.is_empty() && old.group.is_empty();
                Ok(Self { policy: old.into(), is_unversioned, is_for_everyone, unknown })
            }
            (V1BETA1, "Policy") => {
                let mut unknown = unknown(&fields, LINE_FIELDS);
                let spec = object(fields.remove("spec").unwrap_or_default())?;
                unknown.extend(self::unknown(&spec, SPEC_FIELDS));
                let policy = decode::<Policy>(spec)?.with_wildcard();
                Ok(Self { policy, is_unversioned, is_for_everyone: false, unknown })
            }
            _ => Err(format!("expected a Policy of {V1BETA1}, found {kind:?} of {version:?}")),
        }
    }
}

/// The fields of an object, without the fields that are null. As in Go, null counts as absent. This also applies to a
/// spec that is null.
fn object(value: Value) -> Result<Map<String, Value>, String> {
    match value {
        Value::Object(mut fields) => {
            fields.retain(|_name, value| !value.is_null());
            Ok(fields)
        }
        Value::Null => Ok(Map::new()),
        _ => Err("it is not an object".to_owned()),
    }
}

fn text(fields: &Map<String, Value>, name: &str) -> Result<String, String> {
    match fields.get(name) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(format!("{name} is not a string")),
    }
}

/// Names of the fields that are not in `known`.
fn unknown(fields: &Map<String, Value>, known: &[&str]) -> Vec<String> {
    fields.keys().filter(|name| !known.contains(&name.as_str())).cloned().collect()
}

fn decode<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, String> {
    serde_json::from_value(Value::Object(fields)).map_err(|error| error.to_string())
}

// === impl OldPolicy ===

impl From<OldPolicy> for Policy {
    /// An absent field matches everything, and the policy applies to all API groups.
    fn from(old: OldPolicy) -> Self {
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
    /// The policy for all authenticated users if its user or its group is the wildcard `*`, as upstream.
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
            None => match self.non_resource_path.ends_with('*') {
                true => attributes.info.path.starts_with(self.non_resource_path.trim_end_matches('*')),
                false => self.non_resource_path == attributes.info.path,
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
        let v1beta1 =
            r#"{"apiVersion": "abac.authorization.kubernetes.io/v1beta1", "spec": {"user": "ann"}}"#;
        for line in [
            "[]",
            "null",
            "x",
            r#"{"user": 3}"#,
            r#"{"user": "ann"} {}"#,
            r#"{"kind": "Other"}"#,
            r#"{"apiVersion": "v1", "kind": "Policy"}"#,
            r#"{"apiVersion": 1}"#,
            v1beta1,
            &format!("{HEAD}[]}}"),
            &format!("{HEAD}{{\"readonly\": \"yes\"}}}}"),
        ] {
            let error = Abac::parse(&format!("\n{line}")).unwrap_err();
            assert!(error.starts_with(&format!("line 2: {line}: ")), "{error}");
        }
        let long = format!("# {}", "x".repeat(LINE_LIMIT));
        assert!(Abac::parse(&format!("\n\n{long}")).unwrap_err().starts_with("line 3: it has "));
    }

    #[test]
    fn unknown_fields_have_no_effect_and_versions_are_as_upstream() {
        let (ann, pods) = (User::new("ann", &[]), "/api/v1/namespaces/a/pods");
        for (line, expected) in [
            (r#"{"user": "ann", "nonResourcePath": "/x", "usr": "bob"}"#.to_owned(), true),
            (r#"{"kind": "Policy", "user": "ann"}"#.to_owned(), true),
            (format!(r#"{{"apiVersion": "{V0}", "kind": "Policy", "user": "ann"}}"#), true),
            (format!(r#"{{"apiVersion": "{V0}", "user": "ann", "namespace": null}}"#), true),
            (
                format!(r#"{HEAD}{{"user": "ann", "namespace": "a", "resource": "pods", "other": {{}}}}}}"#),
                true,
            ),
            (format!("{HEAD}{{}}}}"), false),
            (format!("{HEAD}null}}"), false),
        ] {
            assert_eq!(line_allows(&line, &ann, Method::POST, pods), expected, "{line}");
        }
        // As upstream, such a line applies to everyone; the log has an error.
        for (line, expected) in [(r#"{"usr": "ann"}"#, true), ("{}", true), (r#"{"user": "*"}"#, false)] {
            let parsed = Parsed::of(line).unwrap();
            assert_eq!((parsed.is_for_everyone, &*parsed.policy.group), (expected, AUTHENTICATED), "{line}");
        }
        let parsed = Parsed::of(r#"{"user": "ann", "readOnly": true}"#).unwrap();
        assert_eq!((parsed.is_unversioned, parsed.unknown), (true, vec!["readOnly".to_owned()]));
        let parsed = Parsed::of(&format!(r#"{HEAD}{{"user": "ann", "usr": 1}}, "x": 1}}"#)).unwrap();
        assert_eq!((parsed.is_unversioned, parsed.unknown), (false, vec!["x".to_owned(), "usr".to_owned()]));
    }
}
