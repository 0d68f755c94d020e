//! Admission policies in CEL: compiled policies with their bindings, and the parameters of a request.
//!
//! A policy is compiled once after each change, and a binding is parsed once. Requests share the compiled form.

mod annotations;
mod merge;
mod mutating;
mod params;
mod validating;

use std::{
    collections::HashMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use coracle_kinds::{Resource, kind::by_resource};
use serde_json::Value;

use super::{
    Admission, Attributes, GROUP,
    expression::{self, LIGHT, Subject},
    matching::Matching,
    review::Objects,
    webhook::objects,
};
use crate::{error::Result, offload};

pub(super) use mutating::MutatingPolicies;
pub(super) use validating::ValidatingPolicies;

/// A compiled policy.
struct Policy<P> {
    name: String,
    revision: u64,
    matching: Matching,
    params: Option<params::ParamKind>,
    rules: P,
    /// Whether an evaluation cost more than [`LIGHT`]. All further evaluations then run outside of the async workers.
    is_costly: AtomicBool,
}

/// A policy and its bindings.
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

/// The policies of one kind, compiled at a revision of policies and a revision of bindings.
struct Policies<P> {
    policies: &'static str,
    bindings: &'static str,
    read: fn(&Value) -> P,
    current: RwLock<Current<P>>,
}

/// The newest revisions of the policies of one kind, and of their bindings.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Revisions {
    policies: u64,
    bindings: u64,
}

struct Current<P> {
    of: Revisions,
    bound: Arc<[Bound<P>]>,
}

/// The groups of reviews.
const REVIEWS: [&str; 2] = ["authentication.k8s.io", "authorization.k8s.io"];

/// Whether a resource is a policy, a webhook configuration or a review. Policies do not apply to such a resource, so
/// that a broken policy can be repaired and does not stop other components. Policies apply to custom resources of the
/// same groups.
fn is_exempt(kind: &Resource) -> bool {
    kind.is_built_in() && (kind.group == GROUP || REVIEWS.contains(&&*kind.group))
}

// === impl Policies ===

impl<P> Policies<P> {
    fn new(policies: &'static str, bindings: &'static str, read: fn(&Value) -> P) -> Self {
        let current = RwLock::new(Current { of: Revisions::default(), bound: Arc::new([]) });
        Self { policies, bindings, read, current }
    }

    /// The policies that have bindings. Changed policies are compiled again.
    ///
    /// # Errors
    /// `InternalError` if a policy or a binding cannot be decrypted and no former state is known. An unknown policy
    /// might deny the request.
    fn current(&self, admission: &Admission) -> Result<Arc<[Bound<P>]>> {
        let kinds = by_resource(GROUP, "v1", self.policies).zip(by_resource(GROUP, "v1", self.bindings));
        let Some((policies, bindings)) = kinds else { return Ok(Arc::new([])) };
        admission.cache.check_complete(policies, "")?;
        admission.cache.check_complete(bindings, "")?;
        let newest =
            |kind: &Resource| admission.cache.of(kind).map_or(0, |collection| collection.lock().newest());
        let of = Revisions { policies: newest(policies), bindings: newest(bindings) };
        let known = || {
            let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
            (current.of == of, current.bound.clone())
        };
        if let (true, bound) = known() {
            return Ok(bound);
        }
        // No lock is held during the compilation, so other requests do not wait for it.
        Ok(offload::run(true, || match known() {
            (true, bound) => bound,
            (false, old) => {
                let bound = self.compile(admission, policies, bindings, &old);
                self.replace(of, &bound);
                bound
            }
        }))
    }

    /// Stores compiled policies. The objects may be newer than these revisions. In this case, the next call reads them
    /// once more.
    fn replace(&self, of: Revisions, bound: &Arc<[Bound<P>]>) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        // Another request may have stored newer policies meanwhile.
        if current.of.policies <= of.policies && current.of.bindings <= of.bindings {
            *current = Current { of, bound: bound.clone() };
        }
    }

    /// The policies that have bindings. Unchanged policies are taken from `old`.
    fn compile(
        &self,
        admission: &Admission,
        policies: &Resource,
        bindings: &Resource,
        old: &[Bound<P>],
    ) -> Arc<[Bound<P>]> {
        let mut known: HashMap<&str, &Arc<Policy<P>>> =
            old.iter().map(|bound| (bound.policy.name.as_str(), &bound.policy)).collect();
        let mut by_policy: HashMap<String, Vec<Binding>> = HashMap::new();
        for binding in admission.cache.list(bindings, "") {
            let binding = binding.value();
            let policy = binding["spec"]["policyName"].as_str().unwrap_or_default().to_owned();
            by_policy.entry(policy).or_default().push(Binding::read(&binding));
        }
        let mut bound = Vec::new();
        for object in admission.cache.list(policies, "") {
            let Some(bindings) = by_policy.remove(object.name()) else { continue };
            let old = known.remove(object.name()).filter(|policy| policy.revision == object.revision);
            let policy = old.cloned().unwrap_or_else(|| {
                Arc::new(Policy::read(object.name(), object.revision, &object.value()["spec"], self.read))
            });
            bound.push(Bound { policy, bindings });
        }
        bound.into()
    }
}

