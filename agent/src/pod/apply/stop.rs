//! Stop of containers and pods: preStop, stop signal, grace period, SIGKILL.

use std::path::Path;
use std::time::Duration;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::jiff::Timestamp;

use super::{ApplyError, Job, Report};
use crate::event_recorder::{ContainerRef, Level};
use crate::pod::hook;
use crate::pod::state::{ObservedContainer, Shape, is_sidecar};
use crate::pod_logs;
use crate::runtime::RuntimeError;

/// Minimum grace period in seconds after the preStop hook, as in the kubelet.
const MIN_AFTER_HOOK: i64 = 2;

impl Job {
    /// Stops one container while its pod continues.
    pub(super) async fn stop_one(
        &mut self,
        id: &str,
        name: &str,
        grace: i64,
        message: &str,
    ) -> Result<(), Vec<ApplyError>> {
        self.node.recorder.container(
            ContainerRef { pod: &self.pod, name },
            Level::Normal,
            "Killing",
            message,
        );
        let stopping = self.hook_and_stop(id, name, grace);
        match self.interrupt.run_until_cancelled(stopping).await {
            None => Ok(()),
            Some(stopped) => stopped.map_err(|e| vec![e]),
        }
    }

    /// Stops all containers except sidecars at the same time, then the sidecars in reverse order, then the sandboxes.
    /// Then releases the pod's CPUs and memory, unprepares its claims and frees its devices.
    pub(super) async fn stop_pod(&mut self, grace: i64) -> Result<(), Vec<ApplyError>> {
        let stopping = self.stop_containers(grace);
        let Some(stopped) = self.interrupt.run_until_cancelled(stopping).await else { return Ok(()) };
        let mut errors = stopped;
        let sandboxes: Vec<String> = self.observed.sandboxes.iter().map(|s| s.id.clone()).collect();
        errors.extend(self.stop_sandboxes(&sandboxes).await);
        if errors.is_empty() {
            // The end of the pod is reported only after these steps: then the control plane may give its CPUs and
            // devices to another pod.
            self.node.managers.release(&self.uid);
            errors.extend(self.node.dra.unprepare(&self.uid).await.map_err(ApplyError::Claims).err());
            self.node.devices.release(&self.uid).await;
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Stops sandboxes, and reports each success to the worker: the runtime shows a sandbox whose stop has failed as
    /// not ready, too.
    pub(super) async fn stop_sandboxes(&self, ids: &[String]) -> Vec<ApplyError> {
        let mut errors = Vec::new();
        for id in ids {
            let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.clone() };
            match self.node.runtime.stop_pod_sandbox(request).await {
                Ok(_) => self.report(Report::Stopped { sandbox: id.clone() }),
                Err(error) => errors.push(self.runtime_error("StopPodSandbox", id)(error)),
            }
        }
        errors
    }

    async fn stop_containers(&self, grace: i64) -> Vec<ApplyError> {
        let spec = self.spec();
        let shape = Shape::of(&spec);
        let began = Timestamp::now();
        let left = || (grace - (Timestamp::now() - began).get_seconds()).max(0);
        let sidecars: Vec<&str> =
            shape.inits().iter().filter(|c| is_sidecar(c)).map(|c| c.name.as_str()).collect();
        let alive = |wanted: &dyn Fn(&ObservedContainer) -> bool| -> Vec<ObservedContainer> {
            self.observed.containers.iter().filter(|c| c.may_run() && wanted(c)).cloned().collect()
        };
        let mut errors = Vec::new();
        let mains = alive(&|c| !sidecars.contains(&c.name.as_str()));
        let stops = mains.iter().map(|c| self.announce_and_stop(c, left()));
        errors.extend(futures::future::join_all(stops).await.into_iter().filter_map(Result::err));
        for name in sidecars.iter().rev() {
            for sidecar in alive(&|c| c.name == **name) {
                errors.extend(self.announce_and_stop(&sidecar, left()).await.err());
            }
        }
        errors
    }

    /// Records the event that a container is stopped.
    pub(super) fn announce_stop(&self, observed: &ObservedContainer) {
        let message = format!("Stopping container {}", observed.name);
        let container = ContainerRef { pod: &self.pod, name: &observed.name };
        self.node.recorder.container(container, Level::Normal, "Killing", message);
    }

    async fn announce_and_stop(&self, observed: &ObservedContainer, grace: i64) -> Result<(), ApplyError> {
        self.announce_stop(observed);
        self.hook_and_stop(&observed.id, &observed.name, grace).await
    }

    async fn hook_and_stop(&self, id: &str, name: &str, grace: i64) -> Result<(), ApplyError> {
        let began = Timestamp::now();
        let spec = self.spec();
        let container = Shape::of(&spec).container(name);
        let mut timeout = grace;
        if let Some(container) = container.filter(|_| grace > 0 && !self.pre_stop_done.contains(id))
            && self.pre_stop(container, id, grace).await
        {
            timeout = (grace - (Timestamp::now() - began).get_seconds()).max(MIN_AFTER_HOOK);
        }
        let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout };
        match self.node.runtime.stop_container(request).await {
            Ok(_) | Err(RuntimeError::NotFound(_)) => Ok(()),
            Err(error) => Err(self.runtime_error("StopContainer", id)(error)),
        }
    }

