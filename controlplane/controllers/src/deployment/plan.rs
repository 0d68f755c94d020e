//! The actions for one deployment, from the deployment, its replica sets, and whether old pods still run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_values::label_selector::LabelSelector;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DeploymentStatus;

use super::condition::{Conditions, PROGRESSING, condition};
use super::revision::{self, History, REVISION};
use super::rolling::{self, Bounds, Size};
use super::status;
use crate::object::{Deployment, ObjectExt, ReplicaSet, controller_of};

/// The input of the plan.
pub(crate) struct Snapshot<'a> {
    pub(crate) deployment: &'a Deployment,
    pub(crate) selector: &'a LabelSelector,
    /// The sets that the deployment controls, and the sets of its namespace without a controller.
    pub(crate) sets: Vec<Arc<ReplicaSet>>,
    /// The uids of sets with pods that have not ended. Pods that are being deleted count.
    pub(crate) running: Vec<String>,
    pub(crate) now: Timestamp,
}

/// The actions, in this order.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) release: Vec<Arc<ReplicaSet>>,
    pub(crate) adopt: Vec<Arc<ReplicaSet>>,
    pub(crate) create: Option<NewSet>,
    pub(crate) update: Vec<Update>,
    pub(crate) delete: Vec<Arc<ReplicaSet>>,
    /// The revision annotation to set on the deployment.
    pub(crate) revision: Option<String>,
    /// The status to write, if it changed.
    pub(crate) status: Option<DeploymentStatus>,
    /// Delay of the next reconcile if nothing changes.
    pub(crate) again: Option<Duration>,
}

/// A replica set to create.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NewSet {
    pub(crate) hash: String,
    pub(crate) replicas: i32,
    pub(crate) annotations: BTreeMap<String, String>,
}

/// A change to a replica set.
#[derive(Debug)]
pub(crate) struct Update {
    pub(crate) set: Arc<ReplicaSet>,
    pub(crate) replicas: Option<i32>,
    pub(crate) min_ready_seconds: Option<i32>,
    pub(crate) annotations: BTreeMap<String, String>,
}

/// Plans the actions.
pub(crate) fn plan(snapshot: Snapshot<'_>) -> Plan {
    let Snapshot { deployment, selector, sets, running, now } = snapshot;
    let mut plan = Plan::default();
    let own = claim_sets(deployment, selector, sets, &mut plan);
    if !plan.adopt.is_empty() || !plan.release.is_empty() {
        // The adoption causes another reconcile, which counts the adopted sets.
        return plan;
    }
    let history = History::of(deployment, own);
    let conditions = paused_or_resumed(deployment, now);
    let paused = deployment.spec.paused == Some(true);
    if deployment.is_being_deleted() {
        plan.plan_status(deployment, status::counts(deployment, &history, conditions, now));
    } else if paused || rolling::is_rescaled(deployment, &history) {
        plan.sync_new(deployment, &history);
        plan.resize(deployment, rolling::rescale(deployment, &history));
        if paused {
            plan.delete = revision::to_clean(deployment, &history);
        }
        plan.plan_status(deployment, status::counts(deployment, &history, conditions, now));
    } else {
        let mut conditions = conditions;
        if plan.roll(deployment, &history, &running) {
            set_found_new_set_condition(deployment, &history, &mut conditions, now);
        }
        let (status, again) = status::rollout(deployment, &history, conditions, now);
        if status::is_complete(deployment, &status) && plan.update.is_empty() && plan.create.is_none() {
            plan.delete = revision::to_clean(deployment, &history);
        }
        plan.again = again;
        plan.plan_status(deployment, status);
    }
    plan
}

/// Returns the controlled sets that match the selector. Plans the release of the other controlled sets, and the
/// adoption of orphaned sets that match.
fn claim_sets(
    deployment: &Deployment,
    selector: &LabelSelector,
    sets: Vec<Arc<ReplicaSet>>,
    plan: &mut Plan,
) -> Vec<Arc<ReplicaSet>> {
    let mut own = Vec::new();
    for set in sets {
        let fits = selector.matches(set.metadata.labels.as_ref());
        match (controller_of(&set.metadata).is_some(), fits) {
            (true, true) => own.push(set),
            (true, false) if !deployment.is_being_deleted() && !set.is_being_deleted() => {
                plan.release.push(set)
            }
            (false, true) if !deployment.is_being_deleted() && !set.is_being_deleted() => {
                plan.adopt.push(set)
            }
            (true | false, _) => {}
        }
    }
    own
}

