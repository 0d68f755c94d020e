//! Pod Security admission: the labels of a namespace determine the pods that it accepts.
//!
//! Source: `k8s.io/pod-security-admission/admission`. The checks themselves are in `coracle_kinds::pod_security`.

mod config;
mod namespace;

use async_trait::async_trait;
use coracle_kinds::{
    kind::by_resource,
    pod_security::{self, Level, LevelVersion, Policy, Violation},
};
use serde_json::Value;

use super::{Admission, Admit, Attributes, Operation};
use crate::error::{ApiError, Result};
pub(super) use config::PodSecurityConfig;

/// Subresources of pods that do not change checked fields. All other subresources are checked.
const IGNORED: [&str; 8] = ["exec", "attach", "binding", "eviction", "log", "portforward", "proxy", "status"];

#[derive(Default)]
pub(super) struct PodSecurity(pub(super) PodSecurityConfig);

/// Metadata and spec of a pod or of a pod template.
#[derive(Clone, Copy)]
struct PodParts<'a> {
    metadata: &'a Value,
    spec: &'a Value,
}

#[async_trait]
impl Admit for PodSecurity {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if attributes.operation == Operation::Delete {
            return Ok(());
        }
        match (&*attributes.kind.group, &*attributes.kind.plural) {
            ("", "namespaces") => namespace::validate(&self.0, admission, attributes, object).await,
            ("", "pods") => self.pod(admission, attributes, object),
            (group, plural) => match pod_security::template(group, plural, object) {
                Some((metadata, spec)) if attributes.subresource.is_empty() => {
                    self.evaluate(admission, attributes, PodParts { metadata, spec }, false)
                }
                _ => Ok(()),
            },
        }
    }
}

// === impl PodSecurity ===

impl PodSecurity {
    fn pod(&self, admission: &Admission, attributes: &Attributes<'_>, pod: &Value) -> Result<()> {
        if IGNORED.contains(&attributes.subresource) || self.is_exempt(attributes, None) {
            return Ok(());
        }
        let same = |old| !pod_security::is_significant_update(pod, old);
        if !attributes.writes_new_pod() && attributes.old.is_some_and(same) {
            return Ok(());
        }
        let parts = PodParts { metadata: &pod["metadata"], spec: &pod["spec"] };
        self.evaluate(admission, attributes, parts, true)
    }

    /// Checks a pod or a template. Only pods are rejected (`enforce`). A template causes only a warning and an audit
    /// annotation, because its pods are checked later.
    fn evaluate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        parts: PodParts<'_>,
        enforce: bool,
    ) -> Result<()> {
        let PodParts { metadata, spec } = parts;
        if self.is_exempt(attributes, spec["runtimeClassName"].as_str()) {
            return Ok(());
        }
        let policy = self.policy(admission, attributes)?;
        let check = |at: LevelVersion| pod_security::evaluate(at, metadata, spec);
        let enforced = if enforce { check(policy.enforce) } else { Vec::new() };
        if enforce {
            annotate(attributes, "enforce-policy", policy.enforce.to_string());
        }
        let audited = check(policy.audit);
        if !audited.is_empty() {
            record_audit(attributes, violates("would violate", policy.audit, &audited));
        }
        if !enforced.is_empty() {
            let why = violates("violates", policy.enforce, &enforced);
            return Err(ApiError::forbidden_object(attributes.kind, attributes.name, why));
        }
        let warned = check(policy.warn);
        if !warned.is_empty() {
            attributes.warnings.add(violates("would violate", policy.warn, &warned));
        }
        Ok(())
    }

    /// Whether the request is exempt from the checks. If so, annotates its audit record with the reason.
    fn is_exempt(&self, attributes: &Attributes<'_>, runtime_class: Option<&str>) -> bool {
        let Some(reason) = self.exemption(attributes, runtime_class.unwrap_or_default()) else {
            return false;
        };
        tracing::debug!(
            namespace = attributes.namespace,
            name = attributes.name,
            reason,
            "pod security exemption"
        );
        annotate(attributes, "exempt", reason);
        true
    }

    fn exemption(&self, attributes: &Attributes<'_>, runtime_class: &str) -> Option<&'static str> {
        let config = &self.0;
        let has = |list: &[String], name: &str| list.iter().any(|one| one == name);
        if has(&config.namespaces, attributes.namespace) {
            Some("namespace")
        } else if has(&config.usernames, &attributes.user.name) {
            Some("user")
        } else if !runtime_class.is_empty() && has(&config.runtime_classes, runtime_class) {
            Some("runtimeClass")
        } else {
            None
        }
    }

    /// The policy of the request's namespace.
    fn policy(&self, admission: &Admission, attributes: &Attributes<'_>) -> Result<Policy> {
        let kind = by_resource("", "v1", "namespaces").ok_or_else(ApiError::no_resource)?;
        let namespace = admission.cache.get(kind, "", attributes.namespace);
        let namespace = namespace.ok_or_else(|| {
            ApiError::internal(format!("failed to lookup namespace {:?}", attributes.namespace))
        })?;
        let labels = &namespace.part(&[&["metadata", "labels"]])["metadata"]["labels"];
        let (policy, causes) = Policy::of_labels(labels, self.0.defaults);
        if !causes.is_empty() {
            let causes = causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message));
            let causes = match causes.collect::<Vec<_>>().as_slice() {
                [one] => one.clone(),
                several => format!("[{}]", several.join(", ")),
            };
            annotate(attributes, "error", format!("Failed to parse policy: {causes}"));
        }
        Ok(policy)
    }
}

/// The message, for example `violates PodSecurity "restricted:latest": privileged (…)`.
fn violates(verb: &str, at: LevelVersion, violations: &[Violation]) -> String {
    format!("{verb} PodSecurity \"{at}\": {}", pod_security::details(violations))
}

/// Annotates the audit record, if there is one.
fn annotate(attributes: &Attributes<'_>, name: &str, value: impl Into<String>) {
    if let Some(record) = attributes.audit {
        record.annotate(&format!("{}{name}", pod_security::PREFIX), value);
    }
}

/// Annotates the audit record. Without an audit record the violation is logged.
fn record_audit(attributes: &Attributes<'_>, violation: String) {
    let annotation = format!("{}audit-violations", pod_security::PREFIX);
    if let Some(record) = attributes.audit {
        return record.annotate(&annotation, violation);
    }
    tracing::info!(
        user = attributes.user.name,
        resource = &*attributes.kind.plural,
        namespace = attributes.namespace,
        name = attributes.name,
        annotation,
        violation,
        "pod security audit violation"
    );
}
