//! Controllers and scheduler that are killed at their writes: before a write, or after it took effect and before its
//! response arrived. Each process is killed after a few writes, so that each step of each controller is interrupted at
//! some time.
//!
//! `CORACLE_FAULT_STEPS` is the number of writes within which a process is killed. With 1, each process is killed at
//! its first write, until the test deletes the namespace. A higher number makes a long run of random operations faster,
//! because the starts of processes take most of the time. `CORACLE_FAULT_OPERATIONS` is the number of random
//! operations, and `CORACLE_FAULT_SEED` repeats the choices of an earlier run.
#![allow(clippy::expect_used, reason = "a test panics")]

mod cluster;
mod fault;
mod one_controller;
mod rng;

use std::collections::BTreeMap;

use cluster::Cluster;
use rng::Rng;
use serde_json::{Value, json};

const APPS: &str = "/apis/apps/v1/namespaces/n";
const BATCH: &str = "/apis/batch/v1/namespaces/n";
const CORE: &str = "/api/v1/namespaces/n";
const DAEMON_SET: &str = "DaemonSet";
/// Number of nodes, and so of the pods of a daemon set.
const NODES: u64 = 2;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn template(name: &str, version: &str, restart: &str) -> Value {
    json!({"metadata": {"labels": {"app": name}, "annotations": {"version": version}},
        "spec": {"restartPolicy": restart, "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "c", "image": "i"}]}})
}

/// An object of `apps/v1` or a ReplicationController.
fn workload(kind: &str, name: &str, spec: Value) -> Value {
    let is_core = kind == "ReplicationController";
    let labels = json!({"app": name});
    let mut whole = json!({"template": template(name, "1", "Always"),
        "selector": if is_core { labels } else { json!({"matchLabels": labels}) }});
    for (field, value) in spec.as_object().into_iter().flatten() {
        whole[field] = value.clone();
    }
    json!({"apiVersion": if is_core { "v1" } else { "apps/v1" }, "kind": kind, "metadata": {"name": name}, "spec": whole})
}

fn job(name: &str, spec: Value) -> Value {
    let mut whole = json!({"template": template(name, "1", "Never")});
    for (field, value) in spec.as_object().into_iter().flatten() {
        whole[field] = value.clone();
    }
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": whole})
}

/// A cron job that runs once a year. `spec` is that of its jobs.
fn cron_job(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": name}, "spec": {
        "schedule": "0 0 1 1 *", "jobTemplate": {"spec": job("", spec)["spec"]}}})
}

/// Sets the last run of a cron job to a time some years ago, so that one run is due.
async fn make_due(cluster: &Cluster, name: &str) {
    let last = json!({"status": {"lastScheduleTime": "2020-06-01T00:00:00Z"}});
    cluster.patch(&format!("{BATCH}/cronjobs/{name}/status"), last).await;
}

/// Describes the fields that do not have the expected values. `None` if all have them.
fn differs(what: &str, found: &Value, expected: &Value) -> Option<String> {
    let fields = expected.as_object().into_iter().flatten();
    let wrong: Vec<_> = fields.filter(|(name, value)| found[name.as_str()] != **value).collect();
    (!wrong.is_empty()).then(|| format!("{what} is {found}, expected {wrong:?}"))
}

/// Creates the namespace and waits for its service account. Until the account exists, the API server delays requests
/// that create pods. The next process starts only after these requests have ended.
async fn create_namespace(cluster: &Cluster) {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}});
    cluster.create("/api/v1/namespaces", namespace).await;
    let account = format!("{CORE}/serviceaccounts/default");
    let is_missing = async |cluster: &Cluster| cluster.get(&account).await.is_null();
    cluster
        .until(async |cluster: &Cluster| is_missing(cluster).await.then(|| "no service account".to_owned()))
        .await;
}

