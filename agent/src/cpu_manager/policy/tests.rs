//! Tests of the static policy, with cases of upstream's `policy_static_test.go` and `topology_hints_test.go`.

use serde_json::json;

use super::super::assign::tests::{dual_socket, multi_numa, single_socket};
use super::*;

fn set(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn options(text: &str) -> CpuOptions {
    let pairs = text.split(',').filter(|name| !name.is_empty());
    let pairs = pairs.map(|name| (name.to_owned(), "true".to_owned())).collect();
    CpuOptions::parse(&pairs, true).unwrap()
}

fn policy(topology: CpuTopology, reserved: usize, names: &str) -> StaticPolicy {
    StaticPolicy::new(topology, reserved, None, options(names), TopologyPolicy::None).unwrap()
}

fn state(shared: &str, exclusive: &[(&str, &str, &str)]) -> CpuState {
    let mut state = CpuState { shared: set(shared), exclusive: BTreeMap::new() };
    for (uid, container, cpus) in exclusive {
        state.exclusive.entry((*uid).to_owned()).or_default().insert((*container).to_owned(), set(cpus));
    }
    state
}

fn pod(spec: serde_json::Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"uid": "u"}, "spec": spec})).unwrap()
}

fn container(name: &str, cpu: &str) -> serde_json::Value {
    let list = json!({"cpu": cpu, "memory": "1Gi"});
    json!({"name": name, "resources": {"requests": list, "limits": list}})
}

#[test]
fn the_lowest_cores_are_reserved() {
    let found = policy(single_socket(), 2, "");
    assert_eq!((found.reserved, found.reserved_cores), (set("0,4"), set("0,4")));
    let found = policy(single_socket(), 1, "");
    assert_eq!((found.reserved, found.reserved_cores), (set("0"), set("0,4")));
    let none = CpuOptions::default();
    let chosen = StaticPolicy::new(single_socket(), 2, Some(set("1,6")), none, TopologyPolicy::None).unwrap();
    assert_eq!((chosen.reserved, chosen.reserved_cores), (set("1,6"), set("1-2,5-6")));
    let error = StaticPolicy::new(single_socket(), 9, None, none, TopologyPolicy::None).unwrap_err();
    assert!(error.contains("unable to reserve the required amount of CPUs"), "{error}");
}

/// Cases of `TestStaticPolicyStart`.
#[test]
fn a_state_that_does_not_fit_is_refused_in_upstreams_words() {
    let normal = policy(dual_socket(), 2, "");
    let strict = policy(dual_socket(), 2, "strict-cpu-reservation");
    assert_eq!(normal.initial_state(), state("0-11", &[]));
    assert_eq!(strict.initial_state(), state("1-5,7-11", &[]));
    assert_eq!(normal.check_state(&state("0-3,6-11", &[("u", "a", "4-5")])), Ok(()));
    assert_eq!(strict.check_state(&state("1-5,7-11", &[])), Ok(()));
    for (policy, state, text) in [
        (&normal, state("", &[("u", "a", "0")]), "default cpuset cannot be empty"),
        (&normal, state("0-1", &[]), "not all reserved cpus: \"0,6\" are present in defaultCpuSet: \"0-1\""),
        (
            &strict,
            state("0-1", &[]),
            "some of strictly reserved cpus: \"0\" are present in defaultCpuSet: \"0-1\"",
        ),
        (
            &normal,
            state("0-9", &[("u", "a", "0-2")]),
            "pod: u, container: a cpuset: \"0-2\" overlaps with default cpuset \"0-9\"",
        ),
        (
            &normal,
            state("0-4,6", &[("u", "a", "5")]),
            "current set of available CPUs \"0-11\" doesn't match with CPUs in state \"0-6\"",
        ),
    ] {
        assert_eq!(policy.check_state(&state).unwrap_err(), text);
    }
}

/// Cases of `TestStaticPolicyAdd`.
#[test]
fn exclusive_cpus_leave_the_shared_pool() {
    let none = CpuSet::default();
    let single = policy(single_socket(), 1, "");
    let mut shared = state("0-7", &[]);
    assert_eq!(single.assign(&mut shared, 1, None, &none).unwrap(), set("4"), "its sibling is reserved");
    assert_eq!(shared.shared, set("0-3,5-7"));
    let mut shared = state("0,4-5", &[("v", "a", "1-3,6-7")]);
    let error = single.assign(&mut shared, 3, None, &none).unwrap_err();
    let text = "Allocate failed due to not enough cpus available to satisfy request: requested=3, available=2, which is unexpected";
    assert_eq!(error.to_string(), text);
    assert_eq!(shared.shared, set("0,4-5"), "unchanged");
    let dual = policy(dual_socket(), 1, "");
    let mut shared = state("0-11", &[]);
    assert_eq!(dual.assign(&mut shared, 6, None, &none).unwrap(), set("1,3,5,7,9,11"));
}

