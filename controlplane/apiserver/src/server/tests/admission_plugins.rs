//! Admission plugins that are off by default, and configurations of plugins.

use futures::future::join_all;

use super::*;

const BINDINGS: &str = "/api/v1/namespaces/default/pods/p/binding";
const ZONE: &str = "topology.kubernetes.io/zone";

async fn with(enabled: &[&str]) -> Fixture {
    with_config(enabled, &[], "").await
}

/// A server with these plugins enabled and disabled, and the `plugins` of the configuration file.
async fn with_config(enabled: &[&str], disabled: &[&str], plugins: &str) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let selection = selection(enabled, disabled);
    let file = directory.path().join("admission.yaml");
    let head = "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:";
    std::fs::write(&file, format!("{head} [{plugins}]\n")).unwrap();
    let configure = |config: &mut ApiserverConfig| {
        config.admission_plugins = selection;
        config.admission_file = Some(file);
    };
    let api = open_with(directory.path(), configure).await;
    let server = Fixture { api, directory };
    server.post("/api/v1/namespaces/default/serviceaccounts", json!({"metadata": {"name": "default"}})).await;
    server
}

fn selection(enabled: &[&str], disabled: &[&str]) -> PluginSelection {
    let own = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    PluginSelection { enabled: own(enabled), disabled: own(disabled) }
}

fn message(answer: &Answer) -> &str {
    answer.body["message"].as_str().unwrap_or_default()
}

fn event(name: &str) -> Value {
    json!({"metadata": {"name": name}, "reason": "R", "type": "Normal", "source": {"component": "c"},
        "involvedObject": {"kind": "Pod", "namespace": "default", "name": "p", "uid": "1"}})
}

/// A node in the zone `a` that declares these features.
async fn add_node(server: &Fixture, features: Value) {
    let node = json!({"metadata": {"name": "n", "labels": {ZONE: "a", "disk": "ssd"}},
        "status": {"allocatable": {"cpu": "4", "memory": "4Gi"}, "declaredFeatures": features}});
    let made = server.post("/api/v1/nodes", node).await;
    assert_eq!(made.code, 201, "{}", made.body);
}

#[tokio::test]
async fn webhooks_are_called_with_the_user_of_the_kubeconfig_file() {
    let webhook = webhook::Webhook::start(|_request| json!({"allowed": true})).await;
    let address = webhook.url.trim_start_matches("https://").trim_end_matches("/hook");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kubeconfig");
    let users = json!({"users": [{"name": address, "user": {"token": "secret"}}, {"name": "*.example.com"}]});
    std::fs::write(&file, users.to_string()).unwrap();
    let plugin = format!(
        "{{name: ValidatingAdmissionWebhook, configuration: {{apiVersion: apiserver.config.k8s.io/v1, \
         kind: WebhookAdmissionConfiguration, kubeConfigFile: {file:?}}}}}"
    );
    let server = with_config(&[], &[], &plugin).await;
    for kind in ["validating", "mutating"] {
        webhook::configure(&server, kind, webhook.configuration(json!({}))).await;
    }
    let made = server.post("/api/v1/namespaces/default/configmaps", webhook::map("m")).await;
    assert_eq!(made.code, 201, "{}", made.body);
    // The mutating plugin has no configuration.
    assert_eq!(webhook.credentials(), ["", "Bearer secret"]);
}

#[tokio::test]
async fn events_above_the_rate_are_refused_and_the_client_learns_when_to_retry() {
    let limits = "{name: EventRateLimit, configuration: {apiVersion: eventratelimit.admission.k8s.io/v1alpha1, \
        kind: Configuration, limits: [{type: User, qps: 1, burst: 2}]}}";
    let server = with_config(&["EventRateLimit"], &[], limits).await;
    let path = "/api/v1/namespaces/default/events";
    // A dry run does not count.
    assert_eq!(server.post(&format!("{path}?dryRun=All"), event("e")).await.code, 201);
    let names: Vec<String> = (0..20).map(|number| format!("e{number}")).collect();
    let answers = join_all(names.iter().map(|name| server.post(path, event(name)))).await;
    let (accepted, refused): (Vec<Answer>, Vec<Answer>) =
        answers.into_iter().partition(|answer| answer.code == 201);
    assert!(accepted.len() >= 2, "{}", accepted.len());
    let refused = refused.into_iter().next().unwrap();
    assert_eq!(refused.code, 429, "{}", refused.body);
    assert_eq!(message(&refused), "Too many requests: limit reached on type User for key admin");
    assert_eq!(refused.headers["retry-after"], "1");
    // Another user has another bucket, and other kinds are not limited.
    let request = Request::post(path).header("content-type", "application/json");
    let request = request.body(Full::from(event("other").to_string())).unwrap();
    assert_eq!(server.send(User::new("ann", &["system:masters"]), request).await.code, 201);
    assert_eq!(server.post(CONFIG_MAPS, config_map("a", json!({}))).await.code, 201);
}

