//! Pods that no node can run: preemption, and the reports about them.

use k8s_openapi::api::core::v1::ObjectReference;
use tokio::time::Instant;

use super::Scheduler;
use crate::bind;
use crate::config::Profile;
use crate::decide::Unschedulable;
use crate::groups::condition::Verdict;
use crate::groups::placement::UNSCHEDULABLE;
use crate::object::Pod;
use crate::preempt::{Preemption, Victim, preempt, with_outcome};
use coracle_events::Event;
use coracle_values::object::ObjectExt;

impl Scheduler {
    /// Handles a pod that no node can run: pods of lower priority may be evicted for it.
    pub(super) fn refused(&mut self, pod: &Pod, profile: &Profile, refused: &Unschedulable) {
        let preemption = if profile.preempts {
            preempt(pod, profile, &mut self.snapshot, &refused.resolvable)
        } else {
            Err(String::new())
        };
        self.handle_refusal(pod, refused, preemption);
    }

    /// Starts a preemption, or records why the pod is unschedulable.
    pub(super) fn handle_refusal(
        &mut self,
        pod: &Pod,
        refused: &Unschedulable,
        preemption: Result<Preemption, String>,
    ) {
        let mut message = refused.message.clone();
        self.queue.refused(pod.uid(), refused.helped_by, Instant::now());
        let nominated = match preemption {
            Ok(Preemption { node, victims }) => {
                self.snapshot.nominate(pod, &node);
                for victim in victims {
                    self.evict(pod, victim, &node);
                }
                Some(node)
            }
            Err(why) => {
                message = with_outcome(refused, &why);
                // A pod that still waits for its victims keeps its nominated node.
                pod.status.nominated_node_name.clone().filter(|_| self.snapshot.is_nominated(pod.uid()))
            }
        };
        self.report_refusal(pod, message, nominated);
        if let Some(group) = pod.group() {
            self.report_group(&group, Verdict { is_scheduled: false, message: UNSCHEDULABLE.to_owned() });
        }
    }

    /// Records an event about a refused pod, and writes its condition.
    pub(super) fn report_refusal(&mut self, pod: &Pod, message: String, nominated: Option<String>) {
        self.record(pod, Event::warning("FailedScheduling", message.clone()));
        let (client, pod) = (self.client.clone(), pod.clone());
        self.marks.spawn(async move {
            let marked = bind::mark_unschedulable(client, &pod, &message, nominated.as_deref()).await;
            if let Err(error) = marked {
                tracing::debug!(
                    pod = pod.name(),
                    namespace = pod.namespace(),
                    %error,
                    "cannot write the condition PodScheduled"
                );
            }
        });
    }

    pub(super) fn evict(&mut self, pod: &Pod, victim: Victim, node: &str) {
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(victim.name.clone()),
            namespace: Some(victim.namespace.clone()),
            uid: Some(victim.uid.clone()),
            ..ObjectReference::default()
        };
        let message = format!("Preempted by pod {} on node {node}", pod.uid());
        self.recorder.record(about, pod.scheduler().to_owned(), Event::normal("Preempted", message));
        let (client, name) = (self.client.clone(), pod.scheduler().to_owned());
        self.marks.spawn(async move {
            if let Err(error) = bind::evict(client, &victim, &name).await {
                tracing::warn!(pod = victim.name, namespace = victim.namespace, %error, "cannot preempt a pod");
            }
        });
    }
}
