//! Built-in versions that are off by default: groups of pods, and migrations of stored objects.

use super::*;

const GROUPS: &str = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups";
const JOBS: &str = "/apis/batch/v1/namespaces/default/jobs";
const WORKLOADS: &str = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/workloads";
const MIGRATIONS: &str = "/apis/storagemigration.k8s.io/v1beta1/storageversionmigrations";

fn with(entries: &[&str]) -> impl FnOnce(&mut ApiserverConfig) + use<> {
    let entries: Vec<String> = entries.iter().map(|&entry| entry.to_owned()).collect();
    move |config| config.runtime_config = RuntimeConfig::parse(&entries).unwrap()
}

fn in_group(name: &str) -> Value {
    let mut pod = pod(name);
    pod["spec"]["schedulingGroup"] = json!({"podGroupName": "g"});
    pod
}

fn group(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"schedulingPolicy": {"gang": {"minCount": 2}}}})
}

/// The same group in upstream's envelope of protobuf.
fn protobuf(name: &str) -> Vec<u8> {
    let field =
        |number: u8, bytes: &[u8]| [&[(number << 3) | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat();
    let kind = [field(1, b"scheduling.k8s.io/v1alpha2"), field(2, b"PodGroup")].concat();
    let policy = field(2, &field(2, &[1 << 3, 2]));
    let group = [field(1, &field(1, name.as_bytes())), field(2, &policy)].concat();
    [b"k8s\0".to_vec(), field(1, &kind), field(2, &group)].concat()
}

#[tokio::test]
async fn versions_that_are_off_do_not_exist() {
    let server = Fixture::new().await;
    assert_eq!(server.get(GROUPS).await.code, 404);
    assert_eq!(server.get(MIGRATIONS).await.body, "404 page not found\n");
    let groups = server.get("/apis").await.body.to_string();
    assert!(groups.contains("scheduling.k8s.io/v1") && !groups.contains("v1alpha2"), "{groups}");
    assert!(!groups.contains("storagemigration"));
    assert_eq!(server.get("/openapi/v3/apis/scheduling.k8s.io/v1alpha2").await.code, 404);
    assert!(!server.get("/openapi/v2").await.body.to_string().contains("scheduling.v1alpha2.PodGroup\""));
    let made = server.post(PODS, in_group("p")).await;
    assert_eq!((made.code, &made.body["spec"]["schedulingGroup"]), (201, &Value::Null), "{}", made.body);
    let warning = made.headers["warning"].to_str().unwrap();
    assert!(warning.contains("schedulingGroup: dropped"), "{warning}");
    assert!(!made.body["metadata"]["managedFields"].to_string().contains("schedulingGroup"));
}

#[tokio::test]
async fn another_server_can_have_the_metrics_of_nodes_and_pods() {
    let server = Fixture::new().await.again_with(with(&["metrics.k8s.io/v1beta1=false"])).await;
    let (services, nodes) =
        ("/apis/apiregistration.k8s.io/v1/apiservices", "/apis/metrics.k8s.io/v1beta1/nodes");
    assert_eq!(server.get(nodes).await.code, 404);
    let own = format!("{services}/v1beta1.metrics.k8s.io");
    eventually_async("this server's API service is deleted", 10, async || server.get(&own).await.code == 404)
        .await;
    let spec = json!({"group": "metrics.k8s.io", "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
        "insecureSkipTLSVerify": true, "service": {"namespace": "kube-system", "name": "metrics-server"}});
    let made =
        server.post(services, json!({"metadata": {"name": "v1beta1.metrics.k8s.io"}, "spec": spec})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    eventually_async("requests go to the other server", 10, async || server.get(nodes).await.code == 503)
        .await;
}

#[tokio::test]
async fn groups_of_pods_are_served_on_request_and_outlive_the_request() {
    let server = Fixture::new().await.again_with(with(&["scheduling.k8s.io/v1alpha2=true"])).await;
    let template = json!({"name": "t", "schedulingPolicy": {"basic": {}}, "disruptionMode": "Pod"});
    let workload = json!({"metadata": {"name": "w"}, "spec": {"podGroupTemplates": [template]}});
    let made = server.post(WORKLOADS, workload).await;
    let template = &made.body["spec"]["podGroupTemplates"][0];
    assert_eq!((made.code, template.get("disruptionMode")), (201, None), "{}", made.body);
    let made = server.post(GROUPS, group("g")).await;
    assert_eq!((made.code, &made.body["status"]), (201, &json!({})), "{}", made.body);
    assert_eq!(made.body["spec"]["disruptionMode"], Value::Null);
    assert_eq!(made.body["metadata"]["finalizers"], json!(["scheduling.k8s.io/podgroup-protection"]));
    for (workload, template, expect) in [("w", "t", 201), ("w", "x", 403), ("none", "t", 403)] {
        let mut of_template = group(&format!("{workload}-{template}"));
        let reference = json!({"workloadName": workload, "podGroupTemplateName": template});
        of_template["spec"]["podGroupTemplateRef"] = json!({"workload": reference});
        let made = server.post(GROUPS, of_template).await;
        assert_eq!(made.code, expect, "{}", made.body);
    }
    let one = format!("{GROUPS}/g");
    let refused = server.merge(&one, json!({"spec": {"schedulingPolicy": {"gang": {"minCount": 3}}}})).await;
    assert_eq!(
        (refused.code, &refused.body["details"]["causes"][0]["field"]),
        (422, &json!("spec.schedulingPolicy"))
    );
    let condition = json!({"type": "PodGroupScheduled", "status": "True", "reason": "Scheduled", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let status = json!({"status": {"conditions": [condition]}, "spec": {"schedulingPolicy": {"basic": {}}}});
    let changed = server.merge(&format!("{one}/status"), status).await;
    assert_eq!(changed.body["status"]["conditions"][0]["type"], "PodGroupScheduled", "{}", changed.body);
    assert_eq!(changed.body["spec"]["schedulingPolicy"]["basic"], Value::Null);
    assert!(
        server.get("/openapi/v3/apis/scheduling.k8s.io/v1alpha2").await.body.to_string().contains("minCount")
    );
    let table = Request::get(&one).header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io");
    let table = server.send(admin(), table.body(Full::default()).unwrap()).await;
    assert_eq!(table.body["rows"][0]["cells"][1], "Gang", "{}", table.body);
    let message = Request::post(GROUPS).header("content-type", "application/vnd.kubernetes.protobuf");
    let made = server.send(admin(), message.body(Full::new(protobuf("q").into())).unwrap()).await;
    assert_eq!(made.body["spec"]["schedulingPolicy"], json!({"gang": {"minCount": 2}}), "{}", made.body);
    let pod = server.post(PODS, in_group("p")).await;
    assert_eq!(pod.body["spec"]["schedulingGroup"]["podGroupName"], "g", "{}", pod.body);
    assert_eq!(server.get(MIGRATIONS).await.code, 404);
    // When the version is no longer served, its objects stay in the store, and a pod with a group keeps the group.
    let server = server.again().await;
    assert_eq!(server.get(&one).await.code, 404);
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    let pod = server.merge(&format!("{PODS}/p"), labels).await;
    assert_eq!(pod.body["spec"]["schedulingGroup"]["podGroupName"], "g", "{}", pod.body);
    let server = server.again_with(with(&["api/alpha=true"])).await;
    assert_eq!(server.get(&one).await.body["spec"]["schedulingPolicy"]["gang"]["minCount"], 2);
}

#[tokio::test]
async fn a_job_keeps_the_parallelism_of_its_gang_while_groups_are_served() {
    let server = Fixture::new().await.again_with(with(&["scheduling.k8s.io/v1alpha2=true"])).await;
    assert_eq!(server.post(GROUPS, group("g")).await.code, 201);
    let mut job = json!({"metadata": {"name": "j"}, "spec": {"template": in_group("p")}});
    job["spec"]["template"]["spec"]["restartPolicy"] = "Never".into();
    let made = server.post(JOBS, job).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let (job, two) = (format!("{JOBS}/j"), json!({"spec": {"parallelism": 2}}));
    let refused = server.merge(&job, two.clone()).await;
    let why = "cannot change parallelism for a Job referencing gang-scheduled PodGroup \"g\"";
    let message = refused.body["message"].as_str().unwrap_or_default();
    assert!(refused.code == 403 && message.ends_with(why), "{}", refused.body);
    let server = server.again().await;
    let changed = server.merge(&job, two).await;
    assert_eq!(changed.code, 200, "a group that is not served has no effect: {}", changed.body);
}

#[tokio::test]
async fn an_empty_configuration_writes_only_what_is_stored_in_another_form() {
    let server = Fixture::new().await.again_with(with(&["api/beta=true"])).await;
    let made = server
        .post(MIGRATIONS, json!({"metadata": {"name": "m"}, "spec": {"resource": {"resource": "secrets"}}}));
    let made = made.await;
    assert_eq!((made.code, &made.body["spec"]["resource"]["group"]), (201, &json!("")), "{}", made.body);
    let made = server.post(CONFIG_MAPS, config_map("c", json!({}))).await.body;
    let apply = async |path: &str, metadata: Value| {
        let body = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata});
        let path = format!("{CONFIG_MAPS}/{path}?fieldManager=m");
        server.call("PATCH", &path, "application/apply-patch+yaml", Some(body)).await
    };
    let metadata = &made["metadata"];
    let of = |name: &str| json!({"name": name, "uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]});
    let same = apply("c", of("c")).await;
    assert_eq!((same.code, &same.body["metadata"]), (200, metadata), "{}", same.body);
    assert_eq!(apply("none", of("none")).await.code, 409, "a deleted object is not created again");
    let changed = server.merge(&format!("{CONFIG_MAPS}/c"), json!({"data": {"b": "c"}})).await;
    assert_eq!((changed.code, apply("c", of("c")).await.code), (200, 409), "a changed object is left alone");
}
