use serde_json::json;

use super::*;
use crate::rules::Action;

fn admin(rules: &Value) -> ClusterPolicy {
    let specification =
        json!({"tier": "Admin", "priority": 7, "subject": {"namespaces": {}}, "egress": rules});
    ClusterPolicy::parse(ClusterKind::ClusterNetworkPolicy, "p", &specification).unwrap()
}

/// Action of the only rule, whether it is restricted to peers, and the problems.
fn parsed(rule: Value) -> (Option<(Action, bool)>, String) {
    let policy = admin(&json!([rule]));
    let rule = policy.rules.egress.unwrap().pop();
    (rule.map(|rule| (rule.action, rule.peers.is_some())), policy.problems.join(", "))
}

#[test]
fn a_rule_that_cannot_be_honoured_fails_closed() {
    let everywhere = json!([{"networks": ["0.0.0.0/0"]}]);
    for (rule, problem) in [
        (json!({"to": [{}]}), "a single key"),
        (json!({"to": [{"planets": {}}]}), "planets"),
        (json!({"to": [{"namespaces": {}, "nodes": {}}]}), "a single key"),
        (json!({"to": []}), "the field to"),
        (json!({"to": everywhere, "from": everywhere}), "the field to"),
        (json!({"to": [{"networks": ["10.0.0.0"]}]}), "invalid network 10.0.0.0"),
        (json!({"to": [{"namespaces": {"matchExpressions": [{"key": "a", "operator": "Like"}]}}]}), "Like"),
        (json!({"to": everywhere, "protocols": [{"tcp": {}}]}), "destinationPort"),
        (json!({"to": everywhere, "protocols": [{"tcp": {"flags": "syn"}}]}), "flags"),
        (json!({"to": everywhere, "protocols": [{"icmp": {}}]}), "icmp"),
        (json!({"to": everywhere, "ports": [{"portRange": {"start": 9, "end": 8}}]}), "invalid ports 9 to 8"),
        (json!({"to": everywhere, "ports": [{"portNumber": {"protocol": "DCCP", "port": 1}}]}), "DCCP"),
        (json!({"to": everywhere, "schedule": "night"}), "schedule"),
    ] {
        for (action, expect) in
            [("Accept", None), ("Deny", Some((Action::Deny, false))), ("Pass", Some((Action::Deny, false)))]
        {
            let mut rule = rule.clone();
            rule["action"] = action.into();
            let (effect, problems) = parsed(rule);
            assert_eq!(effect, expect, "{action} {problem}");
            assert!(problems.starts_with("egress rule 0: ") && problems.contains(problem), "{problems}");
        }
    }
}

#[test]
fn peers_other_than_pods_are_valid_only_in_egress_rules() {
    for peer in
        [json!({"nodes": {}}), json!({"networks": ["10.0.0.0/8"]}), json!({"domainNames": ["a.example"]})]
    {
        for (action, expect) in
            [("Allow", vec![]), ("Deny", vec![Action::Deny]), ("Pass", vec![Action::Deny])]
        {
            let rules = json!([{"action": action, "from": [{"namespaces": {}}, peer]}]);
            let specification = json!({"priority": 7, "subject": {"namespaces": {}}, "ingress": rules});
            let policy = ClusterPolicy::parse(ClusterKind::AdminNetworkPolicy, "p", &specification).unwrap();
            let rules = policy.rules.ingress.unwrap();
            assert!(rules.iter().all(|rule| rule.peers.is_none()), "{action} {peer}");
            assert_eq!(rules.iter().map(|rule| rule.action).collect::<Vec<_>>(), expect, "{action} {peer}");
            assert!(policy.problems[0].contains("egress rules"), "{:?}", policy.problems);
        }
    }
}

#[test]
fn domain_names_match_no_address_and_are_reported() {
    let (effect, problems) = parsed(json!({"action": "Allow", "to": [{"domainNames": ["a.example"]}]}));
    assert_eq!(effect, Some((Action::Allow, true)));
    assert!(problems.contains("domainNames are not supported"), "{problems}");
    let (effect, _) = parsed(json!({"action": "Deny", "to": [{"domainNames": ["a.example"]}]}));
    assert_eq!(effect, Some((Action::Deny, false)));
}

#[test]
fn both_versions_have_the_same_ports() {
    let old = json!([{"action": "Allow", "to": [{"nodes": {}}], "ports": [{"portNumber": {"port": 80}},
        {"portRange": {"protocol": "UDP", "start": 5, "end": 9}}, {"namedPort": "web"}]}]);
    let new = json!([{"action": "Accept", "to": [{"nodes": {}}], "protocols": [{"tcp": {"destinationPort": {"number": 80}}},
        {"udp": {"destinationPort": {"range": {"start": 5, "end": 9}}}}, {"destinationNamedPort": "web"}]}]);
    assert_eq!(admin(&old).rules, admin(&new).rules);
    let rules = admin(&old).rules.egress.unwrap();
    let ports = rules[0].ports.as_ref().unwrap();
    assert_eq!((ports.single.len(), ports.ranges.len(), ports.named.len()), (1, 1, 1));
}

#[test]
fn a_policy_without_a_valid_tier_priority_or_subject_is_rejected() {
    let kind = ClusterKind::ClusterNetworkPolicy;
    for (specification, problem) in [
        (json!({"tier": "Admin", "priority": 1}), "cannot parse"),
        (json!({"tier": "Admin", "priority": 1, "subject": {}}), "cannot parse"),
        (json!({"tier": "Admin", "priority": 1001, "subject": {"namespaces": {}}}), "0 to 1000"),
        (json!({"priority": 1, "subject": {"namespaces": {}}}), "unknown tier (none)"),
        (
            json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {"matchExpressions": [{"key": "a",
            "operator": "Like"}]}}}),
            "selector of the subject",
        ),
    ] {
        let error = ClusterPolicy::parse(kind, "p", &specification).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    let baseline = json!({"subject": {"namespaces": {}}});
    let baseline =
        ClusterPolicy::parse(ClusterKind::BaselineAdminNetworkPolicy, "default", &baseline).unwrap();
    assert_eq!((baseline.rank.tier, baseline.rank.priority), (Tier::Baseline, LAST));
    assert!(baseline.rules.ingress.is_none(), "a direction without rules is not affected");
}
