use serde_json::{Value, json};

use super::object::BIND_COMPLETED;
use super::*;
use crate::config::Profile;
use crate::fixture;
use crate::snapshot::Snapshot;

fn volumes(claims: &[Value], volumes: &[Value], classes: &[Value]) -> Volumes {
    let found = Volumes::default();
    {
        let mut state = found.lock();
        for claim in claims {
            let claim: Claim = serde_json::from_value(claim.clone()).unwrap();
            state.claims.insert(claim.key(), claim);
        }
        for volume in volumes {
            let volume: Volume = serde_json::from_value(volume.clone()).unwrap();
            state.volumes.insert(volume.name().to_owned(), volume);
        }
        for class in classes {
            let class: StorageClass = serde_json::from_value(class.clone()).unwrap();
            state.classes.insert(class.name().to_owned(), class);
        }
    }
    found
}

fn claim(name: &str, fields: Value) -> Value {
    let mut claim = json!({"metadata": {"namespace": "d", "name": name, "uid": name}, "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "s"}});
    for (field, value) in fields.as_object().unwrap() {
        claim["spec"][field] = value.clone();
    }
    claim
}

fn bound(name: &str, volume: &str) -> Value {
    let mut claim = claim(name, json!({"volumeName": volume}));
    claim["metadata"]["annotations"] = json!({BIND_COMPLETED: "yes"});
    claim
}

fn volume(name: &str, node: &str) -> Value {
    let terms = json!([{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]);
    json!({"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "2Gi"},
        "storageClassName": "s", "nodeAffinity": {"required": {"nodeSelectorTerms": terms}}},
        "status": {"phase": "Available"}})
}

fn class(provisioner: &str) -> Value {
    json!({"metadata": {"name": "s"}, "provisioner": provisioner, "volumeBindingMode": "WaitForFirstConsumer"})
}

fn pod(claims: &[&str]) -> Pod {
    let volumes: Vec<Value> = claims
        .iter()
        .map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}))
        .collect();
    fixture::pod("p", json!({"volumes": volumes}))
}

/// The nodes that accept the pod, and the reasons of the others.
fn accepted(volumes: &Volumes, pod: &Pod) -> (Vec<String>, Vec<String>) {
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
    snapshot.volumes = volumes.clone();
    let claims = volumes.of_pod(pod).unwrap();
    let (mut accepted, mut reasons) = (Vec::new(), Vec::new());
    for node in snapshot.candidates() {
        let refused = claims.refuse(&Profile::default(), node.properties, snapshot.volume_usage(node));
        let refusals = refused.map(|refused| refused.reasons).unwrap_or_default();
        if refusals.is_empty() {
            accepted.push(node.properties.name.clone());
        }
        reasons.extend(refusals);
    }
    (accepted, reasons)
}

#[test]
fn a_bound_claim_restricts_the_pod_to_its_volumes_node() {
    let volumes = volumes(&[bound("c", "v")], &[volume("v", "a")], &[]);
    let (nodes, reasons) = accepted(&volumes, &pod(&["c"]));
    assert_eq!(
        (nodes, reasons),
        (vec!["a".to_owned()], vec!["node(s) didn't match PersistentVolume's node affinity".to_owned()])
    );
}

