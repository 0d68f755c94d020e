//! Tests of the memory manager: state file, release of init containers.

use serde_json::json;

use super::*;
use crate::topology::machine::NumaNode;

fn empty() -> MemoryState {
    let node = || NumaNode { memory: 4 << 30, ..NumaNode::default() };
    MemoryState::new(&BTreeMap::from([(0, node()), (1, node())]), &BTreeMap::new())
}

fn manager(file: &Path) -> MemoryManager {
    MemoryManager::open(empty(), file.to_owned(), Arc::default()).unwrap()
}

fn pod(memory: &str) -> Pod {
    let list = json!({"cpu": "1", "memory": memory});
    let container = |name: &str| json!({"name": name, "resources": {"requests": list, "limits": list}});
    let spec = json!({"initContainers": [container("i")], "containers": [container("a")]});
    serde_json::from_value(json!({"metadata": {"uid": "u"}, "spec": spec})).unwrap()
}

fn allocate(manager: &MemoryManager, pod: &Pod) {
    let spec = pod.spec.as_ref().unwrap();
    for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
        let hints = manager.container_hints(pod, container);
        manager.allocate(pod, container, hints["memory"][0]).unwrap();
    }
    manager.record("u").unwrap();
}

#[test]
fn memory_survives_a_restart_and_is_released() {
    let dir = tempfile::tempdir().unwrap();
    let file = state_path(dir.path());
    let (first, pod) = (manager(&file), pod("3Gi"));
    allocate(&first, &pod);
    assert_eq!((first.nodes_of("u", "i"), first.nodes_of("u", "a")), ("0".to_owned(), "0".to_owned()));
    let stored: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let block = |size: u64| json!([{"numaAffinity": [0], "type": "memory", "size": size}]);
    assert_eq!(stored["entries"], json!({"u": {"i": block(0), "a": block(3 << 30)}}));
    assert_eq!((&stored["policyName"], &stored["checksum"]), (&json!("Static"), &json!(0)));
    let second = manager(&file);
    assert!(second.holds("u"));
    second.started("u", pod.spec.as_ref().unwrap(), "i");
    assert_eq!(second.nodes_of("u", "i"), "0", "it may be running");
    second.started("u", pod.spec.as_ref().unwrap(), "ephemeral");
    assert_eq!(second.nodes_of("u", "i"), "0");
    second.started("u", pod.spec.as_ref().unwrap(), "a");
    assert_eq!((second.nodes_of("u", "i"), second.nodes_of("u", "a")), (String::new(), "0".to_owned()));
    second.retain(&|_| false);
    assert!(!second.holds("u") && !manager(&file).holds("u"));
}

#[test]
fn a_pod_is_recorded_once_for_all_its_containers() {
    let dir = tempfile::tempdir().unwrap();
    let file = state_path(dir.path());
    let (first, pod) = (manager(&file), pod("1Gi"));
    let spec = pod.spec.as_ref().unwrap();
    first.allocate(&pod, &spec.containers[0], Hint::default()).unwrap();
    assert!(!manager(&file).holds("u"));
    first.record("v").unwrap();
    assert!(!manager(&file).holds("u"), "another pod has no memory of nodes");
    // A directory is in the place of the file, so the file cannot be written.
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    assert!(first.record("u").is_err() && first.record("v").is_ok());
    std::fs::remove_dir(&file).unwrap();
    first.record("u").unwrap();
    assert!(manager(&file).holds("u"));
}

#[test]
fn only_guaranteed_pods_get_memory_of_nodes() {
    let dir = tempfile::tempdir().unwrap();
    let first = manager(&state_path(dir.path()));
    let mut burstable = pod("1Gi");
    burstable.spec.as_mut().unwrap().containers[0].resources.as_mut().unwrap().limits = None;
    let container = &burstable.spec.as_ref().unwrap().containers[0];
    assert!(
        first.container_hints(&burstable, container).is_empty() && first.pod_hints(&burstable).is_empty()
    );
    first.allocate(&burstable, container, Hint::default()).unwrap();
    assert!(!first.holds("u"));
    assert_eq!(first.pod_hints(&pod("1Gi"))["memory"].len(), 3);
    let error =
        first.allocate(&pod("9Gi"), &pod("9Gi").spec.unwrap().containers[0], Hint::default()).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("Allocate failed due to [memorymanager] failed to get the default NUMA affinity")
    );
}