// === impl Policy ===

impl<P> Policy<P> {
    fn read(name: &str, revision: u64, spec: &Value, read: fn(&Value) -> P) -> Self {
        Self {
            name: name.to_owned(),
            revision,
            matching: Matching::of_policy(&spec["matchConstraints"]),
            params: params::ParamKind::read(&spec["paramKind"]),
            rules: read(spec),
            is_costly: AtomicBool::new(false),
        }
    }

    /// Evaluates the policy. A long evaluation runs outside of the async workers.
    async fn run<T>(&self, subject: &Subject<'_>, is_heavy: bool, evaluate: impl FnMut() -> T) -> Result<T> {
        let before = subject.cost().spent();
        let is_heavy = is_heavy || self.is_costly.load(Ordering::Relaxed);
        let result = expression::evaluate(subject, is_heavy, evaluate).await?;
        self.record_cost(subject.cost().spent() - before);
        Ok(result)
    }

    /// Records the cost of an evaluation.
    fn record_cost(&self, cost: u64) {
        if cost > LIGHT {
            self.is_costly.store(true, Ordering::Relaxed);
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

/// Bytes of objects and parameters above which expressions run outside of the async workers. Two nested loops over that
/// many bytes take about a million units of cost.
const SMALL: usize = 2 << 10;

/// Number of parameters of a binding above which all evaluations run outside of the async workers.
const FEW_PARAMS: usize = 8;

/// Whether the evaluation may take long with these objects, this parameter, and this number of parameters.
fn is_heavy(objects: &Objects, params: Option<&Value>, number: usize) -> bool {
    number > FEW_PARAMS
        || [Some(&objects.new), Some(&objects.old), params]
            .into_iter()
            .flatten()
            .any(|value| offload::is_longer(value, SMALL))
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
async fn versioned(attributes: &Attributes<'_>, kind: &Resource, object: &Value) -> Result<Objects> {
    objects(attributes, kind, object).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_compilation_does_not_replace_a_newer_one() {
        let policies: Policies<()> = Policies::new("p", "b", |_spec| ());
        let revisions = || policies.current.read().unwrap().of;
        let revision = |(policies, bindings)| Revisions { policies, bindings };
        let bound: Arc<[Bound<()>]> = Arc::new([]);
        for (of, expect) in [((1, 4), (1, 4)), ((2, 4), (2, 4)), ((1, 4), (2, 4)), ((3, 3), (2, 4))] {
            let (expect, of) = (revision(expect), revision(of));
            policies.replace(of, &bound);
            assert_eq!(revisions(), expect, "{of:?}");
        }
    }

    #[test]
    fn policies_apply_to_custom_resources_in_the_group_of_reviews() {
        let review = by_resource(REVIEWS[0], "v1", "tokenreviews").unwrap();
        assert!(is_exempt(review));
        let mut custom = crate::custom_resources::with_spec(&serde_json::json!({"type": "object"}));
        custom.group = REVIEWS[0].into();
        assert!(!is_exempt(&custom));
    }

    #[test]
    fn expressions_over_long_objects_or_parameters_are_heavy() {
        let (short, long) = (serde_json::json!({"a": 1}), Value::from("x".repeat(SMALL)));
        let objects = |new: &Value, old: &Value| Objects { new: new.clone(), old: old.clone() };
        assert!(!is_heavy(&objects(&short, &Value::Null), Some(&short), FEW_PARAMS));
        assert!(is_heavy(&objects(&long, &short), None, 1));
        assert!(is_heavy(&objects(&short, &long), None, 1));
        assert!(is_heavy(&objects(&short, &short), Some(&long), 1));
        assert!(is_heavy(&objects(&short, &short), Some(&short), FEW_PARAMS + 1));
    }

    #[test]
    fn the_cost_of_an_evaluation_is_recorded_with_the_policy() {
        let policy = || Policy::read("p", 1, &serde_json::json!({}), |_spec| ());
        let (cheap, costly) = (policy(), policy());
        cheap.record_cost(LIGHT);
        assert!(!cheap.is_costly.load(Ordering::Relaxed));
        costly.record_cost(LIGHT + 1);
        assert!(costly.is_costly.load(Ordering::Relaxed));
    }
}