#[test]
fn a_volume_with_labels_of_a_zone_is_used_in_this_zone_only() {
    let zonal = |name: &str, label: &str, zones: &str| {
        json!({"metadata": {"name": name, "labels": {label: zones}}, "spec": {"accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "2Gi"}, "storageClassName": "s"}, "status": {"phase": "Bound"}})
    };
    let (zone, former) = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone");
    let claims = [bound("c", "v"), bound("d", "w"), bound("e", "x")];
    let all = [zonal("v", zone, "x"), zonal("w", zone, "y__z"), zonal("x", former, "z")];
    let volumes = volumes(&claims, &all, &[]);
    let node = |name: &str| fixture::node(name, json!({"/metadata/labels": {zone: name}}));
    let mut snapshot =
        fixture::snapshot(&[node("x"), node("y"), node("z"), fixture::node("none", json!({}))]);
    snapshot.volumes = volumes.clone();
    let profile = Profile::default();
    let without = Profile { without_filters: ["VolumeZone"].into(), ..Profile::default() };
    let nodes = |claim: &str, profile: &Profile| -> Vec<String> {
        let claims = volumes.of_pod(&pod(&[claim])).unwrap();
        let nodes = snapshot.candidates().filter(|node| {
            let refused = claims.refuse(profile, node.properties, snapshot.volume_usage(*node));
            let reasons = refused.map(|refused| refused.reasons).unwrap_or_default();
            assert!(reasons.is_empty() || reasons == ["node(s) had no available volume zone"], "{reasons:?}");
            reasons.is_empty()
        });
        let mut names: Vec<_> = nodes.map(|node| node.properties.name.clone()).collect();
        names.sort();
        names
    };
    assert_eq!(nodes("c", &profile), ["none", "x"]);
    assert_eq!(nodes("d", &profile), ["none", "y", "z"]);
    assert_eq!(nodes("e", &profile), ["none", "z"], "the former label means the present one");
    assert_eq!(nodes("c", &without).len(), 4);
}

#[test]
fn claims_that_no_node_can_help_are_named() {
    let lost = json!({"metadata": {"namespace": "d", "name": "lost"}, "spec": {"volumeName": "gone"},
        "status": {"phase": "Lost"}});
    let volumes = volumes(&[claim("now", json!({"storageClassName": "other"})), lost], &[], &[class("x")]);
    let why = |name: &str| volumes.of_pod(&pod(&[name])).unwrap_err();
    assert_eq!(why("absent"), "persistentvolumeclaim \"absent\" not found");
    assert_eq!(why("now"), "pod has unbound immediate PersistentVolumeClaims");
    assert_eq!(why("lost"), "persistentvolumeclaim \"lost\" bound to non-existent persistentvolume \"gone\"");
}

#[test]
fn very_many_claims_and_ephemeral_volumes_of_a_pod_take_linear_time() {
    // A comparison of each claim with each volume would take minutes.
    let names: Vec<String> = (0..20_000).map(|at| format!("c{at}")).collect();
    let claims: Vec<Value> = names.iter().map(|name| claim(name, json!({}))).collect();
    let volumes = volumes(&claims, &[], &[class("x.io/y")]);
    let named = names.iter().map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}));
    let ephemeral = names.iter().map(|name| json!({"name": format!("e{name}"), "ephemeral": {}}));
    let all: Vec<Value> = named.chain(ephemeral).collect();
    let pod = fixture::pod("p", json!({"volumes": all}));
    assert_eq!(
        volumes.of_pod(&pod).unwrap_err(),
        "waiting for ephemeral volume controller to create the persistentvolumeclaim \"p-ec0\""
    );
}

#[test]
fn a_waiting_claim_takes_a_volume_of_the_node_or_is_provisioned() {
    let waits = claim("c", json!({}));
    let fixed =
        volumes(std::slice::from_ref(&waits), &[volume("v", "a")], &[class("kubernetes.io/no-provisioner")]);
    let (nodes, reasons) = accepted(&fixed, &pod(&["c"]));
    assert_eq!((nodes.as_slice(), reasons.len()), (["a".to_owned()].as_slice(), 1));
    assert_eq!(reasons[0], "node(s) didn't find available persistent volumes to bind");
    let dynamic = volumes(&[waits], &[volume("v", "a")], &[class("x.io/y")]);
    assert_eq!(accepted(&dynamic, &pod(&["c"])).0, ["a", "b"]);
}

fn existing(claim: &str, volume: &str) -> ChosenVolume {
    ChosenVolume { claim: Key::new("d", claim), choice: Choice::Existing(volume.to_owned()) }
}

