//! Pod Security admission, through the API.

use super::{
    audit::{config_of, events, with_rules},
    *,
};

const NAMESPACES: &str = "/api/v1/namespaces";
const IN_N: &str = "/api/v1/namespaces/n/pods";

fn namespace(labels: &[(&str, &str)]) -> Value {
    let labels =
        labels.iter().map(|(key, value)| (format!("pod-security.kubernetes.io/{key}"), json!(value)));
    json!({"metadata": {"name": "n", "labels": labels.collect::<serde_json::Map<_, _>>()}})
}

/// A server with the namespace and its service account.
async fn with(labels: &[(&str, &str)]) -> Fixture {
    let server = Fixture::new().await;
    add(&server, namespace(labels)).await;
    server
}

/// Creates a namespace and its service account.
async fn add(server: &Fixture, namespace: Value) {
    let name = namespace["metadata"]["name"].as_str().unwrap().to_owned();
    let made = server.post(NAMESPACES, namespace).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let account = json!({"metadata": {"name": "default"}});
    let made = server.post(&format!("{NAMESPACES}/{name}/serviceaccounts"), account).await;
    assert_eq!(made.code, 201, "{}", made.body);
}

/// A server that enforces the level baseline in all namespaces, with these exemptions.
async fn with_exemptions(exemptions: &str) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("admission.yaml");
    let text = format!(
        "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n- name: PodSecurity\n  \
         configuration:\n    apiVersion: pod-security.admission.config.k8s.io/v1\n    \
         kind: PodSecurityConfiguration\n    defaults: {{enforce: baseline}}\n    exemptions: {exemptions}\n"
    );
    std::fs::write(&file, text).unwrap();
    let api = open_with(directory.path(), |config| config.admission_file = Some(file)).await;
    Fixture { api, directory }
}

fn privileged(name: &str) -> Value {
    let mut pod = pod(name);
    pod["metadata"].as_object_mut().unwrap().remove("namespace");
    pod["spec"]["containers"][0]["securityContext"] = json!({"privileged": true});
    pod["spec"]["volumes"] = json!([{"name": "root", "hostPath": {"path": "/"}}]);
    pod
}

fn restricted(name: &str) -> Value {
    let mut pod = privileged(name);
    pod["spec"]["volumes"] = json!([]);
    pod["spec"]["securityContext"] =
        json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
    pod["spec"]["containers"][0]["securityContext"] =
        json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    pod
}

fn warnings(answer: &Answer) -> Vec<String> {
    let inner = |value: &http::HeaderValue| {
        let text = value.to_str().unwrap().strip_prefix("299 - \"").unwrap();
        text.strip_suffix('"').unwrap().to_owned()
    };
    answer.headers.get_all("warning").iter().map(inner).collect()
}

#[tokio::test]
async fn a_restricted_namespace_rejects_a_privileged_pod_in_upstreams_words() {
    let server = with(&[("enforce", "restricted")]).await;
    let refused = server.post(IN_N, privileged("p")).await;
    let container = privileged("p")["spec"]["containers"][0]["name"].as_str().unwrap().to_owned();
    let expect = format!(
        "pods \"p\" is forbidden: violates PodSecurity \"restricted:latest\": privileged (container \"{container}\" \
         must not set securityContext.privileged=true), allowPrivilegeEscalation != false (container \"{container}\" \
         must set securityContext.allowPrivilegeEscalation=false), unrestricted capabilities (container \
         \"{container}\" must set securityContext.capabilities.drop=[\"ALL\"]), restricted volume types (volume \
         \"root\" uses restricted volume type \"hostPath\"), runAsNonRoot != true (pod or container \"{container}\" \
         must set securityContext.runAsNonRoot=true), seccompProfile (pod or container \"{container}\" must set \
         securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")"
    );
    assert_eq!((refused.code, refused.body["message"].as_str().unwrap()), (403, expect.as_str()));
    assert_eq!(warnings(&refused), [] as [&str; 0]);
    assert_eq!(server.post(IN_N, restricted("q")).await.code, 201);
    assert_eq!(server.post(&format!("{IN_N}?dryRun=All"), privileged("p")).await.code, 403);
    // A pod with a generated name is checked, too.
    let mut generated = privileged("");
    generated["metadata"] = json!({"generateName": "p-"});
    let refused = server.post(IN_N, generated).await;
    let message = refused.body["message"].as_str().unwrap();
    let name = message.strip_prefix("pods \"p-").and_then(|rest| rest.split_once("\" is forbidden: "));
    assert_eq!((refused.code, name.map(|(suffix, _)| suffix.len())), (403, Some(5)), "{message}");
}

