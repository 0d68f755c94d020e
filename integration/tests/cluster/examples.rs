//! The manifests in examples/, applied to a cluster as their comments say.

use std::fs;
use std::path::PathBuf;

use coracle_integration::{Cluster, eventually, on_a_machine, repository};

/// Manifests that others need, in the order of their use.
const FIRST: [&str; 2] = ["web.yaml", "custom-resource-definition.yaml"];

fn directory() -> PathBuf {
    repository().join("examples")
}

/// Names of all manifests. Manifests that others need come first.
fn manifests() -> Vec<String> {
    let names = fs::read_dir(directory()).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap()).filter(|name| name.ends_with(".yaml"));
    let mut rest: Vec<String> = names.filter(|name| !FIRST.contains(&name.as_str())).collect();
    rest.sort();
    FIRST.iter().map(|name| (*name).to_owned()).chain(rest).collect()
}

fn apply(cluster: &Cluster, name: &str, flags: &[&str]) -> String {
    let path = directory().join(name);
    cluster.kubectl(&[&["apply", "-f", path.to_str().unwrap()], flags].concat())
}

#[test]
fn every_example_is_listed_and_applied_without_warnings() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        let page = fs::read_to_string(directory().join("README.md")).unwrap();
        let names = manifests();
        assert!(names.len() >= 8, "{names:?}");
        for name in &names {
            assert!(page.contains(&format!("]({name})")), "examples/README.md does not list {name}");
            let path = directory().join(name);
            let strict = ["apply", "--validate=strict", "-f", path.to_str().unwrap()];
            let output = cluster.try_kubectl(&strict);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && errors.is_empty(), "{name}: {errors}");
        }
        for workload in ["deployment/web", "statefulset/store"] {
            cluster.kubectl(&["rollout", "status", workload, "--timeout=300s"]);
        }
        for name in &names {
            apply(&cluster, name, &["--dry-run=server"]);
        }
        let server_side = ["--server-side", "--field-manager=me", "--force-conflicts"];
        let applied = apply(&cluster, "custom-resource.yaml", &server_side);
        assert!(applied.contains("serverside-applied"), "{applied}");
        let object = cluster.get(&["backup", "daily", "--show-managed-fields"]);
        assert_eq!(object["spec"]["compress"], true, "{object}");
        assert!(object["metadata"]["managedFields"].to_string().contains("\"me\""), "{object}");
    });
}

#[test]
fn examples_work_as_their_comments_describe() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        for name in ["stateful-set.yaml", "cron-job.yaml", "tenant.yaml"] {
            apply(&cluster, name, &[]);
        }
        cluster.kubectl(&["rollout", "status", "statefulset/store", "--timeout=300s"]);
        cluster.kubectl(&["delete", "pod", "store-0"]);
        cluster.kubectl(&["rollout", "status", "statefulset/store", "--timeout=300s"]);
        eventually("two starts in the volume", 60, || {
            let output = cluster.try_kubectl(&["exec", "store-0", "--", "cat", "/data/index.html"]);
            let lines = String::from_utf8_lossy(&output.stdout).lines().count();
            output.status.success() && lines == 2
        });

        cluster.kubectl(&["create", "job", "now", "--from=cronjob/nightly"]);
        cluster.kubectl(&["wait", "--for=condition=Complete", "job/now", "--timeout=240s"]);
        let log = cluster.kubectl(&["logs", "job/now"]);
        assert!(log.contains("cleaned up at"), "{log}");

        let refused = cluster.try_kubectl(&["run", "-n", "team-a", "x", "--image=busybox"]);
        let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && errors.contains("violates PodSecurity"), "{errors}");
    });
}
