//! Restart policies and restart rules of containers, and requirements on exit codes. Sources: `ContainerShouldRestart`
//! in `pkg/api/v1/pod`, and `matchPodFailurePolicy` in `pkg/controller/job`.

use k8s_openapi::api::core::v1::ContainerRestartRule;

/// The action of a rule that restarts the container that exited.
pub const RESTART: &str = "Restart";
/// The action of a rule that restarts all containers of the pod.
pub const RESTART_ALL: &str = "RestartAllContainers";

/// Whether an exit code meets a requirement: `In` or `NotIn` the listed codes. No code meets another operator.
#[must_use]
pub fn matches_exit_code(operator: &str, listed: &[i32], code: i32) -> bool {
    match operator {
        "In" => listed.contains(&code),
        "NotIn" => !listed.contains(&code),
        _ => false,
    }
}

/// The action of the first rule for an exit with this code.
#[must_use]
pub fn matching_action(rules: &[ContainerRestartRule], code: i32) -> Option<&str> {
    let is_met = |rule: &&ContainerRestartRule| {
        rule.exit_codes.as_ref().is_some_and(|codes| {
            let listed = codes.values.as_deref().unwrap_or_default();
            matches_exit_code(&codes.operator, listed, code)
        })
    };
    rules.iter().find(is_met).map(|rule| rule.action.as_str())
}

/// Whether a container starts again after an exit with this code. Its first matching rule decides, then its own policy,
/// then the policy of the pod. As upstream, rules of a container without its own policy are ignored.
#[must_use]
pub fn restarts_after(
    pod_policy: Option<&str>,
    own_policy: Option<&str>,
    rules: &[ContainerRestartRule],
    code: i32,
) -> bool {
    if own_policy.is_some() && matches!(matching_action(rules, code), Some(RESTART | RESTART_ALL)) {
        return true;
    }
    match own_policy.or(pod_policy) {
        Some("Never") => false,
        Some("OnFailure") => code != 0,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rule(action: &str, operator: &str) -> ContainerRestartRule {
        let rule = json!({"action": action, "exitCodes": {"operator": operator, "values": [42]}});
        serde_json::from_value(rule).unwrap()
    }

    #[test]
    fn an_operator_decides_whether_a_code_must_be_listed() {
        for (operator, code, is_met) in
            [("In", 3, true), ("In", 4, false), ("NotIn", 3, false), ("NotIn", 4, true), ("Exists", 3, false)]
        {
            assert_eq!(matches_exit_code(operator, &[1, 3], code), is_met, "{operator} {code}");
        }
    }

    #[test]
    fn the_first_matching_rule_has_the_action() {
        let rules = [rule("A", "NotIn"), rule("B", "In"), rule("C", "In")];
        assert_eq!(matching_action(&rules, 42), Some("B"));
        assert_eq!(matching_action(&rules, 1), Some("A"));
        assert_eq!(matching_action(&[ContainerRestartRule::default()], 0), None, "a rule without exit codes");
    }

    #[test]
    fn rules_go_before_policies_and_own_policies_before_that_of_the_pod() {
        let rules = |operator: &str| vec![rule(RESTART, operator)];
        for (pod, own, rules, code, restarts) in [
            ("Never", None, vec![], 1, false),
            ("Never", Some("Always"), vec![], 0, true),
            ("Never", Some("OnFailure"), vec![], 0, false),
            ("Never", Some("OnFailure"), vec![], 1, true),
            ("Always", Some("Never"), rules("In"), 42, true),
            ("Always", Some("Never"), rules("In"), 1, false),
            ("Always", Some("Never"), rules("NotIn"), 42, false),
            ("Always", Some("Never"), vec![rule(RESTART_ALL, "In")], 42, true),
            ("Always", Some("Never"), vec![rule("Stop", "In")], 42, false),
            ("Never", None, rules("In"), 42, false),
        ] {
            assert_eq!(
                restarts_after(Some(pod), own, &rules, code),
                restarts,
                "{pod} {own:?} {rules:?} {code}"
            );
        }
        assert!(restarts_after(None, None, &[], 0), "the default is Always");
    }
}
