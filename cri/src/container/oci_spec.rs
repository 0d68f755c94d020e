//! Builds the OCI runtime spec of a container from its CRI configuration, its image and the host's abilities.
//! Pure: [`SpecInputs`] has all values that must be looked up.

use std::path::PathBuf;

use coracle_proto::cri::security_profile::ProfileType;
use oci_spec::runtime::{
    Capabilities, Capability, Linux, LinuxCapabilities, LinuxNamespace, LinuxNamespaceType, LinuxSeccomp,
    Process, Root, Spec, User as OciUser,
};

use super::devices::{self, Node};
use super::inputs::SpecInputs;
use super::{args, capabilities, mounts, resources};
use crate::error::Error;
use crate::namespaces::{self, PidNamespace};
use crate::security_profile::seccomp;
use crate::user::User;

/// Builds the spec.
pub(crate) fn oci_spec(inputs: &SpecInputs<'_>) -> Result<Spec, Error> {
    let caps = capabilities::sets(
        inputs.security().and_then(|security| security.capabilities.as_ref()),
        inputs.privileged(),
        &inputs.host.capabilities,
    )
    .map_err(|why| Error::invalid("capabilities", why))?;
    let mounts = mounts::mounts(inputs);
    let mut root = Root::default();
    root.set_path(inputs.rootfs.to_owned());
    root.set_readonly(Some(inputs.security().is_some_and(|security| security.readonly_rootfs)));
    let mut spec = Spec::default();
    spec.set_root(Some(root));
    spec.set_hostname(None);
    spec.set_process(Some(process(inputs, &caps)?));
    spec.set_linux(Some(linux(inputs, &caps.kept, mounts.propagation)?));
    spec.set_mounts(Some(mounts.list));
    Ok(spec)
}

fn process(inputs: &SpecInputs<'_>, caps: &capabilities::Sets) -> Result<Process, Error> {
    let SpecInputs { config, image, host, user, .. } = inputs;
    let args = args::args(config, image);
    if args.is_empty() {
        return Err(Error::invalid("command", "is missing in the request and in the image"));
    }
    let mut process = Process::default();
    process.set_terminal(Some(config.tty));
    process.set_args(Some(args));
    process.set_env(Some(args::env(config, image, &inputs.sandbox.hostname)));
    process.set_cwd(args::cwd(config, image).into());
    process.set_user(oci_user(user));
    process.set_capabilities(Some(oci_capabilities(caps)));
    process.set_rlimits(None);
    process.set_apparmor_profile(inputs.apparmor.clone());
    let label = inputs.selinux.and_then(|labels| labels.process.as_ref());
    process.set_selinux_label(label.map(ToString::to_string));
    // The container library fails to load a seccomp profile when this is `false` rather than absent.
    let no_new_privileges = inputs.security().is_some_and(|security| security.no_new_privs);
    process.set_no_new_privileges(no_new_privileges.then_some(true));
    let requested =
        config.linux.as_ref().and_then(|linux| linux.resources.as_ref()).map(|limits| limits.oom_score_adj);
    process.set_oom_score_adj(requested.map(|score| host.oom_score(score)));
    Ok(process)
}

fn oci_user(user: &User) -> OciUser {
    let mut oci = OciUser::default();
    oci.set_uid(user.uid);
    oci.set_gid(user.gid);
    oci.set_additional_gids(Some(user.groups.clone()));
    oci
}

fn oci_capabilities(sets: &capabilities::Sets) -> LinuxCapabilities {
    let typed = |names: &[String]| -> Capabilities {
        names.iter().filter_map(|name| name.trim_start_matches("CAP_").parse::<Capability>().ok()).collect()
    };
    let mut capabilities = LinuxCapabilities::default();
    capabilities.set_bounding(Some(typed(&sets.kept)));
    capabilities.set_permitted(Some(typed(&sets.kept)));
    capabilities.set_effective(Some(typed(&sets.kept)));
    capabilities.set_inheritable(Some(typed(&sets.ambient)));
    capabilities.set_ambient(Some(typed(&sets.ambient)));
    capabilities
}

