//! Access control: verbs, Pod Security levels, credentials, kubelet API.

use std::fs;
use std::process::{Command, Output};

use coracle_integration::{Cluster, Kubectl, Machine, eventually, on_a_machine};

/// RBAC rules of a tenant that may create pods, and has only `get` on subresources.
const TENANT: &str = r#"
{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"tenant","labels":{"pod-security.kubernetes.io/enforce":"restricted"}}}
---
{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"robot","namespace":"tenant"}}
---
{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"Role","metadata":{"name":"robot","namespace":"tenant"},"rules":[
 {"apiGroups":[""],"resources":["pods/exec","pods/attach","pods/portforward"],"verbs":["get"]},
 {"apiGroups":[""],"resources":["pods","pods/ephemeralcontainers"],"verbs":["*"]}]}
---
{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"RoleBinding","metadata":{"name":"robot","namespace":"tenant"},
 "roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"Role","name":"robot"},
 "subjects":[{"kind":"ServiceAccount","name":"robot"}]}
---
{"apiVersion":"v1","kind":"Secret","metadata":{"name":"robot","namespace":"tenant",
 "annotations":{"kubernetes.io/service-account.name":"robot"}},"type":"kubernetes.io/service-account-token"}
---
{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRole","metadata":{"name":"scraper"},"rules":[
 {"apiGroups":[""],"resources":["nodes/metrics","nodes/stats"],"verbs":["get"]}]}
---
{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRoleBinding","metadata":{"name":"scraper"},
 "roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"ClusterRole","name":"scraper"},
 "subjects":[{"kind":"ServiceAccount","name":"scraper","namespace":"tenant"}]}
---
{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"scraper","namespace":"tenant"}}
"#;

/// A pod that the restricted level allows.
const GOOD: &str = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"good","namespace":"tenant"},"spec":{
 "terminationGracePeriodSeconds":0,"securityContext":{"runAsNonRoot":true,"runAsUser":1000,"seccompProfile":{"type":"RuntimeDefault"}},
 "containers":[{"name":"c","image":"busybox","command":["sleep","1000"],"securityContext":{
  "allowPrivilegeEscalation":false,"capabilities":{"drop":["ALL"]}}}]}}"#;

const BAD: &str = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"bad","namespace":"tenant"},"spec":{
 "containers":[{"name":"c","image":"busybox","securityContext":{"privileged":true}}],
 "volumes":[{"name":"root","hostPath":{"path":"/"}}]}}"#;

fn with_tenant(test: impl FnOnce(&mut Machine, &Cluster) + Send + 'static) {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        cluster.apply(TENANT);
        test(machine, &cluster);
    });
}

/// The token in the account's Secret, which the control plane fills in.
fn secret_token(cluster: &Kubectl) -> String {
    let filled = "go-template={{if .data}}{{.data.token | base64decode}}{{end}}";
    eventually("the token of the Secret", 20, || {
        let token = cluster.kubectl(&["get", "secret", "robot", "-n", "tenant", "-o", filled]);
        (token.split('.').count() == 3).then_some(token)
    })
}

/// Runs kubectl with this token and no other credentials.
fn as_token(cluster: &Cluster, machine: &Machine, token: &str, line: &[&str], input: &str) -> Output {
    let view = cluster.kubectl(&["config", "view", "--raw", "-o", "jsonpath={.clusters[0].cluster.server}"]);
    let config = machine.path("token.kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: c}}}}]\n\
         clusters: [{{name: c, cluster: {{server: '{view}', insecure-skip-tls-verify: true}}}}]\n\
         users: [{{name: c, user: {{token: '{token}'}}}}]\n"
    );
    fs::write(&config, text).unwrap();
    let mut all = vec!["--kubeconfig", config.to_str().unwrap(), "-n", "tenant"];
    all.extend(line);
    cluster.kubectl_of("1.37", &all, input)
}

