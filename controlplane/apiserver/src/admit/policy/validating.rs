//! ValidatingAdmissionPolicy. Source: `policy/validating/dispatcher.go`.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use coracle_admission_policies::{Denial, Outcome, ValidatingPolicy};
use serde_json::{Value, json};

use super::{
    Binding, Bound, Policies,
    annotations::Annotations,
    denied, is_exempt, is_heavy,
    params::{self, ParamError},
    versioned,
};
use crate::{
    admit::{Admission, Admit, Attributes, expression::Subject},
    error::{ApiError, Result},
    metrics::{FailedValidation, FailureKind},
};

/// The message if the cost limit stops the evaluation. The limit applies with every failure policy.
const TOO_COSTLY: &str = "the expressions of the admission policies of this request exceed its cost limit";

/// Evaluates validating policies.
pub(in crate::admit) struct ValidatingPolicies(Policies<ValidatingPolicy>);

impl ValidatingPolicies {
    pub(in crate::admit) fn new() -> Self {
        Self(Policies::new(
            "validatingadmissionpolicies",
            "validatingadmissionpolicybindings",
            ValidatingPolicy::read,
        ))
    }
}

#[async_trait]
impl Admit for ValidatingPolicies {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if is_exempt(attributes.kind) {
            return Ok(());
        }
        let policies = self.0.current(admission)?;
        if policies.is_empty() {
            return Ok(());
        }
        let mut first = None;
        for bound in policies.iter() {
            let found = evaluate_policy(admission, bound, attributes, object).await?;
            first = first.or(found);
        }
        first.map_or(Ok(()), Err)
    }

    fn is_local(&self) -> bool {
        false
    }
}

/// Evaluates a policy for each of its bindings and parameters. Returns the first denial.
async fn evaluate_policy(
    admission: &Admission,
    bound: &Bound<ValidatingPolicy>,
    attributes: &Attributes<'_>,
    object: &Value,
) -> Result<Option<ApiError>> {
    let policy = &bound.policy;
    let Some(kind) = policy.matching.find(admission, attributes, object) else { return Ok(None) };
    let mut matching = Vec::new();
    for binding in &bound.bindings {
        if binding.matching.find(admission, attributes, object).is_some() {
            matching.push(binding);
        }
    }
    if matching.is_empty() {
        return Ok(None);
    }
    let objects = versioned(attributes, &kind, object).await?;
    let subject = Subject::new(admission, attributes, &kind);
    let (mut first, mut annotations) = (None, Annotations::default());
    for binding in matching {
        let (kind_of_params, reference) = (policy.params.as_ref(), binding.params.as_ref());
        let collected = params::collect(admission, kind_of_params, reference, attributes.namespace).await;
        let params = match collected {
            Ok(params) => params,
            Err(error) if policy.rules.fails => {
                let why = error.to_string();
                first.get_or_insert_with(|| refusal(attributes, &policy.name, binding, &why, "Invalid"));
                continue;
            }
            Err(ParamError::Failed(_)) => continue,
            Err(error @ ParamError::TooMany(_)) => {
                let outcome = Outcome { denials: vec![invalid(error.to_string())], ..Outcome::default() };
                let found = act(attributes, &policy.name, binding, outcome);
                first = first.or(found);
                continue;
            }
        };
        let number = params.len();
        for params in &params {
            let params = params.as_ref();
            let is_heavy = is_heavy(&objects, params, number);
            let began = Instant::now();
            let evaluate = || policy.rules.evaluate(&subject.input(&objects, params));
            let mut outcome = policy.run(&subject, is_heavy, evaluate).await?;
            if !policy.rules.fails && attributes.cost.is_exhausted() {
                outcome.denials.push(invalid(TOO_COSTLY.to_owned()));
            }
            count(admission, &policy.name, binding, &outcome, began.elapsed());
            annotations.add(std::mem::take(&mut outcome.annotations));
            let found = act(attributes, &policy.name, binding, outcome);
            first = first.or(found);
        }
    }
    if let Some(record) = attributes.audit {
        for (key, value) in annotations.joined() {
            record.annotate_limited(&format!("{}/{key}", policy.name), &value);
        }
    }
    Ok(first)
}