fn linux(inputs: &SpecInputs<'_>, kept: &[String], propagation: &str) -> Result<Linux, Error> {
    let mut linux = Linux::default();
    let label = inputs.selinux.and_then(|labels| labels.mount.as_ref());
    linux.set_mount_label(label.map(ToString::to_string));
    linux.set_namespaces(Some(namespaces_of(inputs)));
    if let Some(mapping) = inputs.mapping() {
        let lists = mapping.to_oci();
        linux.set_uid_mappings(Some(lists.uids));
        linux.set_gid_mappings(Some(lists.gids));
    }
    linux.set_cgroups_path(Some(inputs.cgroup.into()));
    linux.set_rootfs_propagation(Some(propagation.to_owned()));
    linux.set_devices(Some(inputs.devices.iter().map(|node| node.device.clone()).collect()));
    linux.set_resources(Some(limits(inputs)));
    linux.set_seccomp(seccomp_of(inputs, kept)?);
    let (masked, read_only) = match inputs.security() {
        Some(security) if !security.privileged => {
            (security.masked_paths.clone(), security.readonly_paths.clone())
        }
        _ => (Vec::new(), Vec::new()),
    };
    linux.set_masked_paths(Some(masked));
    linux.set_readonly_paths(Some(read_only));
    Ok(linux)
}

fn limits(inputs: &SpecInputs<'_>) -> oci_spec::runtime::LinuxResources {
    let request = inputs.config.linux.as_ref().and_then(|linux| linux.resources.as_ref());
    let mut resources = resources::limits(request, inputs.host.hugetlb);
    // In a user namespace, root of the container can own device nodes of disks, in an image or a volume. So the cgroup
    // must not allow all devices.
    let rules = if inputs.privileged() && inputs.mapping().is_none() {
        vec![devices::rule(true, "rwm")]
    } else {
        std::iter::once(devices::rule(false, "rwm")).chain(inputs.devices.iter().map(Node::rule)).collect()
    };
    resources.set_devices(Some(rules));
    resources
}

/// The namespaces to join or create. A namespace of the node is not listed.
fn namespaces_of(inputs: &SpecInputs<'_>) -> Vec<LinuxNamespace> {
    let sandbox = &inputs.sandbox;
    let of_shim = |name: &str| Some(PathBuf::from(format!("/proc/{}/ns/{name}", sandbox.shim_pid)));
    let of_pid = |pid: i32| Some(PathBuf::from(format!("/proc/{pid}/ns/pid")));
    let mut list = Vec::new();
    if inputs.mapping().is_some() {
        // The shim adds the path.
        list.push(namespace(LinuxNamespaceType::User, None));
    }
    list.push(namespace(LinuxNamespaceType::Mount, None));
    if namespaces::own_network(sandbox.config) {
        list.push(namespace(LinuxNamespaceType::Network, of_shim("net")));
        list.push(namespace(LinuxNamespaceType::Uts, of_shim("uts")));
    }
    if namespaces::own_ipc(sandbox.config) {
        list.push(namespace(LinuxNamespaceType::Ipc, of_shim("ipc")));
    }
    let options = inputs.security().and_then(|security| security.namespace_options.as_ref());
    let path = match namespaces::pids(&namespaces::options(sandbox.config), options) {
        PidNamespace::Node => None,
        PidNamespace::Container => Some(None),
        PidNamespace::Target => Some(of_pid(sandbox.target_pid)),
        PidNamespace::Pod => Some(of_pid(sandbox.init_pid)),
    };
    list.extend(path.map(|path| namespace(LinuxNamespaceType::Pid, path)));
    if inputs.host.unified {
        list.push(namespace(LinuxNamespaceType::Cgroup, None));
    }
    list
}

fn namespace(typ: LinuxNamespaceType, path: Option<PathBuf>) -> LinuxNamespace {
    let mut namespace = LinuxNamespace::default();
    namespace.set_typ(typ);
    namespace.set_path(path);
    namespace
}

fn seccomp_of(inputs: &SpecInputs<'_>, kept: &[String]) -> Result<Option<LinuxSeccomp>, Error> {
    if inputs.privileged() {
        return Ok(None);
    }
    let Some(profile) = inputs.security().and_then(|security| security.seccomp.as_ref()) else {
        return Ok(None);
    };
    match profile.profile_type() {
        ProfileType::Unconfined => Ok(None),
        ProfileType::RuntimeDefault => seccomp::default_profile(kept)
            .map(Some)
            .map_err(|error| Error::invalid("seccomp", error.to_string())),
        ProfileType::Localhost => match &inputs.seccomp_file {
            Some(profile) => Ok(Some(profile.clone())),
            None => Err(Error::invalid("seccomp", "the profile was not read")),
        },
    }
}

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod sample;
#[cfg(test)]
mod tests;