#[test]
fn cpus_are_assigned_on_the_nodes_of_the_affinity_and_reused() {
    let dual = policy(dual_socket(), 1, "");
    let mut shared = state("0-11", &[]);
    let affinity = Some(NumaMask::of([1]));
    assert_eq!(dual.assign(&mut shared, 2, affinity, &CpuSet::default()).unwrap(), set("1,7"));
    // One node does not suffice, so the other CPUs come from the other node.
    assert_eq!(dual.assign(&mut shared, 5, affinity, &CpuSet::default()).unwrap(), set("3,5-6,9,11"));
    let mut full = state("0,6", &[("u", "i", "1-5,7-11")]);
    assert_eq!(dual.assign(&mut full, 2, affinity, &set("1-5,7-11")).unwrap(), set("1,7"));
    assert_eq!(full.shared, set("0,6"));
    assert!(full.release("u") && !full.release("u"));
    assert_eq!(full.shared, set("0-11"));
}

/// Cases of `TestStaticPolicyAddWithCPUAlignment` and of the SMT alignment.
#[test]
fn with_full_cores_parts_of_cores_are_refused() {
    let none = CpuSet::default();
    let full = policy(single_socket(), 1, "full-pcpus-only");
    let mut shared = state("0-7", &[]);
    let error = full.assign(&mut shared, 3, None, &none).unwrap_err();
    assert_eq!(error, AllocationError::PartOfCore { requested: 3, per_core: 2 });
    let error = full.assign(&mut shared, 8, None, &none).unwrap_err();
    assert_eq!(error, AllocationError::FewCores { available: 6, requested: 8, per_core: 2 });
    assert_eq!(full.assign(&mut shared, 2, None, &none).unwrap(), set("1,5"));
    assert!(full.has_full_cores() && full.is_in_one_cache(&set("1,5")));
}

/// Cases of `TestGetTopologyHints`: the narrowest masks are preferred.
#[test]
fn hints_prefer_the_fewest_nodes() {
    let dual = policy(dual_socket(), 1, "");
    let hint =
        |nodes: &[u32], preferred| Hint { nodes: Some(NumaMask::of(nodes.iter().copied())), preferred };
    let none = CpuSet::default();
    let free = set("1-11");
    assert_eq!(dual.hints(&free, &none, 2), [hint(&[0], true), hint(&[1], true), hint(&[0, 1], false)]);
    assert_eq!(dual.hints(&free, &none, 6), [hint(&[1], true), hint(&[0, 1], false)]);
    assert_eq!(dual.hints(&free, &none, 11), [hint(&[0, 1], true)]);
    assert!(dual.hints(&free, &none, 12).is_empty());
    // A node would suffice if it were free: the wider mask is not preferred.
    assert_eq!(dual.hints(&set("0-3"), &none, 4), [hint(&[0, 1], false)]);
    // CPUs that are reused must be in the mask.
    assert_eq!(dual.hints(&free, &set("0"), 2), [hint(&[0], true), hint(&[0, 1], false)]);
    let by_socket = policy(multi_numa(), 1, "align-by-socket");
    let preferred = by_socket.hints(&set("1-79"), &none, 2);
    let preferred = preferred.into_iter().filter(|hint| hint.preferred).count();
    assert_eq!(preferred, 6, "four nodes, and the two pairs within a socket");
}

#[test]
fn whole_cpus_of_guaranteed_pods_are_exclusive() {
    let of = |spec: serde_json::Value| {
        let pod = pod(spec);
        let spec = pod.spec.clone().unwrap();
        (exclusive_count(&pod, &spec.containers[0]), exclusive_count_of_pod(&pod, &spec))
    };
    assert_eq!(of(json!({"containers": [container("a", "2")]})), (2, 2));
    assert_eq!(of(json!({"containers": [container("a", "2000m")]})), (2, 2));
    assert_eq!(of(json!({"containers": [container("a", "1500m")]})), (0, 0));
    let burstable = json!({"name": "a", "resources": {"requests": {"cpu": "2", "memory": "1Gi"}}});
    assert_eq!(of(json!({"containers": [burstable]})), (0, 0));
    let list = json!({"cpu": "2", "memory": "1Gi"});
    let whole = json!({"requests": list, "limits": list});
    assert_eq!(of(json!({"resources": whole, "containers": [container("a", "2")]})), (0, 0));
    let mut sidecar = container("s", "1");
    sidecar["restartPolicy"] = json!("Always");
    let inits = json!([container("i", "2"), sidecar, container("j", "4")]);
    assert_eq!(of(json!({"initContainers": inits, "containers": [container("a", "2")]})), (2, 5));
    let inits = json!([sidecar]);
    assert_eq!(of(json!({"initContainers": inits, "containers": [container("a", "2")]})), (2, 3));
}
