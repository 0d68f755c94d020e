//! The OCI spec of a container, before NRI plugins adjust it.

use coracle_images::Image;
use coracle_proto::cri;
use coracle_proto::cri::security_profile::ProfileType;
use oci_spec::runtime::{LinuxSeccomp, Spec};

use super::check::security;
use super::service::ContainerService;
use crate::cdi;
use crate::cgroup::driver::cgroups_path;
use crate::container::confinement::{self, Modules};
use crate::container::devices::{self, Node};
use crate::container::inputs::{SandboxInputs, SpecInputs};
use crate::container::oci_spec::oci_spec;
use crate::error::{self, Error};
use crate::namespaces;
use crate::nri::PodOf;
use crate::records::ContainerRecord;
use crate::sandbox::user_namespace::Mapping;
use crate::security_profile;
use crate::user::User;

impl ContainerService {
    /// Builds the spec, with the requested CDI devices. `config` has the sources of volumes
    /// ([`ContainerService::find_volumes`]).
    pub(super) fn make_spec(
        &self,
        pod: PodOf<'_>,
        record: &ContainerRecord,
        config: &cri::ContainerConfig,
        image: &Image,
    ) -> Result<Spec, Error> {
        let bundle = self.objects.records.container_dir(&record.id);
        let mapping = Mapping::of(Some(&namespaces::options(pod.sandbox.config()))).ok().flatten();
        let nodes = device_nodes(config, mapping.is_some())?;
        let inputs = SpecInputs {
            config,
            image,
            host: &self.machine.host,
            user: &User {
                uid: u32::try_from(record.uid).unwrap_or_default(),
                gid: u32::try_from(record.gid).unwrap_or_default(),
                groups: record.groups.iter().filter_map(|gid| u32::try_from(*gid).ok()).collect(),
            },
            sandbox: self.sandbox_inputs(pod, config)?,
            rootfs: &bundle.join("rootfs"),
            cgroup: &cgroups_path(&record.cgroup),
            devices: &nodes,
            seccomp_file: seccomp_file(config)?,
            apparmor: apparmor(config)?,
            selinux: record.selinux.as_ref(),
        };
        let mut spec = oci_spec(&inputs)?;
        cdi::requested(config)
            .and_then(|devices| cdi::inject(&mut spec, &devices, &self.config.cdi_dirs))
            .map_err(|why| Error::invalid("CDI_devices", error::chain(&why)))?;
        Ok(spec)
    }

    fn sandbox_inputs<'a>(
        &self,
        pod: PodOf<'a>,
        config: &cri::ContainerConfig,
    ) -> Result<SandboxInputs<'a>, Error> {
        let sandbox = pod.sandbox;
        let dir = self.objects.records.sandbox_dir(&sandbox.id);
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let options = security.and_then(|security| security.namespace_options.as_ref());
        let target_pid = match options.filter(|options| options.pid() == cri::NamespaceMode::Target) {
            None => 0,
            Some(options) => self.target_pid(sandbox, &options.target_id)?,
        };
        Ok(SandboxInputs {
            config: sandbox.config(),
            hostname: namespaces::hostname(sandbox.config(), &self.machine.host.hostname),
            shm_dir: dir.join("shm"),
            dir,
            shim_pid: pod.live.shim.pid(),
            init_pid: pod.live.init_pid,
            target_pid,
        })
    }
}

fn device_nodes(config: &cri::ContainerConfig, has_user_namespace: bool) -> Result<Vec<Node>, Error> {
    match (security(config).privileged, has_user_namespace) {
        (true, false) => Ok(devices::all()),
        (true, true) => devices::all_in_user_namespace(&config.devices),
        (false, _) => devices::requested(&config.devices),
    }
}

/// Name of the AppArmor profile.
fn apparmor(config: &cri::ContainerConfig) -> Result<Option<String>, Error> {
    confinement::apparmor(&security(config), &Modules::detect())
        .map_err(|why| Error::invalid("apparmor", why))
}

/// The seccomp profile of a file on this node. A privileged container has no profile.
fn seccomp_file(config: &cri::ContainerConfig) -> Result<Option<LinuxSeccomp>, Error> {
    let security = security(config);
    let requested = security.seccomp.filter(|_| !security.privileged);
    let localhost = requested.filter(|profile| profile.profile_type() == ProfileType::Localhost);
    localhost.as_ref().map(security_profile::read_seccomp).transpose()
}
