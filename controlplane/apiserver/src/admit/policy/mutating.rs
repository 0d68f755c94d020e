//! MutatingAdmissionPolicy. Source: `policy/mutating/dispatcher.go`.

use async_trait::async_trait;
use coracle_admission_policies::{MutatingPolicy, Patch};
use coracle_kinds::{Resource, patch};
use serde_json::Value;

use super::{
    Binding, Bound, Objects, Policies, Policy, denied, is_exempt, is_heavy,
    merge::merge,
    params::{self, ParamError},
    versioned,
};
use crate::{
    admit::{Admission, Admit, Attributes, Operation, expression::Subject, webhook},
    error::{ApiError, Result},
};

/// Evaluates mutating policies.
pub(in crate::admit) struct MutatingPolicies(Policies<MutatingPolicy>);

impl MutatingPolicies {
    pub(in crate::admit) fn new() -> Self {
        Self(Policies::new(
            "mutatingadmissionpolicies",
            "mutatingadmissionpolicybindings",
            MutatingPolicy::read,
        ))
    }
}

#[async_trait]
impl Admit for MutatingPolicies {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if cannot_change(attributes) {
            return Ok(());
        }
        let policies = self.0.current(admission)?;
        if policies.is_empty() {
            return Ok(());
        }
        let before = object.clone();
        // Policies with `reinvocationPolicy: IfNeeded`, each with the object after its evaluation.
        let mut called: Vec<(&Bound<MutatingPolicy>, Value)> = Vec::new();
        for bound in policies.iter() {
            if apply(admission, bound, attributes, object).await? && bound.policy.rules.again {
                called.push((bound, object.clone()));
            }
        }
        if *object == before {
            return Ok(());
        }
        admission.complete(attributes, object).await?;
        for (bound, left) in called {
            if *object != left {
                apply(admission, bound, attributes, object).await?;
            }
        }
        Ok(())
    }

    async fn reinvoke(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if cannot_change(attributes) {
            return Ok(());
        }
        let policies = self.0.current(admission)?;
        if policies.is_empty() {
            return Ok(());
        }
        for bound in policies.iter().filter(|bound| bound.policy.rules.again) {
            apply(admission, bound, attributes, object).await?;
        }
        Ok(())
    }

    fn is_local(&self) -> bool {
        false
    }
}

fn cannot_change(attributes: &Attributes<'_>) -> bool {
    is_exempt(attributes.kind) || attributes.operation == Operation::Delete
}

/// Applies a policy for each of its bindings and parameters. Returns whether the match conditions held at least once.
async fn apply(
    admission: &Admission,
    bound: &Bound<MutatingPolicy>,
    attributes: &Attributes<'_>,
    object: &mut Value,
) -> Result<bool> {
    let policy = &bound.policy;
    let mut ran = false;
    for binding in &bound.bindings {
        let Some(kind) = policy.matching.find(admission, attributes, object) else { continue };
        if binding.matching.find(admission, attributes, object).is_none() {
            continue;
        }
        let (kind_of_params, reference) = (policy.params.as_ref(), binding.params.as_ref());
        let collected = params::collect(admission, kind_of_params, reference, attributes.namespace).await;
        let params = match collected {
            Ok(params) => params,
            Err(error @ ParamError::TooMany(_)) => {
                return Err(refusal(attributes, policy, binding, &error.to_string()));
            }
            Err(error) => {
                failed(attributes, policy, binding, error.to_string())?;
                continue;
            }
        };
        let number = params.len();
        for params in &params {
            let invocation = Invocation { policy, params: params.as_ref(), number };
            match invocation.run(admission, attributes, &kind, object).await? {
                Ok(matched) => ran |= matched,
                Err(why) => failed(attributes, policy, binding, why)?,
            }
        }
    }
    Ok(ran)
}

/// A policy with one of the parameters of a binding.
struct Invocation<'a> {
    policy: &'a Policy<MutatingPolicy>,
    params: Option<&'a Value>,
    /// Number of parameters of the binding.
    number: usize,
}

impl Invocation<'_> {
    /// Applies the mutations in order. The outer error means that a conversion failed, or that too many requests wait.
    /// The inner error is an error of the policy.
    async fn run(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        kind: &Resource,
        object: &mut Value,
    ) -> Result<std::result::Result<bool, String>> {
        let mut objects = versioned(attributes, kind, object).await?;
        let before = objects.new.clone();
        let subject = Subject::new(admission, attributes, kind);
        let is_heavy = is_heavy(&objects, self.params, self.number);
        let mut is_repeated = false;
        let mutate = || {
            // An interrupted attempt may have changed the object.
            if std::mem::replace(&mut is_repeated, true) {
                objects.new.clone_from(&before);
            }
            self.mutate(attributes, kind, &subject, &mut objects)
        };
        let mutated = self.policy.run(&subject, is_heavy, mutate).await?;
        match mutated {
            Ok(true) => {}
            other => return Ok(other),
        }
        if objects.new != before {
            webhook::replace(attributes, kind, object, objects.new).await?;
        }
        Ok(Ok(true))
    }

    /// Applies the mutations to the new object. Returns whether the match conditions hold.
    fn mutate(
        &self,
        attributes: &Attributes<'_>,
        kind: &Resource,
        subject: &Subject<'_>,
        objects: &mut Objects,
    ) -> std::result::Result<bool, String> {
        let rules = &self.policy.rules;
        if !rules.matches(&subject.input(objects, self.params))? {
            return Ok(false);
        }
        for index in 0..rules.len() {
            let patch = rules.patch(index, &subject.input(objects, self.params))?;
            objects.new = patched(attributes, kind, &objects.new, patch)?;
        }
        Ok(true)
    }
}

/// The object after a patch, with defaults.
fn patched(
    attributes: &Attributes<'_>,
    kind: &Resource,
    object: &Value,
    patch: Patch,
) -> std::result::Result<Value, String> {
    let new = match patch {
        Patch::Json(operations) => match patch::json(object, &operations) {
            Ok(new) => new,
            // If a `test` operation of the patch fails, the patch is skipped without an error.
            Err(error) if error.to_string().contains("value did not match") => return Ok(object.clone()),
            Err(error) => return Err(format!("JSON Patch: {error}")),
        },
        Patch::Apply(config) => merge(attributes, kind, object, config)
            .map_err(|error| format!("error applying patch: {error}"))?,
    };
    webhook::completed(attributes, kind, new)
}

/// Denies the request, unless the failure policy is `Ignore`. An exhausted cost budget denies the request with every
/// failure policy.
fn failed(
    attributes: &Attributes<'_>,
    policy: &Policy<MutatingPolicy>,
    binding: &Binding,
    why: String,
) -> Result<()> {
    if !policy.rules.fails && !attributes.cost.is_exhausted() {
        tracing::debug!(policy = policy.name, binding = binding.name, why, "admission policy failed open");
        return Ok(());
    }
    Err(refusal(attributes, policy, binding, &why))
}

fn refusal(
    attributes: &Attributes<'_>,
    policy: &Policy<MutatingPolicy>,
    binding: &Binding,
    why: &str,
) -> ApiError {
    let message = format!("policy '{}' with binding '{}' denied request: {why}", policy.name, binding.name);
    denied(attributes, &message, "Invalid")
}
