//! Jobs, cron jobs, stateful sets, daemon sets and replication controllers, while the control plane is killed and
//! restarted.

use coracle_integration::{Cluster, eventually, on_a_machine};
use serde_json::{Value, json};

fn pod(script: &str, restart: &str) -> Value {
    json!({"restartPolicy": restart, "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "c", "image": "busybox", "command": ["sh", "-c", script]}]})
}

fn job(name: &str, script: &str, spec: &Value) -> String {
    let mut whole = json!({"template": {"spec": pod(script, "Never")}});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": whole}).to_string()
}

fn conditions(job: &Value) -> Vec<String> {
    let list = job["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let is = list.iter().filter(|condition| condition["status"] == "True");
    is.map(|condition| condition["type"].as_str().unwrap().to_owned()).collect()
}

fn ended(cluster: &Cluster, name: &str, condition: &str) -> Value {
    eventually(&format!("job {name} to be {condition}"), 120, || {
        let job = cluster.get(&["job", name]);
        conditions(&job).iter().any(|found| found == condition).then_some(job)
    })
}

fn pods(cluster: &Cluster, selector: &str) -> Vec<Value> {
    cluster.get(&["pods", "-l", selector])["items"].as_array().unwrap().clone()
}

fn names(cluster: &Cluster, selector: &str) -> Vec<String> {
    let mut names: Vec<String> = pods(cluster, selector)
        .iter()
        .map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn jobs_have_exact_counts_after_the_control_plane_is_killed() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        cluster.apply(&job("work", "sleep 2", &json!({"completions": 6, "parallelism": 2})));
        eventually("a first success", 120, || {
            cluster.get(&["job", "work"])["status"]["succeeded"].as_i64().is_some_and(|count| count > 0)
        });
        cluster.kill();
        cluster.start();
        let work = ended(&cluster, "work", "Complete");
        assert_eq!(work["status"]["succeeded"], 6);
        let created = pods(&cluster, "job-name=work");
        assert_eq!(created.len(), 6, "a pod was created twice");
        assert!(created.iter().all(|pod| pod["metadata"]["finalizers"].is_null()), "a pod is not counted");
        let words = cluster.kubectl(&["get", "job", "work", "--no-headers"]);
        assert!(words.contains("Complete") && words.contains("6/6"), "{words}");

        cluster.apply(&job("broken", "exit 3", &json!({"backoffLimit": 0})));
        let broken = ended(&cluster, "broken", "Failed");
        assert_eq!(broken["status"]["failed"], 1);
        let reasons: Vec<_> = broken["status"]["conditions"].as_array().unwrap().iter().collect();
        assert!(reasons.iter().all(|condition| condition["reason"] == "BackoffLimitExceeded"), "{reasons:?}");

        let policy = json!({"backoffLimit": 6, "podFailurePolicy": {"rules": [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}]}});
        cluster.apply(&job("policy", "exit 42", &policy));
        let policy = ended(&cluster, "policy", "Failed");
        assert_eq!(policy["status"]["failed"], 1);

        let indexed = json!({"completions": 3, "parallelism": 3, "completionMode": "Indexed",
            "backoffLimitPerIndex": 0, "ttlSecondsAfterFinished": 600});
        cluster.apply(&job("indexed", "test $JOB_COMPLETION_INDEX != 1", &indexed));
        let indexed = ended(&cluster, "indexed", "Failed");
        assert_eq!(indexed["status"]["completedIndexes"], "0,2");
        assert_eq!(indexed["status"]["failedIndexes"], "1");

        cluster.apply(&job("short", "true", &json!({"ttlSecondsAfterFinished": 0})));
        eventually("the job to be deleted after its TTL", 120, || {
            !cluster.try_kubectl(&["get", "job", "short"]).status.success()
                && pods(&cluster, "job-name=short").is_empty()
        });

        cluster.apply(&job("asleep", "true", &json!({"suspend": true})));
        eventually("the job to be suspended", 30, || {
            conditions(&cluster.get(&["job", "asleep"])) == ["Suspended"]
        });
        assert!(pods(&cluster, "job-name=asleep").is_empty());
        cluster.kubectl(&["patch", "job", "asleep", "--type=merge", "-p", r#"{"spec":{"suspend":false}}"#]);
        ended(&cluster, "asleep", "Complete");
        cron_jobs(&cluster);
    });
}

/// A yearly schedule with many missed times creates one job, for the last missed time.
fn cron_jobs(cluster: &Cluster) {
    let cron = json!({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "yearly"}, "spec": {
        "schedule": "0 0 1 1 *", "timeZone": "Asia/Tokyo",
        "jobTemplate": {"spec": {"template": {"spec": pod("true", "OnFailure")}}}}});
    cluster.apply(&cron.to_string());
    let last = r#"{"status":{"lastScheduleTime":"2020-06-01T00:00:00Z"}}"#;
    cluster.kubectl(&["patch", "cronjob", "yearly", "--subresource=status", "--type=merge", "-p", last]);
    let created = eventually("a job of the cron job to complete", 120, || {
        let jobs = cluster.get(&["jobs"])["items"].as_array().unwrap().clone();
        let of = |job: &&Value| job["metadata"]["ownerReferences"][0]["name"] == "yearly";
        let created: Vec<Value> = jobs.iter().filter(of).cloned().collect();
        created.iter().any(|job| conditions(job).iter().any(|found| found == "Complete")).then_some(created)
    });
    assert_eq!(created.len(), 1);
    let time =
        created[0]["metadata"]["annotations"]["batch.kubernetes.io/cronjob-scheduled-timestamp"].as_str();
    assert!(time.is_some_and(|time| time.ends_with("-01-01T00:00:00+09:00")), "{time:?}");
    eventually("the status to have no active job", 30, || {
        let status = cluster.get(&["cronjob", "yearly"])["status"].clone();
        status["active"].is_null() && status["lastSuccessfulTime"].is_string()
    });
    cluster.kubectl(&["create", "job", "by-hand", "--from=cronjob/yearly"]);
    ended(cluster, "by-hand", "Complete");
}

fn workload(kind: &str, name: &str, spec: &Value) -> String {
    let mut whole = json!({
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": pod("sleep 100000", "Always")},
    });
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    json!({"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": whole}).to_string()
}

/// Values of the environment variable `A` of the pods.
fn values(cluster: &Cluster, selector: &str) -> Vec<String> {
    let value =
        |pod: &Value| pod["spec"]["containers"][0]["env"][0]["value"].as_str().unwrap_or("-").to_owned();
    pods(cluster, selector).iter().map(value).collect()
}

#[test]
fn sets_of_pods_are_scaled_updated_and_rolled_back() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        cluster.apply(&workload("StatefulSet", "web", &json!({"replicas": 2, "serviceName": "web"})));
        cluster.apply(&workload("DaemonSet", "agent", &json!({})));
        cluster.kubectl(&["rollout", "status", "statefulset/web", "--timeout=120s"]);
        cluster.kubectl(&["rollout", "status", "daemonset/agent", "--timeout=120s"]);
        assert_eq!(names(&cluster, "app=web"), ["web-0", "web-1"]);
        assert_eq!(names(&cluster, "app=agent").len(), 1);
        let host = cluster.kubectl(&["exec", "web-1", "--", "hostname"]);
        assert_eq!(host.trim(), "web-1");

        cluster.kubectl(&["scale", "statefulset/web", "--replicas=3"]);
        cluster.kill();
        cluster.start();
        eventually("three ready pods", 120, || cluster.get(&["sts", "web"])["status"]["readyReplicas"] == 3);
        for set in ["statefulset/web", "daemonset/agent"] {
            cluster.kubectl(&["set", "env", set, "A=2"]);
            cluster.kubectl(&["rollout", "status", set, "--timeout=180s"]);
        }
        assert_eq!(values(&cluster, "app=web"), ["2", "2", "2"]);
        // The old pod's containers have ended, but its object can exist for a moment.
        eventually("only the new daemon pod", 20, || values(&cluster, "app=agent") == ["2"]);
        let revisions = cluster.get(&["controllerrevisions"])["items"].as_array().unwrap().len();
        assert_eq!(revisions, 4, "each of the two sets has two revisions");
        for set in ["statefulset/web", "daemonset/agent"] {
            cluster.kubectl(&["rollout", "undo", set]);
            cluster.kubectl(&["rollout", "status", set, "--timeout=180s"]);
        }
        assert_eq!(values(&cluster, "app=web"), ["-", "-", "-"]);
        eventually("only the old daemon pod", 20, || values(&cluster, "app=agent") == ["-"]);

        cluster.kubectl(&["scale", "statefulset/web", "--replicas=1"]);
        eventually("one pod", 60, || names(&cluster, "app=web") == ["web-0"]);
        cluster.kubectl(&["delete", "statefulset/web", "daemonset/agent"]);
        replication_controller(&cluster);
        eventually("all pods to be removed", 60, || cluster.get(&["pods"])["items"] == json!([]));
    });
}

