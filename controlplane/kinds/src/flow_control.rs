//! The flow schemas and priority levels of every cluster.
//!
//! Source: `k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap`.

use serde_json::{Value, json};

/// The apiVersion of the objects.
pub const API_VERSION: &str = "flowcontrol.apiserver.k8s.io/v1";
const CONTROLLERS: &str = "system:kube-controller-manager";
const SCHEDULER: &str = "system:kube-scheduler";
const ALL_USERS: &[&str] = &["system:unauthenticated", "system:authenticated"];

/// A priority level of type Limited, with queues.
struct QueuedLevel {
    name: &'static str,
    shares: i64,
    /// Percentage of the level's shares that other levels may use.
    lendable_percent: i64,
    queues: i64,
    hand_size: i64,
}

const QUEUED_LEVELS: &[QueuedLevel] = &[
    QueuedLevel { name: "system", shares: 30, lendable_percent: 33, queues: 64, hand_size: 6 },
    QueuedLevel { name: "node-high", shares: 40, lendable_percent: 25, queues: 64, hand_size: 6 },
    QueuedLevel { name: "leader-election", shares: 10, lendable_percent: 0, queues: 16, hand_size: 4 },
    QueuedLevel { name: "workload-high", shares: 40, lendable_percent: 50, queues: 128, hand_size: 6 },
    QueuedLevel { name: "workload-low", shares: 100, lendable_percent: 90, queues: 128, hand_size: 6 },
    QueuedLevel { name: "global-default", shares: 20, lendable_percent: 50, queues: 128, hand_size: 6 },
];

/// The priority levels that every cluster has. Their spec cannot be changed, except `spec.exempt` of the level
/// `exempt`.
pub fn mandatory_levels() -> Vec<Value> {
    let exempt = json!({"type": "Exempt", "exempt": {"nominalConcurrencyShares": 0, "lendablePercent": 0}});
    let limited =
        json!({"nominalConcurrencyShares": 5, "lendablePercent": 0, "limitResponse": {"type": "Reject"}});
    vec![
        object("PriorityLevelConfiguration", "catch-all", json!({"type": "Limited", "limited": limited})),
        object("PriorityLevelConfiguration", "exempt", exempt),
    ]
}

/// The flow schemas that every cluster has and whose spec cannot be changed.
pub fn mandatory_schemas() -> Vec<Value> {
    vec![
        schema("exempt", "exempt", 1, "", whole_api(groups(&["system:masters"]))),
        schema("catch-all", "catch-all", 10_000, "ByUser", whole_api(groups(ALL_USERS))),
    ]
}

/// The priority levels that a new cluster has, and that its administrators may change.
pub fn suggested_levels() -> Vec<Value> {
    let object_of = |level: &QueuedLevel| {
        let queuing = json!({"queues": level.queues, "handSize": level.hand_size, "queueLengthLimit": 50});
        let limited = json!({"nominalConcurrencyShares": level.shares, "lendablePercent": level.lendable_percent,
            "limitResponse": {"type": "Queue", "queuing": queuing}});
        object("PriorityLevelConfiguration", level.name, json!({"type": "Limited", "limited": limited}))
    };
    QUEUED_LEVELS.iter().map(object_of).collect()
}

/// The flow schemas that a new cluster has, and that its administrators may change.
pub fn suggested_schemas() -> Vec<Value> {
    let nodes = || groups(&["system:nodes"]);
    let mut electors = users(&[CONTROLLERS, SCHEDULER]);
    electors.extend(system_accounts());
    let leases = |verbs: &[&str]| on(verbs, "coordination.k8s.io", &["leases"], false);
    let node_rules = json!([on(&["*"], "", &["nodes", "nodes/status"], true), leases(&["*"])]);
    let probes = json!([{"verbs": ["get"], "nonResourceURLs": ["/healthz", "/readyz", "/livez"]}]);
    vec![
        schema("system-nodes", "system", 500, "ByUser", whole_api(nodes())),
        schema(
            "system-node-high",
            "node-high",
            400,
            "ByUser",
            json!({"subjects": nodes(), "resourceRules": node_rules}),
        ),
        schema("probes", "exempt", 2, "", json!({"subjects": groups(ALL_USERS), "nonResourceRules": probes})),
        schema(
            "system-leader-election",
            "leader-election",
            100,
            "ByUser",
            json!({"subjects": electors, "resourceRules": [leases(&["get", "create", "update"])]}),
        ),
        schema(
            "kube-controller-manager",
            "workload-high",
            800,
            "ByNamespace",
            whole_api(users(&[CONTROLLERS])),
        ),
        schema("kube-scheduler", "workload-high", 800, "ByNamespace", whole_api(users(&[SCHEDULER]))),
        schema(
            "kube-system-service-accounts",
            "workload-high",
            900,
            "ByNamespace",
            whole_api(system_accounts()),
        ),
        schema(
            "service-accounts",
            "workload-low",
            9000,
            "ByUser",
            whole_api(groups(&["system:serviceaccounts"])),
        ),
        schema("global-default", "global-default", 9900, "ByUser", whole_api(groups(ALL_USERS))),
    ]
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": API_VERSION, "kind": kind, "spec": spec,
        "metadata": {"name": name, "annotations": {"apf.kubernetes.io/autoupdate-spec": "true"}}})
}

fn schema(name: &str, level: &str, precedence: i64, distinguisher: &str, rule: Value) -> Value {
    let mut spec = serde_json::Map::new();
    spec.insert("priorityLevelConfiguration".to_owned(), json!({"name": level}));
    spec.insert("matchingPrecedence".to_owned(), precedence.into());
    if !distinguisher.is_empty() {
        spec.insert("distinguisherMethod".to_owned(), json!({"type": distinguisher}));
    }
    spec.insert("rules".to_owned(), json!([rule]));
    object("FlowSchema", name, spec.into())
}

fn whole_api(subjects: Vec<Value>) -> Value {
    json!({"subjects": subjects, "resourceRules": [on(&["*"], "*", &["*"], true)],
        "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}]})
}

fn on(verbs: &[&str], group: &str, resources: &[&str], cluster: bool) -> Value {
    let mut rule = json!({"verbs": verbs, "apiGroups": [group], "resources": resources, "namespaces": ["*"]});
    if let (true, Some(rule)) = (cluster, rule.as_object_mut()) {
        rule.insert("clusterScope".to_owned(), true.into());
    }
    rule
}

fn groups(names: &[&str]) -> Vec<Value> {
    names.iter().map(|name| json!({"kind": "Group", "group": {"name": name}})).collect()
}

fn users(names: &[&str]) -> Vec<Value> {
    names.iter().map(|name| json!({"kind": "User", "user": {"name": name}})).collect()
}

fn system_accounts() -> Vec<Value> {
    vec![json!({"kind": "ServiceAccount", "serviceAccount": {"name": "*", "namespace": "kube-system"}})]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{defaults, kind::by_kind, validate};

    #[test]
    fn the_objects_of_every_cluster_are_valid_and_complete() {
        let all = [mandatory_levels(), mandatory_schemas(), suggested_levels(), suggested_schemas()].concat();
        assert_eq!(all.len(), 19);
        for object in all {
            let kind = by_kind(API_VERSION, object["kind"].as_str().unwrap()).unwrap();
            let mut filled = object.clone();
            defaults::apply(kind, &mut filled);
            assert_eq!(filled, object);
            assert_eq!(validate::create(kind, &object), Vec::new(), "{object}");
        }
    }
}
