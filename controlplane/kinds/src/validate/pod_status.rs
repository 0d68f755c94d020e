//! Validates updates of a pod's status. Source: `ValidatePodStatusUpdate` in `pkg/apis/core/validation`.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{Causes, Path, container_status, format, items, pod_annotations, restart, text};

/// Lists of container statuses, each with the list of its containers in the spec. A terminated container must stay
/// terminated, unless a restart rule or policy allows a restart. Ephemeral containers never start again, so their entry
/// has no list of the spec.
const STATUSES: [(&str, Option<&str>); 3] = [
    ("containerStatuses", Some("containers")),
    ("initContainerStatuses", Some("initContainers")),
    ("ephemeralContainerStatuses", None),
];

/// Checks an update of the status.
pub(super) fn update(causes: &mut Causes, new: &Value, old: &Value) {
    pod_annotations::update(causes, new, old);
    let (path, status, before) = (Path::root("status"), &new["status"], &old["status"]);
    let nominated = text(&status["nominatedNodeName"]);
    if !nominated.is_empty() && status["nominatedNodeName"] != before["nominatedNodeName"] {
        let here = path.field("nominatedNodeName");
        causes.format(&here, nominated, format::dns1123_subdomain(nominated));
        if !text(&old["spec"]["nodeName"]).is_empty() {
            causes.forbidden(&here, "may not be set on pods that are already bound to a node");
        }
    }
    let generation = &status["observedGeneration"];
    if generation.as_i64().is_some_and(|generation| generation < 0) {
        causes.invalid(&path.field("observedGeneration"), generation, "must be a non-negative integer");
    }
    let class = &status["qosClass"];
    // Pods stored by earlier versions may have no QoS class.
    if !text(&before["qosClass"]).is_empty() && class != &before["qosClass"] {
        causes.invalid(&path.field("qosClass"), &text(class).into(), "field is immutable");
    }
    for (list, containers) in STATUSES {
        restarts(causes, new, old, list, containers);
    }
    container_status::all(causes, &path, new);
    addresses(causes, &path.field("podIPs"), &status["podIPs"], &before["podIPs"]);
    if let Some((_, first)) = items(&status["hostIPs"]).next()
        && text(&first["ip"]) != text(&status["hostIP"])
    {
        let here = path.field("hostIPs").index(0).field("ip");
        causes.invalid(&here, &first["ip"], "must be equal to `hostIP`");
    }
    addresses(causes, &path.field("hostIPs"), &status["hostIPs"], &before["hostIPs"]);
}

/// Refuses the restart of terminated containers that must not start again. `list` is the field of these containers in
/// the status. `containers` is their field in the spec, or `None` if no container of the list may start again.
fn restarts(causes: &mut Causes, new: &Value, old: &Value, list: &str, containers: Option<&str>) {
    let spec = &old["spec"];
    if containers.is_some() && restart::may_restart_all(spec) {
        return;
    }
    let path = Path::root("status").field(list);
    let statuses = by_name(&new["status"][list]);
    let containers = containers.map(|field| by_name(&spec[field])).unwrap_or_default();
    for (index, before) in items(&old["status"][list]) {
        let Some(code) = before["state"]["terminated"]["exitCode"].as_i64() else { continue };
        let container = containers.get(&before["name"]);
        let may_start = container.is_some_and(|container| restart::restarts_after(spec, container, code));
        let now = statuses.get(&before["name"]);
        if !may_start && now.is_some_and(|now| now["state"]["terminated"].is_null()) {
            causes.forbidden(
                &path.index(index).field("state"),
                "may not be transitioned to non-terminated state",
            );
        }
    }
}

/// The elements of a list by their names. If several elements have one name, the first element is used.
fn by_name(list: &Value) -> HashMap<&Value, &Value> {
    let mut elements = HashMap::new();
    for (_, element) in items(list) {
        elements.entry(&element["name"]).or_insert(element);
    }
    elements
}

