use serde_json::{Value, json};

use super::*;

fn claim_of(fields: Value) -> Claim {
    let mut claim = json!({"metadata": {"namespace": "n", "name": "c", "uid": "u", "resourceVersion": "5"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "s"}, "status": {"phase": "Pending"}});
    merge(&mut claim, &fields);
    serde_json::from_value(claim).unwrap()
}

fn volume_of(fields: Value) -> PersistentVolume {
    let mut volume = json!({"metadata": {"name": "v", "uid": "w", "resourceVersion": "7"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "2Gi"}, "storageClassName": "s",
        "persistentVolumeReclaimPolicy": "Retain"}, "status": {"phase": "Available"}});
    merge(&mut volume, &fields);
    serde_json::from_value(volume).unwrap()
}

fn merge(object: &mut Value, fields: &Value) {
    for (name, value) in fields.as_object().unwrap() {
        if value.is_object() && object[name].is_object() {
            merge(&mut object[name], value);
        } else {
            object[name] = value.clone();
        }
    }
}

fn observed(claim: &Claim) -> ObservedClaim<'_> {
    let (candidates, pods) = (Vec::new(), Vec::new());
    ObservedClaim { claim, volume: None, class: None, default_class: None, candidates, pods }
}

fn class(provisioner: &str, mode: &str) -> Option<Arc<StorageClass>> {
    let class = json!({"metadata": {"name": "s"}, "provisioner": provisioner, "volumeBindingMode": mode});
    Some(Arc::new(serde_json::from_value(class).unwrap()))
}

#[test]
fn a_cached_claim_with_another_uid_does_not_release_a_volume() {
    let claim = Arc::new(claim_of(json!({})));
    let of =
        |uid: &str| volume_of(json!({"spec": {"claimRef": {"namespace": "n", "name": "c", "uid": uid}}}));
    assert!(cached_claim(&of("u"), Some(claim.clone())).is_some());
    assert!(cached_claim(&of("newer"), Some(claim)).is_none(), "the API server is asked");
}

fn reasons(steps: &[Action]) -> Vec<&'static str> {
    let reason = |step: &Action| match step {
        Action::Record(reason, ..) => Some(*reason),
        _ => None,
    };
    steps.iter().filter_map(reason).collect()
}

#[test]
fn a_binding_writes_both_sides_in_order_and_names_the_volumes_version() {
    let claim_object = claim_of(json!({}));
    let volume = Arc::new(volume_of(json!({})));
    let steps = claim(&ObservedClaim { candidates: vec![volume], ..observed(&claim_object) });
    let [
        Action::PatchVolume { patch: reserve, part: Part::Main, .. },
        Action::PatchVolume { part: Part::Status, .. },
        Action::PatchClaim(Part::Main, named),
        Action::PatchClaim(Part::Status, status),
    ] = steps.as_slice()
    else {
        panic!("{steps:?}")
    };
    assert_eq!(
        (&reserve["metadata"]["resourceVersion"], &reserve["spec"]["claimRef"]["uid"]),
        (&json!("7"), &json!("u"))
    );
    assert_eq!(named["spec"]["volumeName"], "v");
    assert_eq!(named["metadata"]["annotations"][BOUND_BY_CONTROLLER], "yes");
    assert_eq!(status["status"]["capacity"]["storage"], "2Gi");
}

