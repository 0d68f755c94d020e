//! Groups of pods in scheduling (upstream's plugin GangScheduling and its scheduling cycle of pod groups).
//!
//! A pod names its group in `spec.schedulingGroup`. The pod is gated until the PodGroup exists. With the policy `gang`,
//! it is also gated until `minCount` pods of the group exist. Pods of the policy `basic` are scheduled one by one. The
//! pods of a gang are placed in one step ([`placement`]). If at least `minCount` pods of the group then have a node,
//! all placed pods are bound. Otherwise no pod is bound. Unlike in upstream's Permit, no pod holds resources while it
//! waits for other pods, so groups cannot deadlock.
//!
//! [`Groups`] is an index from groups to their pods, so that a change of a pod or group reads only that group. [`feed`]
//! watches the groups, beginning with the first pod that names a group. If the API server does not serve groups, pods
//! do not wait for their groups.

pub(crate) mod condition;
pub(crate) mod feed;
pub(crate) mod object;
pub(crate) mod placement;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};

use coracle_values::object::{Key, ObjectExt};
use tokio::time::Instant;

use self::condition::{Verdict, Write, condition, is_scheduled};
use self::object::PodGroup;
use crate::object::Pod;

/// The groups and their pods.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    groups: HashMap<Key, Group>,
    /// The group of each member, by the uid of the pod.
    members: HashMap<String, Key>,
    /// The groups of a list that is being received.
    listed: HashSet<Key>,
    /// Whether the API server does not serve groups. Pods then do not wait for their groups.
    is_not_served: bool,
}

/// A group: its object, its pods, or both.
#[derive(Debug, Default)]
struct Group {
    object: Option<PodGroup>,
    /// The uids of pods that are not on a node.
    waiting: HashSet<String>,
    /// The uids of waiting pods that are gated.
    gated: HashSet<String>,
    /// The uids of pods that are bound or being bound.
    scheduled: HashSet<String>,
    /// Whether the object has the condition `PodGroupScheduled`, or the write in flight sets it.
    is_scheduled: bool,
    /// The next result to write.
    verdict: Option<Verdict>,
    /// The write in flight: the uid of the object, and the result.
    writing: Option<(String, Verdict)>,
    /// End of the back-off of pods that were refused together.
    backoff_until: Option<Instant>,
}

/// The way in which the pods of a group are scheduled now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// The pods wait for the PodGroup or for more pods.
    Gated,
    /// The pods are scheduled one by one.
    Basic,
    /// The pods are scheduled together: at least `needed` more pods must be placed.
    Gang { needed: usize },
    /// The group has a field that this scheduler does not support.
    Unsupported,
}

// === impl Groups ===

impl Groups {
    /// Adds or updates a pod. Returns the pods to wake. A pod without a group is ignored.
    pub(crate) fn put_pod(&mut self, pod: &Pod, is_placed: bool) -> Vec<String> {
        let Some(key) = pod.group() else { return Vec::new() };
        let uid = pod.uid();
        if self.members.get(uid).is_some_and(|known| *known != key) {
            self.remove_pod(uid);
        }
        self.members.insert(uid.to_owned(), key.clone());
        let group = self.groups.entry(key).or_default();
        if !is_placed {
            group.scheduled.remove(uid);
            group.waiting.insert(uid.to_owned());
            return group.release_gated();
        }
        group.scheduled.insert(uid.to_owned());
        group.gated.remove(uid);
        // A pod that another program bound may complete its group.
        if group.waiting.remove(uid) { group.release_waiting() } else { group.release_gated() }
    }

    /// Removes a pod.
    pub(crate) fn remove_pod(&mut self, uid: &str) {
        let Some(key) = self.members.remove(uid) else { return };
        if let Some(group) = self.groups.get_mut(&key) {
            group.waiting.remove(uid);
            group.gated.remove(uid);
            group.scheduled.remove(uid);
        }
        self.prune(&key);
    }