/// Both output streams of a program.
fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Pod Security, and ways to evade it: a privileged pod, a privileged debug container, a new label of the namespace.
#[test]
fn a_restricted_namespace_rejects_privileged_pods() {
    with_tenant(|machine, cluster| {
        let token = secret_token(cluster);
        let refused = as_token(cluster, machine, &token, &["create", "-f", "-"], BAD);
        let text = output_text(&refused);
        assert!(!refused.status.success());
        assert!(
            text.contains("violates PodSecurity \"restricted:latest\": privileged (container \"c\""),
            "{text}"
        );
        let created = as_token(cluster, machine, &token, &["create", "-f", "-"], GOOD);
        assert!(created.status.success(), "{}", output_text(&created));
        let profile = ["debug", "good", "--image=busybox", "--profile=sysadmin", "--", "true"];
        let refused = as_token(cluster, machine, &token, &profile, "");
        assert!(output_text(&refused).contains("violates PodSecurity"), "{}", output_text(&refused));
        let wrong =
            ["label", "namespace", "tenant", "pod-security.kubernetes.io/enforce=Privileged", "--overwrite"];
        assert!(
            output_text(&cluster.try_kubectl(&wrong))
                .contains("must be one of privileged, baseline, restricted")
        );
        // A tenant who is not permitted to change the namespace cannot relax the policy.
        assert!(!as_token(cluster, machine, &token, &wrong, "").status.success());
    });
}

/// kubectl opens a WebSocket with GET. In earlier versions the verb `get` was therefore enough to exec.
#[test]
fn get_is_not_enough_to_enter_a_pod() {
    with_tenant(|machine, cluster| {
        let token = secret_token(cluster);
        cluster.apply(GOOD);
        cluster.kubectl(&["wait", "pod/good", "-n", "tenant", "--for=condition=Ready", "--timeout=120s"]);
        for line in
            [&["exec", "good", "--", "id"][..], &["attach", "good"], &["port-forward", "good", "18080:80"]]
        {
            let refused = as_token(cluster, machine, &token, line, "");
            let text = output_text(&refused);
            assert!(
                !refused.status.success() && text.contains("cannot create resource \"pods/"),
                "{line:?}: {text}"
            );
        }
        assert!(cluster.kubectl(&["exec", "good", "-n", "tenant", "--", "id"]).contains("uid=1000"));
    });
}

/// The kubelet API accepts tokens for the API server's audience and checks the permissions of their users.
#[test]
fn the_kubelet_api_checks_audience_and_permissions_of_tokens() {
    with_tenant(|_, cluster| {
        let token = |name: &str, more: &[&str]| {
            let line = [&["create", "token", name, "-n", "tenant"], more].concat();
            cluster.kubectl(&line).trim().to_owned()
        };
        let node =
            cluster.kubectl(&["get", "nodes", "-o", "jsonpath={.items[0].status.addresses[0].address}"]);
        let ask = |path: &str, token: &str| {
            let url = format!("https://{}:10250{path}", node.trim());
            let header = format!("Authorization: Bearer {token}");
            let code = ["-sk", "-o", "/dev/null", "-w", "%{http_code}", "-H", &header, &url];
            String::from_utf8(Command::new("curl").args(code).output().unwrap().stdout).unwrap()
        };
        let scraper = token("scraper", &[]);
        for path in ["/metrics/resource", "/metrics", "/stats/summary"] {
            assert_eq!(ask(path, &scraper), "200", "{path}");
        }
        let elsewhere = token("scraper", &["--audience=vault"]);
        assert_eq!(ask("/metrics", &elsewhere), "401");
        assert_eq!(ask("/metrics", "forged.token.here"), "401");
        assert_eq!(ask("/metrics", &token("robot", &[])), "403");
        for path in ["/pods", "//pods", "/exec/tenant/good/c?command=id&output=1", "/metrics/../pods"] {
            assert_eq!(ask(path, &scraper), "403", "{path}");
        }
    });
}

/// A token in a Secret ends with the Secret, and the Secret with its account.
#[test]
fn a_secret_token_is_revoked_with_its_account() {
    with_tenant(|machine, cluster| {
        let token = secret_token(cluster);
        let who = || as_token(cluster, machine, &token, &["auth", "whoami"], "");
        assert!(
            output_text(&who()).contains("system:serviceaccount:tenant:robot"),
            "{}",
            output_text(&who())
        );
        cluster.kubectl(&["delete", "serviceaccount", "robot", "-n", "tenant"]);
        assert!(output_text(&who()).contains("Unauthorized"), "{}", output_text(&who()));
        eventually("the Secret to be deleted", 20, || {
            let left = cluster.kubectl(&["get", "secrets", "-n", "tenant", "-o", "name"]);
            !left.contains("secret/robot")
        });
        // A new account with the same name is a different account.
        cluster.apply(
            r#"{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"robot","namespace":"tenant"}}"#,
        );
        assert!(output_text(&who()).contains("Unauthorized"));
    });
}
