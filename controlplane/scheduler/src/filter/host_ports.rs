//! Filter NodePorts: a host port of a node can be used by only one pod.

use super::Refusal;
use crate::request::WantedPorts;
use crate::snapshot::Candidate;

pub(crate) fn refuse(wanted: &WantedPorts, node: Candidate<'_>) -> Vec<Refusal> {
    if !wanted.is_empty() && node.info.ports().any(|used| wanted.conflict(used)) {
        return vec!["node(s) didn't have free ports for the requested pod ports".to_owned()];
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::request::host_ports;
    use serde_json::json;

    #[test]
    fn a_host_port_in_use_is_refused() {
        let pod = |name: &str, port: i32| {
            fixture::pod(name, json!({"containers": [{"ports": [{"containerPort": 80, "hostPort": port}]}]}))
        };
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
        snapshot.place(&pod("first", 8080), "a");
        let node = snapshot.candidates().next().unwrap();
        assert_eq!(refuse(&WantedPorts::of(host_ports(&pod("second", 8080).spec)), node).len(), 1);
        assert!(refuse(&WantedPorts::of(host_ports(&pod("second", 8081).spec)), node).is_empty());
    }
}
