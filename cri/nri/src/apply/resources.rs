//! Applies adjustments of resources.

use coracle_proto::nri::{LinuxCpu, LinuxMemory, LinuxResources};
use oci_spec::runtime as oci;
use serde_json::json;

use super::{Applied, Features, refuse};

pub(super) fn apply(
    limits: &mut oci::LinuxResources,
    requested: &LinuxResources,
    features: Features,
) -> Applied {
    if let Some(requested) = &requested.memory {
        let mut known = limits.memory().unwrap_or_default();
        memory(&mut known, requested, features)?;
        limits.set_memory(Some(known));
    }
    if let Some(requested) = &requested.cpu {
        let mut known = limits.cpu().clone().unwrap_or_default();
        cpu(&mut known, requested);
        limits.set_cpu(Some(known));
    }
    hugepages(limits, requested, features)?;
    if !requested.unified.is_empty() {
        if !features.unified {
            return Err(refuse("unified", "this machine does not use cgroups v2"));
        }
        let files = limits.unified_mut().get_or_insert_default();
        files.extend(requested.unified.iter().map(|(file, value)| (file.clone(), value.clone())));
    }
    if let Some(pids) = requested.pids {
        let mut limit = oci::LinuxPids::default();
        // Negative values mean unlimited.
        limit.set_limit(pids.limit.max(-1));
        limits.set_pids(Some(limit));
    }
    device_rules(limits, requested)?;
    for (field, class) in [("blockio_class", &requested.blockio_class), ("rdt_class", &requested.rdt_class)] {
        // An empty name removes the class. Classes are not supported, so no class has to be removed.
        if class.as_ref().is_some_and(|class| !class.value.is_empty()) {
            return Err(refuse(field, "classes are not supported"));
        }
    }
    Ok(())
}

fn memory(known: &mut oci::LinuxMemory, requested: &LinuxMemory, features: Features) -> Applied {
    let v1_only = [
        ("memory.kernel", requested.kernel.is_some()),
        ("memory.kernel_tcp", requested.kernel_tcp.is_some()),
        ("memory.swappiness", requested.swappiness.is_some()),
        ("memory.disable_oom_killer", requested.disable_oom_killer.is_some_and(|flag| flag.value)),
    ];
    if let Some((field, _)) = v1_only.iter().find(|(_, requested)| features.unified && *requested) {
        return Err(refuse(field, "cgroups v2 have no such limit"));
    }
    if requested.use_hierarchy.is_some_and(|flag| !flag.value) {
        return Err(refuse("memory.use_hierarchy", "the kernel always uses hierarchical accounting"));
    }
    if let Some(limit) = requested.limit {
        known.set_limit(Some(limit.value));
        // The swap limit follows the memory limit, unless a plugin sets it.
        known.set_swap(Some(limit.value));
    }
    if let Some(swap) = requested.swap {
        known.set_swap(Some(swap.value));
    }
    if let Some(reservation) = requested.reservation {
        known.set_reservation(Some(reservation.value));
    }
    if let Some(kernel) = requested.kernel {
        known.set_kernel(Some(kernel.value));
    }
    if let Some(kernel_tcp) = requested.kernel_tcp {
        known.set_kernel_tcp(Some(kernel_tcp.value));
    }
    if let Some(swappiness) = requested.swappiness {
        known.set_swappiness(Some(swappiness.value));
    }
    if let Some(flag) = requested.disable_oom_killer {
        known.set_disable_oom_killer(Some(flag.value));
    }
    Ok(())
}

fn cpu(known: &mut oci::LinuxCpu, requested: &LinuxCpu) {
    if let Some(shares) = requested.shares {
        known.set_shares(Some(shares.value));
    }
    if let Some(quota) = requested.quota {
        known.set_quota(Some(quota.value));
    }
    if let Some(period) = requested.period {
        known.set_period(Some(period.value));
    }
    if let Some(runtime) = requested.realtime_runtime {
        known.set_realtime_runtime(Some(runtime.value));
    }
    if let Some(period) = requested.realtime_period {
        known.set_realtime_period(Some(period.value));
    }
    if !requested.cpus.is_empty() {
        known.set_cpus(Some(requested.cpus.clone()));
    }
    if !requested.mems.is_empty() {
        known.set_mems(Some(requested.mems.clone()));
    }
}

fn hugepages(limits: &mut oci::LinuxResources, requested: &LinuxResources, features: Features) -> Applied {
    if requested.hugepage_limits.is_empty() {
        return Ok(());
    }
    if !features.hugetlb {
        return Err(refuse("hugepage_limits", "this machine cannot limit huge pages"));
    }
    let known = limits.hugepage_limits_mut().get_or_insert_default();
    for requested in &requested.hugepage_limits {
        let mut limit = oci::LinuxHugepageLimit::default();
        limit.set_page_size(requested.page_size.clone());
        limit.set_limit(i64::try_from(requested.limit).unwrap_or(i64::MAX));
        known.retain(|known| *known.page_size() != requested.page_size);
        known.push(limit);
    }
    Ok(())
}

fn device_rules(limits: &mut oci::LinuxResources, requested: &LinuxResources) -> Applied {
    for requested in &requested.devices {
        let kind = if requested.r#type.is_empty() { "a" } else { &requested.r#type };
        let mut rule: oci::LinuxDeviceCgroup =
            serde_json::from_value(json!({ "allow": requested.allow, "type": kind }))
                .map_err(|error| refuse("devices", error.to_string()))?;
        rule.set_major(requested.major.map(|major| major.value));
        rule.set_minor(requested.minor.map(|minor| minor.value));
        rule.set_access(Some(requested.access.clone()));
        limits.devices_mut().get_or_insert_default().push(rule);
    }
    Ok(())
}