/// A denial that is not the result of a validation.
fn invalid(message: String) -> Denial {
    Denial { index: 0, message, reason: "Invalid".to_owned() }
}

/// Performs the actions of a binding. Returns the denial, if the policy denies the request.
fn act(attributes: &Attributes<'_>, policy: &str, binding: &Binding, outcome: Outcome) -> Option<ApiError> {
    let mut denial = None;
    for failed in outcome.denials {
        if binding.has_action("Warn") {
            attributes.warnings.add(format!(
                "Validation failed for ValidatingAdmissionPolicy '{policy}' with binding '{}': {}",
                binding.name, failed.message
            ));
        }
        if binding.has_action("Audit") {
            audit_failure(attributes, policy, binding, &failed);
        }
        if binding.has_action("Deny") && denial.is_none() {
            denial = Some(refusal(attributes, policy, binding, &failed.message, &failed.reason));
        }
    }
    for message in outcome.broken_annotations {
        denial = denial.or_else(|| Some(refusal(attributes, policy, binding, &message, "Invalid")));
    }
    denial
}

/// Counts the failed validations of an evaluation by the actions of the binding.
fn count(admission: &Admission, policy: &str, binding: &Binding, outcome: &Outcome, took: Duration) {
    const ACTIONS: [(&str, &str); 3] = [("Deny", "deny"), ("Audit", "audit"), ("Warn", "warn")];
    let failed = |kind, action| {
        let failed = FailedValidation { policy, binding: &binding.name, kind, action };
        admission.metrics.policies.failed(failed, took);
    };
    for denial in &outcome.denials {
        let kind = failure_kind(&denial.message);
        for (_, action) in ACTIONS.into_iter().filter(|(name, _)| binding.has_action(name)) {
            failed(kind, action);
        }
    }
    // A broken annotation denies the request, independently of the actions.
    for message in &outcome.broken_annotations {
        failed(failure_kind(message), "deny");
    }
}

/// The kind of a failure. As upstream, the kind is read from the message.
fn failure_kind(message: &str) -> FailureKind {
    const BUDGET: &str = "validation failed due to running out of cost budget";
    if message.starts_with("expression '") && message.contains("': compilation failed: ") {
        FailureKind::Compilation
    } else if message.starts_with(BUDGET) || message == TOO_COSTLY {
        FailureKind::OutOfBudget
    } else {
        FailureKind::Invalid
    }
}

/// Annotates the audit record with a failed validation. Without an audit record the failure is logged.
fn audit_failure(attributes: &Attributes<'_>, policy: &str, binding: &Binding, failed: &Denial) {
    const KEY: &str = "validation.policy.admission.k8s.io/validation_failure";
    let Denial { index, message, .. } = failed;
    if let Some(record) = attributes.audit {
        let failure = json!([{
            "message": message, "policy": policy, "binding": binding.name, "expressionIndex": index,
            "validationActions": binding.actions,
        }]);
        return record.annotate(KEY, failure.to_string());
    }
    let binding = &binding.name;
    tracing::info!(policy, binding, expression = index, message, "admission policy validation failed");
}

fn refusal(
    attributes: &Attributes<'_>,
    policy: &str,
    binding: &Binding,
    why: &str,
    reason: &str,
) -> ApiError {
    let binding = &binding.name;
    let message =
        format!("ValidatingAdmissionPolicy '{policy}' with binding '{binding}' denied request: {why}");
    denied(attributes, &message, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_failure_follows_from_its_message() {
        let budget =
            "validation failed due to running out of cost budget, no further validation rules will be run";
        for (message, kind) in [
            ("failed expression: object.a == 1", FailureKind::Invalid),
            ("expression 'object.a' resulted in error: no such key: a", FailureKind::Invalid),
            ("expression '1 +': compilation failed: unexpected end", FailureKind::Compilation),
            (budget, FailureKind::OutOfBudget),
            (TOO_COSTLY, FailureKind::OutOfBudget),
        ] {
            assert_eq!(failure_kind(message), kind, "{message}");
        }
    }
}
