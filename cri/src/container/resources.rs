//! Converts limits from the CRI to the OCI. Pure.

use coracle_proto::cri::LinuxContainerResources;
use oci_spec::runtime::{LinuxCpu, LinuxHugepageLimit, LinuxMemory, LinuxResources};

/// The limits of a container. Limits of huge pages are left out on hosts that cannot limit them. There the limits can
/// only be 0: the kubelet sends 0 for every page size.
pub(crate) fn limits(request: Option<&LinuxContainerResources>, hugetlb: bool) -> LinuxResources {
    let mut resources = LinuxResources::default();
    let Some(request) = request else { return resources };
    resources.set_cpu(cpu(request));
    resources.set_memory(memory(request));
    if hugetlb && !request.hugepage_limits.is_empty() {
        let pages = request.hugepage_limits.iter().map(|limit| {
            let mut page = LinuxHugepageLimit::default();
            page.set_page_size(limit.page_size.clone());
            page.set_limit(i64::try_from(limit.limit).unwrap_or(i64::MAX));
            page
        });
        resources.set_hugepage_limits(Some(pages.collect()));
    }
    if !request.unified.is_empty() {
        resources.set_unified(Some(request.unified.clone()));
    }
    resources
}

fn cpu(request: &LinuxContainerResources) -> Option<LinuxCpu> {
    let mut cpu = LinuxCpu::default();
    cpu.set_shares(positive(request.cpu_shares));
    cpu.set_quota((request.cpu_quota != 0).then_some(request.cpu_quota));
    cpu.set_period(positive(request.cpu_period));
    cpu.set_cpus(named(&request.cpuset_cpus));
    cpu.set_mems(named(&request.cpuset_mems));
    (cpu != LinuxCpu::default()).then_some(cpu)
}

/// Memory limits. Swap is limited like memory, as Kubernetes expects, unless the request has its own limit.
fn memory(request: &LinuxContainerResources) -> Option<LinuxMemory> {
    let limit = request.memory_limit_in_bytes;
    if limit == 0 && request.memory_swap_limit_in_bytes == 0 {
        return None;
    }
    let mut memory = LinuxMemory::default();
    memory.set_limit((limit != 0).then_some(limit));
    let swap =
        if request.memory_swap_limit_in_bytes == 0 { limit } else { request.memory_swap_limit_in_bytes };
    memory.set_swap((swap != 0).then_some(swap));
    Some(memory)
}

fn positive(value: i64) -> Option<u64> {
    u64::try_from(value).ok().filter(|value| *value > 0)
}

fn named(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requested_limits_are_set() {
        let request = LinuxContainerResources {
            cpu_shares: 512,
            cpu_quota: 50_000,
            cpu_period: 100_000,
            memory_limit_in_bytes: 64 << 20,
            hugepage_limits: vec![coracle_proto::cri::HugepageLimit { page_size: "2MB".into(), limit: 0 }],
            ..Default::default()
        };
        let found = limits(Some(&request), false);
        assert_eq!(found.cpu().as_ref().and_then(LinuxCpu::quota), Some(50_000));
        assert_eq!(found.memory().and_then(|memory| memory.swap()), Some(64 << 20));
        assert!(found.hugepage_limits().is_none());
        assert!(limits(Some(&request), true).hugepage_limits().is_some());
        assert!(limits(Some(&LinuxContainerResources::default()), true).cpu().is_none());
    }
}
