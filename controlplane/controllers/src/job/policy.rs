//! The failure and success policies of a job.

use coracle_values::restart;
use k8s_openapi::api::batch::v1::{PodFailurePolicyOnExitCodesRequirement, PodFailurePolicyRule};

use super::indexes::Indexes;
use crate::object::{Job, ObjectExt, Pod};

/// The decision of the failure policy about a failed pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The failure counts.
    Counts,
    /// The failure does not count.
    Ignored,
    /// The failure counts, and the pod's index has failed.
    FailsIndex,
    /// The job fails, with this message.
    FailsJob(String),
}

/// Applies the failure policy of a job to a failed pod. The first rule that matches decides.
pub(super) fn failure(job: &Job, pod: &Pod) -> Failure {
    let rules = job.spec.pod_failure_policy.iter().flat_map(|policy| &policy.rules);
    for (index, rule) in rules.enumerate() {
        let Some(what) = matches(rule, pod) else { continue };
        let action = rule.action.as_str();
        let name = format!("{}/{}", pod.namespace(), pod.name());
        return match action {
            "Ignore" => Failure::Ignored,
            "FailIndex" => Failure::FailsIndex,
            "FailJob" => Failure::FailsJob(match what {
                Match::ExitCode(container, code) => format!(
                    "Container {container} for pod {name} failed with exit code {code} matching FailJob rule at index {index}"
                ),
                Match::Condition(condition) => {
                    format!("Pod {name} has condition {condition} matching FailJob rule at index {index}")
                }
            }),
            _ => Failure::Counts,
        };
    }
    Failure::Counts
}

/// The action of the first rule that matches a failed pod. `None` without such a rule.
pub(super) fn action(job: &Job, pod: &Pod) -> Option<&'static str> {
    let mut rules = job.spec.pod_failure_policy.iter().flat_map(|policy| &policy.rules);
    let rule = rules.find(|rule| matches(rule, pod).is_some())?;
    ["FailJob", "FailIndex", "Ignore", "Count"].into_iter().find(|known| *known == rule.action)
}

enum Match {
    ExitCode(String, i32),
    Condition(String),
}

fn matches(rule: &PodFailurePolicyRule, pod: &Pod) -> Option<Match> {
    if let Some(codes) = &rule.on_exit_codes {
        let status = &pod.status;
        let mut failures =
            status.container_statuses.failures.iter().chain(&status.init_container_statuses.failures);
        let found = failures.find(|failure| matches_exit_code(codes, &failure.container, failure.code))?;
        return Some(Match::ExitCode(found.container.clone(), found.code));
    }
    let mut patterns = rule.on_pod_conditions.iter().flatten();
    let found = patterns.find(|pattern| {
        let status = pattern.status.as_deref().unwrap_or("True");
        pod.condition(&pattern.type_).is_some_and(|condition| condition.status == status)
    })?;
    Some(Match::Condition(found.type_.clone()))
}

fn matches_exit_code(rule: &PodFailurePolicyOnExitCodesRequirement, container: &str, code: i32) -> bool {
    let is_for_container = rule.container_name.as_ref().is_none_or(|name| name == container);
    is_for_container && restart::matches_exit_code(&rule.operator, &rule.values, code)
}

/// The message of the first success rule that is met. `None` if no rule is met.
pub(super) fn success(job: &Job, completed: &Indexes) -> Option<String> {
    let rules = &job.spec.success_policy.as_ref()?.rules;
    let limit = job.spec.completions.unwrap_or_default();
    for (index, rule) in rules.iter().enumerate() {
        let wanted = rule.succeeded_indexes.as_ref().map(|text| Indexes::parse(text, limit));
        let met = match (&wanted, rule.succeeded_count) {
            (None, Some(count)) => completed.total() >= count,
            (Some(wanted), None) => completed.common(wanted) >= wanted.total(),
            (Some(wanted), Some(count)) => completed.common(wanted) >= count,
            (None, None) => false,
        };
        if met {
            return Some(format!("Matched rules at index {index}"));
        }
    }
    None
}
