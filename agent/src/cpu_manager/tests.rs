//! Tests of the CPU manager: state file, reuse, pins.

use futures::FutureExt;
use serde_json::json;

use super::assign::tests::single_socket;
use super::*;
use crate::topology::TopologyPolicy;

/// A manager of eight CPUs; CPU 0 is reserved.
fn manager(file: &Path) -> CpuManager {
    let options = CpuOptions::default();
    let policy = StaticPolicy::new(single_socket(), 1, None, options, TopologyPolicy::None).unwrap();
    CpuManager::open(policy, file.to_owned(), Arc::default()).unwrap()
}

fn pod(uid: &str, inits: &[(&str, &str)], mains: &[(&str, &str)]) -> Pod {
    let containers = |list: &[(&str, &str)]| -> Vec<serde_json::Value> {
        let resources = |cpu: &str| json!({"cpu": cpu, "memory": "1Gi"});
        let one = |(name, cpu): &(&str, &str)| json!({"name": name, "resources": {"requests": resources(cpu), "limits": resources(cpu)}});
        list.iter().map(one).collect()
    };
    let spec = json!({"initContainers": containers(inits), "containers": containers(mains)});
    serde_json::from_value(json!({"metadata": {"uid": uid}, "spec": spec})).unwrap()
}

fn allocate(manager: &CpuManager, pod: &Pod) {
    let spec = pod.spec.as_ref().unwrap();
    for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
        manager.allocate(pod, container, Hint::default()).unwrap();
    }
    manager.record(pod.metadata.uid.as_deref().unwrap()).unwrap();
}

fn cpus(manager: &CpuManager, uid: &str, container: &str) -> String {
    let mut resources = cri::LinuxContainerResources { cpu_quota: 5, cpu_period: 9, ..Default::default() };
    manager.pin(uid, container, &mut resources);
    format!("{} {}", resources.cpuset_cpus, resources.cpu_quota)
}

#[test]
fn exclusive_cpus_survive_a_restart_and_return_to_the_shared_pool() {
    let dir = tempfile::tempdir().unwrap();
    let file = state_path(dir.path());
    let first = manager(&file);
    allocate(&first, &pod("u", &[], &[("a", "2"), ("b", "500m")]));
    assert_eq!(cpus(&first, "u", "a"), "1,5 -1", "exclusive CPUs need no quota");
    assert_eq!(cpus(&first, "u", "b"), "0,2-4,6-7 5");
    assert!(first.has_exclusive("u") && !first.has_exclusive("v"));
    let stored: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let expected = json!({"policyName": "static", "defaultCpuSet": "0,2-4,6-7", "entries": {"u": {"a": "1,5"}}, "checksum": 0});
    assert_eq!(stored, expected);
    let second = manager(&file);
    // A second allocation of the same container changes nothing.
    allocate(&second, &pod("u", &[], &[("a", "2")]));
    assert_eq!(cpus(&second, "u", "a"), "1,5 -1");
    second.retain(&|uid| uid == "u");
    assert!(second.has_exclusive("u"));
    second.retain(&|_| false);
    assert_eq!(cpus(&second, "u", "a"), "0-7 5");
    assert!(!manager(&file).has_exclusive("u"));
}

#[test]
fn a_state_that_does_not_fit_prevents_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = state_path(dir.path());
    let store = |entries: serde_json::Value| {
        let state =
            json!({"policyName": "static", "defaultCpuSet": "0-2", "entries": entries, "checksum": 1});
        std::fs::write(&file, state.to_string()).unwrap();
    };
    store(json!({}));
    assert_eq!(cpus(&manager(&file), "u", "a"), "0-7 5", "no container has exclusive CPUs");
    store(json!({"u": {"a": "3"}}));
    let policy =
        StaticPolicy::new(single_socket(), 1, None, CpuOptions::default(), TopologyPolicy::None).unwrap();
    let error = CpuManager::open(policy, file.clone(), Arc::default()).err().unwrap().to_string();
    assert!(error.contains("doesn't match with CPUs in state \"0-3\""), "{error}");
}

