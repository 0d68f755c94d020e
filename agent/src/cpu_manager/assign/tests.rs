//! Cases of upstream's `cpu_assignment_test.go`, on the machines of its `policy_test.go`.

use super::distribute::Distribution;
use super::*;
use crate::topology::machine::tests::topology;

/// Four cores with two threads each.
pub(crate) fn single_socket() -> CpuTopology {
    topology((0..8).map(|cpu| (cpu, [0, 0, cpu % 4, 0])))
}

/// Two sockets of three cores with two threads each; even cores are in socket 0.
pub(crate) fn dual_socket() -> CpuTopology {
    topology((0..12).map(|cpu| (cpu, [cpu % 2, cpu % 2, cpu % 6, 0])))
}

/// Two sockets, each with two NUMA nodes of ten cores with two threads.
pub(crate) fn multi_numa() -> CpuTopology {
    topology((0..80).map(|cpu| (cpu, [cpu % 40 / 10, cpu % 40 / 20, cpu % 40, 0])))
}

/// Sixteen cores with four caches: in two sockets, or in one socket with one or two NUMA nodes.
fn four_caches(sockets: u32, nodes: u32) -> CpuTopology {
    topology((0..16).map(|cpu| (cpu, [cpu * nodes / 16, cpu * sockets / 16, cpu, cpu / 4])))
}

/// Eight cores with two threads each, and two caches.
fn two_caches() -> CpuTopology {
    topology((0..16).map(|cpu| (cpu, [0, 0, cpu % 8, cpu % 8 / 4])))
}

fn set(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn check(machine: &CpuTopology, order: Order, cases: &[(&str, usize, &str)]) {
    for (available, count, expected) in cases {
        let found = packed(machine, &set(available), *count, order).unwrap();
        assert_eq!(found, set(expected), "{count} of {available}");
    }
}

#[test]
fn whole_sockets_nodes_and_cores_are_taken_first() {
    check(
        &single_socket(),
        Order::Packed,
        &[
            ("0-7", 0, ""),
            ("0-7", 1, "0"),
            ("1,3,5-7", 1, "6"),
            ("0-7", 2, "0,4"),
            ("0-7", 8, "0-7"),
            ("0-3,6", 2, "2,6"),
        ],
    );
    check(
        &dual_socket(),
        Order::Packed,
        &[("0-11", 6, "0,2,4,6,8,10"), ("1-5,7-11", 1, "2"), ("0-11", 8, "0,6,2,8,4,10,1,7")],
    );
    check(
        &multi_numa(),
        Order::Packed,
        &[
            ("0-79", 40, "0-19,40-59"),
            ("0-79", 20, "0-9,40-49"),
            ("10-39,50-79", 20, "10-19,50-59"),
            ("0-79", 60, "0-29,40-69"),
            ("1-39,41-79", 60, "10-39,50-79"),
            ("0-79", 64, "0-31,40-71"),
        ],
    );
}

#[test]
fn too_few_cpus_are_an_error_in_upstreams_words() {
    let error = packed(&single_socket(), &set("0,2,4,6"), 5, Order::Packed).unwrap_err();
    assert_eq!(error.to_string(), "not enough cpus available to satisfy request: requested=5, available=4");
}

#[test]
fn cpus_of_few_caches_are_taken_if_caches_count() {
    let order = Order::PackedByCache;
    check(&four_caches(1, 1), order, &[("1-15", 10, "1-2,4-11")]);
    check(&dual_socket(), order, &[("1-5,7-11", 1, "1")]);
    check(&four_caches(2, 1), order, &[("0-15", 4, "0-3"), ("2-15", 6, "2-7"), ("8-15", 4, "8-11")]);
    check(&four_caches(1, 2), order, &[("3-8,12", 2, "4-5")]);
    check(&two_caches(), order, &[("2-7,10-15", 6, "4-6,12-14"), ("1-7,9-15", 10, "4-7,12-15,1,9")]);
}

#[test]
fn cpus_are_spread_over_cores() {
    check(&single_socket(), Order::Spread, &[("0-7", 3, "0-2")]);
    check(
        &dual_socket(),
        Order::Spread,
        &[
            ("0-11", 2, "0,2"),
            ("0-11", 3, "0,2,4"),
            ("0-11", 6, "0,2,4,6,8,10"),
            ("0-11", 8, "0,2,4,6,8,10,1,3"),
        ],
    );
}

#[test]
fn cpus_are_distributed_over_numa_nodes() {
    let of = |machine: &CpuTopology, available: &str, (count, group): (usize, usize)| {
        let request = Distribution { count, group, order: Order::Packed };
        distributed(machine, &set(available), request).unwrap().to_string()
    };
    let small = dual_socket();
    assert_eq!(of(&small, "0-11", (8, 1)), "0-3,6-9");
    assert_eq!(of(&small, "1-5,7-11", (1, 1)), "1");
    assert_eq!(of(&small, "1-5,7-11", (1, 2)), "2");
    let large = multi_numa();
    for (available, request, expected) in [
        ("0-79", (64, 1), "0-7,10-17,20-27,30-37,40-47,50-57,60-67,70-77"),
        ("0-79", (48, 1), "0-7,10-17,20-27,40-47,50-57,60-67"),
        ("1-29,32-39,41-69,72-79", (48, 1), "1-8,10-17,20-27,41-48,50-57,60-67"),
        ("2-29,31-39,42-69,71-79", (48, 1), "10-17,20-27,31-38,50-57,60-67,71-78"),
        (
            "0-2,10-12,20-22,30-32,40-41,50-51,60-61,70-71",
            (16, 1),
            "0-1,10-11,20-21,30-31,40-41,50-51,60-61,70-71",
        ),
        ("0-79", (26, 1), "0-6,10-16,40-45,50-55"),
        ("0-79", (26, 2), "0-6,10-15,40-46,50-55"),
        ("0-79", (62, 1), "0-7,10-17,20-27,30-37,40-47,50-57,60-66,70-76"),
        ("0-79", (62, 2), "0-7,10-17,20-27,30-36,40-47,50-57,60-67,70-76"),
        ("0-8,10-18,20-39,40-48,50-58,60-79", (62, 1), "0-7,10-17,20-27,30-37,40-46,50-56,60-67,70-77"),
        ("0-8,10-18,20-39,40-48,50-58,60-79", (62, 2), "0-7,10-16,20-27,30-37,40-47,50-56,60-67,70-77"),
        (
            "0-3,10-13,20-23,30-36,40-43,50-53,60-63,70-76",
            (34, 1),
            "0-3,10-13,20-23,30-34,40-43,50-53,60-63,70-74",
        ),
    ] {
        assert_eq!(of(&large, available, request), expected, "{request:?} of {available}");
    }
}
