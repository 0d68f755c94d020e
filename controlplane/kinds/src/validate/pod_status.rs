//! The status of pods. Source: `ValidatePodStatusUpdate` in `pkg/apis/core/validation`.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{Causes, Path, container_status, format, items, pod_annotations, text};

/// Lists of containers that may not start again after their end, unless the restart policy of the pod allows it.
const ENDED: [&str; 2] = ["containerStatuses", "ephemeralContainerStatuses"];

/// Checks a new status.
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
    // Pods of earlier versions may have none yet.
    if !text(&before["qosClass"]).is_empty() && class != &before["qosClass"] {
        causes.invalid(&path.field("qosClass"), &text(class).into(), "field is immutable");
    }
    for list in ENDED {
        restarts(causes, &path.field(list), (&status[list], &before[list]), &old["spec"], list);
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

/// Refuses the restart of containers that may not start again.
fn restarts(causes: &mut Causes, path: &Path, (new, old): (&Value, &Value), spec: &Value, list: &str) {
    let policy = text(&spec["restartPolicy"]);
    let mut by_name: HashMap<&Value, &Value> = HashMap::new();
    for (_, now) in items(new) {
        by_name.entry(&now["name"]).or_insert(now);
    }
    for (index, before) in items(old) {
        let Some(code) = before["state"]["terminated"]["exitCode"].as_i64() else { continue };
        let may_start =
            list == "containerStatuses" && (policy == "Always" || (policy == "OnFailure" && code != 0));
        let now = by_name.get(&before["name"]);
        if !may_start && now.is_some_and(|now| now["state"]["terminated"].is_null()) {
            causes.forbidden(
                &path.index(index).field("state"),
                "may not be transitioned to non-terminated state",
            );
        }
    }
}

/// Checks the addresses of a pod or of its node. Invalid ones of the old status may stay.
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
        let pod = |status: Value| json!({"spec": {"restartPolicy": policy}, "status": status});
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
}
