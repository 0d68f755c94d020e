//! Plans changes of a container's limits: cgroup files, values, order. Pure; [`apply`] executes the plan.

pub(crate) mod apply;
pub(crate) mod note;
pub(crate) mod weight;

use coracle_proto::cri::{HugepageLimit, LinuxContainerResources};

use self::weight::weight_of_shares;
use crate::error::Error;

/// The current state that the plan depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CurrentLimits {
    /// Whether cgroups are v2.
    pub(crate) unified: bool,
    /// Whether huge pages can be limited.
    pub(crate) hugetlb: bool,
    /// Whether the kernel counts swap.
    pub(crate) swap: bool,
    /// The memory limit. `None` if unlimited.
    pub(crate) memory: Option<u64>,
    /// v1: the limit of memory and swap together. `None` if unlimited.
    pub(crate) memory_and_swap: Option<u64>,
    /// Memory that cannot be reclaimed without swap. On v1 the kernel itself refuses a limit below this value.
    pub(crate) anonymous: u64,
    /// v2: the quota in `cpu.max`.
    pub(crate) quota: String,
}

/// A value for a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) controller: &'static str,
    pub(crate) file: String,
    pub(crate) value: String,
    /// Whether this kernel may lack the file.
    pub(crate) optional: bool,
}

/// A step of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    One(Write),
    /// Two writes in this order, or in reverse order if the kernel refuses the first write. The kernel checks each
    /// value against the other value.
    Pair(Write, Write),
}

/// The steps for a request. A field that is 0 or empty stays unchanged.
///
/// # Errors
/// If the request is invalid, or not supported on this machine.
pub(crate) fn plan(request: &LinuxContainerResources, current: &CurrentLimits) -> Result<Vec<Step>, Error> {
    let mut steps = Vec::new();
    cpu(request, current, &mut steps)?;
    for (file, value) in [("cpuset.cpus", &request.cpuset_cpus), ("cpuset.mems", &request.cpuset_mems)] {
        if !value.is_empty() {
            steps.push(one("cpuset", file, value));
        }
    }
    memory(request, current, &mut steps)?;
    huge_pages(&request.hugepage_limits, current, &mut steps)?;
    unified(request, current, &mut steps)?;
    Ok(steps)
}

fn cpu(
    request: &LinuxContainerResources,
    current: &CurrentLimits,
    steps: &mut Vec<Step>,
) -> Result<(), Error> {
    let shares = unsigned("cpu_shares", request.cpu_shares)?;
    let period = unsigned("cpu_period", request.cpu_period)?;
    let quota = request.cpu_quota;
    if current.unified {
        steps.extend(shares.map(|shares| one("cpu", "cpu.weight", weight_of_shares(shares))));
        let text = match quota {
            0 => current.quota.clone(),
            quota if quota < 0 => "max".to_owned(),
            quota => quota.to_string(),
        };
        match (quota, period) {
            (0, None) => {}
            (_, None) => steps.push(one("cpu", "cpu.max", text)),
            (_, Some(period)) => steps.push(one("cpu", "cpu.max", format!("{text} {period}"))),
        }
        return Ok(());
    }
    steps.extend(shares.map(|shares| one("cpu", "cpu.shares", shares)));
    let period = period.map(|period| write("cpu", "cpu.cfs_period_us", period));
    let quota = (quota != 0).then(|| write("cpu", "cpu.cfs_quota_us", quota.max(-1)));
    steps.extend(match (period, quota) {
        (Some(period), Some(quota)) => Some(Step::Pair(period, quota)),
        (period, quota) => period.or(quota).map(Step::One),
    });
    Ok(())
}

/// The common limit of memory and swap. -1 for unlimited, 0 for unchanged. Without a common limit in the request, it is
/// the memory limit, as at the creation of a container.
fn memory_and_swap(request: &LinuxContainerResources) -> i64 {
    match request.memory_swap_limit_in_bytes {
        0 => request.memory_limit_in_bytes.max(-1),
        limit => limit.max(-1),
    }
}

fn memory(
    request: &LinuxContainerResources,
    current: &CurrentLimits,
    steps: &mut Vec<Step>,
) -> Result<(), Error> {
    let (memory, both) = (request.memory_limit_in_bytes.max(-1), memory_and_swap(request));
    if both > 0 && (memory == -1 || memory > both) {
        return Err(Error::invalid("memory_swap_limit_in_bytes", "is less than the memory limit"));
    }
    if !current.swap && both != memory {
        return Err(Error::invalid("memory_swap_limit_in_bytes", "this kernel does not count swap"));
    }
    if current.unified && u64::try_from(memory).is_ok_and(|limit| limit > 0 && limit < current.anonymous) {
        // v2 would accept the limit and kill the container.
        let why = format!("is below the {} bytes in use", current.anonymous);
        return Err(Error::invalid("memory_limit_in_bytes", why));
    }
    if current.unified {
        if memory != 0 {
            steps.push(one("memory", "memory.max", or_max(memory)));
        }
        if both != 0 && current.swap {
            steps.push(one("memory", "memory.swap.max", swap_alone(memory, both, current)?));
        }
        return Ok(());
    }
    let own = (memory != 0).then(|| one("memory", "memory.limit_in_bytes", memory));
    let swap = (both != 0 && current.swap).then(|| one("memory", "memory.memsw.limit_in_bytes", both));
    // At every moment the kernel requires: memory limit <= limit of memory and swap.
    let grows = match current.memory_and_swap {
        None => false,
        Some(now) => memory == -1 || u64::try_from(memory).is_ok_and(|memory| memory > now),
    };
    if grows {
        steps.extend(swap.into_iter().chain(own));
    } else {
        steps.extend(own.into_iter().chain(swap));
    }
    Ok(())
}

