//! Places the pods of a gang: all pods that fit, or no pods. Source: `podGroupSchedulingDefaultAlgorithm` and
//! `submitPodGroupAlgorithmResult` of upstream.
//!
//! Until all pods are placed, the snapshot contains the placed pods, but not the victims of their preemption. Then the
//! snapshot is restored. Unlike upstream, pods are evicted only if the gang fits after all evictions. The attempt ends
//! as soon as too many pods were refused for the gang to fit, or after an error.

use std::time::Duration;

use coracle_values::object::ObjectExt;
use tokio::time::Instant;

use crate::config::Profile;
use crate::decide::{FoundBy, Unschedulable, decide};
use crate::hint::Changes;
use crate::object::Pod;
use crate::placed::Placed;
use crate::preempt::{Preemption, Victim, preempt, waits_for_victims, with_outcome};
use crate::reserve::{Reserved, reserve};
use crate::snapshot::Snapshot;
use crate::volumes::claims_of;

use super::condition::Verdict;

/// Message of a group that does not fit.
pub(crate) const UNSCHEDULABLE: &str = "pod group is unschedulable";
/// Message of a group that fits after other pods have been evicted.
pub(crate) const WAITS_FOR_PREEMPTION: &str =
    "pod group is unschedulable, pod group is waiting for preemption to complete";
/// Message of a pod that fits or was not tried, but whose group does not fit.
const NO_QUORUM: &str = "pod group is unschedulable, waiting for minCount pods from a gang to be scheduled, \
                         one or more plugins asked to wait and no plugin rejected pod";

/// The result for one pod before the whole gang is decided.
#[derive(Debug)]
enum Placement {
    /// A node can run the pod.
    Fits(String, Reserved),
    /// A node can run the pod after these victims are deleted.
    FitsAfterPreemption { node: String, victims: Vec<Victim>, message: String },
    /// No node can run the pod, for this reason.
    Refused(String),
    /// A filter or a reservation failed with this error.
    Failed(String),
}

/// The decision for one pod.
#[derive(Debug)]
pub(crate) enum Decision {
    /// The pod is bound to the node.
    Bind(String, Reserved),
    /// The pod is refused. Its victims are evicted from the nominated node.
    Refuse { message: String, nominated: Option<String>, victims: Vec<Victim> },
}

/// The result for a gang.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// One decision for each pod, in the order of the pods.
    pub(crate) decisions: Vec<Decision>,
    /// The changes that may help the refused pods.
    pub(crate) helped_by: Changes,
    pub(crate) verdict: Verdict,
    /// The time from the reservation of a node until the decision about the gang, for each pod that fits.
    pub(crate) waits: Vec<Duration>,
}

/// Whether the pods of a gang fit together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GangFit {
    Now,
    /// The pods fit after the eviction of other pods.
    AfterPreemption,
    Never,
    /// An error ended the attempt.
    Failed,
}

/// The pods and nodes of one attempt.
struct Attempt<'a> {
    profile: &'a Profile,
    snapshot: &'a mut Snapshot,
    /// Whether the pod with this uid belongs to the gang. The gang's pods are never victims of each other.
    is_member: &'a dyn Fn(&str) -> bool,
    placed: Vec<String>,
    /// The times of the reservations of nodes for pods that fit.
    reserved_at: Vec<Instant>,
    removed: Vec<RemovedVictim>,
    helped_by: Changes,
    /// The error that ended the attempt.
    failure: Option<String>,
    /// Number of pods that may still be refused. `None` if the gang cannot fit any more.
    spare: Option<usize>,
    /// The last refused pod with its message, if no pod was placed after it.
    refused: Option<(&'a Pod, String)>,
}

/// A victim that is removed from the snapshot during an attempt.
struct RemovedVictim {
    node: String,
    uid: String,
    pod: Placed,
}

