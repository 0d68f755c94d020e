//! Pods: containers, volumes, scheduling, security.

use super::*;

#[test]
fn pods_need_containers_names_and_images() {
    let at = "/spec/containers";
    check("Pod", at, json!([]), &["spec.containers: Required value"]);
    check(
        "Pod",
        "/spec/containers/0/name",
        json!("A"),
        &["spec.containers[0].name: Invalid value: \"A\": a lowercase RFC 1123 label"],
    );
    check("Pod", "/spec/containers/0/image", json!(""), &["spec.containers[0].image: Required value"]);
    check(
        "Pod",
        "/spec/containers/0/image",
        json!(" a"),
        &["spec.containers[0].image: Invalid value: \" a\": must not have leading or trailing whitespace"],
    );
    check(
        "Pod",
        "/spec/containers/1",
        json!({"name": "a", "image": "y"}),
        &["spec.containers[1].name: Duplicate value: \"a\""],
    );
    check(
        "Pod",
        "/spec/initContainers",
        json!([{"name": "a", "image": "y"}]),
        &["spec.initContainers[0].name: Duplicate value: \"a\""],
    );
    check(
        "Pod",
        "/spec/containers/0/imagePullPolicy",
        json!("Sometimes"),
        &[
            "spec.containers[0].imagePullPolicy: Unsupported value: \"Sometimes\": supported values: \"Always\", \"IfNotPresent\", \"Never\"",
        ],
    );
    check(
        "Pod",
        "/spec/restartPolicy",
        json!("Maybe"),
        &[
            "spec.restartPolicy: Unsupported value: \"Maybe\": supported values: \"Always\", \"OnFailure\", \"Never\"",
        ],
    );
    check(
        "Pod",
        "/spec/activeDeadlineSeconds",
        json!(0),
        &["spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive"],
    );
    check("Pod", "/spec/dnsPolicy", json!("None"), &["spec.dnsConfig: Required value"]);
}

#[test]
fn the_override_of_a_host_name_is_a_short_subdomain_and_the_only_source_of_the_name() {
    let spec = |name: &str, field: &str| {
        let containers = json!([{"name": "a", "image": "x:1"}]);
        json!({"containers": containers, "hostnameOverride": name, field: true})
    };
    let here = "spec.hostnameOverride";
    check("Pod", "/spec", spec("a.b", "hostPID"), &[]);
    for field in ["setHostnameAsFQDN", "hostNetwork"] {
        let expected = format!("{here}: Forbidden: may not be specified when {field} is true");
        check("Pod", "/spec", spec("a.b", field), &[&expected]);
    }
    let at = "/spec/hostnameOverride";
    check("Pod", at, json!("a".repeat(64)), &[]);
    let too_long = format!("{here}: Too long: may not be more than 64 bytes");
    check("Pod", at, json!("a".repeat(65)), &[&too_long]);
    for name in ["", "A", "-a", "a_b"] {
        let expected =
            format!("{here}: Invalid value: \"{name}\": a lowercase RFC 1123 subdomain must consist of");
        check("Pod", at, json!(name), &[&expected]);
    }
}

