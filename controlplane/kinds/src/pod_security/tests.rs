use serde_json::json;

use super::*;

fn at(level: &str, version: &str) -> LevelVersion {
    LevelVersion { level: Level::parse(level).unwrap(), version: Version::parse(version).unwrap() }
}

/// A spec that the restricted level allows.
fn good() -> Value {
    json!({
        "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "a", "image": "i", "securityContext": {
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}],
    })
}

/// The good spec with one value set, and the details at a level and version.
fn with(pointer: &str, value: Value, level: &str, version: &str) -> String {
    let mut spec = good();
    let mut here = &mut spec;
    for part in pointer.split('/').skip(1) {
        here = match part.parse::<usize>() {
            Ok(index) => &mut here[index],
            Err(_) => &mut here[part],
        };
    }
    *here = value;
    details(&evaluate(at(level, version), &json!({}), &spec))
}

fn check_baseline(cases: &[(&str, Value, &str)]) {
    for (pointer, value, expect) in cases {
        assert_eq!(with(pointer, value.clone(), "baseline", "latest"), *expect);
        assert_eq!(with(pointer, value.clone(), "privileged", "latest"), "", "{pointer}");
    }
}

#[test]
fn each_baseline_check_of_a_security_context_names_the_field() {
    let context = "/containers/0/securityContext";
    check_baseline(&[
        ("/hostPID", json!(true), "host namespaces (hostPID=true)"),
        (
            format!("{context}/privileged").as_str(),
            json!(true),
            "privileged (container \"a\" must not set securityContext.privileged=true)",
        ),
        (
            format!("{context}/capabilities/add").as_str(),
            json!(["SYS_ADMIN", "CHOWN", "NET_RAW"]),
            "non-default capabilities (container \"a\" must not include \"NET_RAW\", \"SYS_ADMIN\" in \
             securityContext.capabilities.add)",
        ),
        (
            format!("{context}/procMount").as_str(),
            json!("Unmasked"),
            "procMount (container \"a\" must not set securityContext.procMount to \"Unmasked\")",
        ),
        (
            format!("{context}/seccompProfile").as_str(),
            json!({"type": "Unconfined"}),
            "seccompProfile (container \"a\" must not set securityContext.seccompProfile.type to \"Unconfined\")",
        ),
        (
            "/securityContext/appArmorProfile",
            json!({"type": "Unconfined"}),
            "forbidden AppArmor profile (pod must not set AppArmor profile type to \"Unconfined\")",
        ),
        (
            "/securityContext/seLinuxOptions",
            json!({"type": "spc_t", "user": "u", "role": "r"}),
            "seLinuxOptions (pod set forbidden securityContext.seLinuxOptions: type \"spc_t\"; user may not be set; \
             role may not be set)",
        ),
        (
            "/securityContext/windowsOptions",
            json!({"hostProcess": true}),
            "hostProcess (pod must not set securityContext.windowsOptions.hostProcess=true)",
        ),
    ]);
    assert_eq!(evaluate(at("baseline", "latest"), &json!({}), &good()), []);
}

#[test]
fn each_baseline_check_of_other_fields_names_the_field() {
    check_baseline(&[
        (
            "/securityContext/sysctls",
            json!([{"name": "kernel.msgmax", "value": "1"}, {"name": "net.ipv4.tcp_rmem", "value": "1"}]),
            "forbidden sysctls (kernel.msgmax)",
        ),
        ("/volumes", json!([{"name": "v", "hostPath": {"path": "/"}}]), "hostPath volumes (volume \"v\")"),
        (
            "/containers/0/ports",
            json!([{"hostPort": 80}, {"hostPort": 443}, {"containerPort": 1, "hostPort": 0}]),
            "hostPort (container \"a\" uses hostPorts 443, 80)",
        ),
        (
            "/containers/0/livenessProbe",
            json!({"httpGet": {"host": "169.254.169.254"}}),
            "probe or lifecycle host (container \"a\" uses probe or lifecycle host \"169.254.169.254\")",
        ),
        (
            "/containers/0/lifecycle",
            json!({"preStop": {"tcpSocket": {"host": "b"}}, "postStart": {"httpGet": {"host": "a"}}}),
            "probe or lifecycle host (container \"a\" uses probe or lifecycle hosts \"a\", \"b\")",
        ),
    ]);
}