/// Places the pods of a gang in this order. The gang is scheduled if at least `needed` pods are placed, and at least
/// one pod is placed. The snapshot is restored. Reservations remain for the pods that must be bound.
pub(crate) fn place(
    pods: &[&Pod],
    profile: &Profile,
    snapshot: &mut Snapshot,
    needed: usize,
    is_member: &dyn Fn(&str) -> bool,
) -> Outcome {
    let mut attempt = Attempt {
        profile,
        snapshot,
        is_member,
        placed: Vec::new(),
        reserved_at: Vec::new(),
        removed: Vec::new(),
        helped_by: Changes::GROUP,
        failure: None,
        spare: pods.len().checked_sub(needed.max(1)),
        refused: None,
    };
    let places: Vec<Placement> = pods.iter().map(|pod| attempt.place_next(pod)).collect();
    attempt.restore();
    let (helped_by, failure) = (attempt.helped_by, attempt.failure.take());
    let waits = attempt.reserved_at.iter().map(Instant::elapsed).collect();
    let count = places.iter().filter(|place| !matches!(place, Placement::Refused(_))).count();
    let fit = if failure.is_some() {
        GangFit::Failed
    } else if count < needed.max(1) {
        GangFit::Never
    } else if places.iter().any(|place| matches!(place, Placement::FitsAfterPreemption { .. })) {
        GangFit::AfterPreemption
    } else {
        GangFit::Now
    };
    let verdict = match fit {
        GangFit::Now => Verdict::scheduled(),
        GangFit::AfterPreemption => Verdict::refused(WAITS_FOR_PREEMPTION),
        GangFit::Never => Verdict::refused(UNSCHEDULABLE),
        GangFit::Failed => Verdict::failed(failed_beside(&failure.unwrap_or_default())),
    };
    let decisions = places.into_iter().map(|place| decision_for(place, fit, &verdict, snapshot)).collect();
    Outcome { decisions, helped_by, verdict, waits }
}

/// The message of a group, and of its other pods, if the attempt for one pod failed with an error.
pub(crate) fn failed_beside(why: &str) -> String {
    format!("failed to schedule other pod from a pod group: {why}")
}

/// The decision for one pod, after all pods of the gang were tried. `verdict` is the result for the gang.
fn decision_for(place: Placement, fit: GangFit, verdict: &Verdict, snapshot: &Snapshot) -> Decision {
    let refuse = |message: &str, nominated| Decision::Refuse {
        message: message.to_owned(),
        nominated,
        victims: Vec::new(),
    };
    if let Placement::Fits(_, reserved) = &place
        && fit != GangFit::Now
    {
        snapshot.volumes.release(&reserved.volumes);
        snapshot.devices.undo(&reserved.devices);
    }
    match (place, fit) {
        (Placement::Failed(why), _) => refuse(&why, None),
        (_, GangFit::Failed) => refuse(&verdict.message, None),
        (Placement::Fits(node, reserved), GangFit::Now) => Decision::Bind(node, reserved),
        (Placement::Fits(node, _), GangFit::AfterPreemption) => refuse(WAITS_FOR_PREEMPTION, Some(node)),
        (Placement::FitsAfterPreemption { node, victims, message }, GangFit::AfterPreemption) => {
            Decision::Refuse { message, nominated: Some(node), victims }
        }
        (Placement::Fits(..) | Placement::FitsAfterPreemption { .. }, _) => refuse(NO_QUORUM, None),
        (Placement::Refused(message), _) => refuse(&message, None),
    }
}

// === impl Attempt ===

impl<'a> Attempt<'a> {
    fn place_next(&mut self, pod: &'a Pod) -> Placement {
        let place = self.place(pod);
        if matches!(place, Placement::Refused(_)) {
            self.spare = self.spare.and_then(|spare| spare.checked_sub(1));
        }
        place
    }