#[tokio::test]
async fn a_limited_priority_class_needs_a_quota() {
    let config = "{name: ResourceQuota, configuration: {apiVersion: apiserver.config.k8s.io/v1, \
        kind: ResourceQuotaConfiguration, limitedResources: [{resource: pods, matchScopes: [\
        {scopeName: PriorityClass, operator: In, values: [high]}]}]}}";
    let server = with_config(&[], &[], config).await;
    let class = json!({"metadata": {"name": "high"}, "value": 10});
    assert_eq!(server.post("/apis/scheduling.k8s.io/v1/priorityclasses", class).await.code, 201);
    let mut wanted = pod("p");
    wanted["spec"]["priorityClassName"] = "high".into();
    let refused = server.post(PODS, wanted.clone()).await;
    let why = "insufficient quota to match these scopes: [{PriorityClass In [high]}]";
    assert_eq!((refused.code, message(&refused)), (500, why));
    assert_eq!(server.post(PODS, pod("q")).await.code, 201, "another class");
    let scope = json!({"scopeName": "PriorityClass", "operator": "In", "values": ["high"]});
    let quota = json!({"metadata": {"name": "q"},
        "spec": {"hard": {"pods": "1"}, "scopeSelector": {"matchExpressions": [scope]}}});
    assert_eq!(server.post("/api/v1/namespaces/default/resourcequotas", quota).await.code, 201);
    assert_eq!(server.post(PODS, wanted).await.code, 201);
}

#[tokio::test]
async fn an_update_to_a_limited_amount_needs_a_quota_of_that_amount() {
    let config = "{name: ResourceQuota, configuration: {apiVersion: apiserver.config.k8s.io/v1, \
        kind: ResourceQuotaConfiguration, limitedResources: [{resource: services, \
        matchContains: [services.loadbalancers]}]}}";
    let server = with_config(&[], &[], config).await;
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"services": "5"}}});
    assert_eq!(server.post("/api/v1/namespaces/default/resourcequotas", quota).await.code, 201);
    let path = "/api/v1/namespaces/default/services";
    let service = json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}});
    assert_eq!(server.post(path, service).await.code, 201);
    // The update does not change `services`, the only resource that the quota limits.
    let refused = server.merge(&format!("{path}/s"), json!({"spec": {"type": "LoadBalancer"}})).await;
    let why = "services \"s\" is forbidden: insufficient quota to consume: services.loadbalancers";
    assert_eq!((refused.code, message(&refused)), (403, why));
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    assert_eq!(server.merge(&format!("{path}/s"), labels).await.code, 200, "no growth");
}

#[tokio::test]
async fn a_webhook_decides_on_the_images_of_pods() {
    let hook = crate::remote::tests::Hook::start(|review| {
        let images = review["spec"]["containers"].as_array().unwrap();
        let bad = images.iter().find(|container| container["image"] == "bad");
        let reason = bad.map(|_| "it is bad").unwrap_or_default();
        (200, json!({"status": {"allowed": bad.is_none(), "reason": reason}}).to_string())
    })
    .await;
    let config = format!(
        "{{name: ImagePolicyWebhook, configuration: {{imagePolicy: {{kubeConfigFile: {:?}}}}}}}",
        hook.file()
    );
    let server = with_config(&["ImagePolicyWebhook"], &[], &config).await;
    let mut refused = pod("q");
    refused["spec"]["containers"][0]["image"] = "bad".into();
    let refused = server.post(PODS, refused).await;
    let why = "pods \"q\" is forbidden: image policy webhook backend denied one or more images: it is bad";
    assert_eq!((refused.code, message(&refused)), (403, why));
    assert_eq!(server.post(PODS, pod("p")).await.code, 201);
    let debug = json!({"spec": {"ephemeralContainers": [{"name": "d", "image": "bad"}]}});
    let path = format!("{PODS}/p/ephemeralcontainers");
    let refused = server.call("PATCH", &path, "application/strategic-merge-patch+json", Some(debug)).await;
    assert_eq!(refused.code, 403, "{}", refused.body);
    // The ephemeral container and the refused pod have equal reviews, so the webhook was called only once for both.
    assert_eq!(hook.count(), 2);
}

