//! Vulnerabilities of kube-apiserver that a client triggers.

use serde_json::json;

use coracle_integration::{Cluster, on_a_cluster, on_a_machine};

use super::{denied, sleeper};

const NODE: [&str; 3] =
    ["--as=system:node:node-1", "--as-group=system:nodes", "--as-group=system:authenticated"];

/// CVE-2019-11250, CVE-2020-8563, CVE-2020-8564, CVE-2020-8565, CVE-2020-8566: secrets and tokens in the log.
#[test]
fn cve_2019_11250_the_most_detailed_log_has_no_secrets() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up_with(
            machine,
            &mirrors,
            &["--image-gc-high-threshold", "100", "--log-level", "trace"],
        );
        let [value, password, token] = ["kept-in-a-secret", "kept-of-a-registry", "kept-as-a-token"];
        // JSON, but no credentials: the parser's error quotes the text.
        let malformed = "kept-in-a-malformed-secret";
        let config = json!({"auths": malformed}).to_string();
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "m"},
            "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": config}});
        cluster.apply(&secret.to_string());
        cluster.kubectl(&["create", "secret", "generic", "s", &format!("--from-literal=key={value}")]);
        let registry = ["create", "secret", "docker-registry", "r", "--docker-server=registry.invalid"];
        let account = ["--docker-username=me", &format!("--docker-password={password}")];
        cluster.kubectl(&[&registry[..], &account[..]].concat());
        let env = json!({"env": [{"name": "V", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}}]});
        let pod = sleeper("p", &json!({"imagePullSecrets": [{"name": "r"}, {"name": "m"}]}), &env);
        super::run_pod(&cluster, "p", &pod);
        let minted = cluster.kubectl(&["create", "token", "default"]);
        let bearer = format!("--token={token}");
        let stranger = ["get", "pods", &bearer, "--kubeconfig=/dev/null", "--insecure-skip-tls-verify"];
        assert!(
            !cluster
                .try_kubectl(&[&stranger[..], &["--server=https://127.0.0.1:6443"]].concat())
                .status
                .success()
        );
        let log = cluster.log();
        assert!(log.contains("DEBUG") || log.contains("TRACE"), "the log is not detailed");
        assert!(log.contains("ignoring an invalid pull secret"), "the malformed secret was not read");
        let events = cluster.get(&["events"]).to_string();
        for secret in [value, password, token, malformed, minted.trim(), &base64(value)] {
            assert!(!log.contains(secret), "{secret} is in the log");
            assert!(!events.contains(secret), "{secret} is in an event");
        }
    });
}

fn base64(text: &str) -> String {
    let output =
        std::process::Command::new("sh").args(["-c", &format!("printf %s {text} | base64")]).output();
    String::from_utf8(output.unwrap().stdout).unwrap().trim().to_owned()
}

/// CVE-2023-2728, CVE-2024-3177: ephemeral containers and `envFrom` evaded the list of an account's secrets.
#[test]
fn cve_2024_3177_an_account_limits_the_secrets_of_its_pods() {
    on_a_cluster(|_, cluster| {
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "secrets": [{"name": "mine"}],
            "metadata": {"name": "a", "annotations": {"kubernetes.io/enforce-mountable-secrets": "true"}}});
        cluster.apply(&account.to_string());
        let env_from = json!({"envFrom": [{"secretRef": {"name": "other"}}]});
        let errors = denied(cluster, &[], &sleeper("p", &json!({"serviceAccountName": "a"}), &env_from));
        assert!(
            errors.contains("with envFrom referencing secret.secretName=\"other\" is not allowed"),
            "{errors}"
        );
        super::run_pod(cluster, "p", &sleeper("p", &json!({"serviceAccountName": "a"}), &json!({})));
        let mut pod = cluster.get(&["pod", "p"]);
        pod["spec"]["ephemeralContainers"] = json!([{"name": "e", "image": "busybox",
            "envFrom": [{"secretRef": {"name": "other"}}]}]);
        let path = "/api/v1/namespaces/default/pods/p/ephemeralcontainers";
        let output = cluster.kubectl_of("1.37", &["replace", "--raw", path, "-f", "-"], &pod.to_string());
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && errors.contains("is not allowed"), "{errors}");
    });
}

/// CVE-2025-5187: a node deleted itself by an owner reference, and came back with other labels and taints.
#[test]
fn cve_2025_5187_a_node_gets_no_owner_from_itself() {
    on_a_cluster(|_, cluster| {
        let patch = r#"{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"x","uid":"u"}]}}"#;
        let command = ["patch", "node", "node-1", "--type=merge", "-p", patch];
        let output = cluster.try_kubectl(&[&command[..], &NODE[..]].concat());
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && errors.contains("ownerReferences"), "{errors}");
    });
}

/// CVE-2025-4563: a node created mirror pods with references to objects that only a scheduled pod may use.
#[test]
fn cve_2025_4563_a_mirror_pod_references_nothing() {
    on_a_cluster(|_, cluster| {
        let uid = cluster.get(&["node", "node-1"])["metadata"]["uid"].clone();
        let secret = json!({"name": "v", "secret": {"secretName": "s"}});
        let claim = json!({"name": "d", "resourceClaimName": "c"});
        let template = json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
        let ephemeral = json!({"name": "v", "ephemeral": {"volumeClaimTemplate": template}});
        let mirror = |field: serde_json::Value| {
            let mut pod: serde_json::Value =
                serde_json::from_str(&sleeper("mirror", &json!({"nodeName": "node-1"}), &json!({}))).unwrap();
            pod["spec"].as_object_mut().unwrap().extend(field.as_object().unwrap().clone());
            pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
            pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Node", "name": "node-1",
                "uid": uid, "controller": true}]);
            pod.to_string()
        };
        for field in [
            json!({"volumes": [secret]}),
            json!({"volumes": [ephemeral]}),
            json!({"resourceClaims": [claim]}),
            json!({"serviceAccountName": "default"}),
        ] {
            denied(cluster, &NODE, &mirror(field));
        }
        // The same pod without references is accepted.
        let create = [&["create", "-f", "-"][..], &NODE].concat();
        let output = cluster.kubectl_of("1.37", &create, &mirror(json!({})));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
}

/// CVE-2020-8562, CVE-2022-3294: the proxy of a node reached addresses of the control plane's own machine.
#[test]
fn cve_2022_3294_the_proxy_of_a_node_reaches_no_other_address() {
    on_a_cluster(|_, cluster| {
        for node in ["node-1", "https:node-1:10250"] {
            assert_eq!(
                cluster.kubectl(&["get", "--raw", &format!("/api/v1/nodes/{node}/proxy/healthz")]),
                "ok"
            );
        }
        // Servers that would respond to these requests: the API server and the registry.
        for (node, path, error) in [
            ("https:node-1:6443", "version", "address not allowed"),
            ("https:127.0.0.1:6443", "version", "not found"),
            ("http:localhost:5005", "v2/", "not found"),
        ] {
            let path = format!("/api/v1/nodes/{node}/proxy/{path}");
            let output = cluster.try_kubectl(&["get", "--raw", &path]);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && errors.contains(error), "{path}: {errors}");
        }
    });
}
