//! Merges resources field by field; each field has one owner.

use coracle_proto::nri::{Field, LinuxCpu, LinuxMemory, LinuxResources};

use crate::owners::{Claims, Conflict};

/// Sets the requested numbers and flags of a part of the resources in every target.
macro_rules! set_values {
    ($part:ident of ($requested:ident, $claims:ident, $targets:ident): $($name:ident is $field:ident),* $(,)?) => {$(
        if let Some(value) = $requested.$name {
            $claims.set(Field::$field)?;
            for target in $targets.iter_mut() {
                target.$part.get_or_insert_default().$name = Some(value);
            }
        }
    )*};
}

/// Sets the requested fields in every target. The caller merges device rules, because updates have none.
pub(super) fn merge(
    requested: &LinuxResources,
    claims: &mut Claims<'_>,
    targets: &mut [&mut LinuxResources],
) -> Result<(), Conflict> {
    if let Some(requested) = &requested.memory {
        memory(requested, claims, targets)?;
    }
    if let Some(requested) = &requested.cpu {
        cpu(requested, claims, targets)?;
    }
    for limit in &requested.hugepage_limits {
        claims.set_entry(Field::HugepageLimits, &limit.page_size)?;
        for target in targets.iter_mut() {
            target.hugepage_limits.retain(|known| known.page_size != limit.page_size);
            target.hugepage_limits.push(limit.clone());
        }
    }
    for (file, value) in &requested.unified {
        claims.set_entry(Field::CgroupsUnified, file)?;
        for target in targets.iter_mut() {
            target.unified.insert(file.clone(), value.clone());
        }
    }
    macro_rules! one_value {
        ($($name:ident is $field:ident),*) => {$(
            if let Some(value) = &requested.$name {
                claims.set(Field::$field)?;
                for target in targets.iter_mut() {
                    target.$name = Some(value.clone());
                }
            }
        )*};
    }
    one_value!(blockio_class is BlockioClass, rdt_class is RdtClass);
    if let Some(value) = requested.pids {
        claims.set(Field::PidsLimit)?;
        targets.iter_mut().for_each(|target| target.pids = Some(value));
    }
    Ok(())
}

fn memory(
    requested: &LinuxMemory,
    claims: &mut Claims<'_>,
    targets: &mut [&mut LinuxResources],
) -> Result<(), Conflict> {
    set_values!(
        memory of (requested, claims, targets):
        limit is MemLimit,
        reservation is MemReservation,
        swap is MemSwapLimit,
        kernel is MemKernelLimit,
        kernel_tcp is MemTcpLimit,
        swappiness is MemSwappiness,
        disable_oom_killer is MemDisableOomKiller,
        use_hierarchy is MemUseHierarchy,
    );
    Ok(())
}

fn cpu(
    requested: &LinuxCpu,
    claims: &mut Claims<'_>,
    targets: &mut [&mut LinuxResources],
) -> Result<(), Conflict> {
    set_values!(
        cpu of (requested, claims, targets):
        shares is CpuShares,
        quota is CpuQuota,
        period is CpuPeriod,
        realtime_runtime is CpuRealtimeRuntime,
        realtime_period is CpuRealtimePeriod,
    );
    macro_rules! named {
        ($($name:ident is $field:ident),*) => {$(
            if !requested.$name.is_empty() {
                claims.set(Field::$field)?;
                for target in targets.iter_mut() {
                    target.cpu.get_or_insert_default().$name.clone_from(&requested.$name);
                }
            }
        )*};
    }
    named!(cpus is CpuSetCpUs, mems is CpuSetMems);
    Ok(())
}