    fn place(&mut self, pod: &'a Pod) -> Placement {
        if let Some((other, message)) = &self.refused
            && is_alike(other, pod)
        {
            return Placement::Refused(message.clone());
        }
        // Too many pods were refused, so the gang fits only after a change that helps one of them. Or an error has
        // ended the attempt.
        if self.spare.is_none() || self.failure.is_some() {
            return Placement::Refused(NO_QUORUM.to_owned());
        }
        let refused = match decide(pod, self.profile, self.snapshot) {
            Ok(node) => match reserve(pod, self.profile, self.snapshot, &node) {
                Ok(reserved) => {
                    self.snapshot.devices.share(&reserved.devices);
                    self.assume(pod, &node);
                    self.reserved_at.push(Instant::now());
                    return Placement::Fits(node, reserved);
                }
                // Volumes or devices changed during the attempt.
                Err(why) => return self.fail(why),
            },
            Err(refused) if refused.found_by == FoundBy::Error => return self.fail(refused.message),
            Err(refused) => refused,
        };
        self.helped_by = self.helped_by | refused.helped_by;
        let place = self.preempt_for(pod, refused);
        if let Placement::Refused(message) = &place {
            self.refused = Some((pod, message.clone()));
        }
        place
    }

    /// Ends the attempt with an error.
    fn fail(&mut self, why: String) -> Placement {
        self.failure = Some(why.clone());
        Placement::Failed(why)
    }

    /// Removes victims of lower priority for a pod that no node can run.
    fn preempt_for(&mut self, pod: &Pod, refused: Unschedulable) -> Placement {
        let devices = self.snapshot.devices.outcome(pod);
        if !self.profile.preempts {
            return Placement::Refused(with_outcome(&refused, devices, ""));
        }
        let (node, victims) = match self.awaited(pod, &refused) {
            // The victims of an earlier attempt are still terminating.
            Some(node) => (node, Vec::new()),
            None => match preempt(pod, self.profile, self.snapshot, &refused.resolvable) {
                Err(why) => return Placement::Refused(with_outcome(&refused, devices, &why)),
                Ok(Preemption { victims, .. })
                    if victims.iter().any(|victim| (self.is_member)(&victim.uid)) =>
                {
                    return Placement::Refused(with_outcome(&refused, devices, ""));
                }
                Ok(Preemption { node, victims }) => (node, victims),
            },
        };
        for victim in &victims {
            if let Some(pod) = self.snapshot.placed_pod(&node, &victim.uid).cloned() {
                self.snapshot.remove(&victim.uid);
                self.removed.push(RemovedVictim { node: node.clone(), uid: victim.uid.clone(), pod });
            }
        }
        self.assume(pod, &node);
        Placement::FitsAfterPreemption { node, victims, message: refused.message }
    }

    /// The nominated node of a pod whose victims are still terminating there.
    fn awaited(&self, pod: &Pod, refused: &Unschedulable) -> Option<String> {
        let waits = self.snapshot.is_nominated(pod.uid())
            && waits_for_victims(pod, self.snapshot, &refused.resolvable);
        pod.status.nominated_node_name.clone().filter(|_| waits)
    }

    fn assume(&mut self, pod: &Pod, node: &str) {
        self.snapshot.place(pod, node);
        self.placed.push(pod.uid().to_owned());
        self.refused = None;
    }

    fn restore(&mut self) {
        self.snapshot.devices.end_sharing();
        for uid in self.placed.drain(..) {
            self.snapshot.remove(&uid);
        }
        for RemovedVictim { node, uid, pod } in self.removed.drain(..) {
            self.snapshot.restore(&uid, &node, pod);
        }
    }
}

/// Whether the filters and the preemption have the same result for two pods of a group.
pub(super) fn is_alike(one: &Pod, other: &Pod) -> bool {
    one.has_same_requirements(other)
        && one.spec.resource_claims.is_empty()
        && claims_of(one).next().is_none()
        && one.metadata.owner_references == other.metadata.owner_references
        && one.status.nominated_node_name.is_none()
        && other.status.nominated_node_name.is_none()
}
