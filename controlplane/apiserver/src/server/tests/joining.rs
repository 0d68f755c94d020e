//! Permissions of joining machines and of nodes.

use rcgen::{CertificateParams, DnType, KeyPair, PublicKeyData as _, SigningKey as _};

use super::*;

const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
const NODE_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";

fn request(name: &str, signer: &str, user: &str, group: &str) -> Value {
    use base64::Engine as _;
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, user);
    params.distinguished_name.push(DnType::OrganizationName, group);
    let pem = params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
    json!({"metadata": {"name": name}, "spec": {
        "request": base64::prelude::BASE64_STANDARD.encode(pem), "signerName": signer,
        "usages": ["digital signature", "client auth"], "username": "system:admin", "groups": ["system:masters"],
    }})
}

fn tlv(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let length = u16::try_from(content.len()).unwrap().to_be_bytes();
    [&[tag, 0x82][..], &length, &content].concat()
}

/// A request with this subject. Each part of the subject is a list of attributes: the x of the type 2.5.4.x, and the
/// text.
fn with_subject(name: &str, signer: &str, subject: &[&[(u8, &str)]]) -> Value {
    use base64::Engine as _;
    let attribute =
        |&(kind, text): &(u8, &str)| tlv(0x30, &[&[0x06, 3, 0x55, 4, kind], &tlv(12, &[text.as_bytes()])]);
    let part = |part: &&[(u8, &str)]| tlv(0x31, &[&part.iter().flat_map(attribute).collect::<Vec<_>>()]);
    let subject = tlv(0x30, &[&subject.iter().flat_map(part).collect::<Vec<_>>()]);
    let key = KeyPair::generate().unwrap();
    let info = tlv(0x30, &[&[0x02, 1, 0], &subject, &key.subject_public_key_info(), &[0xa0, 0]]);
    // ecdsa-with-SHA256, 1.2.840.10045.4.3.2
    let algorithm = [0x30, 10, 0x06, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
    let signature = tlv(0x03, &[&[0], &key.sign(&info).unwrap()]);
    let der = base64::prelude::BASE64_STANDARD.encode(tlv(0x30, &[&info, &algorithm, &signature]));
    let pem = format!("-----BEGIN CERTIFICATE REQUEST-----\n{der}\n-----END CERTIFICATE REQUEST-----\n");
    let mut object = request(name, signer, "x", "y");
    object["spec"]["request"] = base64::prelude::BASE64_STANDARD.encode(pem).into();
    object
}

fn bootstrapper() -> User {
    User::new(
        "system:bootstrap:abcdef",
        &["system:bootstrappers", "system:bootstrappers:kubeadm:default-node-token"],
    )
}

impl Fixture {
    async fn send_as(&self, user: User, method: &str, path: &str, body: Value) -> Answer {
        let media = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let request = Request::builder().method(method).uri(path).header("content-type", media);
        self.send(user, request.body(Full::new(body.to_string().into())).unwrap()).await
    }

    /// The response to a client with a token only.
    async fn with_token(&self, token: &str, path: &str) -> u16 {
        let request = Request::get(path).header("authorization", format!("Bearer {token}"));
        self.api.handle(request.body(Full::<Bytes>::default()).unwrap(), None).await.status().as_u16()
    }
}

#[tokio::test]
async fn a_bootstrap_token_is_for_joining_and_for_nothing_else() {
    let server = Fixture::new().await;
    let secret = json!({"metadata": {"name": "bootstrap-token-abcdef"}, "type": "bootstrap.kubernetes.io/token",
        "stringData": {"token-id": "abcdef", "token-secret": "0123456789abcdef",
            "usage-bootstrap-authentication": "true",
            "auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token"}});
    assert_eq!(server.post("/api/v1/namespaces/kube-system/secrets", secret).await.code, 201);
    let token = "abcdef.0123456789abcdef";
    assert_eq!(server.with_token(token, REQUESTS).await, 200);
    assert_eq!(server.with_token(token, "/api/v1/namespaces/kube-system/secrets").await, 403);
    assert_eq!(server.with_token(token, "/api/v1/nodes").await, 403);
    assert_eq!(server.with_token("abcdef.0123456789abcdee", REQUESTS).await, 401);
    let path = "/api/v1/namespaces/kube-system/secrets/bootstrap-token-abcdef";
    assert_eq!(server.delete(path, json!({})).await.code, 200);
    assert_eq!(server.with_token(token, REQUESTS).await, 401);
}

#[tokio::test]
async fn a_token_for_one_machine_that_was_used_makes_no_other() {
    let server = Fixture::new().await;
    let secret = json!({"metadata": {"name": "bootstrap-token-abcdef"}, "type": "bootstrap.kubernetes.io/token",
        "stringData": {"token-id": "abcdef", "used-by-node": "n1"}});
    let secrets = "/api/v1/namespaces/kube-system/secrets";
    assert_eq!(server.post(secrets, secret).await.code, 201);
    let asks = async |name: &str, node: &str| {
        let asked = request(name, NODE_CLIENT, &format!("system:node:{node}"), "system:nodes");
        server.send_as(bootstrapper(), "POST", REQUESTS, asked).await
    };
    // Without `usage-single-node`, as in kubeadm's tokens, several machines can use the token.
    assert_eq!(asks("a", "n2").await.code, 201);
    let marked = json!({"stringData": {"usage-single-node": "true"}});
    assert_eq!(server.merge(&format!("{secrets}/bootstrap-token-abcdef"), marked).await.code, 200);
    assert_eq!(asks("b", "n1").await.code, 201);
    let refused = asks("c", "n2").await;
    assert_eq!(refused.code, 403);
    let says = "token abcdef is for one machine only, and node n1 has used it";
    assert!(refused.body["message"].as_str().unwrap().contains(says), "{}", refused.body);
    assert_eq!(server.get(&format!("{REQUESTS}/c")).await.code, 404);
}

#[tokio::test]
async fn a_request_records_its_user_and_only_approvers_decide() {
    let server = Fixture::new().await;
    let asked = request("a", NODE_CLIENT, "system:node:n1", "system:nodes");
    let made = server.send_as(bootstrapper(), "POST", REQUESTS, asked).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let spec = &made.body["spec"];
    assert_eq!(spec["username"], "system:bootstrap:abcdef");
    assert!(!spec["groups"].to_string().contains("system:masters"));
    let approved = json!({"status": {"conditions": [{"type": "Approved", "status": "True", "reason": "x"}]}});
    let approval = format!("{REQUESTS}/a/approval");
    assert_eq!(server.send_as(bootstrapper(), "PATCH", &approval, approved.clone()).await.code, 403);
    // Only the subresource `approval` can approve: other writes ignore the condition.
    for path in [format!("{REQUESTS}/a"), format!("{REQUESTS}/a/status")] {
        let answer = server.merge(&path, approved.clone()).await;
        assert_eq!((answer.code, &answer.body["status"]["conditions"]), (200, &Value::Null), "{path}");
    }
    let answer = server.merge(&approval, approved).await;
    assert_eq!(answer.code, 200, "{}", answer.body);
    assert!(answer.body["status"]["conditions"][0]["lastUpdateTime"].is_string());
    let changed = server.merge(&format!("{REQUESTS}/a"), json!({"spec": {"username": "other"}})).await;
    assert_eq!(changed.body["spec"]["username"], "system:bootstrap:abcdef");
    let denied = json!({"status": {"conditions": [{"type": "Denied", "status": "True"}]}});
    assert_eq!(server.merge(&approval, denied).await.code, 422);
}

#[tokio::test]
async fn requests_for_administrator_certificates_are_refused() {
    let server = Fixture::new().await;
    let asked = request("a", "kubernetes.io/kube-apiserver-client", "root", "system:masters");
    let answer = server.post(REQUESTS, asked).await;
    assert_eq!(answer.code, 403);
    assert!(answer.body["message"].as_str().unwrap().contains("system:masters group is not allowed"));
    let mut broken = request("a", NODE_CLIENT, "x", "y");
    broken["spec"]["request"] = "bm9uc2Vuc2U=".into();
    let answer = server.post(REQUESTS, broken).await;
    assert_eq!(answer.code, 422);
    assert!(answer.body["message"].as_str().unwrap().contains("spec.request: Invalid value"));
}

#[tokio::test]
async fn a_request_is_for_one_name_however_it_is_read() {
    const CN: u8 = 3;
    const O: u8 = 10;
    const OU: u8 = 11;
    let server = Fixture::new().await;
    let (node, nodes) = ((CN, "system:node:n1"), (O, "system:nodes"));
    let controllers = (CN, "system:kube-controller-manager");
    let made = with_subject("a", NODE_CLIENT, &[&[nodes], &[node]]);
    let made = server.send_as(bootstrapper(), "POST", REQUESTS, made).await;
    assert_eq!(made.code, 201, "{}", made.body);
    for (subject, why) in [
        (&[&[node][..], &[nodes], &[controllers]][..], "2 common names"),
        (&[&[controllers], &[nodes], &[node]], "2 common names"),
        (&[&[nodes]], "0 common names"),
        (&[&[node, controllers], &[nodes]], "must have exactly one value"),
        (&[&[node], &[nodes], &[(OU, "x")]], "attribute 2.5.4.11"),
    ] {
        for (user, signer) in [
            (bootstrapper(), NODE_CLIENT),
            (super::node("n1"), NODE_CLIENT),
            (super::node("n1"), "kubernetes.io/kubelet-serving"),
            (admin(), "kubernetes.io/kube-apiserver-client"),
        ] {
            let answer = server.send_as(user, "POST", REQUESTS, with_subject("b", signer, subject)).await;
            assert_eq!(answer.code, 403, "{subject:?} {}", answer.body);
            assert!(answer.body["message"].as_str().unwrap().contains(why), "{}", answer.body);
        }
    }
    // The requests of other signers are not restricted: their signer decides.
    let other = with_subject("c", "example.com/signer", &[&[node], &[controllers]]);
    assert_eq!(server.send_as(admin(), "POST", REQUESTS, other).await.code, 201);
    for signer in [NODE_CLIENT, "kubernetes.io/kubelet-serving", "kubernetes.io/kube-apiserver-client"] {
        let asked = with_subject("d", signer, &[&[node], &[nodes], &[(O, "system:masters")]]);
        assert_eq!(server.post(REQUESTS, asked).await.code, 403, "{signer}");
    }
}

#[tokio::test]
async fn the_name_of_the_controllers_is_not_a_credential() {
    let server = Fixture::new().await;
    // The default role of kube-controller-manager can list all resources, but cannot get single nodes.
    let node = "/api/v1/nodes/none";
    assert_eq!(server.get_as(User::new("system:kube-controller-manager", &[]), node).await.code, 403);
    assert_eq!(server.get_as(User::controllers(), node).await.code, 404);
    // A user that may impersonate the controllers does not get their permissions either.
    let everybody = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "impersonate"},
        "rules": [{"apiGroups": [""], "resources": ["users"], "verbs": ["impersonate"]}]});
    let roles = "/apis/rbac.authorization.k8s.io/v1";
    assert_eq!(server.post(&format!("{roles}/clusterroles"), everybody).await.code, 201);
    let binding = json!({"metadata": {"name": "impersonate"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "impersonate"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "ann"}]});
    assert_eq!(server.post(&format!("{roles}/clusterrolebindings"), binding).await.code, 201);
    let request = Request::get(node).header("impersonate-user", "system:kube-controller-manager");
    let request = request.body(Full::default()).unwrap();
    let refused = server.send(User::new("ann", &[]), request).await;
    assert_eq!(refused.code, 403);
    let why = refused.body["message"].as_str().unwrap();
    assert!(why.contains("User \"system:kube-controller-manager\" cannot get"), "{why}");
}

