//! Applies adjustments of resources.

use coracle_proto::nri::{LinuxCpu, LinuxMemory, LinuxResources};
use oci_spec::runtime as oci;
use serde_json::json;

use super::{Applied, Features, refuse};

pub(super) fn apply(limits: &mut oci::LinuxResources, asked: &LinuxResources, features: Features) -> Applied {
    if let Some(asked) = &asked.memory {
        let mut known = limits.memory().unwrap_or_default();
        memory(&mut known, asked, features)?;
        limits.set_memory(Some(known));
    }
    if let Some(asked) = &asked.cpu {
        let mut known = limits.cpu().clone().unwrap_or_default();
        cpu(&mut known, asked);
        limits.set_cpu(Some(known));
    }
    hugepages(limits, asked, features)?;
    if !asked.unified.is_empty() {
        if !features.unified {
            return Err(refuse("unified", "this machine does not use cgroups v2"));
        }
        let files = limits.unified_mut().get_or_insert_default();
        files.extend(asked.unified.iter().map(|(file, value)| (file.clone(), value.clone())));
    }
    if let Some(pids) = asked.pids {
        let mut limit = oci::LinuxPids::default();
        // Negative values mean unlimited.
        limit.set_limit(pids.limit.max(-1));
        limits.set_pids(Some(limit));
    }
    device_rules(limits, asked)?;
    for (field, class) in [("blockio_class", &asked.blockio_class), ("rdt_class", &asked.rdt_class)] {
        // An empty name removes the class; no classes are supported, so there is nothing to remove.
        if class.as_ref().is_some_and(|class| !class.value.is_empty()) {
            return Err(refuse(field, "classes are not supported"));
        }
    }
    Ok(())
}

fn memory(known: &mut oci::LinuxMemory, asked: &LinuxMemory, features: Features) -> Applied {
    let v1_only = [
        ("memory.kernel", asked.kernel.is_some()),
        ("memory.kernel_tcp", asked.kernel_tcp.is_some()),
        ("memory.swappiness", asked.swappiness.is_some()),
        ("memory.disable_oom_killer", asked.disable_oom_killer.is_some_and(|flag| flag.value)),
    ];
    if let Some((field, _)) = v1_only.iter().find(|(_, asked)| features.unified && *asked) {
        return Err(refuse(field, "cgroups v2 have no such limit"));
    }
    if asked.use_hierarchy.is_some_and(|flag| !flag.value) {
        return Err(refuse("memory.use_hierarchy", "the kernel always uses hierarchical accounting"));
    }
    if let Some(limit) = asked.limit {
        known.set_limit(Some(limit.value));
        // The swap limit follows the memory limit, unless a plugin sets it.
        known.set_swap(Some(limit.value));
    }
    if let Some(swap) = asked.swap {
        known.set_swap(Some(swap.value));
    }
    if let Some(reservation) = asked.reservation {
        known.set_reservation(Some(reservation.value));
    }
    if let Some(kernel) = asked.kernel {
        known.set_kernel(Some(kernel.value));
    }
    if let Some(kernel_tcp) = asked.kernel_tcp {
        known.set_kernel_tcp(Some(kernel_tcp.value));
    }
    if let Some(swappiness) = asked.swappiness {
        known.set_swappiness(Some(swappiness.value));
    }
    if let Some(flag) = asked.disable_oom_killer {
        known.set_disable_oom_killer(Some(flag.value));
    }
    Ok(())
}

fn cpu(known: &mut oci::LinuxCpu, asked: &LinuxCpu) {
    if let Some(shares) = asked.shares {
        known.set_shares(Some(shares.value));
    }
    if let Some(quota) = asked.quota {
        known.set_quota(Some(quota.value));
    }
    if let Some(period) = asked.period {
        known.set_period(Some(period.value));
    }
    if let Some(runtime) = asked.realtime_runtime {
        known.set_realtime_runtime(Some(runtime.value));
    }
    if let Some(period) = asked.realtime_period {
        known.set_realtime_period(Some(period.value));
    }
    if !asked.cpus.is_empty() {
        known.set_cpus(Some(asked.cpus.clone()));
    }
    if !asked.mems.is_empty() {
        known.set_mems(Some(asked.mems.clone()));
    }
}

fn hugepages(limits: &mut oci::LinuxResources, asked: &LinuxResources, features: Features) -> Applied {
    if asked.hugepage_limits.is_empty() {
        return Ok(());
    }
    if !features.hugetlb {
        return Err(refuse("hugepage_limits", "this machine cannot limit huge pages"));
    }
    let known = limits.hugepage_limits_mut().get_or_insert_default();
    for asked in &asked.hugepage_limits {
        let mut limit = oci::LinuxHugepageLimit::default();
        limit.set_page_size(asked.page_size.clone());
        limit.set_limit(i64::try_from(asked.limit).unwrap_or(i64::MAX));
        known.retain(|known| *known.page_size() != asked.page_size);
        known.push(limit);
    }
    Ok(())
}

fn device_rules(limits: &mut oci::LinuxResources, asked: &LinuxResources) -> Applied {
    for asked in &asked.devices {
        let kind = if asked.r#type.is_empty() { "a" } else { &asked.r#type };
        let mut rule: oci::LinuxDeviceCgroup =
            serde_json::from_value(json!({ "allow": asked.allow, "type": kind }))
                .map_err(|error| refuse("devices", error.to_string()))?;
        rule.set_major(asked.major.map(|major| major.value));
        rule.set_minor(asked.minor.map(|minor| minor.value));
        rule.set_access(Some(asked.access.clone()));
        limits.devices_mut().get_or_insert_default().push(rule);
    }
    Ok(())
}