    /// Counts a pod as placed before it is bound.
    pub(crate) fn assume(&mut self, uid: &str) {
        if let Some(group) = self.group_of(uid) {
            group.waiting.remove(uid);
            group.gated.remove(uid);
            group.scheduled.insert(uid.to_owned());
        }
    }

    /// Undoes [`Self::assume`].
    pub(crate) fn forget(&mut self, uid: &str) {
        if let Some(group) = self.group_of(uid)
            && group.scheduled.remove(uid)
        {
            group.waiting.insert(uid.to_owned());
        }
    }

    /// Marks a waiting pod as gated by its group.
    pub(crate) fn gate(&mut self, uid: &str) {
        if let Some(group) = self.group_of(uid) {
            group.gated.insert(uid.to_owned());
        }
    }

    /// Adds or updates a group. Returns the pods to wake.
    pub(crate) fn put(&mut self, object: PodGroup) -> Vec<String> {
        let group = self.groups.entry(object.key()).or_default();
        let is_same = group
            .object
            .as_ref()
            .is_some_and(|known| known.metadata.uid == object.metadata.uid && known.spec == object.spec);
        let is_other = group.object.as_ref().is_some_and(|known| known.metadata.uid != object.metadata.uid);
        group.is_scheduled = is_scheduled(&object) || (group.is_scheduled && !is_other);
        group.verdict = group.verdict.take().filter(|_| !is_other);
        group.object = Some(object);
        // Another policy may also help refused pods.
        if is_same { group.release_gated() } else { group.release_waiting() }
    }

    /// Removes a group. Its pods wait until the group is created again.
    pub(crate) fn remove(&mut self, key: &Key) {
        if let Some(group) = self.groups.get_mut(key) {
            group.object = None;
            group.is_scheduled = false;
            group.verdict = None;
        }
        self.prune(key);
    }

    /// Starts to receive a list of groups.
    pub(crate) fn list(&mut self) {
        self.is_not_served = false;
        self.listed.clear();
    }

    /// Ignores all groups until the next list. Returns the pods to wake.
    pub(crate) fn ignore_all(&mut self) -> Vec<String> {
        self.is_not_served = true;
        self.groups.values_mut().flat_map(|group| std::mem::take(&mut group.gated)).collect()
    }

    /// Adds a group of the list. Returns the pods to wake.
    pub(crate) fn put_listed(&mut self, object: PodGroup) -> Vec<String> {
        self.listed.insert(object.key());
        self.put(object)
    }

    /// Ends a list. Removes the groups that are not in the list.
    pub(crate) fn finish_list(&mut self) {
        let listed = std::mem::take(&mut self.listed);
        let objects = self.groups.iter().filter(|(_, group)| group.object.is_some());
        let removed: Vec<Key> =
            objects.map(|(key, _)| key.clone()).filter(|key| !listed.contains(key)).collect();
        for key in removed {
            self.remove(&key);
        }
    }

    /// Whether there are neither groups nor pods of groups.
    pub(crate) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The way in which the pods of a group are scheduled now.
    pub(crate) fn policy(&self, key: &Key) -> Policy {
        if self.is_not_served {
            return Policy::Basic;
        }
        self.groups.get(key).map_or(Policy::Gated, Group::policy)
    }

    /// The uids of the pods of a group that are neither on a node nor gated.
    pub(crate) fn waiting(&self, key: &Key) -> Vec<String> {
        let group = self.groups.get(key);
        group.into_iter().flat_map(|group| group.waiting.difference(&group.gated)).cloned().collect()
    }

    /// End of the back-off of a group. A group that is deleted and created again keeps its back-off.
    pub(crate) fn backoff_until(&self, key: &Key) -> Option<Instant> {
        self.groups.get(key)?.backoff_until
    }

    /// Starts the back-off of a group.
    pub(crate) fn set_backoff(&mut self, key: &Key, until: Instant) {
        if let Some(group) = self.groups.get_mut(key) {
            group.backoff_until = Some(until);
        }
    }

    /// The uids of all pods of groups.
    pub(crate) fn uids(&self) -> impl Iterator<Item = &String> {
        self.members.keys()
    }