#[test]
fn a_reserved_volume_is_not_given_to_a_second_claim() {
    let found = volumes(
        &[claim("c", json!({})), claim("d", json!({}))],
        &[volume("v", "a")],
        &[class("kubernetes.io/no-provisioner")],
    );
    assert!(accepted(&found, &pod(&["c", "d"])).0.is_empty(), "one volume for two claims");
    let snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
    let node = snapshot.candidates().next().unwrap().properties;
    let chosen = found.reserve(&pod(&["c"]), node).unwrap();
    assert_eq!(chosen, [existing("c", "v")]);
    assert!(accepted(&found, &pod(&["d"])).0.is_empty());
    let late = found.reserve(&pod(&["d"]), node).unwrap_err();
    assert_eq!(late, "node(s) didn't find available persistent volumes to bind");
    found.release(&chosen);
    assert_eq!(accepted(&found, &pod(&["d"])).0, ["a"]);
    found.lock().claims.clear();
    assert!(found.reserve(&pod(&["d"]), node).is_err(), "the claim was deleted after the filter");
}

#[test]
fn a_changed_claim_wakes_its_pods_and_an_unchanged_one_wakes_none() {
    use coracle_watch::Event;
    let found = volumes(&[], &[], &[]);
    let (mut state, mut listed) = (found.lock(), std::collections::HashSet::new());
    let of = |name: &str| serde_json::from_value::<Claim>(claim(name, json!({}))).unwrap();
    for (event, claims) in [
        (Event::Apply(of("c")), 1),
        (Event::Apply(of("c")), 0),
        (Event::Delete(of("c")), 1),
        (Event::Delete(of("c")), 0),
    ] {
        assert!(!feed::claim(&mut state, &mut listed, event), "no other pod becomes schedulable");
        assert_eq!(std::mem::take(&mut state.pending).claims.len(), claims);
    }
}

#[test]
fn the_latest_state_of_a_written_claim_remains() {
    use coracle_watch::Event;
    let found = volumes(&[], &[], &[]);
    let (mut state, mut listed) = (found.lock(), std::collections::HashSet::new());
    let of = |version: &str| {
        let mut claim = claim("c", json!({}));
        claim["metadata"]["resourceVersion"] = version.into();
        serde_json::from_value::<Claim>(claim).unwrap()
    };
    let key = of("9").key();
    let known =
        |state: &State| state.claims.get(&key).and_then(|claim| claim.metadata.resource_version.clone());
    feed::claim(&mut state, &mut listed, Event::Apply(of("9")));
    state.update_claim(&key, of("10"));
    feed::claim(&mut state, &mut listed, Event::Apply(of("8")));
    assert_eq!(known(&state).as_deref(), Some("10"), "the event is older than the write");
    feed::claim(&mut state, &mut listed, Event::Apply(of("12")));
    state.update_claim(&key, of("11"));
    assert_eq!(known(&state).as_deref(), Some("12"), "the write is older than the event");
    feed::claim(&mut state, &mut listed, Event::Delete(of("13")));
    state.update_claim(&key, of("12"));
    assert_eq!(known(&state), None, "the claim was deleted after the write");
}

#[test]
fn a_claim_with_a_selected_node_stays_there() {
    let mut selected = claim("c", json!({}));
    selected["metadata"]["annotations"] = json!({SELECTED_NODE: "b"});
    let found = volumes(&[selected], &[], &[class("x.io/y")]);
    assert_eq!(accepted(&found, &pod(&["c"])).0, ["b"]);
}

#[test]
fn an_exclusive_claim_is_used_by_one_pod() {
    let mut exclusive = bound("c", "v");
    exclusive["spec"]["accessModes"] = json!(["ReadWriteOncePod"]);
    let found = volumes(&[exclusive], &[volume("v", "a")], &[]);
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
    let claims = found.of_pod(&pod(&["c"])).unwrap();
    let refused = |snapshot: &Snapshot| {
        let node = snapshot.candidates().next().unwrap();
        claims.refuse(&Profile::default(), node.properties, snapshot.volume_usage(node))
    };
    assert_eq!(refused(&snapshot), None);
    snapshot.claim_users.insert(Key::new("d", "c"), 1);
    let found = refused(&snapshot).unwrap();
    assert!(found.reasons[0].contains("ReadWriteOncePod") && found.resolvable);
}

