//! Does what was planned. Each action is idempotent: cut off at any point, the next plan goes on from what is
//! then seen. What the worker must remember comes back as [`Report`]s while the job runs.

mod finish;
mod make;
mod mounts;
mod start;
mod start_queue;
mod stop;

use std::collections::HashMap;
use std::sync::Arc;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use k8s_openapi::jiff::Timestamp;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Node;
use super::plan::Action;
use super::pull::PullTask;
use super::state::{ObservedPod, Waiting};
use crate::bounded;
use crate::volume::Volumes;

/// Maximum size in bytes of the node's resolver configuration, as in the kubelet.
const RESOLV_CONF_MAX: u64 = 10 << 20;

/// What a job tells its worker.
#[derive(Debug)]
pub(crate) enum Report {
    /// Cgroup and volumes are there.
    Prepared(Volumes),
    /// The sandbox or the volumes are not to be had now; the key is one of `WorkerState::pod_retries`.
    NotPrepared(&'static str),
    SandboxMade,
    /// The image of this container is being pulled since the sandbox was made.
    Pulling {
        container: String,
        pull: PullTask,
    },
    /// A container could not be started.
    NotStarted {
        container: String,
        waiting: Waiting,
        failed: Failed,
    },
    /// A container runs; `crashed` is when the one before it ended.
    Started {
        container: String,
        crashed: Option<Timestamp>,
    },
    /// A running container has to go.
    KillRequest {
        id: String,
        why: String,
    },
    /// A container's preStop hook has run (or failed) and must not run again.
    PreStopDone {
        id: String,
    },
    /// An ended pod holds nothing on the node any more.
    Released,
    /// Nothing is left of the pod; its worker may end.
    Finished,
}

/// Which back-off a failed start lengthens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    Pull {
        image: String,
    },
    Start,
    /// It was created and is a crash like any other.
    Run,
}

/// One run of actions.
pub(crate) struct Job {
    pub(crate) node: Arc<Node>,
    pub(crate) pod: Arc<Pod>,
    pub(crate) uid: String,
    pub(crate) observed: ObservedPod,
    /// Volumes, once prepared.
    pub(crate) volumes: Option<Volumes>,
    /// Pulls that have begun ahead, by container name.
    pub(crate) pulls: HashMap<String, PullTask>,
    /// Containers whose preStop hook has run already.
    pub(crate) pre_stop_done: std::collections::HashSet<String>,
    pub(crate) reports: mpsc::UnboundedSender<Report>,
    /// Cancelled when the pod has to end (or to end faster): whatever waits gives up at once.
    pub(crate) interrupt: CancellationToken,
}

/// Why an action has to be tried again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApplyError {
    /// The runtime refused.
    #[error("{call} of {what}: {status}", status = status.message())]
    Runtime { call: &'static str, what: String, status: Box<tonic::Status> },
    /// The pod's own ids.
    #[error("user namespace of the pod")]
    UserIds(#[source] super::user_ids::UserIdsError),
    /// The pod's cgroup.
    #[error("cgroup of the pod")]
    Cgroup(#[source] crate::cgroup::CgroupError),
    /// The pod's volumes.
    #[error("volumes of the pod")]
    Volume(#[source] crate::volume::VolumeError),
    /// A file of ours.
    #[error("cannot {verb} {path}")]
    File {
        verb: &'static str,
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
}

impl Job {
    /// Runs the actions; those that stop and free go on whatever fails, and all errors come back.
    pub(crate) async fn run(mut self, actions: Vec<Action>) -> Result<(), Vec<ApplyError>> {
        let mut errors = Vec::new();
        for action in actions {
            if let Err(error) = self.action(action).await {
                errors.extend(error);
            }
            if self.interrupt.is_cancelled() {
                break;
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    async fn action(&mut self, action: Action) -> Result<(), Vec<ApplyError>> {
        match action {
            Action::Prepare => self.prepare().await,
            Action::MakeSandbox { attempt, first } => self.make_sandbox(attempt, &first).await,
            Action::Start(containers) => self.start_all(containers).await,
            Action::Stop { id, name, grace, why } => self.stop_one(&id, &name, grace, &why).await,
            Action::StopPod { grace } => self.stop_pod(grace).await,
            Action::RemoveContainers(ids) => self.remove_containers(ids).await,
            Action::RemoveSandboxes(ids) => self.remove_sandboxes(ids).await,
            Action::Release => self.release().await,
            Action::Finish => self.finish().await,
            // The worker's own; nothing is to be done outside it.
            Action::FailPod(_) => Ok(()),
        }
    }

    fn report(&self, report: Report) {
        // The worker outlives its jobs; if it is gone the agent is going too.
        let _ = self.reports.send(report);
    }

    /// Every planned pod has one; an empty spec has no containers and so does nothing.
    fn spec(&self) -> PodSpec {
        self.pod.spec.clone().unwrap_or_default()
    }

    fn runtime_error(
        &self,
        call: &'static str,
        what: &str,
    ) -> impl FnOnce(tonic::Status) -> ApplyError + use<> {
        let what = what.to_owned();
        move |status| ApplyError::Runtime { call, what, status: Box::new(status) }
    }

    /// The sandbox configuration as `RunPodSandbox` got it, which `CreateContainer` wants to see again.
    fn sandbox_config(&self, attempt: u32, parent: &str) -> (cri::PodSandboxConfig, bool) {
        use super::config::{dns, sandbox};
        let (config, spec) = (&self.node.config, self.spec());
        let host = bounded::read_text(&config.resolv_conf, RESOLV_CONF_MAX);
        let host = dns::parse(&host.unwrap_or_default());
        let cluster = dns::Cluster {
            servers: &config.cluster_dns,
            domain: &config.cluster_domain,
            namespace: self.pod.metadata.namespace.as_deref().unwrap_or_default(),
        };
        let resolved = dns::resolve(&spec, &host, &cluster);
        let place = sandbox::Place {
            log_dir: &config.pod_log_dir,
            cgroup_parent: parent,
            cluster_domain: &config.cluster_domain,
            dns: resolved.config,
            users: self.node.user_ids.of(&self.uid),
        };
        (sandbox::config(&self.pod, &spec, attempt, place), resolved.cluster_missing)
    }
}
