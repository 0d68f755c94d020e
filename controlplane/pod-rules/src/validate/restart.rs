//! Restart policies and restart rules of containers. Sources: `validateContainerRestartPolicy` in
//! `pkg/apis/core/validation` and `ContainerShouldRestart` in `pkg/api/v1/pod`.

use coracle_values::restart::{self, RESTART, RESTART_ALL};
use serde_json::Value;

use super::{Causes, Path, items, text};

const ACTIONS: &[&str] = &[RESTART, RESTART_ALL];
const OPERATORS: &[&str] = &["In", "NotIn"];
const POLICIES: &[&str] = &["Always", "Never", "OnFailure"];

/// Maximum number of rules of a container.
const MAX_RULES: usize = 20;
/// Maximum number of exit codes of a rule.
const MAX_CODES: usize = 255;

/// Checks the restart policy and the rules of a container.
pub(super) fn container(causes: &mut Causes, path: &Path, container: &Value) {
    let policy = &container["restartPolicy"];
    if policy.is_null() {
        policy_for_rules(causes, path, container);
    } else if !POLICIES.contains(&text(policy)) {
        causes.unsupported(&path.field("restartPolicy"), policy, POLICIES);
    }
    let (here, list) = (path.field("restartPolicyRules"), &container["restartPolicyRules"]);
    let count = items(list).count();
    if count > MAX_RULES {
        causes.too_many(&here, count, MAX_RULES);
    }
    for (index, rule) in items(list) {
        self::rule(causes, &here.index(index), rule);
    }
}

/// Checks the restart policy and the rules of an init container. As upstream, the rules of an init container without a
/// policy are ignored.
pub(super) fn init_container(causes: &mut Causes, path: &Path, container: &Value) {
    if container["restartPolicy"].is_null() {
        policy_for_rules(causes, path, container);
    } else {
        self::container(causes, path, container);
    }
}

/// Checks that a container with rules has a policy. The policy applies to exits that match no rule.
fn policy_for_rules(causes: &mut Causes, path: &Path, container: &Value) {
    if items(&container["restartPolicyRules"]).next().is_some() {
        let detail = "must specify restartPolicy when restart rules are used";
        causes.required(&path.field("restartPolicy"), detail);
    }
}

fn rule(causes: &mut Causes, path: &Path, rule: &Value) {
    if !ACTIONS.contains(&text(&rule["action"])) {
        causes.unsupported(&path.field("action"), &rule["action"], ACTIONS);
    }
    let (here, codes) = (path.field("exitCodes"), &rule["exitCodes"]);
    if codes.is_null() {
        causes.required(&here, "must be specified");
        return;
    }
    if !OPERATORS.contains(&text(&codes["operator"])) {
        causes.unsupported(&here.field("operator"), &codes["operator"], OPERATORS);
    }
    let count = items(&codes["values"]).count();
    if count > MAX_CODES {
        causes.too_many(&here.field("values"), count, MAX_CODES);
    }
}

/// Whether a container of the pod may end all containers and start them again.
pub fn may_restart_all(spec: &Value) -> bool {
    let mut containers = items(&spec["initContainers"]).chain(items(&spec["containers"]));
    containers.any(|(_, container)| {
        items(&container["restartPolicyRules"]).any(|(_, rule)| rule["action"] == RESTART_ALL)
    })
}