    /// Runs the preStop hook, if there is one, within the grace period. A failure does not keep the container from
    /// ending.
    async fn pre_stop(&self, container: &Container, id: &str, grace: i64) -> bool {
        let Some(handler) = container.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref()) else {
            return false;
        };
        let host_ips = self.node.host_ips();
        let target = hook::Target {
            namespace: self.pod.metadata.namespace.as_deref().unwrap_or_default(),
            runtime: &*self.node.runtime,
            container,
            id,
            ip: self.observed.sandboxes.first().and_then(|s| s.ips.first()).or(host_ips.first()),
        };
        let limit = Duration::from_secs(grace.unsigned_abs());
        if let Err(error) = hook::run(&target, handler, Some(limit)).await {
            self.node.recorder.container(
                ContainerRef { pod: &self.pod, name: &container.name },
                Level::Warning,
                "FailedPreStopHook",
                format!("PreStopHook failed: {error}"),
            );
        }
        self.report(Report::PreStopDone { id: id.to_owned() });
        true
    }

    pub(super) async fn remove_containers(&mut self, ids: Vec<String>) -> Result<(), Vec<ApplyError>> {
        let mut errors = Vec::new();
        for id in ids {
            self.remove_log(&id).await;
            let request = cri::RemoveContainerRequest { container_id: id.clone() };
            if let Err(status) = self.node.runtime.remove_container(request).await {
                errors.push(self.runtime_error("RemoveContainer", &id)(status));
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Removes the log files of a removed container, including the rotated files.
    async fn remove_log(&self, id: &str) {
        let Some(observed) = self.observed.containers.iter().find(|c| c.id == id) else { return };
        let of_pod = crate::pod::config::sandbox::log_dir_name(&self.pod);
        let dir = self.node.config.pod_log_dir.join(of_pod).join(&observed.name);
        let prefix = format!("{}.log", observed.attempt);
        let remove = move |dir: &Path| {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.file_name().to_string_lossy().starts_with(&prefix) {
                    let _ = std::fs::remove_file(entry.path());
                }
            }
            Ok(())
        };
        // The removal of the pod removes what is left.
        let _left = pod_logs::change(dir, remove).await;
    }

    pub(super) async fn remove_sandboxes(&mut self, ids: Vec<String>) -> Result<(), Vec<ApplyError>> {
        let mut errors = Vec::new();
        for id in ids {
            // Removal requires a stopped sandbox. A stop of a stopped sandbox does nothing.
            let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.clone() };
            let stopped = self.node.runtime.stop_pod_sandbox(request).await;
            errors.extend(stopped.map_err(self.runtime_error("StopPodSandbox", &id)).err());
            let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.clone() };
            let removed = self.node.runtime.remove_pod_sandbox(request).await;
            errors.extend(removed.map_err(self.runtime_error("RemovePodSandbox", &id)).err());
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }
}