#[tokio::test]
async fn updates_and_ephemeral_containers_are_checked() {
    let server = with(&[("enforce", "restricted")]).await;
    assert_eq!(server.post(IN_N, restricted("p")).await.code, 201);
    let debugger = json!({"spec": {"ephemeralContainers": [{"name": "d", "image": "i", "terminationMessagePolicy": "File",
        "imagePullPolicy": "Always", "securityContext": {"privileged": true}}]}});
    let path = format!("{IN_N}/p/ephemeralcontainers");
    let media = "application/strategic-merge-patch+json";
    let refused = server.call("PATCH", &path, media, Some(debugger)).await;
    assert_eq!(refused.code, 403, "{}", refused.body);
    // A pod that is older than the policy may change, but it must not get a new image.
    let server = with(&[]).await;
    assert_eq!(server.post(IN_N, privileged("old")).await.code, 201);
    let stricter = server.merge(&format!("{NAMESPACES}/n"), namespace(&[("enforce", "baseline")])).await;
    assert_eq!(
        warnings(&stricter),
        [
            "existing pods in namespace \\\"n\\\" violate the new PodSecurity enforce level \\\"baseline:latest\\\"",
            "old: hostPath volumes, privileged",
        ]
    );
    let labelled = json!({"metadata": {"labels": {"a": "b"}}});
    assert_eq!(server.merge(&format!("{IN_N}/old"), labelled).await.code, 200);
    let mut changed = server.get(&format!("{IN_N}/old")).await.body;
    changed["spec"]["containers"][0]["image"] = "other".into();
    assert_eq!(server.put(&format!("{IN_N}/old"), changed).await.code, 403);
}

