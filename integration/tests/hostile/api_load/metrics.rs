//! Objects of tenants that have time series of their own in the metrics of the control plane.

use coracle_integration::{eventually, on_a_machine};
use serde_json::json;

use super::client::{ADMIN, EVE, Plane};
use super::make_eve_a_tenant;

/// Time series of a namespace: two of each of a hundred stateful sets.
const MAX_SERIES: usize = 200;
const SETS: usize = 130;

fn stateful_set(name: &str) -> String {
    let labels = json!({"app": "a"});
    let template =
        json!({"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}});
    let spec =
        json!({"replicas": 0, "serviceName": "s", "selector": {"matchLabels": labels}, "template": template});
    json!({"metadata": {"name": name}, "spec": spec}).to_string()
}

/// A tenant could make any number of time series.
#[test]
fn stateful_sets_of_a_tenant_make_a_limited_number_of_time_series() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        let kubectl = make_eve_a_tenant(machine);
        let create = |header: &str, namespace: &str, name: &str| {
            let path = format!("/apis/apps/v1/namespaces/{namespace}/statefulsets");
            plane.by(header).send("POST", &path, "application/json", stateful_set(name))
        };
        eventually("the role", 20, || create(EVE, "default", "s").0 == 201);
        for number in 1..SETS {
            let (code, answer) = create(EVE, "default", &format!("s{number}"));
            assert_eq!(code, 201, "{answer}");
        }
        kubectl.kubectl(&["create", "namespace", "other"]);
        assert_eq!(create(ADMIN, "other", "s").0, 201);
        // A set is in the metrics before its status is written.
        eventually("the status of all sets", 60, || {
            let sets = kubectl.get(&["statefulsets", "--all-namespaces"]);
            let sets = sets["items"].as_array().unwrap().iter();
            sets.filter(|set| set["status"]["observedGeneration"] == 1).count() == SETS + 1
        });
        let metrics = kubectl.kubectl(&["get", "--raw", "/metrics"]);
        let series = |namespace: &str| {
            let label = format!("statefulset_namespace=\"{namespace}\"");
            metrics.lines().filter(|line| line.contains(&label)).count()
        };
        assert_eq!((series("default"), series("other")), (MAX_SERIES, 2));
    });
}