/// The present conditions, updated when the deployment is paused or resumed.
fn paused_or_resumed(deployment: &Deployment, now: Timestamp) -> Conditions {
    let mut conditions = Conditions(deployment.status.conditions.clone().unwrap_or_default());
    let reason = conditions.reason(PROGRESSING);
    if status::deadline(deployment).is_none() || reason == Some("ProgressDeadlineExceeded") {
        return conditions;
    }
    let (paused, was) = (deployment.spec.paused == Some(true), reason == Some("DeploymentPaused"));
    if paused && !was {
        let message = "Deployment is paused".to_owned();
        conditions.set(condition(PROGRESSING, "Unknown", "DeploymentPaused", message, now));
    } else if !paused && was {
        let message = "Deployment is resumed".to_owned();
        conditions.set(condition(PROGRESSING, "Unknown", "DeploymentResumed", message, now));
    }
    conditions
}

/// Sets the condition Progressing of a deployment that does not have this condition, if its new set exists already.
fn set_found_new_set_condition(
    deployment: &Deployment,
    history: &History,
    conditions: &mut Conditions,
    now: Timestamp,
) {
    let Some(new) = &history.new else { return };
    if conditions.get(PROGRESSING).is_none() && status::deadline(deployment).is_some() {
        let message = format!("Found new replica set \"{}\"", new.name());
        conditions.set(condition(PROGRESSING, "True", "FoundNewReplicaSet", message, now));
    }
}

// === impl Plan ===

impl Plan {
    /// One step of the rollout. Returns false while the strategy Recreate waits for the end of the old pods.
    fn roll(&mut self, deployment: &Deployment, history: &History, running: &[String]) -> bool {
        if rolling::recreates(deployment) {
            self.resize(deployment, rolling::empty_old(history));
            let old_runs = history.old.iter().any(|set| running.iter().any(|uid| uid == set.uid()));
            if !self.update.is_empty() || old_runs {
                return false;
            }
        }
        let size = rolling::new_size(deployment, history);
        match &history.new {
            None => self.make_new(deployment, history, size),
            Some(new) => {
                self.sync_new(deployment, history);
                // As upstream, a set of the right size keeps its annotations: a change of maxSurge alone causes no
                // write.
                if size != rolling::size(new) {
                    self.resize(deployment, vec![Size { set: new.clone(), to: size }]);
                } else if !rolling::recreates(deployment) {
                    self.resize(deployment, rolling::shrink_old(deployment, history));
                }
            }
        }
        true
    }

    fn make_new(&mut self, deployment: &Deployment, history: &History, replicas: i32) {
        let bounds = Bounds::of(deployment);
        let next = history.next_revision();
        let mut annotations = revision::first_annotations(deployment, next);
        annotations.extend(revision::size_annotations(None, bounds.desired, bounds.most()));
        let hash = deployment.spec.template.hash(deployment.status.collision_count);
        self.create = Some(NewSet { hash, replicas, annotations });
        self.set_revision(deployment, next.to_string());
    }

    /// Updates the annotations of the new set and the deployment's revision.
    fn sync_new(&mut self, deployment: &Deployment, history: &History) {
        let Some(new) = &history.new else { return };
        let next = history.next_revision();
        let annotations = revision::missing_annotations(deployment, new, next);
        let desired = deployment.spec.min_ready_seconds.unwrap_or_default();
        let min_ready_seconds =
            (new.spec.min_ready_seconds.unwrap_or_default() != desired).then_some(desired);
        if !annotations.is_empty() || min_ready_seconds.is_some() {
            let update = self.update_of(new);
            update.annotations.extend(annotations);
            update.min_ready_seconds = min_ready_seconds;
        }
        self.set_revision(deployment, revision::revision(new).max(next).to_string());
    }

    fn set_revision(&mut self, deployment: &Deployment, revision: String) {
        if deployment.annotation(REVISION) != Some(&revision) {
            self.revision = Some(revision);
        }
    }

    fn resize(&mut self, deployment: &Deployment, sizes: Vec<Size>) {
        let bounds = Bounds::of(deployment);
        for Size { set, to } in sizes {
            let annotations = revision::size_annotations(Some(&set), bounds.desired, bounds.most());
            let replicas = (rolling::size(&set) != to).then_some(to);
            if replicas.is_some() || !annotations.is_empty() {
                let update = self.update_of(&set);
                update.replicas = replicas;
                update.annotations.extend(annotations);
            }
        }
    }

    fn update_of(&mut self, set: &Arc<ReplicaSet>) -> &mut Update {
        let place = self.update.iter().position(|update| update.set.uid() == set.uid());
        let place = place.unwrap_or_else(|| {
            self.update.push(Update {
                set: set.clone(),
                replicas: None,
                min_ready_seconds: None,
                annotations: BTreeMap::new(),
            });
            self.update.len() - 1
        });
        &mut self.update[place]
    }

    fn plan_status(&mut self, deployment: &Deployment, status: DeploymentStatus) {
        if !status::are_equal(&status, &deployment.status) {
            self.status = Some(status);
        }
    }
}
