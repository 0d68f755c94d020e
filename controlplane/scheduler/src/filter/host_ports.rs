//! Filter NodePorts: a host port belongs to one pod of a node.

use super::Refusal;
use crate::object::Pod;
use crate::request::host_ports;
use crate::snapshot::Candidate;

pub(crate) fn refuse(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    let wanted = host_ports(&pod.spec);
    if wanted.iter().any(|port| node.info.ports().any(|taken| taken.conflicts(port))) {
        return vec!["node(s) didn't have free ports for the requested pod ports".to_owned()];
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn a_host_port_in_use_is_refused() {
        let pod = |name: &str, port: i32| {
            fixture::pod(name, json!({"containers": [{"ports": [{"containerPort": 80, "hostPort": port}]}]}))
        };
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
        snapshot.place(&pod("first", 8080), "a");
        let node = snapshot.candidates().next().unwrap();
        assert_eq!(refuse(&pod("second", 8080), node).len(), 1);
        assert!(refuse(&pod("second", 8081), node).is_empty());
    }
}