#[tokio::test]
async fn warn_reports_pods_and_templates_and_audit_stays_silent() {
    let server = with(&[("warn", "baseline"), ("warn-version", "v1.30"), ("audit", "restricted")]).await;
    let made = server.post(IN_N, privileged("p")).await;
    let said = warnings(&made);
    assert_eq!(made.code, 201);
    assert!(
        said.len() == 1 && said[0].starts_with("would violate PodSecurity \\\"baseline:v1.30\\\": hostPath"),
        "{said:?}"
    );
    let spec = privileged("p")["spec"].take();
    let deployment = json!({"metadata": {"name": "d"}, "spec": {"selector": {"matchLabels": {"a": "b"}},
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": spec}}});
    let path = "/apis/apps/v1/namespaces/n/deployments";
    let made = server.post(path, deployment.clone()).await;
    assert_eq!((made.code, warnings(&made).len()), (201, 1), "{}", made.body);
    // Only pods are rejected; a template is reported at the enforced level.
    let server = with(&[("enforce", "restricted")]).await;
    let made = server.post(path, deployment).await;
    assert_eq!((made.code, warnings(&made).len()), (201, 1));
    assert!(warnings(&made)[0].starts_with("would violate PodSecurity \\\"restricted:latest\\\""));
}

#[tokio::test]
async fn invalid_labels_are_rejected_when_they_change() {
    let server = Fixture::new().await;
    for (label, value) in [("enforce", "Restricted"), ("warn", "none"), ("audit-version", "1.30")] {
        let refused = server.post(NAMESPACES, namespace(&[(label, value)])).await;
        let message = refused.body["message"].as_str().unwrap().to_owned();
        let begins = format!(
            "Namespace \"n\" is invalid: metadata.labels[pod-security.kubernetes.io/{label}]: Invalid value: \"{value}\": must be "
        );
        assert!(refused.code == 422 && message.starts_with(&begins), "{message}");
    }
    let server = with(&[("enforce", "baseline")]).await;
    let path = format!("{NAMESPACES}/n");
    assert_eq!(server.merge(&path, namespace(&[("enforce", "strict")])).await.code, 422);
    assert_eq!(server.merge(&path, namespace(&[("enforce", "privileged")])).await.code, 200);
}

#[tokio::test]
async fn exemptions_come_from_the_configuration_alone() {
    let server = with_exemptions("{usernames: [robot]}").await;
    server.post("/api/v1/namespaces/default/serviceaccounts", json!({"metadata": {"name": "default"}})).await;
    let request = || Request::post(PODS).body(Full::from(privileged("p").to_string())).unwrap();
    let robot = User::new("robot", &["system:masters"]);
    assert_eq!(server.send(admin(), request()).await.code, 403);
    assert_eq!(server.send(User::new("Robot", &["system:masters"]), request()).await.code, 403);
    assert_eq!(server.send(robot, request()).await.code, 201);
}

#[tokio::test]
async fn the_reason_of_an_exemption_is_annotated() {
    let server = with_exemptions("{usernames: [robot]}").await;
    server.post("/api/v1/namespaces/default/serviceaccounts", json!({"metadata": {"name": "default"}})).await;
    let file = server.directory.path().join("admission.yaml");
    let audit = config_of(server.directory.path(), "[{level: Metadata}]");
    let configure = |config: &mut ApiserverConfig| {
        config.admission_file = Some(file);
        config.audit = Some(audit);
    };
    let server = server.again_with(configure).await;
    let request = Request::post(PODS).body(Full::from(privileged("p").to_string())).unwrap();
    assert_eq!(server.send(User::new("robot", &["system:masters"]), request).await.code, 201);
    let event = &events(&server, PODS, 1).await[0];
    assert_eq!(event["annotations"]["pod-security.kubernetes.io/exempt"], "user");
}

#[tokio::test]
async fn pods_of_exempt_namespaces_and_runtime_classes_are_not_checked() {
    let server = with_exemptions("{namespaces: [free], runtimeClasses: [kata]}").await;
    for name in ["free", "freed"] {
        add(&server, json!({"metadata": {"name": name}})).await;
    }
    for class in ["kata", "katas"] {
        let body = json!({"metadata": {"name": class}, "handler": "h"});
        let made = server.post("/apis/node.k8s.io/v1/runtimeclasses", body).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }
    for (namespace, class, is_exempt) in [
        ("free", None, true),
        ("freed", None, false),
        ("freed", Some("kata"), true),
        ("freed", Some("katas"), false),
    ] {
        let mut pod = privileged(&format!("p-{}", class.unwrap_or("plain")));
        if let Some(class) = class {
            pod["spec"]["runtimeClassName"] = class.into();
        }
        let answer = server.post(&format!("{NAMESPACES}/{namespace}/pods"), pod).await;
        let message = answer.body["message"].as_str().unwrap_or_default();
        let is_violation = message.contains("violates PodSecurity \"baseline:latest\"");
        let expect = if is_exempt { (201, false) } else { (403, true) };
        assert_eq!((answer.code, is_violation), expect, "{namespace} {class:?}: {message}");
    }
}

#[tokio::test]
async fn audit_annotates_the_events_of_violations_only() {
    let server = with_rules("[{level: Metadata}]").await;
    add(&server, namespace(&[("enforce", "baseline"), ("audit", "restricted")])).await;
    let violation = |event: &Value| {
        event["annotations"]["pod-security.kubernetes.io/audit-violations"].as_str().map(str::to_owned)
    };
    let is_restricted = |violation: &Option<String>| {
        let begins = "would violate PodSecurity \"restricted:latest\": ";
        violation.as_ref().is_some_and(|violation| violation.starts_with(begins))
    };
    let made = server.post(IN_N, pod("p")).await;
    assert_eq!((made.code, warnings(&made).len()), (201, 0), "{}", made.body);
    assert_eq!(server.post(IN_N, restricted("q")).await.code, 201);
    // The rejected pod also violates the audit level.
    assert_eq!(server.post(IN_N, privileged("r")).await.code, 403);
    let found: Vec<_> = events(&server, IN_N, 3).await.iter().map(violation).collect();
    assert!(is_restricted(&found[0]) && is_restricted(&found[2]), "{found:?}");
    assert_eq!(found[1], None, "a pod without a violation");
    let spec = pod("p")["spec"].take();
    let deployment = json!({"metadata": {"name": "d"}, "spec": {"selector": {"matchLabels": {"a": "b"}},
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": spec}}});
    let path = "/apis/apps/v1/namespaces/n/deployments";
    assert_eq!(server.post(path, deployment).await.code, 201);
    let event = &events(&server, path, 1).await[0];
    let found = violation(event);
    assert!(is_restricted(&found), "{found:?}");
    // Only the events of pods name the enforced policy.
    let enforced = |event: &Value| event["annotations"]["pod-security.kubernetes.io/enforce-policy"].clone();
    assert_eq!(enforced(event), json!(null));
    for event in events(&server, IN_N, 3).await {
        assert_eq!(enforced(&event), "baseline:latest");
    }
}
