//! NRI plugins and the runtime: what they are told, and what they ask for.
//!
//! The hooks stand where containerd has them. Locks are taken in one order: the pass that keeps plugins from
//! joining, then a container's `starting`.

pub(crate) mod about;
mod late_hooks;
pub(crate) mod limits;
mod sysctls;

use std::sync::Arc;

use coracle_nri::apply::{Abilities, apply};
use coracle_nri::{About, Host, Known, Runs};
use coracle_proto::cri;
use coracle_proto::nri::{ContainerEviction, ContainerUpdate};
use coracle_systemd::Scope;
use futures::future::BoxFuture;
use oci_spec::runtime::Spec;
use tracing::warn;

use crate::cdi;
use crate::cgroup::driver::CgroupDriver;
use crate::cgroup::is_below_root;
use crate::container::Container;
use crate::error::{self, Error};
use crate::records::{ContainerRecord, SandboxRecord};
use crate::runtime::{Inner, Runtime};
use crate::sandbox::{Live, Sandbox};
use crate::undo::{Step, Undo};

/// What plugins were told of something that is being made: taken back when it is not.
pub(crate) enum Told {
    /// A pod.
    Pod(Box<coracle_proto::nri::PodSandbox>),
    /// A container.
    Container(Box<About>),
}

impl std::fmt::Debug for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pod(pod) => write!(f, "pod {}", pod.id),
            Self::Container(about) => write!(f, "container {}", about.1.id),
        }
    }
}

// === impl Told ===

impl Told {
    /// Tells plugins that it is gone.
    pub(crate) async fn take_back(&self, inner: &Inner) {
        match self {
            Self::Pod(pod) => inner.nri.remove_pod(&pod.id, || pod.as_ref().clone()).await,
            Self::Container(about) => inner.nri.undo_create(&about.1.id, || about.as_ref().clone()).await,
        }
    }
}

impl Runtime {
    /// Starts what the settings ask for. Without NRI pods run as well.
    pub(crate) async fn start_plugins(&self) {
        let host: Arc<dyn Host> = Arc::<Inner>::clone(&self.inner);
        if let Err(error) = self.inner.nri.start(Arc::downgrade(&host)).await {
            let socket = self.inner.nri.socket();
            warn!(?socket, %error, "cannot listen for NRI plugins: there will be none");
        }
    }

    /// Tells that a pod runs, before anybody can see it.
    pub(crate) async fn tell_pod_runs(
        &self,
        record: &SandboxRecord,
        live: &Live,
        undo: &mut Undo,
    ) -> Result<(), Error> {
        if !self.inner.nri.is_active() {
            return Ok(());
        }
        let pod = about::pod(record, Some(live));
        undo.push(Step::Told(Told::Pod(Box::new(pod.clone()))));
        Ok(self.inner.nri.run_pod(&record.id, || pod).await?)
    }

    /// Tells that a pod's containers have ended, then that the pod has.
    pub(crate) async fn tell_pod_stopped(&self, sandbox: &Sandbox) {
        if !self.inner.nri.is_active() {
            return;
        }
        for container in self.containers_of(&sandbox.id) {
            self.tell_stopped(&container).await;
        }
        self.inner.nri.stop_pod(&sandbox.id, || about::pod_now(sandbox)).await;
    }

    /// Tells that a pod is gone.
    pub(crate) async fn tell_pod_removed(&self, sandbox: &Sandbox) {
        self.inner.nri.remove_pod(&sandbox.id, || about::pod_now(sandbox)).await;
    }

    /// Asks what plugins want changed of a container that is about to be made, and changes it.
    pub(crate) async fn adjust(
        &self,
        (sandbox, live): (&Sandbox, &Live),
        record: &mut ContainerRecord,
        spec: &mut Spec,
        undo: &mut Undo,
    ) -> Result<(), Error> {
        let nri = &self.inner.nri;
        if !nri.is_active() {
            return Ok(());
        }
        let container = about::container(record, spec);
        let about = (about::pod(&sandbox.record, Some(live)), container);
        undo.push(Step::Told(Told::Container(Box::new(about.clone()))));
        let Some(adjustment) = nri.create_container(&record.id, || about).await? else { return Ok(()) };
        sysctls::check(&adjustment, sandbox.config())?;
        let abilities = Abilities { unified: self.inner.host.unified, hugetlb: self.inner.host.hugetlb };
        apply(spec, &adjustment, abilities).map_err(|why| Error::invalid("NRI", why.to_string()))?;
        let devices: Vec<String> = adjustment.cdi_devices.iter().map(|device| device.name.clone()).collect();
        cdi::inject(spec, &devices, &self.inner.config.cdi_dirs)
            .map_err(|why| Error::invalid("NRI", error::chain(&why)))?;
        if let Some(process) = spec.process_mut() {
            process.set_oom_score_adj(
                process.oom_score_adj().map(|score| self.inner.host.oom_score(score.into())),
            );
        }
        record.late_hooks = late_hooks::any(spec);
        let cgroup = adjustment.linux.map(|linux| linux.cgroups_path).unwrap_or_default();
        if !cgroup.is_empty() {
            let scope = Scope::parse(&cgroup).filter(|_| self.inner.layout.driver() == CgroupDriver::Systemd);
            let cgroup = scope.map_or(cgroup, |scope| scope.path());
            if !cgroup.starts_with('/') || !is_below_root(&cgroup) {
                let why =
                    format!("the cgroup {cgroup:?} of an NRI plugin is no absolute path below the root");
                return Err(Error::invalid("NRI", why));
            }
            record.cgroup = cgroup;
            undo.push(Step::Cgroup(record.cgroup.clone()));
        }
        self.inner.records.write_container(record)
    }