#[test]
fn files_of_variables_are_in_empty_dirs() {
    let spec = |list: &str, reference: Value| {
        let mut spec = json!({"containers": [{"name": "a", "image": "x:1"}],
            "volumes": [{"name": "v", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/x"}}]});
        let env = json!([{"name": "A", "valueFrom": {"fileKeyRef": reference}}]);
        spec[list] = json!([{"name": "b", "image": "x:1", "env": env}]);
        spec
    };
    let of = |volume: &str, path: &str, key: &str| json!({"volumeName": volume, "path": path, "key": key});
    for list in ["containers", "initContainers"] {
        let here = format!("spec.{list}[0].env[0].valueFrom.fileKeyRef");
        check("Pod", "/spec", spec(list, of("v", "a/..b", "K")), &[]);
        for (reference, problem) in [
            (of("v", "", "K"), "path: Required value"),
            (of("v", "a/../b", "K"), "path: Invalid value: \"a/../b\": must not contain '..'"),
            (of("v", "a", ""), "key: Required value"),
            (of("v", "a", "K=V"), "key: Invalid value: \"K=V\": a valid environment variable name"),
            (of("w", "a", "K"), "volumeName: Not found: \"w\""),
            (
                of("h", "a", "K"),
                "volumeName: Invalid value: \"h\": referenced volume must be of type emptyDir",
            ),
        ] {
            check("Pod", "/spec", spec(list, reference), &[&format!("{here}.{problem}")]);
        }
        let missing = [format!("{here}.volumeName: Required"), format!("{here}.volumeName: Not found: \"\"")];
        check("Pod", "/spec", spec(list, of("", "a", "K")), &missing.each_ref().map(String::as_str));
    }
}

#[test]
fn names_of_sysctls_are_checked() {
    let regex = "^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";
    let list = |name: &str| json!({"sysctls": [{"name": name, "value": "1"}]});
    for name in ["foo-", "foo-.bar", "-foo", "foo_", "foo..bar", "Foo", "foo/", &"a".repeat(254)] {
        let expected = format!(
            "spec.securityContext.sysctls[0].name: Invalid value: \"{name}\": must have at most 253 characters and \
             match regex {regex}"
        );
        check("Pod", "/spec/securityContext", list(name), &[&expected]);
    }
    for name in ["kernel.shm_rmid_forced", "net/ipv4/ip_local_port_range", "a-b.c_d", "a"] {
        check("Pod", "/spec/securityContext", list(name), &[]);
    }
}

#[test]
fn ports_and_environment_are_checked() {
    let c = "/spec/containers/0";
    let port = |port: Value| json!([port]);
    check(
        "Pod",
        &format!("{c}/ports"),
        port(json!({"containerPort": 0})),
        &["spec.containers[0].ports[0].containerPort: Required value"],
    );
    check(
        "Pod",
        &format!("{c}/ports"),
        port(json!({"containerPort": 65536})),
        &[
            "spec.containers[0].ports[0].containerPort: Invalid value: 65536: must be between 1 and 65535, inclusive",
        ],
    );
    check(
        "Pod",
        &format!("{c}/ports"),
        port(json!({"containerPort": 1, "protocol": "X"})),
        &["spec.containers[0].ports[0].protocol: Unsupported value: \"X\""],
    );
    let twice = json!([{"containerPort": 1, "hostPort": 5}, {"containerPort": 2, "hostPort": 5}]);
    check(
        "Pod",
        &format!("{c}/ports"),
        twice,
        &["spec.containers[0].ports[1].hostPort: Duplicate value: \"TCP//5\""],
    );
    check(
        "Pod",
        &format!("{c}/env"),
        json!([{"name": "A=B"}]),
        &["spec.containers[0].env[0].name: Invalid value: \"A=B\": a valid environment"],
    );
    check(
        "Pod",
        &format!("{c}/env"),
        json!([{"name": ""}]),
        &["spec.containers[0].env[0].name: Required value"],
    );
    check(
        "Pod",
        &format!("{c}/env"),
        json!([{"name": "A", "valueFrom": {}}]),
        &["spec.containers[0].env[0].valueFrom: Invalid value: \"\": must specify one of"],
    );
}

#[test]
fn environment_sources_are_checked() {
    let c = "/spec/containers/0";
    let field = |path: &str| json!([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": path}}}]);
    check("Pod", &format!("{c}/env"), field("status.podIP"), &[]);
    check("Pod", &format!("{c}/env"), field("metadata.labels['a']"), &[]);
    check(
        "Pod",
        &format!("{c}/env"),
        field("spec.foo"),
        &[
            "spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Invalid value: \"spec.foo\": error converting fieldPath",
        ],
    );
    check(
        "Pod",
        &format!("{c}/envFrom"),
        json!([{"configMapRef": {"name": ""}}]),
        &["spec.containers[0].envFrom[0].configMapRef.name: Required value"],
    );
}

#[test]
fn volumes_have_one_source_and_mounts_name_them() {
    check(
        "Pod",
        "/spec/containers/0/volumeMounts",
        json!([{"name": "v", "mountPath": "/v"}]),
        &["spec.containers[0].volumeMounts[0].name: Not found: \"v\""],
    );
    let two = json!([{"name": "v", "emptyDir": {}, "hostPath": {"path": "/"}}]);
    check(
        "Pod",
        "/spec/volumes",
        two,
        &["spec.volumes[0].hostPath: Forbidden: may not specify more than 1 volume type"],
    );
    check(
        "Pod",
        "/spec/volumes",
        json!([{"name": "v"}, {"name": "v"}]),
        &["spec.volumes[1].name: Duplicate value: \"v\""],
    );
    check(
        "Pod",
        "/spec/volumes",
        json!([{"name": "v", "hostPath": {"path": "/a/../b"}}]),
        &["spec.volumes[0].hostPath.path: Invalid value: \"/a/../b\": must not contain '..'"],
    );
    check(
        "Pod",
        "/spec/volumes",
        json!([{"name": "v", "secret": {}}]),
        &["spec.volumes[0].secret.secretName: Required value"],
    );
    let item = json!([{"name": "v", "configMap": {"name": "c", "defaultMode": 1000, "items": [{"key": "k", "path": "../x"}]}}]);
    check(
        "Pod",
        "/spec/volumes",
        item,
        &[
            "spec.volumes[0].configMap.defaultMode: Invalid value: 1000: must be a number between 0 and 0777 (octal), both inclusive",
            "spec.volumes[0].configMap.items[0].path: Invalid value: \"../x\": must not contain '..'",
        ],
    );
    let token = json!([{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 5}}]}}]);
    check(
        "Pod",
        "/spec/volumes",
        token,
        &[
            "spec.volumes[0].projected.sources[0].serviceAccountToken.expirationSeconds: Invalid value: 5: may not",
            "spec.volumes[0].projected.sources[0].serviceAccountToken: Forbidden: must not be specified when serviceAccountName",
        ],
    );
}

#[test]
fn requests_stay_below_limits() {
    let at = "/spec/containers/0/resources";
    let with = |requests: Value, limits: Value| json!({"requests": requests, "limits": limits});
    check(
        "Pod",
        at,
        with(json!({"cpu": "2"}), json!({"cpu": "1"})),
        &[
            "spec.containers[0].resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
        ],
    );
    check(
        "Pod",
        at,
        json!({"limits": {"cpu": "-1"}}),
        &[
            "spec.containers[0].resources.limits[cpu]: Invalid value: \"-1\": must be greater than or equal to 0",
            "spec.containers[0].resources.requests[cpu]: Invalid",
        ],
    );
    let foo = [
        "spec.containers[0].resources.limits[foo]: Invalid value: \"foo\": must be a standard resource type",
        "spec.containers[0].resources.limits[foo]: Invalid value: \"foo\": must be a standard resource for",
        "spec.containers[0].resources.requests[foo]: Invalid",
        "spec.containers[0].resources.requests[foo]: Invalid",
    ];
    check("Pod", at, json!({"limits": {"foo": "1"}}), &foo);
    check(
        "Pod",
        at,
        with(json!({"e.com/x": "1"}), json!({"e.com/x": "2"})),
        &["spec.containers[0].resources.requests: Invalid value: \"1\": must be equal to e.com/x limit of 2"],
    );
}

#[test]
fn probes_tolerations_and_security_are_checked() {
    let c = "/spec/containers/0";
    check(
        "Pod",
        &format!("{c}/livenessProbe"),
        json!({}),
        &["spec.containers[0].livenessProbe: Required value: must specify a handler type"],
    );
    check(
        "Pod",
        &format!("{c}/livenessProbe"),
        json!({"exec": {"command": ["a"]}, "tcpSocket": {"port": 1}}),
        &["spec.containers[0].livenessProbe.tcpSocket: Forbidden: may not specify more than 1 handler type"],
    );
    check(
        "Pod",
        &format!("{c}/livenessProbe"),
        json!({"tcpSocket": {"port": 1}, "successThreshold": 2}),
        &["spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1"],
    );
    check(
        "Pod",
        "/spec/tolerations",
        json!([{"operator": "Equal"}]),
        &[
            "spec.tolerations[0].operator: Invalid value: \"Equal\": operator must be Exists when `key` is empty",
        ],
    );
    check(
        "Pod",
        "/spec/tolerations",
        json!([{"key": "a", "tolerationSeconds": 1, "effect": "NoSchedule"}]),
        &["spec.tolerations[0].effect: Invalid value"],
    );
    check(
        "Pod",
        "/spec/securityContext/runAsUser",
        json!(-1),
        &["spec.securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive"],
    );
    check(
        "Pod",
        &format!("{c}/securityContext"),
        json!({"privileged": true, "allowPrivilegeEscalation": false}),
        &[
            "spec.containers[0].securityContext: Invalid value: {\"allowPrivilegeEscalation\":false,\"privileged\":true}: cannot set",
        ],
    );
}

#[test]
fn resources_of_the_whole_pod_cover_the_containers() {
    let at = "/spec/resources";
    check("Pod", at, json!({"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}), &[]);
    check(
        "Pod",
        at,
        json!({"limits": {"example.com/gpu": "1"}}),
        &[
            "spec.resources.limits[example.com/gpu]: Unsupported value: \"example.com/gpu\": supported values: \"cpu\", \"memory\"",
        ],
    );
    check(
        "Pod",
        at,
        json!({"claims": [{"name": "x"}], "requests": {"cpu": "2"}, "limits": {"cpu": "1"}}),
        &[
            "spec.resources.claims: Forbidden: claims may not be set for Resources at pod-level",
            "spec.resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
        ],
    );
    check(
        "Pod",
        "/spec",
        json!({"containers": [{"name": "a", "image": "x", "resources": {"limits": {"cpu": "2"}, "requests": {"cpu": "2"}}}],
            "resources": {"limits": {"cpu": "1"}}}),
        &[
            "spec.resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
            "spec.resources.containers[0][cpu].limits: Invalid value: \"2\": must be less than or equal to pod limits of 1",
        ],
    );
}

#[test]
fn huge_pages_are_whole_and_come_with_cpu_or_memory() {
    check(
        "Pod",
        "/spec/containers/0/resources",
        json!({"limits": {"hugepages-2Mi": "3Mi"}, "requests": {"hugepages-2Mi": "3Mi"}}),
        &[
            "spec.containers[0].resources.limits[hugepages-2Mi]: Invalid value: \"3Mi\": 3Mi is not positive integer multiple of hugepages-2Mi",
            "spec.containers[0].resources.requests[hugepages-2Mi]: Invalid value: \"3Mi\": 3Mi is not positive integer multiple of hugepages-2Mi",
            "spec.containers[0].resources: Forbidden: HugePages require cpu or memory",
        ],
    );
}

#[test]
fn ephemeral_containers_target_a_container_of_the_pod_and_have_no_fields_of_workloads() {
    let added = |fields: Value| {
        let mut pod = good("Pod");
        pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
        defaults::apply(kind("Pod"), &mut pod);
        let old = pod.clone();
        let mut container = json!({"name": "debug", "image": "x"});
        container.as_object_mut().unwrap().extend(fields.as_object().cloned().unwrap());
        pod["spec"]["ephemeralContainers"] = json!([container]);
        defaults::apply(kind("Pod"), &mut pod);
        texts(ephemeral_containers(&pod, &old))
    };
    let mount = |fields: Value| {
        let mut mount = json!({"name": "v", "mountPath": "/v"});
        mount.as_object_mut().unwrap().extend(fields.as_object().cloned().unwrap());
        json!({"volumeMounts": [mount]})
    };
    for fields in [json!({}), json!({"targetContainerName": "a", "resources": {}}), mount(json!({}))] {
        assert_eq!(added(fields), Vec::<String>::new());
    }
    let at = "spec.ephemeralContainers[0]";
    for (fields, field, why) in [
        (json!({"targetContainerName": "debug"}), "targetContainerName", "Not found: \"debug\""),
        (json!({"restartPolicy": "Always"}), "restartPolicy", "Forbidden: cannot be set"),
        (json!({"resources": {"limits": {"cpu": "1"}}}), "resources", "Forbidden: cannot be set"),
        (mount(json!({"subPath": "s"})), "volumeMounts[0].subPath", "Forbidden: cannot be set"),
        (mount(json!({"subPathExpr": "$(A)"})), "volumeMounts[0].subPathExpr", "Forbidden: cannot be set"),
    ] {
        let found = added(fields);
        assert!(
            matches!(found.as_slice(), [one] if one.starts_with(&format!("{at}.{field}: {why}"))),
            "{found:?}"
        );
    }
}

#[test]
fn a_user_namespace_excludes_namespaces_of_the_node_and_is_needed_for_an_unmasked_proc() {
    let containers = |context: Value| json!([{"name": "a", "image": "x", "securityContext": context}]);
    let spec = |fields: Value, context: Value| {
        let mut spec = json!({"containers": containers(context)});
        spec.as_object_mut().unwrap().extend(fields.as_object().cloned().unwrap());
        spec
    };
    let unmasked = || json!({"procMount": "Unmasked"});
    check("Pod", "/spec", spec(json!({"hostUsers": false}), unmasked()), &[]);
    let need = "spec.containers[0].securityContext.procMount: Invalid value: \"Unmasked\": `hostUsers` must be false to use `Unmasked`";
    check("Pod", "/spec", spec(json!({}), unmasked()), &[need]);
    check("Pod", "/spec", spec(json!({"hostUsers": true}), unmasked()), &[need]);
    for (field, shown) in [("hostNetwork", "hostNetwork"), ("hostPID", "HostPID"), ("hostIPC", "HostIPC")] {
        let both = json!({"hostUsers": false, field: true});
        let refused = format!("spec.{shown}: Forbidden: when `hostUsers` is false");
        check("Pod", "/spec", spec(both, json!({})), &[&refused]);
    }
    check(
        "Pod",
        "/spec",
        spec(json!({"hostPID": true, "shareProcessNamespace": true}), json!({})),
        &[
            "spec.securityContext.shareProcessNamespace: Invalid value: true: ShareProcessNamespace and HostPID cannot both be enabled",
        ],
    );
}

#[test]
fn long_lists_are_checked_in_linear_time() {
    let list =
        |field: &str| -> Value { (0..20_000).map(|number| json!({(field): format!("a{number}")})).collect() };
    let mut pod = good("Pod");
    pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    pod["metadata"]["finalizers"] = (0..20_000).map(|number| format!("a/{number}")).collect();
    for (name, field) in
        [("topologySpreadConstraints", "topologyKey"), ("tolerations", "key"), ("schedulingGates", "name")]
    {
        pod["spec"][name] = list(field);
    }
    assert_eq!(update(kind("Pod"), &pod, &pod).len(), 300, "the constraints have no skew");
}