#[test]
fn the_restricted_level_requires_and_replaces() {
    assert_eq!(evaluate(at("restricted", "latest"), &json!({}), &good()), []);
    let bare = json!({"containers": [{"name": "a"}], "initContainers": [{"name": "i"}]});
    let said = details(&evaluate(at("restricted", "latest"), &json!({}), &bare));
    assert_eq!(
        said,
        "allowPrivilegeEscalation != false (containers \"i\", \"a\" must set \
         securityContext.allowPrivilegeEscalation=false), unrestricted capabilities (containers \"i\", \"a\" must set \
         securityContext.capabilities.drop=[\"ALL\"]), runAsNonRoot != true (pod or containers \"i\", \"a\" must set \
         securityContext.runAsNonRoot=true), seccompProfile (pod or containers \"i\", \"a\" must set \
         securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")"
    );
    let context = "/containers/0/securityContext";
    for (pointer, value, expect) in [
        (
            format!("{context}/capabilities").as_str(),
            json!({"drop": ["all"], "add": ["NET_BIND_SERVICE", "CHOWN"]}),
            "unrestricted capabilities (container \"a\" must set securityContext.capabilities.drop=[\"ALL\"]; container \
             \"a\" must not include \"CHOWN\" in securityContext.capabilities.add)",
        ),
        (
            format!("{context}/runAsNonRoot").as_str(),
            json!(false),
            "runAsNonRoot != true (container \"a\" must not set securityContext.runAsNonRoot=false)",
        ),
        ("/securityContext/runAsUser", json!(0), "runAsUser=0 (pod must not set runAsUser=0)"),
        (
            "/volumes",
            json!([{"name": "v", "nfs": {}}, {"name": "w", "emptyDir": {}}, {"name": "h", "hostPath": {}}]),
            "restricted volume types (volumes \"v\", \"h\" use restricted volume types \"hostPath\", \"nfs\")",
        ),
        (
            "/ephemeralContainers",
            json!([{"name": "e", "securityContext": {"allowPrivilegeEscalation": false,
                "capabilities": {"drop": ["ALL"]}, "runAsUser": 0}}]),
            "runAsUser=0 (container \"e\" must not set runAsUser=0)",
        ),
    ] {
        assert_eq!(with(pointer, value, "restricted", "latest"), expect);
    }
}

#[test]
fn a_version_selects_the_checks_of_its_time() {
    let sysctl = |name: &str, version: &str| {
        let list = json!([{"name": name, "value": "1"}]);
        with("/securityContext/sysctls", list, "baseline", version).is_empty()
    };
    for (name, first) in [
        ("net.ipv4.ip_local_reserved_ports", 27),
        ("net.ipv4.tcp_fin_timeout", 29),
        ("net.ipv4.tcp_wmem", 32),
    ] {
        assert!(!sysctl(name, &format!("v1.{}", first - 1)), "{name}");
        assert!(
            sysctl(name, &format!("v1.{first}")) && sysctl(name, "latest") && sysctl(name, "v1.99"),
            "{name}"
        );
    }
    assert!(!sysctl("net.ipv4.tcp_notsent_lowat", "latest"), "allowed since v1.37 only");
    let probe = json!({"tcpSocket": {"host": "h"}});
    assert_eq!(with("/containers/0/livenessProbe", probe, "restricted", "v1.33"), "");
    assert_eq!(with("/securityContext/runAsUser", json!(0), "restricted", "v1.22"), "");
    let windows = json!({"os": {"name": "windows"}, "containers": [{"name": "a"}],
        "securityContext": {"runAsNonRoot": true}});
    assert_eq!(evaluate(at("restricted", "v1.25"), &json!({}), &windows), []);
    assert_eq!(
        reasons(&evaluate(at("restricted", "v1.24"), &json!({}), &windows)),
        "allowPrivilegeEscalation != false, unrestricted capabilities, seccompProfile"
    );
    let engine = json!({"type": "container_engine_t"});
    assert_eq!(with("/securityContext/seLinuxOptions", engine.clone(), "baseline", "v1.31"), "");
    assert_ne!(with("/securityContext/seLinuxOptions", engine, "baseline", "v1.30"), "");
}