#[test]
fn a_disk_in_use_keeps_other_pods_off_its_node() {
    let on_disk = |name: &str| {
        let disk = json!({"name": "v", "iscsi": {"iqn": "iqn.x", "targetPortal": "10.0.0.1", "lun": 0}});
        fixture::pod(name, json!({"volumes": [disk]}))
    };
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
    snapshot.place(&on_disk("p"), "a");
    let refused = crate::decide::decide(&on_disk("q"), &Profile::default(), &mut snapshot).unwrap_err();
    assert_eq!(refused.message, "0/1 nodes are available: 1 node(s) had no available disk.");
    assert_eq!(refused.resolvable, ["a".to_owned()].into());
    snapshot.remove("p");
    assert_eq!(crate::decide::decide(&on_disk("q"), &Profile::default(), &mut snapshot), Ok("a".to_owned()));
}

#[test]
fn a_nominated_pod_does_not_reserve_its_exclusive_claim() {
    let mut exclusive = bound("c", "v");
    exclusive["spec"]["accessModes"] = json!(["ReadWriteOncePod"]);
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
    snapshot.volumes = volumes(&[exclusive], &[volume("v", "a")], &[]);
    let user = json!([{"name": "c", "persistentVolumeClaim": {"claimName": "c"}}]);
    let other = fixture::pod("other", json!({"volumes": user}));
    let decide = |snapshot: &mut Snapshot| {
        let found = crate::decide::decide(&pod(&["c"]), &Profile::default(), snapshot);
        found.map_err(|refused| refused.message)
    };
    snapshot.nominate(&other, "a");
    assert_eq!(decide(&mut snapshot), Ok("a".to_owned()));
    snapshot.place(&other, "a");
    assert!(decide(&mut snapshot).unwrap_err().contains("ReadWriteOncePod"));
}

#[test]
fn a_nodes_limit_of_volumes_per_driver_is_respected() {
    let mut volumes_ = Vec::new();
    for name in ["v", "w", "x"] {
        let mut volume = volume(name, "a");
        volume["spec"]["csi"] = json!({"driver": "x.io/y", "volumeHandle": name});
        volume["spec"]["nodeAffinity"] = Value::Null;
        volumes_.push(volume);
    }
    let found =
        volumes(&[bound("c", "v"), bound("d", "w"), claim("e", json!({}))], &volumes_, &[class("x.io/y")]);
    let node = json!({"metadata": {"name": "a"}, "spec": {"drivers": [{"name": "x.io/y", "allocatable": {"count": 2}}]}});
    found.add("CSINode", &node).unwrap();
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
    snapshot.volumes = found.clone();
    let refused = |snapshot: &Snapshot, names: &[&str]| {
        let claims = found.of_pod(&pod(names)).unwrap();
        let node = snapshot.candidates().next().unwrap();
        claims
            .refuse(&Profile::default(), node.properties, snapshot.volume_usage(node))
            .map(|refused| refused.reasons)
    };
    let many = Some(vec!["node(s) exceed max volume count".to_owned()]);
    assert_eq!(refused(&snapshot, &["c", "d"]), None);
    assert_eq!(refused(&snapshot, &["c", "d", "e"]), many);
    snapshot.place(&pod(&["c"]), "a");
    assert_eq!(refused(&snapshot, &["c", "d"]), None, "a volume counts once");
    let shared = json!({"volumes": [{"name": "c", "persistentVolumeClaim": {"claimName": "c"}}]});
    snapshot.place(&fixture::pod("q", shared), "a");
    assert_eq!(refused(&snapshot, &["d"]), None, "two pods of the node share a claim");
    let attachment = json!({"metadata": {"name": "t"}, "spec": {"attacher": "x.io/y", "nodeName": "a",
        "source": {"persistentVolumeName": "x"}}});
    found.add("VolumeAttachment", &attachment).unwrap();
    assert_eq!(refused(&snapshot, &["d"]), many);
}

