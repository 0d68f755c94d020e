//! NRI hooks of the runtime: notifications to plugins, and the changes that plugins request.
//!
//! The hooks are called at the same points as in containerd. Lock order: first the guard that keeps plugins from
//! joining, then a container's `starting`.

pub(crate) mod about;
mod late_hooks;
pub(crate) mod limits;
mod sysctls;

use std::path::PathBuf;
use std::sync::Arc;

use coracle_nri::apply::{Features, apply};
use coracle_nri::{JoinGuard, Nri, PodAndContainer};
use coracle_proto::cri;
use coracle_proto::nri::PodSandbox;
use coracle_systemd::Scope;
use oci_spec::runtime::Spec;
use tracing::warn;

use crate::announcement::Announcement;
use crate::cdi;
use crate::cgroup::driver::CgroupDriver;
use crate::cgroup::is_below_root;
use crate::container::Container;
use crate::error::{self, Error};
use crate::host::Host;
use crate::records::{ContainerRecord, Records, SandboxRecord};
use crate::sandbox::{LiveShim, Sandbox};
use crate::tables::Tables;
use crate::undo::{Step, Undo};

/// Calls the hooks of NRI plugins.
#[derive(Clone)]
pub(crate) struct PluginHooks {
    pub(crate) nri: Nri,
    pub(crate) tables: Arc<Tables>,
    pub(crate) records: Arc<Records>,
    pub(crate) host: Arc<Host>,
    pub(crate) cgroup_driver: CgroupDriver,
    pub(crate) cdi_dirs: Arc<[PathBuf]>,
}

/// The pod of a container that is being created.
#[derive(Clone, Copy)]
pub(crate) struct PodOf<'a> {
    pub(crate) sandbox: &'a Sandbox,
    pub(crate) live: &'a LiveShim,
}

// === impl PluginHooks ===

impl PluginHooks {
    /// Whether any plugin is connected. The result may be outdated immediately.
    pub(crate) fn is_active(&self) -> bool {
        self.nri.is_active()
    }