#[tokio::test]
async fn tolerations_come_from_the_namespace_and_are_those_that_it_allows() {
    let config = "{name: PodTolerationRestriction, configuration: {kind: Configuration, \
        apiVersion: podtolerationrestriction.admission.k8s.io/v1alpha1, default: [{key: cluster, operator: Exists}]}}";
    let server = with_config(&["PodTolerationRestriction"], &["DefaultTolerationSeconds"], config).await;
    let made = server.post(PODS, pod("p")).await;
    let cluster = json!([{"key": "cluster", "operator": "Exists"}]);
    assert_eq!(made.body["spec"]["tolerations"], cluster, "{}", made.body);
    let annotations = json!({
        "scheduler.alpha.kubernetes.io/defaultTolerations": r#"[{"key": "own", "operator": "Exists"}]"#,
        "scheduler.alpha.kubernetes.io/tolerationsWhitelist":
            r#"[{"key": "own", "operator": "Exists"}, {"key": "node.kubernetes.io/memory-pressure", "operator": "Exists"}]"#,
    });
    server.merge("/api/v1/namespaces/default", json!({"metadata": {"annotations": annotations}})).await;
    let mut burstable = pod("q");
    burstable["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1"}});
    let made = server.post(PODS, burstable).await;
    let pressure =
        json!({"key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule"});
    let expected = json!([{"key": "own", "operator": "Exists"}, pressure]);
    assert_eq!(made.body["spec"]["tolerations"], expected, "{}", made.body);
    let mut other = pod("r");
    other["spec"]["tolerations"] = cluster;
    let refused = server.post(PODS, other).await;
    let why = "pod tolerations (possibly merged with namespace default tolerations) conflict with its namespace whitelist";
    assert_eq!((refused.code, message(&refused)), (500, why));
    let mut many = pod("s");
    many["spec"]["tolerations"] =
        (0..1001).map(|number| json!({"key": format!("k{number}"), "operator": "Exists"})).collect();
    let refused = server.post(PODS, many).await;
    assert_eq!(refused.code, 403);
    assert!(message(&refused).ends_with("the pod has 1001 tolerations, more than 1000"), "{}", refused.body);
}

#[tokio::test]
async fn a_pod_gets_the_zone_of_its_node() {
    let server = Fixture::new().await;
    add_node(&server, json!([])).await;
    let mut placed = pod("placed");
    placed["spec"]["nodeName"] = "n".into();
    placed["metadata"]["labels"] = json!({"app": "x"});
    let made = server.post(PODS, placed).await;
    assert_eq!(made.body["metadata"]["labels"], json!({"app": "x", ZONE: "a"}), "{}", made.body);
    server.post(PODS, pod("p")).await;
    let binding = |labels: Value| json!({"metadata": {"name": "p", "labels": labels}, "target": {"kind": "Node", "name": "n"}});
    // The labels reach the pod without another validation.
    assert_eq!(server.post(BINDINGS, binding(json!({"a b": "c"}))).await.code, 422);
    let bound = server.post(BINDINGS, binding(json!({"own": "b", ZONE: "wrong"}))).await;
    assert_eq!(bound.code, 201, "{}", bound.body);
    let labels = server.get(&format!("{PODS}/p")).await.body["metadata"]["labels"].clone();
    assert_eq!(labels, json!({"own": "b", ZONE: "a"}));
}

#[tokio::test]
async fn a_resize_needs_the_features_of_the_node() {
    const FEATURE: &str = "InPlacePodLevelResourcesVerticalScaling";
    let server = Fixture::new().await;
    add_node(&server, json!([])).await;
    let mut whole = pod("p");
    whole["spec"]["resources"] = json!({"requests": {"cpu": "1"}, "limits": {"cpu": "1"}});
    whole["spec"]["nodeName"] = "n".into();
    let made = server.post(PODS, whole).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let patch = json!({"spec": {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "2"}}}});
    let resize = async || server.merge(&format!("{PODS}/p/resize"), patch.clone()).await;
    let refused = resize().await;
    let why = format!("pod update requires features {FEATURE} which are not available on node \"n\"");
    assert_eq!((refused.code, message(&refused)), (403, &*format!("pods \"p\" is forbidden: {why}")));
    let declared = json!({"status": {"declaredFeatures": [FEATURE]}});
    assert_eq!(server.merge("/api/v1/nodes/n/status", declared).await.code, 200);
    assert_eq!(resize().await.code, 200);
}

