//! Rules of pods that pod templates do not have, and rules of both.

use super::*;

fn spec(more: Value) -> Value {
    let mut spec = json!({"containers": [{"name": "a", "image": "x:1"}]});
    spec.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
    spec
}

#[test]
fn templates_may_have_images_with_spaces_and_without_a_reference() {
    let volumes = json!([{"name": "v", "image": {"pullPolicy": "Always"}}]);
    let wrong = json!({"containers": [{"name": "a", "image": " x"}], "volumes": volumes});
    let image =
        "spec.containers[0].image: Invalid value: \" x\": must not have leading or trailing whitespace";
    check("Pod", "/spec", wrong.clone(), &[image, "spec.volumes[0].image.reference: Required value"]);
    check("Deployment", "/spec/template/spec", wrong, &[]);
}

#[test]
fn claims_of_ephemeral_volumes_have_valid_names_and_one_user() {
    let claim =
        json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}}});
    let ephemeral = json!({"name": "v", "ephemeral": {"volumeClaimTemplate": claim}});
    let used = json!({"name": "w", "persistentVolumeClaim": {"claimName": "x-v"}});
    check(
        "Pod",
        "/spec/volumes",
        json!([ephemeral, used]),
        &[
            "spec.volumes[1].persistentVolumeClaim.claimName: Invalid value: \"x-v\": must not reference a PVC",
        ],
    );
    let mut pod = good("Pod");
    pod["metadata"]["name"] = "a".repeat(253).into();
    pod["spec"]["volumes"] = json!([ephemeral]);
    defaults::apply(kind("Pod"), &mut pod);
    let causes = texts(create(kind("Pod"), &pod));
    assert!(causes[0].starts_with("spec.volumes[0].name: Invalid value: \"v\": PVC name"), "{causes:?}");
    let mut named = ephemeral;
    named["ephemeral"]["volumeClaimTemplate"]["metadata"] = json!({"name": "x", "labels": {"a": "b c"}});
    let here = "spec.volumes[0].ephemeral.volumeClaimTemplate.metadata";
    check(
        "Pod",
        "/spec/volumes",
        json!([named]),
        &[
            &format!("{here}.labels: Invalid value: \"b c\""),
            &format!("{here}.name: Forbidden: cannot be set"),
        ],
    );
}

#[test]
fn a_pod_with_gates_has_no_node() {
    let gated = spec(json!({"nodeName": "n", "schedulingGates": [{"name": "a"}, {"name": "b"}]}));
    check("Pod", "/spec", gated, &["spec.nodeName: Forbidden: cannot be set until all schedulingGates"]);
}

#[test]
fn annotations_of_templates_are_checked() {
    let at = "/spec/template/metadata/annotations";
    check("Deployment", at, json!({"a b": "x"}), &["spec.template.annotations: Invalid value: \"a b\""]);
    let cost = "controller.kubernetes.io/pod-deletion-cost";
    let expect = format!("spec.template.annotations[{cost}]: Invalid value: \"x\": must be a 32bit integer");
    check("Deployment", at, json!({(cost): "x"}), &[&expect]);
    check("Job", at, json!({(cost): "x"}), &[&expect]);
    let expect = format!("template.annotations[{cost}]: Invalid value: \"x\"");
    check("PodTemplate", "/template/metadata/annotations", json!({(cost): "x"}), &[&expect]);
    let expect = format!("metadata.annotations[{cost}]: Invalid value: \"x\"");
    check("Pod", "/metadata/annotations", json!({(cost): "x"}), &[&expect]);
}

#[test]
fn search_domains_are_limited() {
    let of = |count: usize, length: usize| json!({"searches": vec!["a".repeat(length); count]});
    check("Pod", "/spec/dnsConfig", of(32, 3), &[]);
    let many = "spec.dnsConfig.searches: Invalid value: [\"aaa\"";
    check("Pod", "/spec/dnsConfig", of(33, 3), &[many]);
    let mut pod = good("Pod");
    pod["spec"]["dnsConfig"] = of(32, 63);
    defaults::apply(kind("Pod"), &mut pod);
    assert_eq!(texts(create(kind("Pod"), &pod)), Vec::<String>::new(), "32 * 64 - 1 = 2047");
    pod["spec"]["dnsConfig"]["searches"][0] = format!("{}.aa", "a".repeat(62)).into();
    let causes = texts(create(kind("Pod"), &pod));
    assert!(causes.len() == 1 && causes[0].contains("must not have more than 2048 characters"), "{causes:?}");
}