/// Checks the addresses of a pod or of its node. Invalid addresses of the old status may stay.
fn addresses(causes: &mut Causes, path: &Path, list: &Value, before: &Value) {
    let known: HashSet<&Value> = items(before).map(|(_, old)| &old["ip"]).collect();
    for (index, address) in items(list) {
        if !known.contains(&address["ip"]) {
            let ip = text(&address["ip"]);
            causes.format(&path.index(index), ip, format::ip(ip));
        }
    }
    let families: Vec<bool> = items(list).map(|(_, address)| text(&address["ip"]).contains(':')).collect();
    let is_pair = families.len() == 2 && families[0] != families[1];
    if families.len() > 1 && !is_pair {
        causes.invalid(path, list, "may specify no more than one IP for each IP family");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(old: Value, new: Value, policy: &str) -> Vec<String> {
        let mut causes = Causes::default();
        let spec = json!({"restartPolicy": policy, "containers": [{"name": "c"}]});
        let pod = |status: Value| json!({"spec": spec, "status": status});
        update(&mut causes, &pod(new), &pod(old));
        causes.into_list().into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn addresses_are_valid_and_one_of_each_family() {
        let ips =
            |list: &[&str]| json!({"podIPs": list.iter().map(|ip| json!({"ip": ip})).collect::<Vec<_>>()});
        assert_eq!(fields(json!({}), ips(&["10.0.0.1", "fd00::1"]), ""), Vec::<String>::new());
        assert_eq!(fields(json!({}), ips(&["x"]), ""), ["status.podIPs[0]"]);
        assert_eq!(fields(ips(&["x"]), ips(&["x"]), ""), Vec::<String>::new());
        assert_eq!(fields(json!({}), ips(&["10.0.0.1", "10.0.0.2"]), ""), ["status.podIPs"]);
        let host = json!({"hostIP": "10.0.0.1", "hostIPs": [{"ip": "10.0.0.2"}]});
        assert_eq!(fields(json!({}), host, ""), ["status.hostIPs[0].ip"]);
    }

    #[test]
    fn the_annotation_of_mirror_pods_stays() {
        let pod =
            |annotations: Value| json!({"metadata": {"annotations": annotations}, "spec": {"nodeName": "n"}});
        let (plain, mirror) = (pod(json!({"a": "b"})), pod(json!({"kubernetes.io/config.mirror": "x"})));
        for (old, new, is_refused) in
            [(&plain, &mirror, true), (&mirror, &plain, true), (&mirror, &mirror, false)]
        {
            let mut causes = Causes::default();
            update(&mut causes, new, old);
            assert_eq!(!causes.is_empty(), is_refused, "{old} {new}");
        }
    }

    #[test]
    fn the_class_stays_and_ended_containers_stay_ended() {
        let class = |class: &str| json!({"qosClass": class});
        assert_eq!(fields(class("BestEffort"), class("Guaranteed"), ""), ["status.qosClass"]);
        let state = |state: Value| json!({"containerStatuses": [{"name": "c", "state": state}]});
        let ended = |code: i64| state(json!({"terminated": {"exitCode": code}}));
        let running = || state(json!({"running": {}}));
        for (policy, code, is_refused) in
            [("Always", 0, false), ("OnFailure", 1, false), ("OnFailure", 0, true), ("Never", 1, true)]
        {
            let expect: &[&str] = if is_refused { &["status.containerStatuses[0].state"] } else { &[] };
            assert_eq!(fields(ended(code), running(), policy), expect, "{policy} {code}");
        }
    }

    #[test]
    fn ended_init_containers_stay_ended_unless_their_policy_restarts_them() {
        let refused = |pod: &str, own: Value, code: i64| {
            let spec = json!({"restartPolicy": pod, "initContainers": [{"name": "i", "restartPolicy": own}]});
            let pod = |state: Value| json!({"spec": spec, "status": {"initContainerStatuses": [{"name": "i", "state": state}]}});
            let mut causes = Causes::default();
            update(
                &mut causes,
                &pod(json!({"running": {}})),
                &pod(json!({"terminated": {"exitCode": code}})),
            );
            causes.into_list().into_iter().map(|cause| cause.field).collect::<Vec<_>>()
        };
        for (pod, own, code) in [
            ("Always", Value::Null, 0),
            ("OnFailure", Value::Null, 1),
            ("OnFailure", json!("Always"), 0),
            ("Never", json!("Always"), 1),
        ] {
            assert_eq!(refused(pod, own, code), Vec::<String>::new(), "{pod} {code}");
        }
        for (pod, code) in [("OnFailure", 0), ("Never", 1)] {
            assert_eq!(refused(pod, Value::Null, code), ["status.initContainerStatuses[0].state"], "{pod}");
        }
    }

    #[test]
    fn restart_rules_let_ended_containers_start_again() {
        let status = |list: &str, state: Value| json!({list: [{"name": "c", "state": state}]});
        let refused = |list: &str, action: &str, code: i64| {
            let rule = json!({"action": action, "exitCodes": {"operator": "In", "values": [42]}});
            let rules = json!([{"name": "c", "restartPolicy": "Never", "restartPolicyRules": [rule]}]);
            let spec = json!({"restartPolicy": "Never", "containers": rules});
            let pod = |state: Value| json!({"spec": spec, "status": status(list, state)});
            let mut causes = Causes::default();
            let ended = pod(json!({"terminated": {"exitCode": code}}));
            update(&mut causes, &pod(json!({"waiting": {}})), &ended);
            !causes.is_empty()
        };
        for (list, action, code, is_refused) in [
            ("containerStatuses", "Restart", 42, false),
            ("containerStatuses", "Restart", 1, true),
            ("containerStatuses", "RestartAllContainers", 1, false),
            ("ephemeralContainerStatuses", "RestartAllContainers", 42, true),
        ] {
            assert_eq!(refused(list, action, code), is_refused, "{list} {action} {code}");
        }
    }
}