#[test]
fn containers_reuse_the_cpus_of_init_containers_but_not_of_sidecars() {
    let dir = tempfile::tempdir().unwrap();
    let first = manager(&state_path(dir.path()));
    allocate(&first, &pod("u", &[("i", "4"), ("j", "2")], &[("a", "2"), ("b", "1")]));
    assert_eq!(cpus(&first, "u", "i"), "1-2,5-6 -1");
    assert_eq!(cpus(&first, "u", "j"), "1,5 -1");
    assert_eq!((cpus(&first, "u", "a"), cpus(&first, "u", "b")), ("1,5 -1".to_owned(), "4 -1".to_owned()));
    first.release("u");
    let mut with_sidecar = pod("v", &[("s", "2")], &[("a", "2")]);
    let inits = with_sidecar.spec.as_mut().unwrap().init_containers.as_mut().unwrap();
    inits[0].restart_policy = Some("Always".to_owned());
    allocate(&first, &with_sidecar);
    assert_eq!((cpus(&first, "v", "s"), cpus(&first, "v", "a")), ("1,5 -1".to_owned(), "2,6 -1".to_owned()));
}

#[test]
fn hints_of_assigned_cpus_are_their_own_nodes() {
    let dir = tempfile::tempdir().unwrap();
    let first = manager(&state_path(dir.path()));
    let (small, large) = (pod("u", &[], &[("a", "2")]), pod("u", &[], &[("a", "3")]));
    let container = |pod: &Pod| pod.spec.clone().unwrap().containers.remove(0);
    assert_eq!(first.container_hints(&small, &container(&small)), first.pod_hints(&small));
    allocate(&first, &small);
    assert_eq!(first.container_hints(&small, &container(&small))[CPU].len(), 1);
    assert!(
        first.container_hints(&large, &container(&large))[CPU].is_empty(),
        "the container requests another number of CPUs"
    );
    assert!(first.pod_hints(&large)[CPU].is_empty());
    let shared = pod("w", &[], &[("a", "1500m")]);
    assert!(
        first.container_hints(&shared, &container(&shared)).is_empty() && first.pod_hints(&shared).is_empty()
    );
}

/// A container of the pod u, whose name is the first letter of its id.
fn container(id: &str) -> cri::Container {
    let labels = [(POD_UID, "u"), (CONTAINER_NAME, &id[..1])];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    cri::Container { id: id.to_owned(), labels, ..Default::default() }
}

#[test]
fn running_containers_are_due_when_the_shared_pool_changes() {
    let dir = tempfile::tempdir().unwrap();
    let first = manager(&state_path(dir.path()));
    first.started("u", "b", "b", "0-7");
    assert_eq!(first.due(&container("b")), None);
    allocate(&first, &pod("u", &[], &[("a", "1")]));
    assert_eq!(first.due(&container("b")).unwrap().to_string(), "0-3,5-7");
    assert_eq!(first.due(&container("a")).unwrap().to_string(), "4", "not known yet");
    first.started("u", "a", "a", "4");
    assert_eq!(first.due(&container("a")), None);
    assert_eq!(first.due(&cri::Container::default()), None, "a container without labels");
}

#[test]
fn restarts_of_containers_do_not_fill_the_memory() {
    let dir = tempfile::tempdir().unwrap();
    let first = manager(&state_path(dir.path()));
    for attempt in 0..3 {
        first.started("u", "b", &format!("b{attempt}"), "0-7");
    }
    assert_eq!(first.lock().applied["u"].len(), 1);
    assert!(first.due(&container("b2")).is_none() && first.due(&container("b0")).is_some());
    first.release("u");
    assert!(first.lock().applied.is_empty());
}

#[test]
fn a_container_that_is_updated_before_its_start_is_recorded_is_updated_again() {
    let dir = tempfile::tempdir().unwrap();
    let first = manager(&state_path(dir.path()));
    // After the container was created with 0-7, the pool was 0-3 for a moment.
    first.updated(&container("b"), "0-3".parse().unwrap());
    first.started("u", "b", "b", "0-7");
    assert_eq!(first.due(&container("b")).unwrap().to_string(), "0-7");
}

#[tokio::test]
async fn a_change_is_not_delayed_by_containers_that_cannot_be_updated() {
    let dir = tempfile::tempdir().unwrap();
    let first = manager(&state_path(dir.path()));
    // The start of the manager counts as a change.
    assert!(first.wait_to_retry().now_or_never().is_some());
    assert!(first.wait_to_retry().now_or_never().is_none());
    allocate(&first, &pod("u", &[], &[("a", "1")]));
    assert!(first.wait_to_retry().now_or_never().is_some());
}
