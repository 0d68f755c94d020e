//! Applies planned actions. Each action is idempotent: after an interruption at any point, the next plan continues
//! from the observed state. Results that the worker must keep are sent as [`Report`]s.

mod env_files;
mod finish;
mod make;
mod mounts;
mod resize;
mod restart_all;
mod start;
mod start_queue;
mod stop;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use coracle_error_chain::chain;
use coracle_proto::cri;
use futures::channel::mpsc;
use k8s_openapi::api::core::v1::{Pod, PodSpec, ResourceRequirements};
use k8s_openapi::jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::NodeContext;
use super::plan::Action;
use super::pull::PullTask;
use super::removed::RemovedContainers;
use super::state::{Failed, ObservedPod, Verdict, Waiting};
use crate::bounded;
use crate::event_recorder::Level;
use crate::policy_gate::PendingAdmission;
use crate::runtime::RuntimeError;
use crate::volume::Volumes;

/// Maximum size in bytes of the node's resolver configuration, as in the kubelet.
const RESOLV_CONF_MAX: u64 = 10 << 20;
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The servers that systemd-resolved uses. With systemd-resolved, [`RESOLV_CONF`] contains only the loopback address of
/// systemd-resolved.
const RESOLVED_CONF: &str = "/run/systemd/resolve/resolv.conf";

