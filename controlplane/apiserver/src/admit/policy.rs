//! Admission policies in CEL: the compiled policies with their bindings, and the parameters of a request.
//!
//! A policy is compiled once after it changed; a binding is read once. Requests share the compiled form.

mod mutating;
mod params;
mod validating;

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
};

use coracle_kinds::{Resource, kind::by_resource};
use serde_json::Value;

use super::{Attributes, GROUP, matching::Matching, webhook::objects};
use crate::{error::Result, server::State};

pub(super) use mutating::MutatingPolicies;
pub(super) use validating::ValidatingPolicies;

/// A compiled policy.
struct Policy<P> {
    name: String,
    revision: u64,
    matching: Matching,
    params: Option<params::ParamKind>,
    rules: P,
}

/// A policy with the bindings that name it.
struct Bound<P> {
    policy: Arc<Policy<P>>,
    bindings: Vec<Binding>,
}

/// A binding of a policy.
struct Binding {
    name: String,
    matching: Matching,
    params: Option<params::ParamRef>,
    /// `validationActions`.
    actions: Vec<String>,
}

/// The policies of one kind, compiled at these revisions of policies and bindings.
struct Policies<P> {
    policies: &'static str,
    bindings: &'static str,
    read: fn(&Value) -> P,
    current: RwLock<Current<P>>,
}

struct Current<P> {
    of: (u64, u64),
    bound: Arc<[Bound<P>]>,
}

/// Whether a request is for a policy or a webhook configuration. No policy applies to it, so that a broken policy can
/// be repaired.
fn is_exempt(attributes: &Attributes<'_>) -> bool {
    attributes.kind.group == GROUP
}

// === impl Policies ===

impl<P> Policies<P> {
    fn new(policies: &'static str, bindings: &'static str, read: fn(&Value) -> P) -> Self {
        let current = RwLock::new(Current { of: (0, 0), bound: Arc::new([]) });
        Self { policies, bindings, read, current }
    }

    /// The policies that have bindings. Those that changed are compiled again.
    fn current(&self, state: &State) -> Arc<[Bound<P>]> {
        let kinds = by_resource(GROUP, "v1", self.policies).zip(by_resource(GROUP, "v1", self.bindings));
        let Some((policies, bindings)) = kinds else { return Arc::new([]) };
        let newest =
            |kind: &Resource| state.cache.of(kind).map_or(0, |collection| collection.lock().newest());
        let of = (newest(policies), newest(bindings));
        {
            let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
            if current.of == of {
                return current.bound.clone();
            }
        }
        // The objects may be newer than these revisions; then they are read once more.
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if current.of == of {
            return current.bound.clone();
        }
        let mut known: HashMap<&str, &Arc<Policy<P>>> =
            current.bound.iter().map(|bound| (bound.policy.name.as_str(), &bound.policy)).collect();
        let mut by_policy: HashMap<String, Vec<Binding>> = HashMap::new();
        for binding in state.cache.list(bindings, "") {
            let binding = binding.value();
            let policy = binding["spec"]["policyName"].as_str().unwrap_or_default().to_owned();
            by_policy.entry(policy).or_default().push(Binding::read(&binding));
        }
        let mut bound = Vec::new();
        for object in state.cache.list(policies, "") {
            let Some(bindings) = by_policy.remove(object.name()) else { continue };
            let old = known.remove(object.name()).filter(|policy| policy.revision == object.revision);
            let policy = old.cloned().unwrap_or_else(|| {
                Arc::new(Policy::read((object.name(), object.revision), &object.value()["spec"], self.read))
            });
            bound.push(Bound { policy, bindings });
        }
        let bound: Arc<[Bound<P>]> = bound.into();
        *current = Current { of, bound: bound.clone() };
        bound
    }
}

// === impl Policy ===

impl<P> Policy<P> {
    fn read((name, revision): (&str, u64), spec: &Value, read: fn(&Value) -> P) -> Self {
        Self {
            name: name.to_owned(),
            revision,
            matching: Matching::of_policy(&spec["matchConstraints"]),
            params: params::ParamKind::read(&spec["paramKind"]),
            rules: read(spec),
        }
    }
}

// === impl Binding ===

impl Binding {
    fn read(binding: &Value) -> Self {
        let spec = &binding["spec"];
        let actions = spec["validationActions"].as_array().into_iter().flatten();
        Self {
            name: binding["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
            matching: Matching::of_binding(&spec["matchResources"]),
            params: params::ParamRef::read(&spec["paramRef"]),
            actions: actions.filter_map(Value::as_str).map(str::to_owned).collect(),
        }
    }

    fn has_action(&self, action: &str) -> bool {
        self.actions.iter().any(|known| known == action)
    }
}

/// The error of a request that a policy denies.
fn denied(attributes: &Attributes<'_>, message: &str, reason: &str) -> crate::error::ApiError {
    let mut error = crate::error::ApiError::forbidden_object(attributes.kind, attributes.name, message);
    (error.code, error.reason) = match reason {
        "Unauthorized" => (401, "Unauthorized"),
        "Forbidden" => (403, "Forbidden"),
        "RequestEntityTooLarge" => (413, "RequestEntityTooLarge"),
        _ => (422, "Invalid"),
    };
    if let Some(details) = error.details.as_object_mut() {
        details.insert("causes".to_owned(), serde_json::json!([{"message": message}]));
    }
    error
}

/// The objects of the request in the version of a rule.
async fn versioned(
    attributes: &Attributes<'_>,
    kind: &Resource,
    object: &Value,
) -> Result<super::webhook::review::Objects> {
    objects(attributes, kind, object).await
}