/// Whether a container of the pod starts again after an exit with this code.
pub fn restarts_after(spec: &Value, container: &Value, code: i64) -> bool {
    let rules = items(&container["restartPolicyRules"]);
    let rules: Vec<_> = rules.filter_map(|(_, rule)| serde::Deserialize::deserialize(rule).ok()).collect();
    // The schema refuses codes of more than 32 bits.
    let code = i32::try_from(code).unwrap_or(i32::MAX);
    restart::restarts_after(spec["restartPolicy"].as_str(), container["restartPolicy"].as_str(), &rules, code)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn messages(check: fn(&mut Causes, &Path, &Value), container: &Value) -> Vec<String> {
        let mut causes = Causes::default();
        check(&mut causes, &Path::root("c"), container);
        causes.into_list().into_iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
    }

    fn with_rules(policy: Value, rules: Value) -> Value {
        json!({"restartPolicy": policy, "restartPolicyRules": rules})
    }

    #[test]
    fn rules_need_a_policy_an_action_and_an_operator() {
        let codes = json!({"operator": "In", "values": [42]});
        let good = json!([{"action": "RestartAllContainers", "exitCodes": codes}]);
        let odd = json!([{"action": "Stop"}, {"exitCodes": {"operator": "Exists"}}]);
        let needed =
            "c.restartPolicy: Required value: must specify restartPolicy when restart rules are used";
        let action = "supported values: \"Restart\", \"RestartAllContainers\"";
        let first = format!("c.restartPolicyRules[0].action: Unsupported value: \"Stop\": {action}");
        let second = format!("c.restartPolicyRules[1].action: Unsupported value: \"\": {action}");
        let of_odd = [
            first.as_str(),
            "c.restartPolicyRules[0].exitCodes: Required value: must be specified",
            second.as_str(),
            "c.restartPolicyRules[1].exitCodes.operator: Unsupported value: \"Exists\": supported values: \"In\", \"NotIn\"",
        ];
        for check in [container, init_container] {
            for policy in ["Always", "Never", "OnFailure"] {
                assert_eq!(messages(check, &with_rules(json!(policy), good.clone())), Vec::<String>::new());
            }
            assert_eq!(messages(check, &with_rules(Value::Null, good.clone())), [needed]);
            assert_eq!(messages(check, &with_rules(json!("Never"), odd.clone())), of_odd);
            let policy = messages(check, &with_rules(json!("Maybe"), json!([])));
            let expected = "c.restartPolicy: Unsupported value: \"Maybe\": supported values: \"Always\", \"Never\", \"OnFailure\"";
            assert_eq!(policy, [expected]);
        }
        // Without a policy, upstream checks the rules of ordinary containers only.
        assert_eq!(messages(container, &with_rules(Value::Null, odd.clone())).len(), 5);
        assert_eq!(messages(init_container, &with_rules(Value::Null, odd)), [needed]);
    }

    #[test]
    fn rules_and_exit_codes_are_limited() {
        let rule = |codes: usize| json!({"action": "Restart", "exitCodes": {"operator": "NotIn", "values": vec![1; codes]}});
        let rules = |count: usize| with_rules(json!("Never"), vec![rule(255); count].into());
        assert_eq!(messages(container, &rules(20)), Vec::<String>::new());
        let expected = "c.restartPolicyRules: Too many: 21: must have at most 20 items";
        assert_eq!(messages(container, &rules(21)), [expected]);
        let expected = "c.restartPolicyRules[0].exitCodes.values: Too many: 256: must have at most 255 items";
        assert_eq!(messages(container, &with_rules(json!("Never"), json!([rule(256)]))), [expected]);
    }

    #[test]
    fn the_first_matching_rule_goes_before_the_policies() {
        let codes = |operator: &str| json!({"operator": operator, "values": [42]});
        let rule = |operator: &str| json!([{"action": "Restart", "exitCodes": codes(operator)}]);
        let never = json!({"restartPolicy": "Never"});
        for (container, code, restarts) in [
            (json!({}), 1, false),
            (json!({"restartPolicy": "Always"}), 0, true),
            (json!({"restartPolicy": "OnFailure"}), 0, false),
            (json!({"restartPolicy": "OnFailure"}), 1, true),
            (with_rules(json!("Never"), rule("In")), 42, true),
            (with_rules(json!("Never"), rule("In")), 1, false),
            (with_rules(json!("Never"), rule("NotIn")), 42, false),
            (with_rules(json!("Never"), rule("NotIn")), 1, true),
            // Upstream ignores rules without a policy.
            (with_rules(Value::Null, rule("In")), 42, false),
        ] {
            assert_eq!(restarts_after(&never, &container, code), restarts, "{container} {code}");
        }
    }
}
