//! Tests of the static policy, with cases of upstream's `policy_static_test.go`.

use serde_json::json;

use super::*;

const GIB: u64 = 1 << 30;

/// Two NUMA nodes of 2 GiB; 512 MiB of each are reserved, and node 0 has 512 MiB in huge pages.
fn machine() -> MemoryState {
    let huge = BTreeMap::from([("hugepages-2Mi".to_owned(), GIB / 2)]);
    let nodes = BTreeMap::from([
        (0, NumaNode { memory: 2 * GIB, huge_pages: huge, distances: BTreeMap::new() }),
        (1, NumaNode { memory: 2 * GIB, ..NumaNode::default() }),
    ]);
    let reserved = Amounts::from([("memory".to_owned(), GIB / 2)]);
    MemoryState::new(&nodes, &BTreeMap::from([(0, reserved.clone()), (1, reserved)]))
}

fn memory(bytes: u64) -> Amounts {
    Amounts::from([("memory".to_owned(), bytes)])
}

fn hint(nodes: &[u32], preferred: bool) -> Hint {
    Hint { nodes: Some(NumaMask::of(nodes.iter().copied())), preferred }
}

fn spec(containers: &[(&str, bool)]) -> PodSpec {
    let (inits, mains): (Vec<_>, Vec<_>) = containers.iter().partition(|(_, is_init)| *is_init);
    let named = |list: Vec<&(&str, bool)>| -> Vec<serde_json::Value> {
        list.into_iter().map(|(name, _)| json!({"name": name})).collect()
    };
    serde_json::from_value(json!({"initContainers": named(inits), "containers": named(mains)})).unwrap()
}

fn allocate(
    state: &mut MemoryState,
    container: &str,
    requested: &Amounts,
    affinity: Hint,
) -> Result<NumaMask, String> {
    let blocks = state.allocate(requested, affinity, &Reusable::default())?;
    let nodes = blocks[0].nodes();
    state.store("u", &spec(&[(container, false)]), container, blocks);
    Ok(nodes)
}

fn free(state: &MemoryState) -> Vec<u64> {
    state.nodes.values().map(|node| node.memory_map["memory"].free).collect()
}

#[test]
fn reserved_memory_and_huge_pages_are_not_allocatable() {
    let state = machine();
    assert_eq!(free(&state), [GIB, GIB + GIB / 2]);
    let table = &state.nodes[&0].memory_map["memory"];
    assert_eq!((table.total, table.system_reserved, table.allocatable), (2 * GIB, GIB / 2, GIB));
    assert_eq!(state.nodes[&0].memory_map["hugepages-2Mi"].free, GIB / 2);
}

#[test]
fn hints_have_the_nodes_with_enough_memory() {
    let mut state = machine();
    let none = Reusable::default();
    let of = |state: &MemoryState, bytes| state.hints(&memory(bytes), &none).remove("memory");
    assert_eq!(of(&state, GIB), Some(vec![hint(&[0], true), hint(&[1], true), hint(&[0, 1], false)]));
    assert_eq!(of(&state, 2 * GIB), Some(vec![hint(&[0, 1], true)]));
    assert_eq!(of(&state, 4 * GIB), None, "no preference: the allocation fails");
    allocate(&mut state, "a", &memory(GIB), hint(&[0], true)).unwrap();
    // Node 0 serves a container alone, so it is not used together with node 1.
    assert_eq!(of(&state, GIB), Some(vec![hint(&[1], true)]));
    let huge = Amounts::from([("hugepages-2Mi".to_owned(), 1), ("memory".to_owned(), 1)]);
    assert!(machine().hints(&huge, &none).values().all(|hints| hints[0] == hint(&[0], true)));
}

#[test]
fn containers_of_several_nodes_and_of_one_node_do_not_share_a_node() {
    let mut state = machine();
    let any = Hint { nodes: None, preferred: true };
    assert_eq!(allocate(&mut state, "a", &memory(2 * GIB), any).unwrap(), NumaMask::of([0, 1]));
    assert_eq!(free(&state), [0, GIB / 2]);
    let error = allocate(&mut state, "b", &memory(GIB / 4), hint(&[1], true)).map(|nodes| nodes.count());
    assert_eq!(error, Ok(1), "an affinity of one node is not checked, as upstream");
    let mut state = machine();
    allocate(&mut state, "a", &memory(1), hint(&[0], true)).unwrap();
    let error = allocate(&mut state, "b", &memory(1), hint(&[0, 1], false)).unwrap_err();
    assert_eq!(error, "[memorymanager] preferred hint violates NUMA node allocation");
}