#[test]
fn a_user_namespace_relaxes_some_checks_since_1_35() {
    let mut spec = good();
    spec["hostUsers"] = false.into();
    spec["securityContext"]["runAsUser"] = 0.into();
    spec["securityContext"]["runAsNonRoot"] = false.into();
    assert_eq!(evaluate(at("restricted", "v1.35"), &json!({}), &spec), []);
    assert_eq!(
        reasons(&evaluate(at("restricted", "v1.34"), &json!({}), &spec)),
        "runAsNonRoot != true, runAsUser=0"
    );
    spec["containers"][0]["securityContext"]["procMount"] = "Unmasked".into();
    assert_eq!(evaluate(at("baseline", "v1.35"), &json!({}), &spec), []);
    assert_eq!(reasons(&evaluate(at("restricted", "v1.35"), &json!({}), &spec)), "procMount");
}

#[test]
fn annotations_of_old_versions_are_read() {
    let seccomp = json!({"annotations": {"seccomp.security.alpha.kubernetes.io/pod": "unconfined",
        "container.seccomp.security.alpha.kubernetes.io/a": "docker/default"}});
    let said = |metadata: &Value, version| details(&evaluate(at("baseline", version), metadata, &good()));
    assert_eq!(
        said(&seccomp, "v1.18"),
        "seccompProfile (forbidden annotation seccomp.security.alpha.kubernetes.io/pod=\"unconfined\")"
    );
    assert_eq!(said(&seccomp, "v1.19"), "");
    let armor = json!({"annotations": {"container.apparmor.security.beta.kubernetes.io/a": "unconfined"}});
    assert_eq!(
        said(&armor, "latest"),
        "forbidden AppArmor profile (annotation must not set AppArmor profile type to \
         \"container.apparmor.security.beta.kubernetes.io/a=\"unconfined\"\")"
    );
}

#[test]
fn labels_are_read_strictly() {
    let read = |labels: Value| Policy::of_labels(&labels, Policy::default());
    let (policy, causes) = read(json!({
        "pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/enforce-version": "v1.30",
        "pod-security.kubernetes.io/audit": "baseline",
    }));
    assert!(causes.is_empty());
    assert_eq!(policy.enforce.to_string(), "restricted:v1.30");
    assert_eq!(policy.audit.to_string(), "baseline:latest");
    // Without a label of its own, warn follows enforce.
    assert_eq!(policy.warn.to_string(), "restricted:v1.30");
    let (policy, _) = read(json!({"pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/warn": "privileged"}));
    assert_eq!(policy.warn.level, Level::Privileged);
    for (label, value, level) in [
        ("enforce", "Restricted", Level::Restricted),
        ("enforce", "", Level::Restricted),
        ("audit", "strict", Level::Privileged),
        ("warn", "BASELINE", Level::Privileged),
    ] {
        let (policy, causes) = read(json!({format!("{PREFIX}{label}"): value}));
        let mode = match label {
            "enforce" => policy.enforce,
            "audit" => policy.audit,
            _ => policy.warn,
        };
        assert_eq!(mode.level, level, "{label}={value}");
        assert_eq!(causes[0].field, format!("metadata.labels[{PREFIX}{label}]"));
        let message = format!("Invalid value: \"{value}\": must be one of privileged, baseline, restricted");
        assert_eq!(causes[0].message, message);
    }
    for version in ["v1.01", "1.30", "v1.", "v1.-1", "v2.1", "Latest", "v1.99999999999"] {
        assert!(Version::parse(version).is_err(), "{version}");
    }
    assert_eq!(Version::parse("v1.0"), Ok(Version::Minor(0)));
}

#[test]
fn only_containers_and_images_make_an_update_significant() {
    let old = json!({"metadata": {"labels": {}}, "spec": good()});
    let changed = |pointer: &str, value: Value| {
        let mut new = old.clone();
        *new.pointer_mut(pointer).unwrap() = value;
        is_significant_update(&new, &old)
    };
    assert!(!changed("/metadata/labels", json!({"a": "b"})));
    assert!(changed("/spec/containers/0/image", json!("other")));
    let mut new = old.clone();
    new["spec"]["ephemeralContainers"] = json!([{"name": "e"}]);
    assert!(is_significant_update(&new, &old));
}

#[test]
fn templates_are_found_by_kind() {
    let template = json!({"metadata": {"labels": {}}, "spec": {"containers": []}});
    let deployment = json!({"spec": {"template": template}});
    assert!(super::template("apps", "deployments", &deployment).is_some());
    assert!(super::template("", "replicationcontrollers", &json!({"spec": {}})).is_none());
    assert!(super::template("batch", "cronjobs", &json!({"spec": {"jobTemplate": deployment}})).is_some());
    assert!(super::template("", "configmaps", &deployment).is_none());
}