#[tokio::test]
async fn quotas_can_be_switched_off() {
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}});
    for (disabled, code) in [(&[][..], 403), (&["ResourceQuota"][..], 201)] {
        let server = with_config(&[], disabled, "").await;
        server.post("/api/v1/namespaces/default/resourcequotas", quota.clone()).await;
        assert_eq!(server.post(PODS, pod("p")).await.code, code, "{disabled:?}");
    }
}

#[tokio::test]
async fn a_server_that_denies_everything_starts_and_reads() {
    let server = with(&["AlwaysDeny", "AlwaysAdmit"]).await;
    let refused = server.post(CONFIG_MAPS, config_map("a", json!({}))).await;
    let why = "configmaps \"a\" is forbidden: admission control is denying all modifications";
    assert_eq!((refused.code, message(&refused)), (403, why));
    let refused = server.delete("/api/v1/namespaces/kube-node-lease", json!({})).await;
    assert!(
        message(&refused).ends_with("admission control is denying all modifications"),
        "{}",
        refused.body
    );
    assert_eq!(server.get("/api/v1/namespaces/kube-node-lease").await.code, 200);
    // Subresources with their own object are denied, too.
    let server = server.again().await;
    server.post("/api/v1/namespaces/default/serviceaccounts", json!({"metadata": {"name": "default"}})).await;
    assert_eq!(server.post(PODS, pod("p")).await.code, 201);
    let denied = |config: &mut ApiserverConfig| config.admission_plugins = selection(&["AlwaysDeny"], &[]);
    let server = server.again_with(denied).await;
    let binding = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}});
    assert_eq!(server.post(BINDINGS, binding).await.code, 403);
}

#[tokio::test]
async fn images_are_always_pulled() {
    let server = with(&["AlwaysPullImages"]).await;
    let mut wanted = pod("p");
    wanted["spec"]["containers"][0]["imagePullPolicy"] = "Never".into();
    let made = server.post(PODS, wanted).await;
    assert_eq!(made.body["spec"]["containers"][0]["imagePullPolicy"], "Always", "{}", made.body);
}

#[tokio::test]
async fn external_addresses_of_services_are_denied() {
    let server = with(&["DenyServiceExternalIPs"]).await;
    let path = "/api/v1/namespaces/default/services";
    let spec = json!({"ports": [{"port": 80}], "externalIPs": ["192.0.2.9"]});
    let refused = server.post(path, json!({"metadata": {"name": "s"}, "spec": spec})).await;
    assert_eq!(refused.code, 403);
    assert!(
        refused.body["message"]
            .as_str()
            .unwrap()
            .ends_with("Use of external IPs is denied by admission control")
    );
    let made = server.post(path, json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}})).await;
    assert_eq!(made.code, 201, "{}", made.body);
}

#[tokio::test]
async fn a_missing_namespace_is_created_with_its_first_object() {
    let server = with(&["NamespaceAutoProvision"]).await;
    let path = "/api/v1/namespaces/new/configmaps";
    let dry = server.post(&format!("{path}?dryRun=All"), config_map("a", json!({}))).await;
    assert_eq!(dry.code, 404, "{}", dry.body);
    assert_eq!(server.post(path, config_map("a", json!({}))).await.code, 201);
    assert_eq!(server.get("/api/v1/namespaces/new").await.body["status"]["phase"], "Active");
}

#[tokio::test]
async fn pods_run_on_the_nodes_of_their_namespace() {
    let server = with(&["PodNodeSelector"]).await;
    let annotations = json!({"scheduler.alpha.kubernetes.io/node-selector": "env=test"});
    server.merge("/api/v1/namespaces/default", json!({"metadata": {"annotations": annotations}})).await;
    assert_eq!(server.post(PODS, pod("p")).await.body["spec"]["nodeSelector"], json!({"env": "test"}));
    let mut other = pod("q");
    other["spec"]["nodeSelector"] = json!({"env": "prod"});
    assert_eq!(server.post(PODS, other).await.code, 403);
}