#[test]
fn allocations_fail_in_upstreams_words() {
    let any = Hint::default();
    let error = allocate(&mut machine(), "a", &memory(4 * GIB), any).unwrap_err();
    let text = "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available";
    assert_eq!(error, text);
    let error = allocate(&mut machine(), "a", &memory(4 * GIB), hint(&[0], true)).unwrap_err();
    assert_eq!(error, "[memorymanager] failed to find NUMA nodes to extend the current topology hint");
    let mut state = machine();
    allocate(&mut state, "a", &memory(GIB), hint(&[0], true)).unwrap();
    allocate(&mut state, "b", &memory(GIB), hint(&[1], true)).unwrap();
    let preferred = Hint { nodes: None, preferred: true };
    let error = allocate(&mut state, "c", &memory(GIB), preferred).unwrap_err();
    assert_eq!(error, text);
}

#[test]
fn an_affinity_that_does_not_suffice_is_extended() {
    let mut state = machine();
    assert_eq!(allocate(&mut state, "a", &memory(2 * GIB), hint(&[1], false)).unwrap(), NumaMask::of([0, 1]));
}

#[test]
fn memory_of_init_containers_is_used_again() {
    let (mut state, mut reusable) = (machine(), Reusable::default());
    let spec = spec(&[("i", true), ("a", false)]);
    let at = hint(&[0], true);
    let init = state.allocate(&memory(GIB), at, &reusable).unwrap();
    reuse(&mut reusable, "u", &init, true);
    state.store("u", &spec, "i", init);
    assert_eq!(free(&state), [0, GIB + GIB / 2]);
    // The nodes of the affinity have too few free bytes. Together with the bytes of the init container they suffice.
    let main = state.allocate(&memory(GIB / 2), at, &reusable).unwrap();
    reuse(&mut reusable, "u", &main, false);
    state.store("u", &spec, "a", main);
    assert_eq!(reusable.size(NumaMask::of([0]), "memory"), GIB / 2);
    let sizes = |name: &str| state.of("u", name).unwrap().iter().map(|block| block.size).sum::<u64>();
    assert_eq!((sizes("i"), sizes("a")), (GIB / 2, GIB / 2));
    assert!(state.release_container("u", "i") && !state.release_container("u", "i"));
    assert_eq!(free(&state), [GIB / 2, GIB + GIB / 2]);
    assert!(state.release("u") && !state.release("u"));
    assert_eq!(state, machine());
}

#[test]
fn a_state_of_another_machine_is_refused() {
    let mut state = machine();
    allocate(&mut state, "a", &memory(2 * GIB), Hint::default()).unwrap();
    assert_eq!(state.check(&machine()), Ok(()));
    let text = serde_json::to_string(&state.nodes[&1]).unwrap();
    let expected = json!({
        "numberOfAssignments": 1, "cells": [0, 1],
        "memoryMap": {"memory": {"total": 2 * GIB, "systemReserved": GIB / 2, "allocatable": GIB + GIB / 2, "reserved": GIB, "free": GIB / 2}},
    });
    assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), expected);
    let mut other = machine();
    other.nodes.remove(&1);
    let error = state.check(&other).unwrap_err();
    assert!(error.contains("the memory assignment uses the NUMA that does not exist"), "{error}");
    let mut changed = machine();
    changed.nodes.get_mut(&0).unwrap().memory_map.get_mut("memory").unwrap().system_reserved = 1;
    let error = state.check(&changed).unwrap_err();
    assert_eq!(error, "[memorymanager] the expected machine state is different from the real one");
    state.blocks.clear();
    assert!(state.check(&machine()).is_err(), "memory without containers");
}

#[test]
fn requests_of_a_pod_are_those_at_the_same_time() {
    let container = |name: &str, memory: &str| json!({"name": name, "resources": {"requests": {"memory": memory, "cpu": "1"}}});
    let mut sidecar = container("s", "1Gi");
    sidecar["restartPolicy"] = json!("Always");
    let of = |inits: serde_json::Value| {
        let spec = json!({"initContainers": inits, "containers": [container("a", "2Gi")]});
        requested_of_pod(&serde_json::from_value(spec).unwrap())
    };
    assert_eq!(of(json!([])), Ok(memory(2 * GIB)));
    assert_eq!(of(json!([sidecar])), Ok(memory(3 * GIB)));
    assert_eq!(of(json!([sidecar, container("i", "4Gi")])), Ok(memory(5 * GIB)));
    let error = of(json!([container("i", "100m")])).unwrap_err();
    assert_eq!(error, "[memorymanager] failed to represent quantity as int64");
}

#[test]
fn hints_of_known_memory_are_its_nodes() {
    let mut state = machine();
    allocate(&mut state, "a", &memory(GIB), hint(&[1], true)).unwrap();
    let blocks = state.of("u", "a").unwrap();
    let known = known_hints(blocks, &memory(GIB));
    assert_eq!(known["memory"], [hint(&[1], true)]);
    assert!(known_hints(blocks, &memory(1)).is_empty() && known_hints(&[], &memory(1)).is_empty());
}