    /// Prevents plugins from joining while the guard is held.
    pub(crate) async fn block_joins(&self) -> JoinGuard<'_> {
        self.nri.block_joins().await
    }

    /// Calls the hook RunPodSandbox, before clients can see the pod.
    pub(crate) async fn run_pod_sandbox(
        &self,
        record: &SandboxRecord,
        live: &LiveShim,
        undo: &mut Undo,
    ) -> Result<(), Error> {
        if !self.nri.is_active() {
            return Ok(());
        }
        let pod = about::pod(record, Some(live));
        undo.push(Step::Announced(Announcement::Pod(Box::new(pod.clone()))));
        Ok(self.nri.run_pod(&record.id, || pod).await?)
    }

    /// Calls the hook StopContainer for each container of the pod, then StopPodSandbox.
    pub(crate) async fn stop_pod_sandbox(&self, sandbox: &Sandbox) {
        if !self.nri.is_active() {
            return;
        }
        for container in self.tables.containers_of(&sandbox.id) {
            self.stop_container(&container).await;
        }
        self.nri.stop_pod(&sandbox.id, || about::current_pod(sandbox)).await;
    }

    /// Calls the hook RemovePodSandbox.
    pub(crate) async fn remove_pod_sandbox(&self, sandbox: &Sandbox) {
        self.nri.remove_pod(&sandbox.id, || about::current_pod(sandbox)).await;
    }

    /// Calls the hook CreateContainer. Applies the adjustments of plugins to the spec and the record.
    pub(crate) async fn create_container(
        &self,
        pod: PodOf<'_>,
        record: &mut ContainerRecord,
        spec: &mut Spec,
        undo: &mut Undo,
    ) -> Result<(), Error> {
        if !self.nri.is_active() {
            return Ok(());
        }
        let container = about::container(record, spec);
        let about = (about::pod(&pod.sandbox.record, Some(pod.live)), container);
        undo.push(Step::Announced(Announcement::Container(Box::new(about.clone()))));
        let Some(adjustment) = self.nri.create_container(&record.id, || about).await? else { return Ok(()) };
        sysctls::check(&adjustment, pod.sandbox.config())?;
        let features = Features { unified: self.host.unified, hugetlb: self.host.hugetlb };
        apply(spec, &adjustment, features).map_err(|why| Error::invalid("NRI", why.to_string()))?;
        let devices: Vec<String> = adjustment.cdi_devices.iter().map(|device| device.name.clone()).collect();
        cdi::inject(spec, &devices, &self.cdi_dirs)
            .map_err(|why| Error::invalid("NRI", error::chain(&why)))?;
        if let Some(process) = spec.process_mut() {
            process.set_oom_score_adj(process.oom_score_adj().map(|score| self.host.oom_score(score.into())));
        }
        record.late_hooks = late_hooks::any(spec);
        let cgroup = adjustment.linux.map(|linux| linux.cgroups_path).unwrap_or_default();
        if !cgroup.is_empty() {
            record.cgroup = self.plugin_cgroup(cgroup)?;
            undo.push(Step::Cgroup(record.cgroup.clone()));
        }
        self.records.write_container(record)
    }

    /// The path of a cgroup that a plugin requests. With the systemd driver it may be in the form `slice:prefix:name`.
    fn plugin_cgroup(&self, requested: String) -> Result<String, Error> {
        let scope = Scope::parse(&requested).filter(|_| self.cgroup_driver == CgroupDriver::Systemd);
        let path = scope.map_or(requested, |scope| scope.path());
        if !path.starts_with('/') || !is_below_root(&path) {
            let why = format!("cgroup {path:?} of a plugin must be an absolute path below the root");
            return Err(Error::invalid("NRI", why));
        }
        Ok(path)
    }

    /// Calls the hook PostCreateContainer.
    pub(crate) async fn post_create_container(&self, container: &Container) {
        self.nri.post_create_container(|| self.about(container)).await;
    }

    /// Calls the hook StartContainer. Plugins can refuse the start.
    pub(crate) async fn start_container(&self, container: &Container) -> Result<(), Error> {
        let refused = self.nri.start_container(|| self.about(container)).await;
        if refused.is_err() {
            self.stop_container(container).await;
        }
        Ok(refused?)
    }

    /// Calls the hook PostStartContainer.
    pub(crate) async fn post_start_container(&self, container: &Container) {
        self.nri.post_start_container(|| self.about(container)).await;
    }

    /// Calls the hook UpdateContainer. Returns the requested limits with the changes of plugins.
    pub(crate) async fn update_container(
        &self,
        container: &Container,
        requested: cri::LinuxContainerResources,
    ) -> Result<cri::LinuxContainerResources, Error> {
        let changed =
            self.nri.update_container(|| self.about(container), || limits::to_nri(&requested)).await?;
        let Some(changed) = changed else { return Ok(requested) };
        let limits = limits::to_cri(&changed).map_err(|why| Error::invalid("NRI", why))?;
        // NRI has no field for the OOM score.
        Ok(cri::LinuxContainerResources { oom_score_adj: requested.oom_score_adj, ..limits })
    }

    /// Calls the hook PostUpdateContainer.
    pub(crate) async fn post_update_container(&self, container: &Container) {
        self.nri.post_update_container(|| self.about(container)).await;
    }

    /// Calls the hook UpdatePodSandbox. Plugins can refuse the new limits.
    pub(crate) async fn update_pod_sandbox(
        &self,
        sandbox: &Sandbox,
        request: &cri::UpdatePodSandboxResourcesRequest,
    ) -> Result<(), Error> {
        let overhead = request.overhead.as_ref().map(limits::to_nri);
        let resources = request.resources.as_ref().map(limits::to_nri);
        Ok(self.nri.update_pod(|| about::current_pod(sandbox), overhead, resources).await?)
    }

    /// Calls the hook PostUpdatePodSandbox.
    pub(crate) async fn post_update_pod_sandbox(&self, sandbox: &Sandbox) {
        self.nri.post_update_pod(|| about::current_pod(sandbox)).await;
    }

    /// Calls the hook StopContainer, once per container.
    pub(crate) async fn stop_container(&self, container: &Container) {
        self.nri.stop_container(&container.id, || self.about(container)).await;
    }

    /// Calls the hook StopContainer in a separate task.
    pub(crate) fn stop_container_in_background(&self, id: &str) {
        if !self.nri.is_active() {
            return;
        }
        if let Some(container) = self.tables.containers.get(id) {
            let hooks = self.clone();
            coracle_threads::spawn(async move { hooks.stop_container(&container).await });
        }
    }

    /// Calls the hook RemoveContainer.
    pub(crate) async fn remove_container(&self, container: &Container) {
        self.nri.remove_container(&container.id, || self.about(container)).await;
    }

    /// An existing container and its pod, in the types of NRI. The spec is read from its file: it is not kept in memory.
    fn about(&self, container: &Container) -> PodAndContainer {
        let sandbox = self.tables.sandboxes.get(&container.record.sandbox_id);
        let pod = sandbox
            .map(|sandbox| about::current_pod(&sandbox))
            .unwrap_or_else(|| PodSandbox { id: container.record.sandbox_id.clone(), ..Default::default() });
        (pod, about::container(&container.record_now(), &self.spec_of(&container.id)))
    }

    fn spec_of(&self, id: &str) -> Spec {
        let path = self.records.container_dir(id).join("config.json");
        Spec::load(&path).unwrap_or_else(|error| {
            warn!(container = id, %error, "cannot read the spec of a container for NRI plugins");
            Spec::default()
        })
    }
}