#[test]
fn a_binding_takes_the_attributes_class_of_the_volume() {
    let class = |phase: &str| {
        let spec = json!({"volumeAttributesClassName": "gold"});
        let claim_object = claim_of(json!({"spec": spec, "status": {"phase": phase}}));
        let volume = Arc::new(volume_of(json!({"spec": spec})));
        let steps = bind(&claim_object, &volume);
        match steps.last() {
            Some(Action::PatchClaim(Part::Status, patch)) => {
                patch["status"]["currentVolumeAttributesClassName"].clone()
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!([class("Pending"), class("Lost")], [json!("gold"), Value::Null]);
}

#[test]
fn a_complete_binding_needs_no_write() {
    let bound = claim_of(json!({"metadata": {"annotations": {BIND_COMPLETED: "yes"}},
        "spec": {"volumeName": "v"}, "status": {"phase": "Bound"}}));
    let reference = json!({"namespace": "n", "name": "c", "uid": "u"});
    let taken = volume_of(json!({"spec": {"claimRef": reference}, "status": {"phase": "Bound"}}));
    assert_eq!(claim(&ObservedClaim { volume: Some(Arc::new(taken.clone())), ..observed(&bound) }), []);
    assert_eq!(volume(&taken, Some(&bound)), []);
}

#[test]
fn events_of_pending_claims_name_the_reason() {
    let plain = claim_of(json!({}));
    let selected = claim_of(json!({"metadata": {"annotations": {SELECTED_NODE: "a"}}}));
    let none = claim_of(json!({"spec": {"storageClassName": ""}}));
    let own = local_volume::PROVISIONER_NAME;
    for (claim_object, class, expect) in [
        (&plain, None, vec!["ProvisioningFailed"]),
        (&none, None, vec!["FailedBinding"]),
        (&plain, class(own, "WaitForFirstConsumer"), vec!["WaitForFirstConsumer"]),
        (&selected, class(own, "WaitForFirstConsumer"), vec![]),
        (&plain, class("x.io/y", "Immediate"), vec!["ExternalProvisioning"]),
        (&plain, class(NO_PROVISIONER, "Immediate"), vec!["ProvisioningFailed"]),
    ] {
        let steps = claim(&ObservedClaim { class: class.clone(), ..observed(claim_object) });
        assert_eq!(reasons(&steps), expect, "{class:?}");
    }
}

#[test]
fn a_claim_that_waits_for_a_pod_takes_only_a_reserved_volume() {
    let claim_object = claim_of(json!({}));
    let waits = || class("x", "WaitForFirstConsumer");
    let free = Arc::new(volume_of(json!({})));
    let steps = claim(&ObservedClaim { class: waits(), candidates: vec![free], ..observed(&claim_object) });
    assert_eq!(reasons(&steps), ["WaitForFirstConsumer"]);
    let reserved = volume_of(json!({"spec": {"claimRef": {"namespace": "n", "name": "c", "uid": "u"}}}));
    let steps = claim(&ObservedClaim {
        class: waits(),
        candidates: vec![Arc::new(reserved)],
        ..observed(&claim_object)
    });
    assert!(matches!(steps.as_slice(), [Action::PatchVolume { part: Part::Status, .. }, ..]), "{steps:?}");
}

#[test]
fn the_event_of_a_claim_that_waits_names_its_pods() {
    let waits = || class("x", "WaitForFirstConsumer");
    let unbound = claim_of(json!({}));
    let event = |pods: &[&str]| {
        let pods = pods.iter().map(|pod| (*pod).to_owned()).collect();
        let steps = claim(&ObservedClaim { class: waits(), pods, ..observed(&unbound) });
        let [Action::Record(reason, false, message)] = &steps[..] else { panic!("{steps:?}") };
        format!("{reason}: {message}")
    };
    assert_eq!(event(&[]), "WaitForFirstConsumer: waiting for first consumer to be created before binding");
    assert_eq!(event(&["p"]), "WaitForPodScheduled: waiting for pod p to be scheduled");
    assert_eq!(event(&["p", "q"]), "WaitForPodScheduled: waiting for pods p,q to be scheduled");
    assert!(names_pods(&unbound, waits().as_deref()) && !names_pods(&unbound, None));
    let pod = |node: Value, phase: &str, name: &str| -> Pod {
        let volume = json!({"name": "data", "persistentVolumeClaim": {"claimName": name}});
        let spec = json!({"nodeName": node, "volumes": [volume]});
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec, "status": {"phase": phase}}))
            .unwrap()
    };
    let uses = |node: Value, phase: &str, name: &str| is_pending_user(&pod(node, phase, name), &unbound);
    assert!(uses(Value::Null, "Pending", "c"));
    assert!(!uses(json!("a"), "Pending", "c") && !uses(Value::Null, "Failed", "c"));
    assert!(!uses(Value::Null, "Pending", "other"));
}

#[test]
fn a_reserved_volume_of_another_mode_has_events() {
    let reference = json!({"namespace": "n", "name": "c", "uid": "u"});
    let block = volume_of(json!({"spec": {"claimRef": reference, "volumeMode": "Block"}}));
    let steps = volume(&block, Some(&claim_of(json!({}))));
    let of_volume = "Cannot bind PersistentVolume to requested PersistentVolumeClaim \"c\" due to incompatible volumeMode.";
    let of_claim = "Cannot bind PersistentVolume \"v\" to requested PersistentVolumeClaim due to incompatible volumeMode.";
    assert_eq!(
        steps,
        [
            Action::warning("VolumeMismatch", of_volume),
            Action::WarnClaim("VolumeMismatch", of_claim.to_owned()),
        ]
    );
    let same = volume_of(json!({"spec": {"claimRef": reference}}));
    assert!(volume(&same, Some(&claim_of(json!({})))).is_empty());
}

#[test]
fn a_claim_without_a_class_gets_the_default_and_an_empty_class_means_none() {
    let unset = claim_of(json!({"spec": {"storageClassName": null}}));
    let default_class = Some("d".to_owned());
    let steps = claim(&ObservedClaim { default_class: default_class.clone(), ..observed(&unset) });
    let [Action::PatchClaim(Part::Main, patch)] = steps.as_slice() else { panic!("{steps:?}") };
    assert_eq!(patch["spec"]["storageClassName"], "d");
    // A volume without a class has precedence.
    let free = vec![Arc::new(volume_of(json!({"spec": {"storageClassName": null}})))];
    let steps =
        claim(&ObservedClaim { default_class: default_class.clone(), candidates: free, ..observed(&unset) });
    assert!(matches!(steps.as_slice(), [Action::PatchVolume { .. }, ..]), "{steps:?}");
    let empty = claim_of(json!({"spec": {"storageClassName": ""}}));
    assert_eq!(reasons(&claim(&ObservedClaim { default_class, ..observed(&empty) })), ["FailedBinding"]);
}