#[tokio::test]
async fn a_node_requests_and_writes_in_its_own_name_only() {
    let server = Fixture::new().await;
    let asked = |of: &str| request(of, NODE_CLIENT, &format!("system:node:{of}"), "system:nodes");
    assert_eq!(server.send_as(node("n1"), "POST", REQUESTS, asked("n1")).await.code, 201);
    let refused = server.send_as(node("n1"), "POST", REQUESTS, asked("n2")).await;
    assert_eq!(refused.code, 403);
    assert!(
        refused.body["message"]
            .as_str()
            .unwrap()
            .contains("can only create a node CSR with CN=system:node:n1")
    );
    let nodes = "/api/v1/nodes";
    let object = |name: &str, labels: Value| json!({"metadata": {"name": name, "labels": labels}});
    let secret = json!({"node-restriction.kubernetes.io/x": "1"});
    assert_eq!(server.send_as(node("n1"), "POST", nodes, object("n1", secret.clone())).await.code, 403);
    assert_eq!(server.send_as(node("n1"), "POST", nodes, object("n2", json!({}))).await.code, 403);
    let unnamed = json!({"metadata": {"generateName": "n1"}});
    assert_eq!(server.send_as(node("n1"), "POST", nodes, unnamed).await.code, 403);
    let made = server.send_as(node("n1"), "POST", nodes, object("n1", json!({"mine": "1"}))).await;
    assert_eq!(made.code, 201, "{}", made.body);
    assert_eq!(made.body["spec"]["taints"][0]["key"], "node.kubernetes.io/not-ready");
    let own = "/api/v1/nodes/n1";
    for patch in [
        json!({"spec": {"taints": []}}),
        json!({"metadata": {"labels": secret}}),
        json!({"metadata": {"ownerReferences": [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "y"}]}}),
    ] {
        assert_eq!(server.send_as(node("n1"), "PATCH", own, patch.clone()).await.code, 403, "{patch}");
    }
    assert_eq!(
        server.send_as(node("n1"), "PATCH", own, json!({"metadata": {"labels": {"mine": "2"}}})).await.code,
        200
    );
    assert_eq!(
        server.send_as(node("n2"), "PATCH", own, json!({"metadata": {"labels": {"mine": "3"}}})).await.code,
        403
    );
    assert_eq!(
        server.send_as(node("n2"), "PATCH", &format!("{own}/status"), json!({"status": {}})).await.code,
        403
    );
    assert_eq!(server.send_as(node("n1"), "DELETE", own, json!({})).await.code, 403);
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
    assert_eq!(
        server.send_as(node("n1"), "POST", leases, json!({"metadata": {"name": "n2"}})).await.code,
        403
    );
    assert_eq!(
        server.send_as(node("n1"), "POST", leases, json!({"metadata": {"name": "n1"}})).await.code,
        201
    );
}

