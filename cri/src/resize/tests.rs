//! Tests of plans, as lines of `file=value`.

use super::*;

const V1: CurrentLimits = CurrentLimits {
    unified: false,
    hugetlb: false,
    swap: true,
    memory: Some(100),
    memory_and_swap: Some(100),
    anonymous: 0,
    quota: String::new(),
};

fn v2() -> CurrentLimits {
    CurrentLimits { unified: true, quota: "max".into(), ..V1 }
}

fn lines(request: &LinuxContainerResources, current: &CurrentLimits) -> Vec<String> {
    let text = |write: &Write| format!("{}={}", write.file, write.value);
    let steps = plan(request, current).expect("a plan");
    steps
        .iter()
        .map(|step| match step {
            Step::One(write) => text(write),
            Step::Pair(first, second) => format!("{} {}", text(first), text(second)),
        })
        .collect()
}

fn request(change: impl FnOnce(&mut LinuxContainerResources)) -> LinuxContainerResources {
    let mut request = LinuxContainerResources::default();
    change(&mut request);
    request
}

#[test]
fn an_empty_request_has_no_steps() {
    assert_eq!(lines(&LinuxContainerResources::default(), &V1), Vec::<String>::new());
    assert_eq!(lines(&LinuxContainerResources::default(), &v2()), Vec::<String>::new());
}

#[test]
fn cpu_limits_on_v1_and_v2() {
    let asked = request(|r| (r.cpu_shares, r.cpu_quota, r.cpu_period) = (1024, 50_000, 100_000));
    assert_eq!(lines(&asked, &V1), ["cpu.shares=1024", "cpu.cfs_period_us=100000 cpu.cfs_quota_us=50000"]);
    assert_eq!(lines(&asked, &v2()), ["cpu.weight=100", "cpu.max=50000 100000"]);
    let unlimited = request(|r| r.cpu_quota = -1);
    assert_eq!(lines(&unlimited, &V1), ["cpu.cfs_quota_us=-1"]);
    assert_eq!(lines(&unlimited, &v2()), ["cpu.max=max"]);
    let period = request(|r| r.cpu_period = 20_000);
    assert_eq!(lines(&period, &CurrentLimits { quota: "777".into(), ..v2() }), ["cpu.max=777 20000"]);
    assert!(plan(&request(|r| r.cpu_shares = -5), &V1).is_err());
}

#[test]
fn memory_never_exceeds_memory_and_swap() {
    let memory =
        |limit, both| request(|r| (r.memory_limit_in_bytes, r.memory_swap_limit_in_bytes) = (limit, both));
    let (own, both) = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes");
    assert_eq!(lines(&memory(50, 0), &V1), [format!("{own}=50"), format!("{both}=50")]);
    assert_eq!(lines(&memory(200, 300), &V1), [format!("{both}=300"), format!("{own}=200")]);
    assert_eq!(lines(&memory(-1, 0), &V1), [format!("{both}=-1"), format!("{own}=-1")]);
    assert_eq!(lines(&memory(0, 400), &V1), [format!("{both}=400")]);
    let free = CurrentLimits { memory_and_swap: None, ..V1 };
    assert_eq!(lines(&memory(200, 0), &free), [format!("{own}=200"), format!("{both}=200")]);
    assert_eq!(lines(&memory(50, 0), &CurrentLimits { swap: false, ..V1 }), [format!("{own}=50")]);
    assert!(plan(&memory(50, 60), &CurrentLimits { swap: false, ..V1 }).is_err());
    assert!(plan(&memory(60, 50), &V1).is_err());
    assert_eq!(lines(&memory(50, 0), &v2()), ["memory.max=50", "memory.swap.max=0"]);
    assert_eq!(lines(&memory(50, 80), &v2()), ["memory.max=50", "memory.swap.max=30"]);
    assert_eq!(lines(&memory(-1, -1), &v2()), ["memory.max=max", "memory.swap.max=max"]);
    assert_eq!(lines(&memory(0, 130), &v2()), ["memory.swap.max=30"]);
    assert!(plan(&memory(0, 130), &CurrentLimits { memory: None, ..v2() }).is_err());
    assert!(plan(&memory(50, 0), &CurrentLimits { anonymous: 51, ..v2() }).is_err());
}

#[test]
fn huge_pages_and_unified_files() {
    let limit = |limit| HugepageLimit { page_size: "2MB".into(), limit };
    let asked = |bytes| request(|r| r.hugepage_limits = vec![limit(bytes)]);
    assert_eq!(lines(&asked(0), &V1), Vec::<String>::new());
    assert!(plan(&asked(1), &V1).is_err());
    let counted = CurrentLimits { hugetlb: true, ..v2() };
    assert_eq!(lines(&asked(4), &counted), ["hugetlb.2MB.max=4", "hugetlb.2MB.rsvd.max=4"]);
    let unified = |file: &str| request(|r| drop(r.unified.insert(file.into(), "1".into())));
    assert_eq!(lines(&unified("memory.low"), &v2()), ["memory.low=1"]);
    assert!(plan(&unified("memory.low"), &V1).is_err());
    assert!(plan(&unified("../memory.low"), &v2()).is_err());
    assert!(plan(&unified("cgroup.procs"), &v2()).is_err());
}

#[test]
fn unset_fields_keep_their_recorded_values() {
    let old = request(|r| {
        (r.cpu_shares, r.memory_limit_in_bytes, r.cpuset_cpus) = (512, 100, "0".into());
        r.hugepage_limits = vec![HugepageLimit { page_size: "2MB".into(), limit: 1 }];
    });
    let new = request(|r| {
        (r.memory_limit_in_bytes, r.oom_score_adj) = (200, 5);
        r.hugepage_limits = vec![HugepageLimit { page_size: "2MB".into(), limit: 2 }];
    });
    let found = merged(old, &new);
    assert_eq!((found.cpu_shares, found.cpuset_cpus.as_str(), found.oom_score_adj), (512, "0", 5));
    assert_eq!((found.memory_limit_in_bytes, found.memory_swap_limit_in_bytes), (200, 200));
    assert_eq!(found.hugepage_limits, new.hugepage_limits);
}