async fn create_workloads(cluster: &Cluster) {
    create_namespace(cluster).await;
    let claim = json!({"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Mi"}}}});
    let stateful = json!({"replicas": 2, "serviceName": "db", "volumeClaimTemplates": [claim]});
    let objects = [
        (APPS, "deployments", workload("Deployment", "web", json!({"replicas": 3}))),
        (APPS, "statefulsets", workload("StatefulSet", "db", stateful)),
        (APPS, "daemonsets", workload("DaemonSet", "agent", json!({}))),
        (CORE, "replicationcontrollers", workload("ReplicationController", "old", json!({"replicas": 2}))),
        (BATCH, "jobs", job("work", json!({"completions": 4, "parallelism": 2}))),
        (
            BATCH,
            "jobs",
            job("indexed", json!({"completions": 3, "parallelism": 3, "completionMode": "Indexed"})),
        ),
        (BATCH, "cronjobs", cron_job("yearly", json!({}))),
        (
            CORE,
            "services",
            json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
                "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]}}),
        ),
        (
            "/apis/policy/v1/namespaces/n",
            "poddisruptionbudgets",
            json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "web"},
                "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "web"}}}}),
        ),
    ];
    for (group, plural, object) in objects {
        cluster.create(&format!("{group}/{plural}"), object).await;
    }
    make_due(cluster, "yearly").await;
}

/// The first object that has not reached its goal.
async fn unfinished(cluster: &Cluster) -> Option<String> {
    let expected = [
        (APPS, "deployments/web", json!({"readyReplicas": 3, "updatedReplicas": 3, "replicas": 3})),
        (APPS, "statefulsets/db", json!({"readyReplicas": 2, "currentReplicas": 2})),
        (APPS, "daemonsets/agent", json!({"numberReady": 2, "desiredNumberScheduled": 2})),
        (CORE, "replicationcontrollers/old", json!({"readyReplicas": 2})),
        (BATCH, "jobs/work", json!({"succeeded": 4})),
        (BATCH, "jobs/indexed", json!({"succeeded": 3, "completedIndexes": "0-2"})),
        ("/apis/policy/v1/namespaces/n", "poddisruptionbudgets/web", json!({"disruptionsAllowed": 1})),
    ];
    for (group, name, status) in expected {
        let found = cluster.get(&format!("{group}/{name}")).await;
        if let Some(difference) = differs(name, &found["status"], &status) {
            return Some(difference);
        }
    }
    let endpoints = cluster.list("/apis/discovery.k8s.io/v1/namespaces/n/endpointslices").await;
    let ready: usize = endpoints.iter().map(|slice| slice["endpoints"].as_array().map_or(0, Vec::len)).sum();
    let cron = cluster.get(&format!("{BATCH}/cronjobs/yearly")).await;
    let done = ready == 3 && cron["status"]["lastSuccessfulTime"].is_string();
    (!done).then(|| format!("{ready} endpoints; the cron job has {}", cron["status"]))
}