#[tokio::test]
async fn a_node_writes_only_its_own_storage_drivers() {
    let server = Fixture::new().await;
    let drivers = "/apis/storage.k8s.io/v1/csinodes";
    let of = |name: &str| json!({"metadata": {"name": name}, "spec": {"drivers": []}});
    assert_eq!(server.send_as(node("n1"), "POST", drivers, of("n2")).await.code, 403);
    assert_eq!(server.send_as(node("n1"), "POST", drivers, of("n1")).await.code, 201);
    let own = format!("{drivers}/n1");
    let said = json!({"spec": {"drivers": [{"name": "csi.example", "nodeID": "1"}]}});
    assert_eq!(server.send_as(node("n1"), "PATCH", &own, said.clone()).await.code, 200);
    assert_eq!(server.send_as(node("n2"), "PATCH", &own, said).await.code, 403);
    assert_eq!(server.send_as(node("n2"), "GET", &own, json!({})).await.code, 403);
}

#[tokio::test]
async fn a_node_reads_and_writes_its_own_pods_only() {
    let server = Fixture::new().await;
    let pods = "/api/v1/namespaces/default/pods";
    assert_eq!(server.post(pods, pod("p")).await.code, 201);
    let target = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n1"}});
    assert_eq!(server.post(&format!("{pods}/p/binding"), target).await.code, 201);
    let own = format!("{pods}/p");
    assert_eq!(server.get_as(node("n1"), &own).await.code, 200);
    assert_eq!(server.get_as(node("n2"), &own).await.code, 403);
    assert_eq!(server.get_as(node("n1"), "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1").await.code, 200);
    assert_eq!(server.get_as(node("n2"), "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1").await.code, 403);
    assert_eq!(server.get_as(node("n1"), "/api/v1/pods").await.code, 403);
    let status = format!("{own}/status");
    let patch = json!({"status": {"phase": "Running"}});
    assert_eq!(server.send_as(node("n2"), "PATCH", &status, patch.clone()).await.code, 403);
    let invalid = json!({"status": {"podIP": "x", "podIPs": [{"ip": "x"}]}});
    let code = async |name: &str| server.send_as(node(name), "PATCH", &status, invalid.clone()).await.code;
    assert_eq!((code("n1").await, code("n2").await), (422, 403), "validation reveals nothing of other pods");
    assert_eq!(server.send_as(node("n1"), "PATCH", &status, patch).await.code, 200);
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    assert_eq!(server.send_as(node("n1"), "PATCH", &status, labels).await.code, 403);
    let eviction = json!({"metadata": {"name": "p"}});
    assert_eq!(server.send_as(node("n2"), "POST", &format!("{own}/eviction"), eviction).await.code, 403);
    let account = "/api/v1/namespaces/default/serviceaccounts/default";
    assert_eq!(server.get_as(node("n1"), account).await.code, 200);
    assert_eq!(server.get_as(node("n2"), account).await.code, 403);
    // A mirror pod, which the node creates, must not refer to objects of the cluster.
    let mut mirror = pod("m");
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    mirror["spec"]["nodeName"] = "n1".into();
    let answer = server.send_as(node("n1"), "POST", pods, mirror.clone()).await;
    assert!(answer.body["message"].as_str().unwrap().contains("owner reference"), "{}", answer.body);
    let made = server.send_as(node("n1"), "POST", "/api/v1/nodes", json!({"metadata": {"name": "n1"}})).await;
    mirror["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Node", "name": "n1",
        "uid": made.body["metadata"]["uid"], "controller": true}]);
    let mut greedy = mirror.clone();
    greedy["spec"]["volumes"] = json!([{"name": "v", "secret": {"secretName": "s"}}]);
    let answer = server.send_as(node("n1"), "POST", pods, greedy.clone()).await;
    assert!(answer.body["message"].as_str().unwrap().contains("reference secrets"), "{}", answer.body);
    let template =
        json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
    greedy["spec"]["volumes"] = json!([{"name": "v", "ephemeral": {"volumeClaimTemplate": template}}]);
    let answer = server.send_as(node("n1"), "POST", pods, greedy).await;
    let message = answer.body["message"].as_str().unwrap();
    assert!(message.contains("reference persistentvolumeclaims (via ephemeral volumes)"), "{message}");
    let answer = server.send_as(node("n1"), "POST", pods, mirror).await;
    assert_eq!(answer.code, 201, "{}", answer.body);
    // A node evicts its own mirror pods only.
    for (of, expect) in [("n2", 403), ("n1", 201)] {
        let eviction = json!({"metadata": {"name": "m"}});
        let answer = server.send_as(node(of), "POST", &format!("{pods}/m/eviction"), eviction).await;
        assert_eq!(answer.code, expect, "{of}: {}", answer.body);
    }
}