fn replication_controller(cluster: &Cluster) {
    let spec = json!({"replicas": 1, "template": {"metadata": {"labels": {"app": "rc"}}, "spec": pod("sleep 100000", "Always")}});
    let controller = json!({"apiVersion": "v1", "kind": "ReplicationController", "metadata": {"name": "rc"}, "spec": spec});
    cluster.apply(&controller.to_string());
    cluster.kubectl(&["scale", "rc/rc", "--replicas=2"]);
    eventually("two ready pods", 60, || cluster.get(&["rc", "rc"])["status"]["readyReplicas"] == 2);
    cluster.kubectl(&["delete", "rc/rc"]);
}

/// Two cycles of owner references: one of two config maps, one of three.
#[test]
fn objects_that_own_each_other_are_deleted_with_one_of_them() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        let own = |dependent: &str, owner: &str| {
            let uid = &cluster.get(&["configmap", owner])["metadata"]["uid"];
            let owners = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": owner, "uid": uid,
                "controller": true, "blockOwnerDeletion": true}]);
            let patch = json!({"metadata": {"ownerReferences": owners}}).to_string();
            cluster.kubectl(&["patch", "configmap", dependent, "--type=merge", "-p", &patch]);
        };
        let cycles = [&["a", "b"][..], &["c", "d", "e"]];
        for cycle in cycles {
            for name in cycle {
                cluster.kubectl(&["create", "configmap", name]);
            }
            for (at, name) in cycle.iter().enumerate() {
                own(name, cycle[(at + 1) % cycle.len()]);
            }
        }
        cluster.kubectl(&["create", "configmap", "kept"]);
        cluster.kubectl(&["delete", "configmap", "a", "--cascade=foreground", "--timeout=60s"]);
        cluster.kubectl(&["delete", "configmap", "c", "--cascade=background", "--timeout=60s"]);
        eventually("only objects outside of the cycles", 60, || {
            let names = cluster.kubectl(&["get", "configmaps", "-o", "jsonpath={.items[*].metadata.name}"]);
            names == "kept kube-root-ca.crt"
        });
    });
}