    /// Whether a pod is a member of a group.
    pub(crate) fn is_member(&self, uid: &str, key: &Key) -> bool {
        self.members.get(uid) == Some(key)
    }

    /// Reports the result of scheduling a group. Returns the write to start. `None` if a write is in flight or not
    /// needed.
    pub(crate) fn report(&mut self, key: &Key, verdict: Verdict) -> Option<Write> {
        let group = self.groups.get_mut(key).filter(|group| group.object.is_some())?;
        // The condition never returns to `False`, even if a further pod of the group does not fit.
        if verdict.is_scheduled() || !group.is_scheduled {
            group.is_scheduled = verdict.is_scheduled();
            group.verdict = Some(verdict).filter(|verdict| !group.is_writing(verdict));
        }
        if group.writing.is_some() { None } else { group.next_write(key) }
    }

    /// Ends a write. Returns the next write.
    pub(crate) fn written(&mut self, written: &Write, is_done: bool) -> Option<Write> {
        let group = self.groups.get_mut(&written.key)?;
        group.writing = None;
        let object = group.object.as_ref();
        if !is_done && group.verdict.is_none() && object.is_some_and(|one| one.uid() == written.uid) {
            group.is_scheduled = object.is_some_and(is_scheduled);
        }
        let next = group.next_write(&written.key);
        self.prune(&written.key);
        next
    }

    fn group_of(&mut self, uid: &str) -> Option<&mut Group> {
        self.groups.get_mut(self.members.get(uid)?)
    }

    fn prune(&mut self, key: &Key) {
        let is_unused = |group: &Group| {
            group.object.is_none()
                && group.waiting.is_empty()
                && group.scheduled.is_empty()
                && group.writing.is_none()
        };
        if self.groups.get(key).is_some_and(is_unused) {
            self.groups.remove(key);
        }
    }
}

// === impl Group ===

impl Group {
    fn policy(&self) -> Policy {
        let Some(object) = &self.object else { return Policy::Gated };
        let constraints = object.spec.scheduling_constraints.as_ref();
        let topology = constraints.and_then(|constraints| constraints["topology"].as_array());
        if topology.is_some_and(|topology| !topology.is_empty()) {
            return Policy::Unsupported;
        }
        let Some(gang) = &object.spec.scheduling_policy.gang else { return Policy::Basic };
        let wanted = usize::try_from(gang.min_count).unwrap_or_default();
        if self.waiting.len() + self.scheduled.len() < wanted {
            return Policy::Gated;
        }
        Policy::Gang { needed: wanted.saturating_sub(self.scheduled.len()) }
    }

    /// Releases the gated pods and returns them, unless the group still gates its pods.
    fn release_gated(&mut self) -> Vec<String> {
        if self.gated.is_empty() || self.policy() == Policy::Gated {
            return Vec::new();
        }
        std::mem::take(&mut self.gated).into_iter().collect()
    }

    /// Releases the gated pods and returns all waiting pods, unless the group still gates its pods.
    fn release_waiting(&mut self) -> Vec<String> {
        if self.policy() == Policy::Gated {
            return Vec::new();
        }
        self.gated.clear();
        self.waiting.iter().cloned().collect()
    }

    /// Whether the write in flight has this result and is for the current object. The write may be for a deleted object
    /// of the same name.
    fn is_writing(&self, verdict: &Verdict) -> bool {
        let uid = self.object.as_ref().map(ObjectExt::uid);
        self.writing.as_ref().is_some_and(|(of, one)| Some(of.as_str()) == uid && one == verdict)
    }

    fn next_write(&mut self, key: &Key) -> Option<Write> {
        let (object, verdict) = (self.object.as_ref()?, self.verdict.take()?);
        let condition = condition(object, &verdict, jiff::Timestamp::now())?;
        self.writing = Some((object.uid().to_owned(), verdict));
        Some(Write { key: key.clone(), uid: object.uid().to_owned(), condition })
    }
}
