//! Index of volumes by claim, of volumes without a claim by storage class, and of unbound claims by storage class. So a
//! change needs no scan of all objects.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::object::{Claim, Key, ObjectExt, PersistentVolume};

/// The volumes and the unbound claims.
#[derive(Debug, Default)]
pub(crate) struct VolumeIndex {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Names of volumes without claimRef, by storage class.
    free: HashMap<String, BTreeSet<String>>,
    /// Names of volumes with a claimRef, by the claim.
    reserved: HashMap<Key, BTreeSet<String>>,
    /// Claims that are not bound, by storage class.
    pending: HashMap<String, BTreeSet<Key>>,
}

// === impl VolumeIndex ===

impl VolumeIndex {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a changed volume.
    pub(crate) fn volume(&self, old: Option<&PersistentVolume>, new: Option<&PersistentVolume>) {
        let mut state = self.lock();
        if let Some(old) = old {
            match old.claim() {
                Some(claim) => remove(&mut state.reserved, &claim, old.name()),
                None => remove(&mut state.free, old.class(), old.name()),
            }
        }
        if let Some(new) = new {
            let name = new.name().to_owned();
            match new.claim() {
                Some(claim) => state.reserved.entry(claim).or_default().insert(name),
                None => state.free.entry(new.class().to_owned()).or_default().insert(name),
            };
        }
    }

    /// Records a changed claim.
    pub(crate) fn claim(&self, old: Option<&Claim>, new: Option<&Claim>) {
        let mut state = self.lock();
        if let Some(old) = old {
            remove(&mut state.pending, old.class(), &old.key());
        }
        if let Some(new) = new.filter(|new| new.status.phase.as_deref() != Some("Bound")) {
            state.pending.entry(new.class().to_owned()).or_default().insert(new.key());
        }
    }

    /// Names of volumes to which this claim could be bound.
    pub(crate) fn candidates(&self, claim: &Claim) -> Vec<String> {
        let state = self.lock();
        let reserved = state.reserved.get(&claim.key()).into_iter().flatten();
        reserved.chain(state.free.get(claim.class()).into_iter().flatten()).cloned().collect()
    }

    /// Claims of a storage class that are not bound.
    pub(crate) fn pending(&self, class: &str) -> Vec<Key> {
        self.lock().pending.get(class).into_iter().flatten().cloned().collect()
    }

    /// Volumes that are bound to or reserved for a claim.
    pub(crate) fn reserved(&self, claim: &Key) -> Vec<String> {
        self.lock().reserved.get(claim).into_iter().flatten().cloned().collect()
    }
}

/// Removes a value from its group, and the group if it is empty.
fn remove<K, Q, V, W>(groups: &mut HashMap<K, BTreeSet<V>>, group: &Q, value: &W)
where
    K: std::borrow::Borrow<Q> + std::hash::Hash + Eq,
    Q: std::hash::Hash + Eq + ?Sized,
    V: std::borrow::Borrow<W> + Ord,
    W: Ord + ?Sized,
{
    if let Some(values) = groups.get_mut(group) {
        values.remove(value);
        if values.is_empty() {
            groups.remove(group);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn volumes_move_between_free_and_reserved_and_leave_no_entries() {
        let volume = |reference: serde_json::Value| -> PersistentVolume {
            serde_json::from_value(json!({"metadata": {"name": "v"},
                "spec": {"storageClassName": "c", "claimRef": reference}}))
            .unwrap()
        };
        let claim: Claim = serde_json::from_value(json!({"metadata": {"namespace": "n", "name": "a"},
            "spec": {"storageClassName": "c"}}))
        .unwrap();
        let other: Claim = serde_json::from_value(json!({"metadata": {"namespace": "n", "name": "b"},
            "spec": {"storageClassName": "c"}}))
        .unwrap();
        let index = VolumeIndex::default();
        let (free, reserved) = (volume(json!(null)), volume(json!({"namespace": "n", "name": "a"})));
        index.volume(None, Some(&free));
        assert_eq!((index.candidates(&claim).len(), index.candidates(&other).len()), (1, 1));
        index.volume(Some(&free), Some(&reserved));
        assert_eq!((index.candidates(&claim).len(), index.candidates(&other).len()), (1, 0));
        index.volume(Some(&reserved), None);
        index.claim(None, Some(&claim));
        assert_eq!(index.pending("c"), [claim.key()]);
        index.claim(Some(&claim), None);
        let state = index.lock();
        assert!(state.free.is_empty() && state.reserved.is_empty() && state.pending.is_empty());
    }
}
