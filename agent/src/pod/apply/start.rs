//! Start of containers: image, environment, mounts, create, start, postStart.

use std::collections::BTreeMap;
use std::net::IpAddr;

use coracle_error_chain::chain;
use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio_util::sync::CancellationToken;

use super::mounts::RuntimeMounts;
use super::start_queue::StartQueue;
use super::{ApplyError, Job, Report};
use crate::cgroup::{CgroupError, CgroupParent, container_resources};
use crate::device_plugins::DeviceOptions;
use crate::event_recorder::{ContainerRef, Level};
use crate::pod::admit::{containers, unsupported};
use crate::pod::config::{container as container_config, files, hostname};
use crate::pod::env::{Addresses, Sources, environment, references};
use crate::pod::plan::StartContainer;
use crate::pod::pull::{self, Missing, Present, PullTask};
use crate::pod::state::{Failed, Shape, Waiting};
use crate::pod::{hook, security};
use crate::source::is_static;

/// Error of a start that the end of the pod has interrupted. It is not reported.
const ENDING: &str = "the pod is ending";

/// A failed container start.
#[derive(Debug)]
struct NotStarted {
    waiting: Waiting,
    failed: Failed,
}

impl NotStarted {
    fn config(message: impl ToString) -> Self {
        Self::new("CreateContainerConfigError", message, Failed::Start)
    }

    fn new(reason: &str, message: impl ToString, failed: Failed) -> Self {
        Self { waiting: Waiting { reason: reason.to_owned(), message: message.to_string() }, failed }
    }
}

/// The variables of a container and of its devices. The container's own variables take precedence.
fn with_device_env(devices: BTreeMap<String, String>, own: Vec<(String, String)>) -> Vec<(String, String)> {
    let is_own = |name: &String| own.iter().any(|(known, _)| known == name);
    let mut all: Vec<_> = devices.into_iter().filter(|(name, _)| !is_own(name)).collect();
    all.extend(own);
    all
}