/// A result of a job, for its worker.
#[derive(Debug)]
pub(crate) enum Report {
    /// Cgroup, claims and volumes are ready.
    Prepared(Volumes),
    /// Sandbox, claims or volumes cannot be created now. The value is a key of `WorkerState::pod_retries`.
    NotPrepared(&'static str),
    SandboxMade,
    /// The pull of this container's image was started before the creation of the sandbox.
    Pulling {
        container: String,
        pull: PullTask,
    },
    /// A container did not start.
    NotStarted {
        container: String,
        waiting: Waiting,
        failed: Failed,
    },
    /// Containers did not start because their network policies are not in the kernel. `pending` returns when the
    /// policies are in the kernel.
    PoliciesAwaited {
        containers: Vec<String>,
        pending: PendingAdmission,
    },
    /// A container has started. `crashed` is the end of the previous run.
    Started {
        container: String,
        crashed: Option<Timestamp>,
    },
    /// These containers are being removed by a restart of all containers.
    Removing(RemovedContainers),
    /// A restart of all containers has removed the last container.
    AllRemoved,
    /// The postStart hook of a running container has failed, so the container must be killed.
    PostStartFailed {
        id: String,
    },
    /// The preStop hook of a container has run, or failed, and must not run again.
    PreStopDone {
        id: String,
    },
    /// The limits of a running container were changed to these resources.
    Resized {
        id: String,
        resources: ResourceRequirements,
    },
    /// The pod's cgroup and all containers have the resources of this generation of the pod.
    ResizeDone {
        generation: Option<i64>,
    },
    /// A resize failed and must be retried.
    ResizeFailed {
        message: String,
    },
    /// The node does not have the devices that the pod requests.
    Rejected(Verdict),
    /// The sandbox with this id is stopped.
    Stopped {
        sandbox: String,
    },
    /// The volumes, devices and cgroup of an ended pod are released.
    Released,
    /// The pod is removed; its worker ends.
    Finished,
}

/// A list of actions that is being applied.
pub(crate) struct Job {
    pub(crate) node: Arc<NodeContext>,
    pub(crate) pod: Arc<Pod>,
    pub(crate) uid: String,
    pub(crate) observed: ObservedPod,
    /// The prepared volumes. None before their preparation.
    pub(crate) volumes: Option<Volumes>,
    /// Pulls that were started in advance, by container name.
    pub(crate) pulls: HashMap<String, PullTask>,
    /// Ids of containers whose preStop hook has run.
    pub(crate) pre_stop_done: std::collections::HashSet<String>,
    pub(crate) reports: mpsc::UnboundedSender<Report>,
    /// Cancelled when the pod must end, or must end faster: waits end at once.
    pub(crate) interrupt: CancellationToken,
}

/// A sandbox configuration, and the problems of its resolver configuration.
struct SandboxConfig {
    config: cri::PodSandboxConfig,
    /// Whether the pod needs a cluster DNS that does not exist.
    is_cluster_dns_missing: bool,
    /// Messages about the servers and domains that are left out.
    omitted: Vec<String>,
}

/// The reason why an action must be retried.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApplyError {
    /// A call of the runtime failed.
    #[error("{call} of {what} failed")]
    Runtime {
        call: &'static str,
        what: String,
        #[source]
        source: RuntimeError,
    },
    /// The ids of the pod's user namespace cannot be allocated or recorded.
    #[error("cannot prepare the user namespace of the pod")]
    UserIds(#[source] super::user_ids::UserIdsError),
    /// The pod's cgroup cannot be created, limited or removed.
    #[error("cannot prepare or remove the cgroup of the pod")]
    Cgroup(#[source] crate::cgroup::CgroupError),
    /// The pod's ResourceClaims cannot be unprepared.
    #[error("cannot unprepare the ResourceClaims of the pod")]
    Claims(#[source] crate::dra::DraError),
    /// The pod's volumes cannot be unmounted or removed.
    #[error("cannot unmount the volumes of the pod")]
    Volume(#[source] crate::volume::VolumeError),
    /// A file of the agent cannot be written or removed.
    #[error("cannot {verb} {path}")]
    File {
        verb: &'static str,
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// The kind of an action, for the event of its failure.
#[derive(Clone, Copy)]
enum Step {
    /// The pod is prepared or gets its sandbox.
    Make,
    /// The pod is stopped.
    Stop,
    /// Failures are in the log only, or have events of their own.
    Other,
}

// === impl Step ===

impl Step {
    fn of(action: &Action) -> Self {
        match action {
            Action::Prepare | Action::MakeSandbox { .. } => Self::Make,
            Action::StopPod { .. } => Self::Stop,
            _ => Self::Other,
        }
    }

    /// The kubelet's reason and message of a failure (`SyncPod` and `SyncTerminatingPod` of pkg/kubelet).
    fn event(self, errors: &[ApplyError]) -> Option<(&'static str, String)> {
        let is_cgroup = |error: &&ApplyError| matches!(error, ApplyError::Cgroup(_));
        let (reason, what, error) = match self {
            Self::Make => {
                let error = errors.iter().find(is_cgroup)?;
                ("FailedCreatePodContainer", "unable to ensure pod container exists", error)
            }
            Self::Stop => ("FailedKillPod", "error killing pod", errors.first()?),
            Self::Other => return None,
        };
        Some((reason, format!("{what}: {}", chain(error))))
    }
}

// === impl Job ===

impl Job {
    /// Runs the actions. Stopping and releasing continue after an error; all errors are returned.
    pub(crate) async fn run(mut self, actions: Vec<Action>) -> Result<(), Vec<ApplyError>> {
        let mut errors = Vec::new();
        let starts = |action: &Action| matches!(action, Action::MakeSandbox { .. } | Action::Start(_));
        let _counted = actions.iter().any(starts).then(|| self.node.recorder.pod_start());
        for action in actions {
            let step = Step::of(&action);
            if let Err(failed) = self.action(action).await {
                if let Some((reason, message)) = step.event(&failed) {
                    self.node.recorder.pod(&self.pod, Level::Warning, reason, message);
                }
                errors.extend(failed);
            }
            if self.interrupt.is_cancelled() {
                break;
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    async fn action(&mut self, action: Action) -> Result<(), Vec<ApplyError>> {
        // The long futures are boxed. Otherwise the task of each job would have room for the longest future, and the
        // allocator would map memory for this room.
        match action {
            Action::Prepare => self.prepare().await,
            Action::MakeSandbox { attempt, first } => {
                if self.allocate_devices().await {
                    Box::pin(self.make_sandbox(attempt, &first)).await
                } else {
                    Ok(())
                }
            }
            Action::Start(containers) => Box::pin(self.start_all(containers)).await,
            Action::RestartAll { others, triggers } => Box::pin(self.restart_all(&others, &triggers)).await,
            Action::Stop { id, name, grace, message } => self.stop_one(&id, &name, grace, &message).await,
            Action::Resize { before, containers } => {
                Box::pin(self.resize(&before, containers)).await;
                Ok(())
            }
            Action::StopPod { grace } => self.stop_pod(grace).await,
            Action::RemoveContainers(ids) => self.remove_containers(ids).await,
            Action::RemoveSandboxes(ids) => self.remove_sandboxes(ids).await,
            Action::Release { unstopped } => self.release(&unstopped).await,
            Action::Finish => self.finish().await,
            // The worker itself handles this action.
            Action::FailPod(_) => Ok(()),
        }
    }

    fn report(&self, report: Report) {
        // The worker outlives its jobs. Without a receiver the agent is stopping.
        let _ = self.reports.unbounded_send(report);
    }

    /// The pod's spec. Every planned pod has a spec; an empty spec has no containers.
    fn spec(&self) -> PodSpec {
        self.pod.spec.clone().unwrap_or_default()
    }

    fn runtime_error(
        &self,
        call: &'static str,
        what: &str,
    ) -> impl FnOnce(RuntimeError) -> ApplyError + use<> {
        let what = what.to_owned();
        move |source| ApplyError::Runtime { call, what, source }
    }

    /// The sandbox configuration of `RunPodSandbox`, which `CreateContainer` requires again.
    fn sandbox_config(&self, attempt: u32, parent: &str) -> SandboxConfig {
        use super::config::{dns, sandbox};
        let (config, spec) = (&self.node.config, self.spec());
        let read = |path: &Path| dns::parse(&node_resolv_conf(path));
        let mut host = read(&config.resolv_conf);
        if config.resolv_conf == Path::new(RESOLV_CONF) {
            host = dns::reachable(host, || read(Path::new(RESOLVED_CONF)));
        }
        let cluster = dns::Cluster {
            servers: &config.cluster_dns,
            domain: &config.cluster_domain,
            namespace: self.pod.metadata.namespace.as_deref().unwrap_or_default(),
        };
        let resolved = dns::resolve(&spec, &host, &cluster);
        let place = sandbox::SandboxInputs {
            log_dir: &config.pod_log_dir,
            cgroup_parent: parent,
            cluster_domain: &config.cluster_domain,
            dns: resolved.config,
            users: self.node.user_ids.mapping(&self.uid),
        };
        SandboxConfig {
            config: sandbox::config(&self.pod, &spec, attempt, place),
            is_cluster_dns_missing: resolved.cluster_missing,
            omitted: resolved.omitted,
        }
    }
}

/// The node's resolver configuration. Empty if it cannot be read or is too large.
fn node_resolv_conf(path: &Path) -> String {
    bounded::read_text(path, RESOLV_CONF_MAX).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::CgroupError;

    #[test]
    fn failures_of_cgroups_and_of_stops_have_events() {
        let file = || ApplyError::File {
            verb: "make",
            path: "/logs".into(),
            source: std::io::Error::from(std::io::ErrorKind::NotFound),
        };
        let cgroup = || ApplyError::Cgroup(CgroupError::NoHierarchy);
        let make = Step::of(&Action::MakeSandbox { attempt: 0, first: Vec::new() });
        let (reason, message) = make.event(&[file(), cgroup()]).unwrap();
        assert_eq!(reason, "FailedCreatePodContainer");
        assert!(
            message.starts_with("unable to ensure pod container exists: cannot prepare or remove the cgroup"),
            "{message}"
        );
        assert!(make.event(&[file()]).is_none());
        let (reason, message) = Step::of(&Action::StopPod { grace: 1 }).event(&[file()]).unwrap();
        assert_eq!(
            (reason, message.starts_with("error killing pod: cannot make /logs")),
            ("FailedKillPod", true)
        );
        assert!(Step::of(&Action::Finish).event(&[cgroup()]).is_none());
    }

    #[test]
    fn a_resolver_configuration_that_is_too_large_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("resolv.conf");
        std::fs::write(&path, "nameserver 192.0.2.1\n").unwrap();
        assert_eq!(node_resolv_conf(&path), "nameserver 192.0.2.1\n");
        std::fs::File::options().write(true).open(&path).unwrap().set_len(RESOLV_CONF_MAX + 1).unwrap();
        assert_eq!(node_resolv_conf(&path), "");
    }
}
