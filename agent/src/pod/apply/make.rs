//! Preparation of a pod: cgroup, volumes, first images and sandbox.

use std::fs::DirBuilder;
use std::time::Instant;

use coracle_error_chain::chain;
use coracle_proto::cri;

use super::{ApplyError, Job, Report, SandboxConfig};
use crate::checkpoint::runtime_class;
use crate::device_plugins::DeviceError;
use crate::event_recorder::Level;
use crate::pod::admit;
use crate::pod::config::files;
use crate::pod::config::sandbox::log_dir_name;
use crate::pod::pull;
use crate::pod::resize::is_unfinished;
use crate::pod::state::{SANDBOX, Shape, VOLUMES};
use crate::pod_logs;
use crate::volume;

impl Job {
    /// Creates the cgroup and the volumes, or adopts the cgroup and the volumes that an earlier agent created.
    pub(super) async fn prepare(&mut self) -> Result<(), Vec<ApplyError>> {
        // A resize that an earlier agent began continues after the preparation. The resize checks the memory usage, and
        // changes the cgroups of pod and containers in an order that the kernel accepts.
        if !self.observed.alive() || !is_unfinished(&self.pod) {
            self.node
                .cgroups_of(&self.uid)
                .ensure_pod(&self.pod)
                .await
                .map_err(|e| vec![ApplyError::Cgroup(e)])?;
        }
        self.mount().await;
        Ok(())
    }

    /// Prepares the pod's claims and mounts its volumes.
    async fn mount(&self) {
        let preparing = self.node.dra.prepare(&self.pod);
        let Some(prepared) = self.interrupt.run_until_cancelled(preparing).await else { return };
        if let Err(error) = prepared {
            // The kubelet's reason and message (`SyncPod` of pkg/kubelet/kuberuntime).
            let message = format!("Failed to prepare dynamic resources: {}", chain(&error));
            self.node.recorder.pod(&self.pod, Level::Warning, "FailedPrepareDynamicResources", message);
            self.report(Report::NotPrepared(VOLUMES));
            return;
        }
        let mounting = volume::mount_all(&self.node.volumes, &self.pod);
        let Some(mounted) = self.interrupt.run_until_cancelled(mounting).await else { return };
        match mounted {
            Ok(volumes) => self.report(Report::Prepared(volumes)),
            Err(error) => {
                let (reason, message) = error.event();
                self.node.recorder.pod(&self.pod, Level::Warning, reason, message);
                self.report(Report::NotPrepared(VOLUMES));
            }
        }
    }

    /// Allocates the pod's devices. Returns false if the pod must not start now.
    pub(super) async fn allocate_devices(&self) -> bool {
        let allocating = self.node.devices.allocate(&self.pod);
        let message = match self.interrupt.run_until_cancelled(allocating).await {
            Some(Ok(())) => return true,
            None => return false,
            Some(Err(DeviceError::Reject(reason))) => {
                self.report(Report::Rejected(admit::devices_unavailable(&reason)));
                return false;
            }
            Some(Err(error)) => format!("Failed to allocate devices: {}", chain(&error)),
        };
        self.node.recorder.pod(&self.pod, Level::Warning, "FailedAllocateDevices", message);
        self.report(Report::NotPrepared(SANDBOX));
        false
    }

    /// Creates the next sandbox while volumes are mounted and the first images are pulled. Pulls may take longer than
    /// the sandbox: each container waits for its own image.
    pub(super) async fn make_sandbox(
        &mut self,
        attempt: u32,
        first: &[String],
    ) -> Result<(), Vec<ApplyError>> {
        if !self.observed.sandboxes.is_empty() {
            // The kubelet's message for a replaced sandbox (`SyncPod` of pkg/kubelet/kuberuntime).
            let message = "Pod sandbox changed, it will be killed and re-created.".to_owned();
            self.node.recorder.pod(&self.pod, Level::Normal, "SandboxChanged", message);
        }
        for old in &self.observed.sandboxes {
            // Releases the network of a sandbox whose shim has exited. Stopping a stopped sandbox does nothing.
            let request = cri::StopPodSandboxRequest { pod_sandbox_id: old.id.clone() };
            let stopped = self.node.runtime.stop_pod_sandbox(request).await;
            stopped.map_err(|s| vec![self.runtime_error("StopPodSandbox", &old.id)(s)])?;
        }
        let parent = self.node.cgroups_of(&self.uid).ensure_pod(&self.pod).await;
        let parent = parent.map_err(|error| vec![ApplyError::Cgroup(error)])?;
        if self.pod.spec.as_ref().and_then(|spec| spec.host_users) == Some(false) {
            let allocated = self.node.user_ids.allocate(&self.uid, &*self.node.runtime).await;
            allocated.map_err(|error| vec![ApplyError::UserIds(error)])?;
        }
        let SandboxConfig { config, is_cluster_dns_missing, omitted } =
            self.sandbox_config(attempt, &parent.0);
        if is_cluster_dns_missing {
            self.report_missing_dns();
        }
        for message in omitted {
            self.node.recorder.pod(&self.pod, Level::Warning, "DNSConfigForming", message);
        }
        self.pull_first(first);
        let mounting = async {
            if self.volumes.is_none() {
                self.mount().await;
            }
        };
        tokio::join!(self.run_sandbox(config), mounting);
        Ok(())
    }