#[test]
fn a_driver_that_reports_its_space_provisions_only_there() {
    let found = volumes(&[claim("c", json!({}))], &[], &[class("x.io/y")]);
    assert_eq!(accepted(&found, &pod(&["c"])).0, ["a", "b"]);
    found
        .add("CSIDriver", &json!({"metadata": {"name": "x.io/y"}, "spec": {"storageCapacity": true}}))
        .unwrap();
    let none = accepted(&found, &pod(&["c"]));
    assert_eq!((none.0.len(), none.1[0].as_str()), (0, "node(s) did not have enough free storage"));
    for (name, node, capacity) in [("1", "a", "2Gi"), ("2", "b", "1Mi")] {
        let topology = json!({"matchLabels": {"kubernetes.io/hostname": node}});
        let capacity = json!({"metadata": {"name": name, "namespace": "d"}, "storageClassName": "s",
            "nodeTopology": topology, "capacity": capacity});
        found.add("CSIStorageCapacity", &capacity).unwrap();
    }
    assert_eq!(accepted(&found, &pod(&["c"])).0, ["a"]);
}

#[test]
fn a_claim_larger_than_the_disk_with_local_volumes_waits_for_another_node() {
    let found = volumes(&[claim("c", json!({}))], &[], &[class("coracle.dev/local-path")]);
    let node = |disk: &str| {
        let mut node = fixture::node("a", json!({}));
        let name = "coracle.dev/local-volumes-disk".to_owned();
        node.metadata.annotations = Some([(name, disk.to_owned())].into());
        fixture::snapshot(&[node])
    };
    let refused = |snapshot: &Snapshot| {
        let claims = found.of_pod(&pod(&["c"])).unwrap();
        let node = snapshot.candidates().next().unwrap();
        let refused = claims.refuse(&Profile::default(), node.properties, snapshot.volume_usage(node));
        refused.map(|refused| refused.reasons)
    };
    let none = Some(vec!["node(s) did not have enough free storage".to_owned()]);
    assert_eq!(refused(&node("1048575Ki")), none);
    assert_eq!((refused(&node("1Gi")), refused(&node("unknown"))), (None, None));
    assert_eq!(accepted(&found, &pod(&["c"])).0, ["a", "b"], "nodes that report no size");
}

#[test]
fn the_smallest_claim_takes_the_smallest_volume() {
    let mut large = volume("large", "a");
    large["spec"]["capacity"]["storage"] = json!("9Gi");
    let big = claim("big", json!({"resources": {"requests": {"storage": "5Gi"}}}));
    let found = volumes(&[big, claim("small", json!({}))], &[volume("v", "a"), large], &[class("x.io/y")]);
    let snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
    let claims = found.of_pod(&pod(&["big", "small"])).unwrap();
    let chosen = claims.choices(snapshot.candidates().next().unwrap().properties).unwrap();
    assert_eq!(chosen, [existing("small", "v"), existing("big", "large")]);
}

/// A client of an API server that answers each request with this object.
fn client(answer: &Value) -> kube::Client {
    let answer = answer.to_string();
    let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
        let body = kube::client::Body::from(answer.clone().into_bytes());
        async { Ok::<_, std::convert::Infallible>(http::Response::new(body)) }
    });
    kube::Client::new(service, "")
}

/// The paused clock moves only while all tasks wait for a timer.
#[tokio::test(start_paused = true)]
async fn a_pod_is_queued_again_if_the_provisioner_does_not_respond() {
    let waiting = claim("c", json!({}));
    let volumes = volumes(std::slice::from_ref(&waiting), &[], &[class("x")]);
    let mut selected = waiting;
    selected["metadata"]["annotations"] = json!({SELECTED_NODE: "a"});
    let chosen = [ChosenVolume { claim: Key::new("d", "c"), choice: Choice::Provision }];
    let (start, timeout) = (tokio::time::Instant::now(), std::time::Duration::from_secs(600));
    let error = bind::bind(&client(&selected), &volumes, &chosen, "a", timeout).await.unwrap_err();
    assert_eq!(error.to_string(), "binding volumes: context deadline exceeded");
    assert!(start.elapsed() >= timeout);
    assert_eq!(
        accepted(&volumes, &pod(&["c"])).0,
        ["a"],
        "the provisioner may work on a volume of this node"
    );
}