    /// Tells that a container was made.
    pub(crate) async fn tell_created(&self, container: &Container) {
        self.inner.nri.post_create_container(|| self.about(container)).await;
    }

    /// Tells that a container is about to be started, which plugins may refuse.
    pub(crate) async fn tell_starting(&self, container: &Container) -> Result<(), Error> {
        let refused = self.inner.nri.start_container(|| self.about(container)).await;
        if refused.is_err() {
            self.tell_stopped(container).await;
        }
        Ok(refused?)
    }

    /// Tells that a container was started.
    pub(crate) async fn tell_started(&self, container: &Container) {
        self.inner.nri.post_start_container(|| self.about(container)).await;
    }

    /// Asks what plugins make of new limits.
    pub(crate) async fn ask_about_update(
        &self,
        container: &Container,
        asked: cri::LinuxContainerResources,
    ) -> Result<cri::LinuxContainerResources, Error> {
        let nri = &self.inner.nri;
        let changed = nri.update_container(|| self.about(container), || limits::to_nri(&asked)).await?;
        let Some(changed) = changed else { return Ok(asked) };
        let limits = limits::to_cri(&changed).map_err(|why| Error::invalid("NRI", why))?;
        // Plugins have no word for it.
        Ok(cri::LinuxContainerResources { oom_score_adj: asked.oom_score_adj, ..limits })
    }

    /// Tells that a container has new limits.
    pub(crate) async fn tell_updated(&self, container: &Container) {
        self.inner.nri.post_update_container(|| self.about(container)).await;
    }

    /// Tells that a pod is about to get new limits, which plugins may refuse.
    pub(crate) async fn ask_about_pod_update(
        &self,
        sandbox: &Sandbox,
        request: &cri::UpdatePodSandboxResourcesRequest,
    ) -> Result<(), Error> {
        let overhead = request.overhead.as_ref().map(limits::to_nri);
        let resources = request.resources.as_ref().map(limits::to_nri);
        Ok(self.inner.nri.update_pod(|| about::pod_now(sandbox), overhead, resources).await?)
    }

    /// Tells that a pod has new limits.
    pub(crate) async fn tell_pod_updated(&self, sandbox: &Sandbox) {
        self.inner.nri.post_update_pod(|| about::pod_now(sandbox)).await;
    }

    /// Tells that a container has ended, unless that is known.
    pub(crate) async fn tell_stopped(&self, container: &Container) {
        self.inner.nri.stop_container(&container.id, || self.about(container)).await;
    }

    /// The same beside what is going on.
    pub(crate) fn tell_stopped_later(&self, id: &str) {
        if !self.inner.nri.is_active() {
            return;
        }
        if let Some(container) = self.inner.containers.get(id) {
            let runtime = self.clone();
            tokio::spawn(async move { runtime.tell_stopped(&container).await });
        }
    }

    /// Tells that a container is about to be forgotten.
    pub(crate) async fn tell_removed(&self, container: &Container) {
        self.inner.nri.remove_container(&container.id, || self.about(container)).await;
    }

    /// A container that exists, with its pod. Its spec is read again: it is kept nowhere else.
    pub(crate) fn about(&self, container: &Container) -> About {
        let sandbox = self.inner.sandboxes.get(&container.record.sandbox_id);
        let pod = sandbox.map(|sandbox| about::pod_now(&sandbox)).unwrap_or_else(|| {
            coracle_proto::nri::PodSandbox { id: container.record.sandbox_id.clone(), ..Default::default() }
        });
        (pod, about::container(&container.record_now(), &self.spec_of(&container.id)))
    }

    fn spec_of(&self, id: &str) -> Spec {
        let path = self.inner.records.container_dir(id).join("config.json");
        Spec::load(&path).unwrap_or_else(|error| {
            warn!(container = id, %error, "could not read a container's spec for NRI plugins");
            Spec::default()
        })
    }
}

// === impl Host ===

impl Host for Inner {
    fn known(&self) -> Known {
        let sandboxes = self.sandboxes.all();
        let pods = sandboxes.iter().map(|sandbox| {
            let runs = if sandbox.live().is_some() { Runs::Yes } else { Runs::No };
            (about::pod_now(sandbox), runs)
        });
        let containers = self.containers.all();
        let containers = containers.iter().filter(|container| container.visible()).map(|container| {
            let path = self.records.container_dir(&container.id).join("config.json");
            about::container(&container.record_now(), &Spec::load(path).unwrap_or_default())
        });
        Known { pods: pods.collect(), containers: containers.collect() }
    }

    fn update(self: Arc<Self>, update: ContainerUpdate) -> BoxFuture<'static, Result<(), String>> {
        Box::pin(async move {
            let Some(container) = self.containers.get(&update.container_id) else { return Ok(()) };
            let asked = update.linux.and_then(|linux| linux.resources).unwrap_or_default();
            let limits = limits::to_cri(&asked)?;
            let runtime = Runtime { inner: self };
            runtime.update_limits(&container, limits).await.map_err(|error| error.chain())
        })
    }

    fn evict(self: Arc<Self>, eviction: ContainerEviction) -> BoxFuture<'static, Result<(), String>> {
        Box::pin(async move {
            let Some(container) = self.containers.get(&eviction.container_id) else { return Ok(()) };
            let runtime = Runtime { inner: self };
            runtime.kill_container(&container).await.map_err(|error| error.chain())
        })
    }
}