#[tokio::test]
async fn a_node_requests_tokens_for_an_audience_that_it_is_authorized_for() {
    let server = Fixture::new().await;
    let mut object = pod("p");
    object["spec"]["nodeName"] = "n1".into();
    let uid = server.post(PODS, object).await.body["metadata"]["uid"].clone();
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let request = |audiences: Value| {
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid});
        json!({"spec": {"audiences": audiences, "boundObjectRef": bound}})
    };
    let post = async |audiences: Value| server.send_as(node("n1"), "POST", path, request(audiences)).await;
    assert_eq!(post(json!([])).await.code, 201);
    let refused = post(json!(["registry"])).await;
    let expect = "serviceaccounts \"default\" is forbidden: audience \"registry\" not found in pod spec volume, \
        system:node:n1 is not authorized to request tokens for this audience";
    assert_eq!((refused.code, &refused.body["message"]), (403, &json!(expect)));
    let rule = json!({"apiGroups": [""], "resources": ["registry"], "resourceNames": ["default"],
        "verbs": ["request-serviceaccounts-token-audience"]});
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    let role = json!({"metadata": {"name": "r"}, "rules": [rule]});
    assert_eq!(server.post(&format!("{rbac}/clusterroles"), role).await.code, 201);
    let subject = json!({"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": "system:nodes"});
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "r"});
    let binding = json!({"metadata": {"name": "b"}, "subjects": [subject], "roleRef": role});
    assert_eq!(server.post(&format!("{rbac}/clusterrolebindings"), binding).await.code, 201);
    let made = post(json!(["registry"])).await;
    assert_eq!(made.code, 201, "{}", made.body);
    assert_eq!(post(json!(["other"])).await.code, 403);
    let refused = post(json!(["registry", "other"])).await;
    assert_eq!(refused.code, 403);
    let message = refused.body["message"].as_str().unwrap();
    assert!(message.ends_with("node may only request 0 or 1 audiences"), "{message}");
}