#[test]
fn a_named_volume_must_fit_and_must_be_free() {
    let named = claim_of(json!({"spec": {"volumeName": "v"}}));
    let with = |volume: PersistentVolume| {
        claim(&ObservedClaim { volume: Some(Arc::new(volume)), ..observed(&named) })
    };
    assert_eq!(with(volume_of(json!({}))).len(), 4);
    assert_eq!(
        reasons(&with(volume_of(json!({"spec": {"capacity": {"storage": "1Mi"}}})))),
        ["VolumeMismatch"]
    );
    let deleted = volume_of(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    assert_eq!(reasons(&with(deleted)), ["VolumeMismatch"]);
    let other = json!({"spec": {"claimRef": {"namespace": "n", "name": "other", "uid": "x"}}});
    assert_eq!(reasons(&with(volume_of(other))), ["FailedBinding"]);
}

#[test]
fn a_bound_claim_without_its_volume_is_lost() {
    let bound = claim_of(json!({"metadata": {"annotations": {BIND_COMPLETED: "yes"}},
        "spec": {"volumeName": "v"}, "status": {"phase": "Bound"}}));
    assert_eq!(reasons(&claim(&observed(&bound))), ["ClaimLost"]);
    let other = volume_of(json!({"spec": {"claimRef": {"namespace": "n", "name": "other", "uid": "x"}}}));
    let steps = claim(&ObservedClaim { volume: Some(Arc::new(other)), ..observed(&bound) });
    assert_eq!(reasons(&steps), ["ClaimMisbound"]);
}

#[test]
fn a_released_volume_is_kept_deleted_or_failed() {
    let reference = json!({"namespace": "n", "name": "c", "uid": "gone"});
    let in_phase = |phase: &str, policy: &str, provisioner: Value| {
        let volume_object = volume_of(json!({"metadata": {"annotations": {PROVISIONED_BY: provisioner}},
            "spec": {"claimRef": reference, "persistentVolumeReclaimPolicy": policy}, "status": {"phase": phase}}));
        volume(&volume_object, None)
    };
    let released = |policy: &str, provisioner: Value| in_phase("Bound", policy, provisioner);
    let own = json!(local_volume::PROVISIONER_NAME);
    assert_eq!(released("Retain", own.clone()).len(), 1);
    let first = released("Delete", own.clone());
    assert!(matches!(first[..], [Action::PatchVolume { part: Part::Status, .. }]), "{first:?}");
    assert_eq!(in_phase("Released", "Delete", own), [Action::DeleteVolume]);
    assert_eq!(released("Delete", json!("csi.example.com")).len(), 1);
    let without =
        volume_of(json!({"spec": {"claimRef": reference, "persistentVolumeReclaimPolicy": "Delete"}}));
    assert_eq!(reasons(&volume(&without, None)), ["VolumeFailedDelete"]);
    assert_eq!(reasons(&released("Recycle", json!("x"))), ["VolumeFailedRecycle"]);
}

#[test]
fn a_volume_of_a_claim_with_another_volume_is_free_again() {
    let elsewhere = claim_of(json!({"spec": {"volumeName": "other"}}));
    let reference = json!({"namespace": "n", "name": "c", "uid": "u"});
    let chosen = volume_of(json!({"metadata": {"annotations": {BOUND_BY_CONTROLLER: "yes"}},
        "spec": {"claimRef": reference}}));
    let steps = volume(&chosen, Some(&elsewhere));
    let [Action::PatchVolume { patch, .. }] = steps.as_slice() else { panic!("{steps:?}") };
    assert_eq!(patch["spec"], json!({"claimRef": null}));
    let provisioned = |policy: &str| {
        let annotations = json!({PROVISIONED_BY: local_volume::PROVISIONER_NAME});
        let spec = json!({"claimRef": reference, "persistentVolumeReclaimPolicy": policy});
        volume(&volume_of(json!({"metadata": {"annotations": annotations}, "spec": spec})), Some(&elsewhere))
    };
    assert!(matches!(&provisioned("Delete")[..], [Action::PatchVolume { part: Part::Status, .. }]));
    assert!(matches!(&provisioned("Retain")[..], [Action::PatchVolume { part: Part::Main, .. }]));
}

#[test]
fn a_deleted_volume_is_released_when_its_claim_is_gone() {
    let claim = claim_of(json!({"spec": {"volumeName": "v"}}));
    let deleted = volume_of(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"claimRef": {"namespace": "n", "name": "c", "uid": "u"}, "persistentVolumeReclaimPolicy": "Delete"},
        "status": {"phase": "Bound"}}));
    assert!(volume(&deleted, Some(&claim)).is_empty());
    let patch = json!({"metadata": {"uid": "w"}, "status": {"phase": "Released", "message": null}});
    let step = Action::PatchVolume { name: "v".to_owned(), part: Part::Status, patch };
    assert_eq!(volume(&deleted, None), [step]);
}