/// The kind of a container for the metrics.
fn kind_of(shape: &Shape<'_>, name: &str) -> &'static str {
    let has = |containers: &[Container]| containers.iter().any(|container| container.name == name);
    match (has(shape.mains()), has(shape.inits())) {
        (true, _) => "container",
        (false, true) => "init_container",
        (false, false) => "ephemeral_container",
    }
}

/// Pulls the images of the container's image volumes with `pull`. Returns the ids of the images by volume name. The end
/// of the pod cancels a pull: a slow registry must not delay the end.
async fn pull_image_volumes<F: Future<Output = Result<Present, Missing>>>(
    pod: &Pod,
    container: &Container,
    interrupt: &CancellationToken,
    pull: impl Fn(Container) -> F,
) -> Result<BTreeMap<String, String>, NotStarted> {
    let mut ids = BTreeMap::new();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    for (volume, image) in volumes.filter_map(|volume| Some((volume, volume.image.as_ref()?))) {
        if !container.volume_mounts.iter().flatten().any(|mount| mount.name == volume.name) {
            continue;
        }
        // An image volume has the same fields as a container's image.
        let wanted = Container {
            name: container.name.clone(),
            image: image.reference.clone(),
            image_pull_policy: image.pull_policy.clone(),
            ..Container::default()
        };
        let present = match interrupt.run_until_cancelled(pull(wanted)).await {
            Some(Ok(present)) => present,
            Some(Err(missing)) => {
                return Err(NotStarted { waiting: missing.waiting, failed: missing.failed });
            }
            None => return Err(NotStarted::config(ENDING)),
        };
        ids.insert(volume.name.clone(), present.id);
    }
    Ok(ids)
}

impl Job {
    /// Starts each container as soon as its image is available. Containers whose images are available start in the
    /// order of the spec, because postStart hooks may rely on it. A failure does not delay the other containers.
    pub(super) async fn start_all(&mut self, starts: Vec<StartContainer>) -> Result<(), Vec<ApplyError>> {
        let spec = self.spec();
        let shape = Shape::of(&spec);
        let begun = |start: &StartContainer| {
            let pull = self.pulls.remove(&start.name);
            pull.or_else(|| Some(pull::begin(&self.node, &self.pod, &*shape.any(&start.name)?)))
        };
        let pulls: Vec<Option<PullTask>> = starts.iter().map(begun).collect();
        if let Err(not) = self.admit_by_policies(&starts).await {
            for start in starts {
                self.report(Report::NotStarted {
                    container: start.name,
                    waiting: not.waiting.clone(),
                    failed: not.failed.clone(),
                });
            }
            return Ok(());
        }
        let mut queue = StartQueue::new(starts.into_iter().zip(pulls));
        while let Some(Some((start, image))) = self.interrupt.run_until_cancelled(queue.next()).await {
            let Some(container) = shape.any(&start.name) else { continue };
            let started = match image {
                Ok(image) => self.start(&shape, &container, &start, image).await,
                Err(missing) => Err(NotStarted { waiting: missing.waiting, failed: missing.failed }),
            };
            if started.is_err() && self.interrupt.is_cancelled() {
                // The end of the pod may have interrupted the start. This is not a failure.
                break;
            }
            let failure = started.as_ref().err().map(|not| not.waiting.reason.as_str());
            self.node.metrics.container_started(kind_of(&shape, &start.name), failure);
            match started {
                Ok(()) => self.report(Report::Started { container: start.name, crashed: start.crashed }),
                Err(not) => self.report(Report::NotStarted {
                    container: start.name,
                    waiting: not.waiting,
                    failed: not.failed,
                }),
            }
        }
        Ok(())
    }

    /// Waits until the network policies hold for the addresses of the pod's sandbox.
    async fn admit_by_policies(&self, starts: &[StartContainer]) -> Result<(), NotStarted> {
        let Some(sandbox) = self.observed.sandbox() else { return Ok(()) };
        let ips: Vec<IpAddr> = sandbox.ips.iter().filter_map(|ip| ip.parse().ok()).collect();
        let admitted = self.node.policies.admit(&self.pod, &ips);
        match self.interrupt.run_until_cancelled(admitted).await {
            None | Some(Ok(())) => Ok(()),
            Some(Err(error)) => {
                let message = format!("network is not ready: {error}");
                self.node.recorder.pod(&self.pod, Level::Warning, "NetworkNotReady", message);
                let not = NotStarted::new("CreateContainerError", &error, Failed::Start);
                let containers = starts.iter().map(|start| start.name.clone()).collect();
                self.report(Report::PoliciesAwaited { containers, pending: error.pending });
                Err(not)
            }
        }
    }

    /// The parent cgroup of a container, with the limits that it needs: the pod may have been resized since its cgroup
    /// was made. While a resize is pending, running containers need the former limits.
    async fn cgroup_parent(&self, start: &StartContainer) -> Result<CgroupParent, CgroupError> {
        let cgroups = self.node.cgroups_of(&self.uid);
        if let Some(before) = &start.pod_before {
            cgroups.widen_pod(before, &self.pod).await?;
        } else if self.pod.metadata.generation.is_some_and(|generation| generation > 1) {
            return cgroups.ensure_pod(&self.pod).await;
        }
        cgroups.parent(&self.pod)
    }

    async fn start(
        &self,
        shape: &Shape<'_>,
        container: &Container,
        start: &StartContainer,
        image: Present,
    ) -> Result<(), NotStarted> {
        let Some(sandbox) = self.observed.sandbox() else { return Ok(()) };
        if let Some(old) = &start.instead_of {
            let request = cri::RemoveContainerRequest { container_id: old.clone() };
            let removed = self.node.runtime.remove_container(request).await;
            removed.map_err(|s| NotStarted::new("CreateContainerError", s.message(), Failed::Start))?;
        }
        let made = self.container_config(shape, container, start.attempt, image).await;
        let config = made.inspect_err(|not| {
            // The end of the pod may have interrupted the start.
            if !self.interrupt.is_cancelled() {
                self.record_failure(container, &not.waiting.message);
            }
        })?;
        let resources = config.linux.as_ref().and_then(|linux| linux.resources.as_ref());
        let cpus = resources.map(|resources| resources.cpuset_cpus.clone()).unwrap_or_default();
        let parent = self.cgroup_parent(start).await.map_err(NotStarted::config)?;
        let sandbox_config = self.sandbox_config(sandbox.attempt, &parent.0).config;
        let image_volumes = config.mounts.iter().filter(|mount| mount.image.is_some()).count();
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox.id.clone(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let created = self.node.runtime.create_container(request).await;
        if image_volumes > 0 {
            self.node.metrics.image_volumes_mounted(image_volumes, created.is_ok());
        }
        let created = created.map_err(|status| {
            self.record_failure(container, status.message());
            NotStarted::new("CreateContainerError", status.message(), Failed::Start)
        })?;
        let id = created.container_id;
        self.event(container, "Created", format!("Created container: {}", container.name));
        let request = cri::StartContainerRequest { container_id: id.clone() };
        if let Err(status) = self.node.runtime.start_container(request).await {
            self.record_failure(container, status.message());
            return Err(NotStarted::new("RunContainerError", status.message(), Failed::Run));
        }
        self.node.managers.started(&self.pod, &container.name, &id, &cpus);
        self.event(container, "Started", format!("Started container {}", container.name));
        self.post_start(container, &id).await
    }

    async fn post_start(&self, container: &Container, id: &str) -> Result<(), NotStarted> {
        let Some(handler) = container.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()) else {
            return Ok(());
        };
        let host_ips = self.node.host_ips();
        let target = hook::Target {
            namespace: self.pod.metadata.namespace.as_deref().unwrap_or_default(),
            runtime: &*self.node.runtime,
            container,
            id,
            ip: self.observed.sandbox().and_then(|s| s.ips.first()).or(host_ips.first()),
        };
        let run = hook::run(&target, handler, None);
        let Some(Err(error)) = self.interrupt.run_until_cancelled(run).await else { return Ok(()) };
        self.node.recorder.container(
            ContainerRef { pod: &self.pod, name: &container.name },
            Level::Warning,
            "FailedPostStartHook",
            format!("PostStartHook failed: {error}"),
        );
        self.report(Report::PostStartFailed { id: id.to_owned() });
        Err(NotStarted::new("PostStartHookError", error, Failed::Run))
    }

    async fn container_config(
        &self,
        shape: &Shape<'_>,
        container: &Container,
        attempt: u32,
        image: Present,
    ) -> Result<cri::ContainerConfig, NotStarted> {
        if shape.container(&container.name).is_none() {
            self.check_added(container)?;
        }
        let sources = self.sources(container).await?;
        let env = environment(&self.pod, container, &sources).map_err(NotStarted::config)?;
        if shape.spec.host_users == Some(false) {
            // If the record of a running pod is damaged, its ids are read from the runtime.
            self.node.user_ids.restore(&*self.node.runtime).await.map_err(NotStarted::config)?;
        }
        let users = self.node.user_ids.mapping(&self.uid);
        let mut security =
            security::container(shape.spec, container, &image.user, &self.node.seccomp(), users)
                .map_err(NotStarted::config)?;
        if let Some(target) = shape.target(&container.name) {
            let options = security.namespace_options.get_or_insert_default();
            options.pid = cri::NamespaceMode::Target.into();
            options.target_id = self.target(target)?;
        }
        let runtime = RuntimeMounts {
            images: self.image_volumes(container).await?,
            recursive_read_only: self.recursive_read_only(container).await?,
            mount_options: self.applies_mount_options(container).await?,
        };
        let volumes = self.volume_mounts(container, &env, &runtime).await.map_err(NotStarted::config)?;
        let devices = self.device_options(container).await?;
        let mut mounts = [devices.mounts, volumes].concat();
        self.own_files(shape, container, attempt, &mut mounts).map_err(NotStarted::config)?;
        if let Some(users) = users {
            // Files on the node keep the ids that they have without a user namespace.
            for mount in &mut mounts {
                (mount.uid_mappings, mount.gid_mappings) = (vec![users], vec![users]);
            }
        }
        let claimed = self.node.dra.devices(&self.pod, container).map_err(NotStarted::config)?;
        let mut resources = container_resources(&self.pod, container, self.node.machine);
        self.node.managers.pin(&self.uid, &container.name, &mut resources);
        let parts = container_config::Parts {
            attempt,
            image_id: image.id,
            env: with_device_env(devices.env, env),
            mounts,
            resources,
            security,
            devices: devices.devices,
            cdi_devices: devices.cdi.into_iter().chain(claimed).collect(),
            annotations: devices.annotations,
        };
        container_config::config(&self.pod, container, parts).map_err(NotStarted::config)
    }

    /// The changes of the container's configuration for its devices.
    async fn device_options(&self, container: &Container) -> Result<DeviceOptions, NotStarted> {
        let options = self.node.devices.container_options(&self.pod, container);
        // The end of the pod cancels the call: a plugin that does not answer must not delay the end of the pod.
        match self.interrupt.run_until_cancelled(options).await {
            Some(options) => options.map_err(|error| NotStarted::config(chain(&error))),
            None => Err(NotStarted::config(ENDING)),
        }
    }

    /// Checks an ephemeral container, which was added after the pod's admission.
    fn check_added(&self, container: &Container) -> Result<(), NotStarted> {
        if let Some(spec) = &self.pod.spec {
            containers::check_added(spec, &container.name).map_err(NotStarted::config)?;
        }
        unsupported::check_added(container).map_err(NotStarted::config)?;
        let ignored = unsupported::ignored_by(container);
        if !ignored.is_empty() {
            let message = format!("This node ignores {}", ignored.join(", "));
            let recorder = &self.node.recorder;
            recorder.container(
                ContainerRef { pod: &self.pod, name: &container.name },
                Level::Warning,
                unsupported::UNSUPPORTED,
                message,
            );
        }
        Ok(())
    }

    /// The id of the running container with this name.
    fn target(&self, name: &str) -> Result<String, NotStarted> {
        let observed = self.observed.current(name).filter(|observed| observed.running());
        let missing = || NotStarted::config(format!("unable to find target container {name:?}"));
        observed.map(|observed| observed.id.clone()).ok_or_else(missing)
    }

    /// Pulls the images of the container's image volumes. Returns the ids of the images by volume name.
    async fn image_volumes(&self, container: &Container) -> Result<BTreeMap<String, String>, NotStarted> {
        let (node, pod) = (&*self.node, &*self.pod);
        let pull = |wanted: Container| async move { pull::ensure(node, pod, &wanted, None).await };
        pull_image_volumes(pod, container, &self.interrupt, pull).await
    }

    /// Whether the runtime supports recursive read-only mounts. The runtime is queried only if the container uses such
    /// a mount.
    async fn recursive_read_only(&self, container: &Container) -> Result<bool, NotStarted> {
        let mut mounts = container.volume_mounts.iter().flatten();
        if !mounts.any(|mount| mount.recursive_read_only.as_deref().is_some_and(|mode| mode != "Disabled")) {
            return Ok(false);
        }
        let status = self.node.runtime.status(cri::StatusRequest { verbose: false }).await;
        let status = status.map_err(|status| NotStarted::config(status.message()))?;
        let handler = self.runtime_handler().await.map_err(NotStarted::config)?;
        let known = status.runtime_handlers.into_iter().find(|known| known.name == handler);
        Ok(known.and_then(|known| known.features).is_some_and(|has| has.recursive_read_only_mounts))
    }

    /// Whether the runtime applies mount options. The runtime is queried only if the container has mount options.
    async fn applies_mount_options(&self, container: &Container) -> Result<bool, NotStarted> {
        let mut mounts = container.volume_mounts.iter().flatten();
        if mounts.all(|mount| self.mount_options(mount).is_empty()) {
            return Ok(false);
        }
        let status = self.node.runtime.status(cri::StatusRequest { verbose: false }).await;
        let status = status.map_err(|status| NotStarted::config(status.message()))?;
        Ok(status.features.is_some_and(|features| features.mount_options))
    }

    /// Reads the objects and files that the container's environment refers to.
    async fn sources(&self, container: &Container) -> Result<Sources, NotStarted> {
        let namespace = self.pod.metadata.namespace.as_deref().unwrap_or_default();
        let references = references(container);
        let (mut config_maps, mut found_secrets) = (BTreeMap::new(), BTreeMap::new());
        let configs = &self.node.configs;
        for name in references.config_maps {
            let map = configs.get(namespace, &name).await;
            config_maps.insert(name, map.map_err(NotStarted::config)?);
        }
        for name in references.secrets {
            let secret = configs.get(namespace, &name).await;
            found_secrets.insert(name, secret.map_err(NotStarted::config)?);
        }
        let links = self.pod.spec.as_ref().and_then(|s| s.enable_service_links) != Some(false);
        let services = self.node.services.environment(links.then_some(namespace)).await;
        let services = match services {
            // As upstream, a static pod does not wait for the services: it may be the API server.
            Err(_) if is_static(&self.uid) => Vec::new(),
            services => services.map_err(NotStarted::config)?,
        };
        let sandbox_ips = self.observed.sandbox().map(|s| s.ips.clone()).filter(|ips| !ips.is_empty());
        Ok(Sources {
            config_maps,
            secrets: found_secrets,
            files: self.env_files(container).await.map_err(NotStarted::config)?,
            services,
            addresses: Addresses {
                pod_ips: sandbox_ips.unwrap_or_else(|| self.node.host_ips()),
                host_ips: self.node.host_ips(),
            },
            node: self.node.volumes.allocatable().clone(),
        })
    }

    /// The files that the pod's containers share, and the container's termination message file.
    fn own_files(
        &self,
        shape: &Shape<'_>,
        container: &Container,
        attempt: u32,
        mounts: &mut Vec<cri::Mount>,
    ) -> std::io::Result<()> {
        let dir = self.node.volumes.pod_dir(&self.uid);
        if !mounts.iter().any(|m| m.container_path == "/etc/hosts") {
            let path = dir.join(files::HOSTS);
            let aliases = shape.spec.host_aliases.as_deref().unwrap_or_default();
            let text = if shape.spec.host_network == Some(true) {
                files::host_hosts(&files::node_hosts()?, aliases)
            } else {
                let ips = self.observed.sandbox().map(|s| s.ips.clone()).unwrap_or_default();
                let (name, domain) = hostname(&self.pod, &self.node.config.cluster_domain);
                files::hosts(&ips, &name, domain.as_deref(), aliases)
            };
            files::write_shared(&path, &text)?;
            mounts.push(files::bind("/etc/hosts", &path));
        }
        let security = container.security_context.as_ref();
        let readonly = security.is_some_and(|own| own.read_only_root_filesystem == Some(true));
        let shared = files::sandbox_mounts(&dir, mounts, readonly);
        mounts.extend(shared);
        let message = files::make_message_file(&dir.join("containers").join(&container.name), attempt)?;
        mounts.push(files::bind(&container_config::message_path(container).to_string_lossy(), &message));
        Ok(())
    }

    fn record_failure(&self, container: &Container, message: &str) {
        let message = format!("Error: {message}");
        self.node.recorder.container(
            ContainerRef { pod: &self.pod, name: &container.name },
            Level::Warning,
            "Failed",
            message,
        );
    }

    fn event(&self, container: &Container, reason: &'static str, message: String) {
        self.node.recorder.container(
            ContainerRef { pod: &self.pod, name: &container.name },
            Level::Normal,
            reason,
            message,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use futures::FutureExt;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_end_of_a_pod_cancels_the_pull_of_an_image_volume() {
        let volumes = json!([{"name": "v", "image": {"reference": "i:1"}}, {"name": "w", "image": {}}]);
        let pod = json!({"spec": {"containers": [], "volumes": volumes}});
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let container = json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        let container: Container = serde_json::from_value(container).unwrap();
        let interrupt = CancellationToken::new();
        let present = |wanted: Container| {
            let id = wanted.image.unwrap_or_default();
            ready(Ok(Present { id, user: security::ImageUser { uid: None, name: String::new() } }))
        };
        let pulled = pull_image_volumes(&pod, &container, &interrupt, present).now_or_never();
        assert_eq!(pulled.unwrap().unwrap(), BTreeMap::from([("v".to_owned(), "i:1".to_owned())]));
        let mut pulling = Box::pin(pull_image_volumes(&pod, &container, &interrupt, |_| pending()));
        assert!(pulling.as_mut().now_or_never().is_none());
        interrupt.cancel();
        assert!(pulling.now_or_never().unwrap().is_err());
    }
}