#[tokio::test]
async fn owners_are_changed_only_by_users_who_may_delete() {
    let server = with(&["OwnerReferencesPermissionEnforcement"]).await;
    let role = json!({"metadata": {"name": "writer"}, "rules": [{"apiGroups": [""], "resources": ["configmaps"],
        "verbs": ["create", "patch", "get"]}]});
    let roles = "/apis/rbac.authorization.k8s.io/v1/namespaces/default";
    assert_eq!(server.post(&format!("{roles}/roles"), role).await.code, 201);
    let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "writer"});
    let subject = json!({"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "ann"});
    let binding = json!({"metadata": {"name": "writer"}, "roleRef": reference, "subjects": [subject]});
    assert_eq!(server.post(&format!("{roles}/rolebindings"), binding).await.code, 201);
    server.post(CONFIG_MAPS, config_map("a", json!({}))).await;
    let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "1"});
    let patch = json!({"metadata": {"ownerReferences": [owner]}});
    let request = |body: &Value| {
        let request = Request::patch(format!("{CONFIG_MAPS}/a"));
        request
            .header("content-type", "application/merge-patch+json")
            .body(Full::from(body.to_string()))
            .unwrap()
    };
    let refused = server.send(User::new("ann", &[]), request(&patch)).await;
    assert_eq!(refused.code, 403);
    let message = refused.body["message"].as_str().unwrap();
    assert!(message.contains("cannot set an ownerRef on a resource you can't delete"), "{message}");
    assert_eq!(server.send(User::new("ann", &[]), request(&json!({"data": {"x": "1"}}))).await.code, 200);
    assert_eq!(server.send(admin(), request(&patch)).await.code, 200);
}

#[tokio::test]
async fn an_ingress_gets_the_default_class() {
    let server = Fixture::new().await;
    let class = |name: &str, default: &str| {
        json!({"metadata": {"name": name, "annotations": {"ingressclass.kubernetes.io/is-default-class": default}},
            "spec": {"controller": "example.com/c"}})
    };
    for (name, default) in [("plain", "false"), ("usual", "true")] {
        let made = server.post("/apis/networking.k8s.io/v1/ingressclasses", class(name, default)).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }
    let backend = json!({"service": {"name": "s", "port": {"number": 80}}});
    let ingress = json!({"metadata": {"name": "i"}, "spec": {"defaultBackend": backend}});
    let made = server.post("/apis/networking.k8s.io/v1/namespaces/default/ingresses", ingress).await;
    assert_eq!(made.body["spec"]["ingressClassName"], "usual", "{}", made.body);
}

#[tokio::test]
async fn new_storage_objects_get_the_finalizer_that_protects_them_while_in_use() {
    let server = Fixture::new().await;
    let volume = json!({"metadata": {"name": "v"}, "spec": {"capacity": {"storage": "1Mi"},
        "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/x"}}});
    let class = json!({"metadata": {"name": "c"}, "driverName": "d", "parameters": {"a": "b"}});
    for (path, object, finalizer) in [
        ("/api/v1/persistentvolumes", volume, "kubernetes.io/pv-protection"),
        ("/apis/storage.k8s.io/v1/volumeattributesclasses", class, "kubernetes.io/vac-protection"),
    ] {
        let made = server.post(path, object).await;
        assert_eq!(made.body["metadata"]["finalizers"], json!([finalizer]), "{}", made.body);
    }
}

#[tokio::test]
async fn a_claim_gets_the_default_class_and_grows_only_if_its_class_allows_it() {
    const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
    let server = Fixture::new().await;
    let class = |name: &str, is_default: bool| {
        let annotations = json!({"storageclass.kubernetes.io/is-default-class": is_default.to_string()});
        json!({"metadata": {"name": name, "annotations": annotations}, "provisioner": "example.com/p",
            "allowVolumeExpansion": is_default})
    };
    for class in [class("a-default", true), class("rigid", false)] {
        let made = server.post("/apis/storage.k8s.io/v1/storageclasses", class).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }
    let resources = |size: &str| json!({"requests": {"storage": size}});
    for (class, expected, code) in [(Value::Null, "a-default", 200), (json!("rigid"), "rigid", 403)] {
        let claim = json!({"metadata": {"name": expected}, "spec": {"storageClassName": class,
            "accessModes": ["ReadWriteOnce"], "resources": resources("1Gi")}});
        let made = server.post(CLAIMS, claim).await;
        assert_eq!(made.body["spec"]["storageClassName"], expected, "{}", made.body);
        let path = format!("{CLAIMS}/{expected}");
        let bound = server.merge(&format!("{path}/status"), json!({"status": {"phase": "Bound"}})).await;
        assert_eq!(bound.code, 200, "{}", bound.body);
        let grown = server.merge(&path, json!({"spec": {"resources": resources("2Gi")}})).await;
        assert_eq!(grown.code, code, "{}", grown.body);
        assert_eq!(message(&grown).contains("only dynamically provisioned pvc can be resized"), code == 403);
    }
}
