//! Resource limits: maps names of the OCI spec to numbers of the kernel.

use libcontainer::oci_spec::runtime::{PosixRlimit, PosixRlimitType};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, rlim_t, setrlimit};

/// The kernel's number of a limit. `None` for a limit that the kernel interface does not have.
pub(crate) fn resource(kind: PosixRlimitType) -> Option<Resource> {
    Some(match kind {
        PosixRlimitType::RlimitCpu => Resource::RLIMIT_CPU,
        PosixRlimitType::RlimitFsize => Resource::RLIMIT_FSIZE,
        PosixRlimitType::RlimitData => Resource::RLIMIT_DATA,
        PosixRlimitType::RlimitStack => Resource::RLIMIT_STACK,
        PosixRlimitType::RlimitCore => Resource::RLIMIT_CORE,
        PosixRlimitType::RlimitRss => Resource::RLIMIT_RSS,
        PosixRlimitType::RlimitNproc => Resource::RLIMIT_NPROC,
        PosixRlimitType::RlimitNofile => Resource::RLIMIT_NOFILE,
        PosixRlimitType::RlimitMemlock => Resource::RLIMIT_MEMLOCK,
        PosixRlimitType::RlimitAs => Resource::RLIMIT_AS,
        PosixRlimitType::RlimitLocks => Resource::RLIMIT_LOCKS,
        PosixRlimitType::RlimitSigpending => Resource::RLIMIT_SIGPENDING,
        PosixRlimitType::RlimitMsgqueue => Resource::RLIMIT_MSGQUEUE,
        PosixRlimitType::RlimitNice => Resource::RLIMIT_NICE,
        PosixRlimitType::RlimitRtprio => Resource::RLIMIT_RTPRIO,
        PosixRlimitType::RlimitRttime => Resource::RLIMIT_RTTIME,
    })
}

pub(crate) fn apply(limits: &[PosixRlimit]) -> nix::Result<()> {
    for limit in limits {
        if let Some(resource) = resource(limit.typ()) {
            setrlimit(resource, amount(limit.soft()), amount(limit.hard()))?;
        }
    }
    Ok(())
}

/// A limit in the C library's type, which has 32 or 64 bits.
pub(crate) fn amount(limit: u64) -> rlim_t {
    rlim_t::try_from(u128::from(limit)).unwrap_or(RLIM_INFINITY)
}

/// The hard limit of this process. `u64::MAX` if there is no limit.
pub(crate) fn hard(resource: Resource) -> u64 {
    match getrlimit(resource) {
        Ok((_, hard)) if hard != RLIM_INFINITY => u64::try_from(u128::from(hard)).unwrap_or(u64::MAX),
        _ => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_have_the_same_values_in_both_types() {
        assert_eq!([0, 1024, u64::MAX].map(amount), [0, 1024, RLIM_INFINITY]);
        let (_, files) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(amount(hard(Resource::RLIMIT_NOFILE)), files);
    }
}