#[test]
fn host_ports_equal_container_ports_in_the_network_of_the_node() {
    let port =
        |host: i64| json!([{"name": "a", "image": "x", "ports": [{"containerPort": 1, "hostPort": host}]}]);
    let of = |host: i64| json!({"containers": port(host), "hostNetwork": true});
    check("Pod", "/spec", of(1), &[]);
    let expect = "spec.containers[0].ports[0].hostPort: Invalid value: 2: must match `containerPort`";
    check("Pod", "/spec", of(2), &[expect]);
    let init = |names: [&str; 2]| {
        let one =
            |name: &str| json!({"name": name, "image": "x", "ports": [{"containerPort": 1, "hostPort": 5}]});
        Value::from(names.map(one).to_vec())
    };
    check("Pod", "/spec/initContainers", init(["i", "j"]), &[]);
    let mut twice = init(["i", "j"]);
    twice[1]["ports"] = json!([{"containerPort": 1, "hostPort": 5}, {"containerPort": 2, "hostPort": 5}]);
    check(
        "Pod",
        "/spec/initContainers",
        twice,
        &["spec.initContainers[0].ports[1].hostPort: Duplicate value: \"TCP//5\""],
    );
}

#[test]
fn a_hook_sleeps_at_most_for_the_grace_period() {
    let hook = |seconds: i64| json!({"preStop": {"sleep": {"seconds": seconds}}});
    check("Pod", "/spec/containers/0/lifecycle", hook(30), &[]);
    check("Pod", "/spec/containers/0/lifecycle", hook(0), &[]);
    let here = "spec.containers[0].lifecycle.preStop.sleep: Invalid value";
    let detail = "must be non-negative and less than terminationGracePeriodSeconds (30)";
    for seconds in [31, -1] {
        let expect = format!("{here}: {seconds}: {detail}");
        check("Pod", "/spec/containers/0/lifecycle", hook(seconds), &[&expect]);
    }
}

#[test]
fn policies_and_amounts_of_pods_are_checked() {
    check("Pod", "/spec/preemptionPolicy", json!("Never"), &[]);
    let expect =
        "spec.preemptionPolicy: Unsupported value: \"x\": supported values: \"PreemptLowerPriority\"";
    check("Pod", "/spec/preemptionPolicy", json!("x"), &[expect]);
    check("Pod", "/spec/overhead", json!({"cpu": "1m"}), &[]);
    check(
        "Pod",
        "/spec/overhead",
        json!({"cpu": "-1"}),
        &["spec.overhead.limits[cpu]: Invalid value: \"-1\""],
    );
}

#[test]
fn ephemeral_containers_of_mirror_pods_are_refused() {
    let mut pod = good("Pod");
    pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    let causes = texts(ephemeral_containers(&pod, &pod));
    assert_eq!(causes, ["[]: Forbidden: static pods do not support ephemeral containers"]);
    pod["spec"]["nodeName"] = "n".into();
    pod["spec"]["resourceClaims"] = json!([{"name": "a", "resourceClaimName": "c"}]);
    defaults::apply(kind("Pod"), &mut pod);
    let causes = texts(create(kind("Pod"), &pod));
    assert_eq!(causes, ["[]: Forbidden: static pods do not support resource claims"]);
}

#[test]
fn a_pod_that_is_invalid_today_gets_ephemeral_containers_and_is_resized() {
    let mut old = good("Pod");
    old["metadata"]["name"] = "p".into();
    old["spec"]["dnsConfig"] = json!({"searches": vec!["a"; 33]});
    old["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1"}});
    defaults::apply(kind("Pod"), &mut old);
    let mut new = old.clone();
    new["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2".into();
    assert_eq!(texts(resize(&new, &old)), Vec::<String>::new());
    let mut new = old.clone();
    new["spec"]["ephemeralContainers"] = json!([{"name": "debug", "image": "x"}]);
    defaults::apply(kind("Pod"), &mut new);
    assert_eq!(texts(ephemeral_containers(&new, &old)), Vec::<String>::new());
    let mut changed = new.clone();
    changed["spec"]["ephemeralContainers"][0]["image"] = "y".into();
    let cause =
        "spec.ephemeralContainers: Forbidden: existing ephemeral containers \"debug\" may not be changed";
    assert_eq!(texts(ephemeral_containers(&changed, &new)), [cause]);
    new["spec"]["ephemeralContainers"][0]["name"] = "A".into();
    let causes = texts(ephemeral_containers(&new, &old));
    assert!(
        causes.len() == 1 && causes[0].starts_with("spec.ephemeralContainers[0].name: Invalid"),
        "{causes:?}"
    );
}

#[test]
fn names_of_headers_have_no_underscores() {
    let probe = |name: &str| json!({"httpGet": {"path": "/", "port": 80, "httpHeaders": [{"name": name, "value": ""}]}});
    let pointer = "/spec/containers/0/readinessProbe";
    check("Pod", pointer, probe("X-Header-1"), &[]);
    let cause =
        "spec.containers[0].readinessProbe.httpGet.httpHeaders: Invalid value: \"X_A\": a valid HTTP header";
    check("Pod", pointer, probe("X_A"), &[cause]);
}
