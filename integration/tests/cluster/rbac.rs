//! RBAC with kubectl: roles, bindings, `auth can-i`, and requests with a service account's token.

use std::fs;

use coracle_integration::{Nodes, eventually, on_a_machine};

const CIDRS: &str = "10.42.0.0/16";

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// Result of `kubectl auth can-i` for a user.
fn can(nodes: &Nodes, user: &str, what: &str) -> bool {
    let mut all = vec!["auth", "can-i"];
    all.extend(words(what));
    let user = format!("--as={user}");
    all.push(&user);
    let output = nodes.try_kubectl(&all);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(["yes\n", "no\n"].contains(&text.as_str()), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text == "yes\n"
}

const ACCOUNT: &str = "system:serviceaccount:default:robot";

#[test]
fn a_service_account_has_the_permissions_of_its_roles() {
    on_a_machine(|machine| {
        let nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        for line in [
            "create serviceaccount robot",
            "create role reader --verb=get,list,watch --resource=pods,pods/log",
            "create rolebinding reader --role=reader --serviceaccount=default:robot",
            "create clusterrole scaler --verb=patch --resource=deployments/scale --resource-name=web",
            "create clusterrolebinding scaler --clusterrole=scaler --user=ann --group=dev",
        ] {
            nodes.kubectl(&words(line));
        }
        for (user, what, expect) in [
            (ACCOUNT, "list pods", true),
            (ACCOUNT, "get pods/log", true),
            (ACCOUNT, "list pods -n kube-system", false),
            (ACCOUNT, "list pods -A", false),
            (ACCOUNT, "delete pods", false),
            (ACCOUNT, "get /healthz", true),
            (ACCOUNT, "get /metrics", false),
            ("ann", "patch deployments/web --subresource=scale", true),
            ("ann", "patch deployments/other --subresource=scale", false),
            ("ben", "get pods", false),
        ] {
            assert_eq!(can(&nodes, user, what), expect, "{user}: {what}");
        }
        let listed = nodes.kubectl(&["auth", "can-i", "--list", &format!("--as={ACCOUNT}")]);
        assert!(listed.contains("pods/log") && listed.contains("selfsubjectaccessreviews"), "{listed}");
        let table = nodes.kubectl(&["get", "rolebinding", "reader", "-o", "wide"]);
        assert!(table.contains("Role/reader") && table.contains("default/robot"), "{table}");
        assert!(nodes.kubectl(&["describe", "clusterrole", "cluster-admin"]).contains("*.*"));
        let changed = r#"{"roleRef": {"name": "other"}}"#;
        let refused = nodes.try_kubectl(&["patch", "rolebinding", "reader", "--type=merge", "-p", changed]);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("cannot change roleRef"));
        with_its_token(&nodes, machine.path("robot.kubeconfig").to_str().unwrap());
        aggregated(&nodes);
    });
}

/// Sends requests with a token of the service account.
fn with_its_token(nodes: &Nodes, kubeconfig: &str) {
    let token = nodes.kubectl(&["create", "token", "robot"]);
    let token = token.trim();
    let config = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         contexts: [{{name: c, context: {{cluster: c, user: c}}}}]\n\
         clusters: [{{name: c, cluster: {{server: 'https://192.0.2.2:6443', insecure-skip-tls-verify: true}}}}]\n\
         users: [{{name: c, user: {{token: '{token}'}}}}]\n"
    );
    fs::write(kubeconfig, config).unwrap();
    let run = |line: &str| {
        let all: Vec<&str> = ["--kubeconfig", kubeconfig].into_iter().chain(line.split(' ')).collect();
        nodes.kubectl_of("1.37", &all, "")
    };
    assert!(run("get pods").status.success());
    let refused = run("get secrets");
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    let expected =
        format!("User \"{ACCOUNT}\" cannot list resource \"secrets\" in API group \"\" in the namespace");
    assert!(!refused.status.success() && errors.contains(&expected), "{errors}");
    let refused =
        run("create clusterrolebinding x --clusterrole=cluster-admin --serviceaccount=default:robot");
    assert!(!refused.status.success());
    // Deleting the binding revokes the permissions.
    nodes.kubectl(&["delete", "rolebinding", "reader"]);
    assert!(!run("get pods").status.success());
}

/// The user-facing roles aggregate other roles. New roles can extend them.
fn aggregated(nodes: &Nodes) {
    nodes.kubectl(&words("create rolebinding view --clusterrole=view --serviceaccount=default:robot"));
    nodes.kubectl(&words("create rolebinding admin --clusterrole=admin --user=ann"));
    eventually("view to be aggregated", 10, || can(nodes, ACCOUNT, "list configmaps"));
    assert!(!can(nodes, ACCOUNT, "list secrets") && !can(nodes, ACCOUNT, "create pods"));
    // Aggregation happens level by level: admin contains edit, which contains view.
    eventually("admin to be aggregated", 10, || {
        ["create rolebindings", "delete secrets"].iter().all(|what| can(nodes, "ann", what))
    });
    assert!(!can(nodes, "ann", "delete nodes"));
    nodes.kubectl(&words("create clusterrole leases --verb=list --resource=leases"));
    assert!(!can(nodes, ACCOUNT, "list leases"));
    nodes.kubectl(&words("label clusterrole leases rbac.authorization.k8s.io/aggregate-to-view=true"));
    eventually("the extension of view", 10, || can(nodes, ACCOUNT, "list leases"));
    let grants = |line: &str| nodes.try_kubectl(&[words(line), vec!["--as=ann"]].concat());
    // The extension also reaches admin.
    eventually("ann to have the permissions that she grants", 10, || {
        grants("create rolebinding ben --clusterrole=edit --user=ben").status.success()
    });
    let refused = grants("create rolebinding ben-all --clusterrole=cluster-admin --user=ben");
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(errors.contains("is attempting to grant RBAC permissions not currently held"), "{errors}");
}
