//! Validation of a container's configuration, before anything is created.

use coracle_proto::cri;
use oci_spec::runtime::Spec;

use crate::container::{fields, volume};
use crate::error::Error;
use crate::host::Host;
use crate::namespaces;
use crate::resize::{check_huge_pages, check_unified};
use crate::security_profile;
use crate::services::images::check_handler;

/// Refuses a configuration that this node cannot fulfil.
pub(crate) fn check(config: &cri::ContainerConfig, host: &Host) -> Result<(), Error> {
    if config.metadata.as_ref().is_none_or(|metadata| metadata.name.is_empty()) {
        return Err(Error::invalid("config.metadata", "needs a name"));
    }
    if config.windows.is_some() {
        return Err(Error::invalid("config.windows", "is not supported on Linux"));
    }
    config.image.as_ref().map_or(Ok(()), check_handler)?;
    fields::check(config)?;
    seccomp_profile(config)?;
    let resources = config.linux.as_ref().and_then(|linux| linux.resources.as_ref());
    let pages = resources.map(|resources| resources.hugepage_limits.as_slice()).unwrap_or_default();
    check_huge_pages(pages, host.hugetlb)?;
    config.mounts.iter().try_for_each(|mount| volume::check(mount, host.kernel))
}

/// Refuses a privileged container unless one of the pod's sandbox configurations is privileged.
pub(super) fn check_privilege<'a>(
    config: &cri::ContainerConfig,
    mut pods: impl Iterator<Item = &'a cri::PodSandboxConfig>,
) -> Result<(), Error> {
    let allowed = pods.any(|pod| namespaces::security(pod).is_some_and(|security| security.privileged));
    if security(config).privileged && !allowed {
        let why = "the pod sandbox does not allow privileged containers";
        return Err(Error::invalid("config.linux.security_context.privileged", why));
    }
    Ok(())
}

/// The seccomp profile, in the current field or in the deprecated field.
pub(super) fn seccomp_profile(config: &cri::ContainerConfig) -> Result<Option<cri::SecurityProfile>, Error> {
    let security = security(config);
    #[allow(deprecated, reason = "older kubelets set it")]
    let old = security.seccomp_profile_path.as_str();
    security_profile::requested_seccomp(security.seccomp.as_ref(), old)
}

/// Refuses cgroup files in the spec that are not limits, from the client or from plugins. UpdateContainerResources
/// refuses the same files.
pub(super) fn check_limits(spec: &Spec, unified: bool) -> Result<(), Error> {
    let resources = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref());
    let files = resources.and_then(|resources| resources.unified().as_ref());
    check_unified(files.into_iter().flat_map(|files| files.keys()), unified)
}

pub(super) fn security(config: &cri::ContainerConfig) -> cri::LinuxContainerSecurityContext {
    config.linux.as_ref().and_then(|linux| linux.security_context.clone()).unwrap_or_default()
}