    async fn run_sandbox(&self, config: cri::PodSandboxConfig) {
        let ran = self.request_sandbox(config).await;
        self.node.metrics.pod_started(ran.is_ok());
        if self.pod.spec.as_ref().and_then(|spec| spec.host_users) == Some(false) {
            self.node.metrics.user_namespaced_pod_started(ran.is_ok());
        }
        match ran {
            Ok(()) => self.report(Report::SandboxMade),
            Err(error) => {
                for (reason, message) in sandbox_events(&error, self.network_error().await) {
                    self.node.recorder.pod(&self.pod, Level::Warning, reason, message);
                }
                self.report(Report::NotPrepared(SANDBOX));
            }
        }
    }

    /// The reason why a pod with its own network cannot start now. `None` if the network is ready or the runtime does
    /// not respond.
    async fn network_error(&self) -> Option<String> {
        if self.pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true) {
            return None;
        }
        network_error(self.node.runtime.status(cri::StatusRequest { verbose: false }).await.ok()?)
    }

    /// Makes the log directory and the pod's files, and requests the sandbox with the handler of the pod's
    /// RuntimeClass. The error is a message for an event. If the class does not exist, or the runtime does not have its
    /// handler, the pod stays Pending.
    async fn request_sandbox(&self, config: cri::PodSandboxConfig) -> Result<(), String> {
        let logs = self.node.config.pod_log_dir.join(log_dir_name(&self.pod));
        let made =
            pod_logs::change(logs.clone(), |logs| DirBuilder::new().recursive(true).create(logs)).await;
        made.map_err(|error| format!("cannot make {}: {error}", logs.display()))?;
        let dir = self.node.volumes.pod_dir(&self.uid);
        files::write_sandbox_files(&dir, &config).map_err(|error| error.to_string())?;
        let runtime_handler = self.runtime_handler().await?;
        let handler = runtime_handler.clone();
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler };
        let begun = Instant::now();
        let ran = self.node.runtime.run_pod_sandbox(request).await;
        self.node.metrics.sandbox_run(&handler, begun.elapsed(), ran.is_ok());
        ran.map(drop).map_err(|status| status.message().to_owned())
    }

    /// The handler of the pod's RuntimeClass, empty for a pod without a RuntimeClass. An error is a message.
    pub(super) async fn runtime_handler(&self) -> Result<String, String> {
        let Some(class) = runtime_class(&self.pod) else { return Ok(String::new()) };
        match self.node.configs.runtime_handler(class).await {
            Ok(Some(handler)) => Ok(handler),
            Ok(None) => Err(format!("runtimeclass.node.k8s.io {class:?} not found")),
            Err(error) => Err(chain(&error)),
        }
    }

    /// Starts the pulls of the first containers, unless an earlier attempt has started them.
    fn pull_first(&mut self, first: &[String]) {
        let spec = self.spec();
        let shape = Shape::of(&spec);
        for container in first.iter().filter_map(|name| shape.container(name)) {
            let pull = self.pulls.remove(&container.name);
            let pull = pull.unwrap_or_else(|| pull::begin(&self.node, &self.pod, container));
            self.report(Report::Pulling { container: container.name.clone(), pull });
        }
    }

    fn report_missing_dns(&self) {
        let meta = &self.pod.metadata;
        let text = |s: &Option<String>| s.clone().unwrap_or_default();
        let message = format!(
            "pod: \"{}_{}({})\". kubelet does not have ClusterDNS IP configured and cannot create Pod using \
             \"ClusterFirst\" policy. Falling back to \"Default\" policy.",
            text(&meta.name),
            text(&meta.namespace),
            text(&meta.uid)
        );
        self.node.recorder.pod(&self.pod, Level::Warning, "MissingClusterDNS", message);
    }
}

/// The events of a sandbox that could not be created. The error of the sandbox is always among them: the failure may
/// have another cause than the network. `network` is the message about a network that is not ready.
fn sandbox_events(error: &str, network: Option<String>) -> Vec<(&'static str, String)> {
    let failed = ("FailedCreatePodSandBox", format!("Failed to create pod sandbox: {error}"));
    network.map(|message| ("NetworkNotReady", message)).into_iter().chain([failed]).collect()
}

/// The kubelet's message (`NetworkNotReadyErrorMsg`) for a runtime whose network is not ready.
fn network_error(status: cri::StatusResponse) -> Option<String> {
    let conditions = status.status?.conditions;
    let network = conditions.into_iter().find(|one| one.r#type == "NetworkReady" && !one.status)?;
    Some(format!(
        "network is not ready: container runtime network not ready: NetworkReady=false reason:{} message:{}",
        network.reason, network.message
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_sandbox_is_shown_also_while_the_network_is_not_ready() {
        let events = |network: Option<&str>| sandbox_events("no such handler", network.map(str::to_owned));
        let failed = ("FailedCreatePodSandBox", "Failed to create pod sandbox: no such handler".to_owned());
        assert_eq!(events(None), std::slice::from_ref(&failed));
        let network = ("NetworkNotReady", "network is not ready".to_owned());
        assert_eq!(events(Some("network is not ready")), [network, failed]);
    }

    #[test]
    fn a_network_that_is_not_ready_has_its_own_reason() {
        let with = |status: bool| {
            let network = cri::RuntimeCondition {
                r#type: "NetworkReady".to_owned(),
                status,
                reason: "NetworkPluginNotReady".to_owned(),
                message: "no address range".to_owned(),
            };
            let status = Some(cri::RuntimeStatus { conditions: vec![network] });
            network_error(cri::StatusResponse { status, ..cri::StatusResponse::default() })
        };
        assert_eq!(with(true), None);
        let message = "network is not ready: container runtime network not ready: NetworkReady=false \
                       reason:NetworkPluginNotReady message:no address range";
        assert_eq!(with(false).as_deref(), Some(message));
        assert_eq!(network_error(cri::StatusResponse::default()), None);
    }
}