/// Asserts that every workload has exactly the pods that it needs, and never had others.
async fn assert_exact(cluster: &Cluster) {
    let sets = cluster.list(&format!("{APPS}/replicasets")).await;
    assert_eq!(sets.len(), 1, "one replica set of the deployment");
    let set = format!("ReplicaSet/{}", sets[0]["metadata"]["name"].as_str().unwrap_or_default());
    let jobs = cluster.list(&format!("{BATCH}/jobs")).await;
    assert_eq!(jobs.len(), 3, "one job of the cron job");
    let of_cron = jobs.iter().filter_map(|job| job["metadata"]["name"].as_str());
    let of_cron = of_cron.into_iter().find(|name| name.starts_with("yearly")).expect("the cron job's job");
    let expected = [
        (set.as_str(), 3),
        ("StatefulSet/db", 2),
        ("DaemonSet/agent", 2),
        ("ReplicationController/old", 2),
        ("Job/work", 4),
        ("Job/indexed", 3),
        (&format!("Job/{of_cron}"), 1),
    ];
    for (owner, count) in expected {
        assert_eq!(cluster.created_of("n", owner), count, "pods of {owner} in total");
    }
    let pods = cluster.list(&format!("{CORE}/pods")).await;
    assert_eq!(pods.len(), 17);
    for pod in pods {
        assert!(pod["metadata"]["finalizers"].is_null(), "a pod that is not counted: {}", pod["metadata"]);
    }
    assert_eq!(cluster.list(&format!("{CORE}/persistentvolumeclaims")).await.len(), 2);
    assert_eq!(cluster.list("/api/v1/persistentvolumes").await.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn controllers_killed_at_any_write_create_no_pod_twice_and_leave_none() {
    let dir = tempfile::tempdir().expect("a directory");
    let (seed, steps) = (setting("CORACLE_FAULT_SEED", 1), setting("CORACLE_FAULT_STEPS", 10));
    let cluster = Cluster::start(dir.path(), seed, steps).await;
    create_workloads(&cluster).await;
    cluster.until(unfinished).await;
    assert_exact(&cluster).await;
    let created = cluster.killed();
    assert!(created >= 10, "only {created} processes were killed");

    let version = json!({"spec": {"template": template("web", "2", "Always")}});
    cluster.patch(&format!("{APPS}/deployments/web"), version).await;
    cluster.delete(&format!("{APPS}/daemonsets/agent?propagationPolicy=Foreground")).await;
    cluster.until(updated).await;

    // The namespace controller sends a deletion for each kind, even if the kind has no objects. A process with fewer
    // writes would never reach the last kind.
    cluster.set_steps(200);
    cluster.delete("/api/v1/namespaces/n").await;
    cluster.until(emptied).await;
    println!("{created} processes killed until the workloads ran, {} in total", cluster.killed());
    cluster.stop().await;
}

async fn updated(cluster: &Cluster) -> Option<String> {
    let web = cluster.get(&format!("{APPS}/deployments/web")).await;
    let expected = json!({"updatedReplicas": 3, "readyReplicas": 3, "replicas": 3, "observedGeneration": 2});
    if let Some(difference) = differs("the deployment", &web["status"], &expected) {
        return Some(difference);
    }
    let pods = cluster.list(&format!("{CORE}/pods")).await;
    let of = |app: &str| pods.iter().filter(|pod| pod["metadata"]["labels"]["app"] == app).count();
    let counts = (of("web"), of("agent"));
    let set = cluster.get(&format!("{APPS}/daemonsets/agent")).await;
    (counts != (3, 0) || !set.is_null()).then(|| format!("{counts:?} pods; the daemon set is {set}"))
}

/// Describes what is left of the namespace and its pods. `None` if all is deleted.
async fn emptied(cluster: &Cluster) -> Option<String> {
    let namespace = cluster.get("/api/v1/namespaces/n").await;
    let pods = cluster.list("/api/v1/pods").await.len();
    (!namespace.is_null() || pods > 0)
        .then(|| format!("{pods} pods; the namespace has {}", namespace["status"]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_class_of_volume_attributes_is_deleted_after_its_last_use() {
    const CLASS: &str = "/apis/storage.k8s.io/v1/volumeattributesclasses/gold";
    let dir = tempfile::tempdir().expect("a directory");
    let cluster = Cluster::start(dir.path(), 3, 12).await;
    let class = json!({"apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttributesClass",
        "metadata": {"name": "gold"}, "driverName": "d", "parameters": {"iops": "1"}});
    cluster.create("/apis/storage.k8s.io/v1/volumeattributesclasses", class).await;
    let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "v"}, "spec": {
        "capacity": {"storage": "1Mi"}, "accessModes": ["ReadWriteOnce"], "volumeAttributesClassName": "gold",
        "csi": {"driver": "d", "volumeHandle": "h"}}});
    cluster.create("/api/v1/persistentvolumes", volume).await;
    cluster.delete(CLASS).await;
    // A later change of another class shows that the controller has seen the deletion.
    let other = json!({"apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttributesClass",
        "metadata": {"name": "unused"}, "driverName": "d", "parameters": {"iops": "1"}});
    cluster.create("/apis/storage.k8s.io/v1/volumeattributesclasses", other).await;
    cluster.delete("/apis/storage.k8s.io/v1/volumeattributesclasses/unused").await;
    let is_gone = async |path: &str| cluster.get(path).await.is_null();
    cluster
        .until(async |_| {
            let path = "/apis/storage.k8s.io/v1/volumeattributesclasses/unused";
            (!is_gone(path).await).then(|| "the unused class exists".to_owned())
        })
        .await;
    assert!(!is_gone(CLASS).await, "the class is in use");
    cluster.delete("/api/v1/persistentvolumes/v").await;
    cluster.until(async |_| (!is_gone(CLASS).await).then(|| "the class exists".to_owned())).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_controllers_still_create_ephemeral_claims_and_delete_expired_jobs() {
    let dir = tempfile::tempdir().expect("a directory");
    let (seed, steps) = (setting("CORACLE_FAULT_SEED", 4), setting("CORACLE_FAULT_STEPS", 10));
    let cluster = Cluster::start(dir.path(), seed, steps).await;
    create_namespace(&cluster).await;
    let claim =
        json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
    let mut pod = template("scratch", "1", "Always");
    pod["metadata"]["name"] = "scratch".into();
    pod["spec"]["volumes"] = json!([{"name": "data", "ephemeral": {"volumeClaimTemplate": claim}}]);
    cluster.create(&format!("{CORE}/pods"), pod).await;
    cluster.create(&format!("{BATCH}/jobs"), job("short", json!({"ttlSecondsAfterFinished": 0}))).await;
    cluster
        .until(async |cluster: &Cluster| {
            let pod = cluster.get(&format!("{CORE}/pods/scratch")).await;
            let claim = cluster.get(&format!("{CORE}/persistentvolumeclaims/scratch-data")).await;
            let job = cluster.get(&format!("{BATCH}/jobs/short")).await;
            let is_owned = claim["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"];
            let is_bound = claim["status"]["phase"] == "Bound" && pod["status"]["phase"] == "Running";
            (!(is_owned && is_bound && job.is_null())).then(|| format!("pod {pod}, claim {claim}, job {job}"))
        })
        .await;
    assert_eq!(cluster.created_of("n", "Job/short"), 1);
    cluster.stop().await;
}

/// The desired number of pods of each workload, by the workload's path.
type Workloads = BTreeMap<String, u64>;

fn is_daemon_set(path: &str) -> bool {
    path.starts_with(&format!("{APPS}/daemonsets/"))
}

/// The fields of a job with two pods.
fn two_pods() -> Value {
    json!({"completions": 2, "parallelism": 2})
}

/// One random operation on the workloads.
async fn operate(cluster: &Cluster, rng: &mut Rng, workloads: &mut Workloads, number: u64) {
    const KINDS: [(&str, &str, &str); 5] = [
        (APPS, "daemonsets", DAEMON_SET),
        (APPS, "deployments", "Deployment"),
        (APPS, "replicasets", "ReplicaSet"),
        (APPS, "statefulsets", "StatefulSet"),
        (CORE, "replicationcontrollers", "ReplicationController"),
    ];
    let replicas = rng.below(4);
    let existing: Vec<String> = workloads.keys().cloned().collect();
    let at = usize::try_from(rng.below(existing.len().max(1) as u64)).unwrap_or_default();
    match (rng.below(6), existing.get(at)) {
        (0, Some(path)) => {
            let policy = ["Background", "Foreground"][usize::try_from(rng.below(2)).unwrap_or_default()];
            cluster.delete(&format!("{path}?propagationPolicy={policy}")).await;
            workloads.remove(path);
        }
        (1, Some(path)) if !is_daemon_set(path) => {
            cluster.patch(path, json!({"spec": {"replicas": replicas}})).await;
            workloads.insert(path.clone(), replicas);
        }
        (1 | 2, Some(path)) => {
            let annotations = json!({"version": number.to_string()});
            let template = json!({"metadata": {"annotations": annotations}});
            cluster.patch(path, json!({"spec": {"template": template}})).await;
        }
        (0..=3, _) if existing.len() < 12 => {
            let (group, plural, kind) = KINDS[usize::try_from(rng.below(5)).unwrap_or_default()];
            let name = format!("w{number}");
            let replicas = if kind == DAEMON_SET { NODES } else { replicas };
            let spec = match kind {
                DAEMON_SET => json!({}),
                "StatefulSet" => {
                    json!({"replicas": replicas, "serviceName": name, "podManagementPolicy": "Parallel"})
                }
                _ => json!({"replicas": replicas}),
            };
            cluster.create(&format!("{group}/{plural}"), workload(kind, &name, spec)).await;
            workloads.insert(format!("{group}/{plural}/{name}"), replicas);
        }
        (4, _) => {
            let name = format!("c{number}");
            cluster.create(&format!("{BATCH}/cronjobs"), cron_job(&name, two_pods())).await;
            make_due(cluster, &name).await;
        }
        (_, _) => {
            cluster.create(&format!("{BATCH}/jobs"), job(&format!("j{number}"), two_pods())).await;
        }
    }
}

/// The first difference between the workloads and their pods.
async fn inexact(cluster: &Cluster, workloads: &Workloads) -> Option<String> {
    for (path, replicas) in workloads {
        let found = cluster.get(path).await;
        let fields = match is_daemon_set(path) {
            true => ["numberReady", "currentNumberScheduled"],
            false => ["readyReplicas", "replicas"],
        };
        let [ready, all] = fields.map(|field| found["status"][field].as_u64().unwrap_or(0));
        let is_observed = found["status"]["observedGeneration"] == found["metadata"]["generation"];
        if ready != *replicas || all != *replicas || !is_observed {
            return Some(format!("{path} needs {replicas} pods and has {}", found["status"]));
        }
    }
    let crons = cluster.list(&format!("{BATCH}/cronjobs")).await;
    if let Some(due) = crons.iter().find(|cron| cron["status"]["lastSuccessfulTime"].is_null()) {
        return Some(format!("cron job {} has {}", due["metadata"]["name"], due["status"]));
    }
    let jobs = cluster.list(&format!("{BATCH}/jobs")).await;
    let open =
        jobs.iter().find(|job| job["status"]["succeeded"] != 2 || job["status"]["completionTime"].is_null());
    if let Some(job) = open {
        return Some(format!("job {} has {}", job["metadata"]["name"], job["status"]));
    }
    let pods = cluster.list(&format!("{CORE}/pods")).await.len() as u64;
    let expected = workloads.values().sum::<u64>() + 2 * jobs.len() as u64;
    (pods != expected).then(|| format!("{pods} pods instead of {expected}"))
}

/// Deletes all jobs and cron jobs. Asserts that no job had more than its pods, and no cron job more than one job.
async fn delete_jobs(cluster: &Cluster) {
    let name_of = |object: &Value| object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let jobs: Vec<String> = cluster.list(&format!("{BATCH}/jobs")).await.iter().map(name_of).collect();
    for name in &jobs {
        assert_eq!(cluster.created_of("n", &format!("Job/{name}")), 2, "pods of job {name} in total");
        cluster.delete(&format!("{BATCH}/jobs/{name}?propagationPolicy=Background")).await;
    }
    for name in cluster.list(&format!("{BATCH}/cronjobs")).await.iter().map(name_of) {
        let of_cron = jobs.iter().filter(|job| job.starts_with(&format!("{name}-"))).count();
        assert_eq!(of_cron, 1, "jobs of cron job {name}");
        cluster.delete(&format!("{BATCH}/cronjobs/{name}?propagationPolicy=Background")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_operations_with_killed_controllers_end_with_exact_counts() {
    const CHECK_EVERY: u64 = 25;
    let dir = tempfile::tempdir().expect("a directory");
    let seed = setting("CORACLE_FAULT_SEED", 2);
    let cluster = Cluster::start(dir.path(), seed, setting("CORACLE_FAULT_STEPS", 12)).await;
    create_namespace(&cluster).await;
    let (mut rng, mut workloads) = (Rng::new(seed), Workloads::new());
    for number in 1..=setting("CORACLE_FAULT_OPERATIONS", 50) {
        operate(&cluster, &mut rng, &mut workloads, number).await;
        if number % CHECK_EVERY == 0 {
            cluster.until(async |cluster: &Cluster| inexact(cluster, &workloads).await).await;
            delete_jobs(&cluster).await;
            // Events live for an hour, so the events of a long run would take much memory.
            cluster.delete(&format!("{CORE}/events")).await;
        }
    }
    println!("{} processes killed", cluster.killed());
    cluster.stop().await;
}
