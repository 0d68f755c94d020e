//! Resource limits: maps names of the OCI spec to numbers of the kernel.

use libcontainer::oci_spec::runtime::{PosixRlimit, PosixRlimitType};
use nix::sys::resource::{Resource, setrlimit};

/// `None` for a limit that the kernel interface does not have.
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
            setrlimit(resource, limit.soft(), limit.hard())?;
        }
    }
    Ok(())
}
