//! Conversion of limits between NRI and the CRI. Pure.

use coracle_proto::cri::{HugepageLimit, LinuxContainerResources};
use coracle_proto::nri::{self, LinuxCpu, LinuxMemory, LinuxResources, OptionalInt64, OptionalUInt64};

/// Converts limits of the CRI for plugins. 0 means no limit in the CRI, and is left out.
pub(crate) fn to_nri(limits: &LinuxContainerResources) -> LinuxResources {
    let number = |value: i64| (value != 0).then_some(OptionalInt64 { value });
    let size =
        |value: i64| u64::try_from(value).ok().filter(|v| *v != 0).map(|value| OptionalUInt64 { value });
    LinuxResources {
        memory: Some(LinuxMemory {
            limit: number(limits.memory_limit_in_bytes),
            swap: number(limits.memory_swap_limit_in_bytes),
            ..LinuxMemory::default()
        }),
        cpu: Some(LinuxCpu {
            shares: size(limits.cpu_shares),
            quota: number(limits.cpu_quota),
            period: size(limits.cpu_period),
            cpus: limits.cpuset_cpus.clone(),
            mems: limits.cpuset_mems.clone(),
            ..LinuxCpu::default()
        }),
        hugepage_limits: limits
            .hugepage_limits
            .iter()
            .map(|limit| nri::HugepageLimit { page_size: limit.page_size.clone(), limit: limit.limit })
            .collect(),
        unified: limits.unified.iter().map(|(file, value)| (file.clone(), value.clone())).collect(),
        ..LinuxResources::default()
    }
}

/// Converts limits of plugins to a request of the CRI. Absent limits stay unchanged.
///
/// # Errors
/// If a limit of a running container cannot be changed.
pub(crate) fn to_cri(requested: &LinuxResources) -> Result<LinuxContainerResources, String> {
    let memory = requested.memory.unwrap_or_default();
    let cpu = requested.cpu.clone().unwrap_or_default();
    let refused = [
        ("memory.reservation", memory.reservation.is_some()),
        ("memory.kernel", memory.kernel.is_some()),
        ("memory.kernel_tcp", memory.kernel_tcp.is_some()),
        ("memory.swappiness", memory.swappiness.is_some()),
        ("memory.disable_oom_killer", memory.disable_oom_killer.is_some()),
        ("memory.use_hierarchy", memory.use_hierarchy.is_some()),
        ("cpu.realtime_runtime", cpu.realtime_runtime.is_some()),
        ("cpu.realtime_period", cpu.realtime_period.is_some()),
        ("pids", requested.pids.is_some()),
        ("devices", !requested.devices.is_empty()),
        ("blockio_class", requested.blockio_class.as_ref().is_some_and(|class| !class.value.is_empty())),
        ("rdt_class", requested.rdt_class.as_ref().is_some_and(|class| !class.value.is_empty())),
    ];
    if let Some((field, _)) = refused.iter().find(|(_, requested)| *requested) {
        return Err(format!("{field} of an existing container cannot be changed"));
    }
    let number = |value: Option<OptionalInt64>| value.map_or(0, |value| value.value);
    let size = |value: Option<OptionalUInt64>| {
        i64::try_from(value.map_or(0, |value| value.value)).unwrap_or(i64::MAX)
    };
    Ok(LinuxContainerResources {
        cpu_period: size(cpu.period),
        cpu_quota: number(cpu.quota),
        cpu_shares: size(cpu.shares),
        memory_limit_in_bytes: number(memory.limit),
        memory_swap_limit_in_bytes: number(memory.swap),
        cpuset_cpus: cpu.cpus,
        cpuset_mems: cpu.mems,
        hugepage_limits: requested
            .hugepage_limits
            .iter()
            .map(|limit| HugepageLimit { page_size: limit.page_size.clone(), limit: limit.limit })
            .collect(),
        unified: requested.unified.iter().map(|(file, value)| (file.clone(), value.clone())).collect(),
        ..LinuxContainerResources::default()
    })
}

#[cfg(test)]
mod tests {
    use coracle_proto::nri::{LinuxPids, OptionalString};

    use super::*;

    #[test]
    fn limits_are_converted_both_ways() {
        let limits = LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: -1,
            cpu_shares: 512,
            memory_limit_in_bytes: 1 << 26,
            cpuset_cpus: "0-1".into(),
            hugepage_limits: vec![HugepageLimit { page_size: "2MB".into(), limit: 7 }],
            unified: [("memory.high".to_owned(), "1".to_owned())].into(),
            ..Default::default()
        };
        assert_eq!(to_cri(&to_nri(&limits)), Ok(limits));
        let none = LinuxContainerResources::default();
        assert_eq!(to_cri(&to_nri(&none)), Ok(none));
    }

    #[test]
    fn limits_without_a_cri_field_are_refused() {
        let pids = LinuxResources { pids: Some(LinuxPids { limit: 5 }), ..Default::default() };
        assert!(to_cri(&pids).expect_err("pids").starts_with("pids"));
        let class = Some(OptionalString { value: "gold".into() });
        assert!(to_cri(&LinuxResources { rdt_class: class, ..Default::default() }).is_err());
    }
}