/// The limit of swap alone, for v2.
fn swap_alone(memory: i64, both: i64, current: &CurrentLimits) -> Result<String, Error> {
    if both == -1 {
        return Ok("max".to_owned());
    }
    let memory =
        if memory == 0 { current.memory.and_then(|limit| i64::try_from(limit).ok()) } else { Some(memory) };
    match memory {
        Some(memory) if memory >= 0 && memory <= both => Ok((both - memory).to_string()),
        _ => Err(Error::invalid(
            "memory_swap_limit_in_bytes",
            "needs a memory limit that is not above this limit",
        )),
    }
}

/// Refuses limits of huge pages without the controller. A limit of 0 is allowed: the kubelet sends it for every page size.
pub(crate) fn check_huge_pages(limits: &[HugepageLimit], hugetlb: bool) -> Result<(), Error> {
    if !hugetlb && limits.iter().any(|limit| limit.limit > 0) {
        return Err(Error::Unsupported("a limit of huge pages without the hugetlb controller"));
    }
    Ok(())
}

fn huge_pages(limits: &[HugepageLimit], current: &CurrentLimits, steps: &mut Vec<Step>) -> Result<(), Error> {
    check_huge_pages(limits, current.hugetlb)?;
    for limit in limits.iter().filter(|_| current.hugetlb) {
        if limit.page_size.is_empty() || limit.page_size.contains('/') {
            return Err(Error::invalid(
                "hugepage_limits",
                format!("{:?} is not a page size", limit.page_size),
            ));
        }
        let end = if current.unified { "max" } else { "limit_in_bytes" };
        let usage = format!("hugetlb.{}.{end}", limit.page_size);
        steps.push(one("hugetlb", &usage, limit.limit));
        let reserved = format!("hugetlb.{}.rsvd.{end}", limit.page_size);
        steps.push(Step::One(Write { optional: true, ..write("hugetlb", &reserved, limit.limit) }));
    }
    Ok(())
}

fn unified(
    request: &LinuxContainerResources,
    current: &CurrentLimits,
    steps: &mut Vec<Step>,
) -> Result<(), Error> {
    check_unified(request.unified.keys(), current.unified)?;
    let mut pairs: Vec<_> = request.unified.iter().collect();
    pairs.sort_unstable();
    steps.extend(pairs.into_iter().map(|(file, value)| one("", file, value)));
    Ok(())
}

/// Refuses names that are not files of a v2 controller.
///
/// # Errors
/// For the first such name, or for any name on v1.
pub(crate) fn check_unified<'a>(
    files: impl IntoIterator<Item = &'a String>,
    unified: bool,
) -> Result<(), Error> {
    for file in files {
        if !unified {
            return Err(Error::invalid("unified", "this machine's cgroups are v1"));
        }
        if file.contains('/') || !file.contains('.') || file.starts_with("cgroup.") {
            return Err(Error::invalid("unified", format!("{file:?} is not a file of a controller")));
        }
    }
    Ok(())
}

/// The recorded limits after a request: unset fields stay unchanged.
pub(crate) fn merged(old: LinuxContainerResources, new: &LinuxContainerResources) -> LinuxContainerResources {
    let number = |old: i64, new: i64| if new == 0 { old } else { new };
    let text = |old: String, new: &String| if new.is_empty() { old } else { new.clone() };
    let (memory, both) = (new.memory_limit_in_bytes.max(-1), memory_and_swap(new));
    let mut pages = old.hugepage_limits;
    for limit in &new.hugepage_limits {
        pages.retain(|known| known.page_size != limit.page_size);
        pages.push(limit.clone());
    }
    let mut unified = old.unified;
    unified.extend(new.unified.clone());
    LinuxContainerResources {
        cpu_period: number(old.cpu_period, new.cpu_period),
        cpu_quota: number(old.cpu_quota, new.cpu_quota),
        cpu_shares: number(old.cpu_shares, new.cpu_shares),
        memory_limit_in_bytes: number(old.memory_limit_in_bytes, memory),
        oom_score_adj: number(old.oom_score_adj, new.oom_score_adj),
        cpuset_cpus: text(old.cpuset_cpus, &new.cpuset_cpus),
        cpuset_mems: text(old.cpuset_mems, &new.cpuset_mems),
        hugepage_limits: pages,
        unified,
        memory_swap_limit_in_bytes: number(old.memory_swap_limit_in_bytes, both),
    }
}

fn or_max(limit: i64) -> String {
    if limit < 0 { "max".to_owned() } else { limit.to_string() }
}

fn unsigned(field: &'static str, value: i64) -> Result<Option<u64>, Error> {
    let value = u64::try_from(value).map_err(|_negative| Error::invalid(field, "is negative"))?;
    Ok((value > 0).then_some(value))
}

fn one(controller: &'static str, file: &str, value: impl ToString) -> Step {
    Step::One(write(controller, file, value))
}

#[allow(clippy::needless_pass_by_value, reason = "accepts numbers and strings")]
fn write(controller: &'static str, file: &str, value: impl ToString) -> Write {
    Write { controller, file: file.to_owned(), value: value.to_string(), optional: false }
}

#[cfg(test)]
mod tests;
