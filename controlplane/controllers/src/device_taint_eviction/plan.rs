//! The eviction time of pods with a claim, from the taints of its devices and the tolerations of its requests. No I/O.
//! Source: `claimEvictionTime` of `pkg/controller/devicetainteviction`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use coracle_values::toleration::tolerates;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Taint, Toleration};
use serde_json::Value;

use crate::object::{ObjectExt, ResourceSlice};

/// All slices by driver and pool, then by name.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    slices: HashMap<(String, String), BTreeMap<String, Arc<ResourceSlice>>>,
    /// Number of slices with a device that has a NoExecute taint.
    tainted: usize,
}

// === impl Pools ===

impl Pools {
    pub(crate) fn insert(&mut self, slice: &Arc<ResourceSlice>) {
        self.tainted += usize::from(slice.is_tainted());
        let pool = self.slices.entry(slice.pool()).or_default();
        let old = pool.insert(slice.name().to_owned(), slice.clone());
        self.tainted -= usize::from(old.is_some_and(|old| old.is_tainted()));
    }

    pub(crate) fn remove(&mut self, slice: &ResourceSlice) {
        let id = slice.pool();
        let Some(pool) = self.slices.get_mut(&id) else { return };
        let old = pool.remove(slice.name());
        self.tainted -= usize::from(old.is_some_and(|old| old.is_tainted()));
        if pool.is_empty() {
            self.slices.remove(&id);
        }
    }

    /// Whether a device of any slice has a NoExecute taint.
    pub(crate) fn are_tainted(&self) -> bool {
        self.tainted > 0
    }

    /// The NoExecute taints of a device that a pod on this node uses. Slices of other nodes do not count: otherwise a
    /// node could evict pods of other nodes. Slices of an earlier generation do not count either.
    fn taints<'a>(&'a self, result: &'a Value, node: &'a str) -> impl Iterator<Item = &'a Taint> {
        let text = |field: &str| result[field].as_str().unwrap_or_default().to_owned();
        let pool = self.slices.get(&(text("driver"), text("pool")));
        let is_usable = move |slice: &&Arc<ResourceSlice>| {
            let own = slice.spec.node_name.as_deref().unwrap_or_default();
            own.is_empty() || own == node
        };
        let slices = pool.into_iter().flat_map(BTreeMap::values).filter(is_usable);
        let newest = slices.clone().map(|slice| slice.spec.pool.generation).max();
        let slices = slices.filter(move |slice| Some(slice.spec.pool.generation) == newest);
        let devices = slices.flat_map(|slice| slice.spec.devices.iter());
        let devices = devices.filter(move |device| result["device"] == device.name.as_str());
        devices.flat_map(|device| device.taints.iter())
    }
}

/// The time at which the node's pods that use this allocation must be evicted. `None` if they stay.
pub(crate) fn due(allocation: &Value, pools: &Pools, node: &str, now: Timestamp) -> Option<Timestamp> {
    let results = allocation.pointer("/devices/results").and_then(Value::as_array).into_iter().flatten();
    let ends = results.filter_map(|result| {
        let mut taints = pools.taints(result, node).peekable();
        taints.peek()?;
        let tolerations = result["tolerations"].as_array().into_iter().flatten();
        // A toleration that cannot be read tolerates no taint.
        let tolerations = tolerations.filter_map(|one| serde_json::from_value(one.clone()).ok());
        let tolerations: Vec<Toleration> = tolerations.collect();
        taints.filter_map(|taint| end(taint, &tolerations, now)).min()
    });
    ends.min()
}

/// The time at which the toleration of one taint expires. `None` if it does not expire. As upstream, only tolerations
/// with the effect NoExecute count. The shortest `tolerationSeconds` applies. If a toleration has no
/// `tolerationSeconds`, the toleration does not expire.
fn end(taint: &Taint, tolerations: &[Toleration], now: Timestamp) -> Option<Timestamp> {
    let since = taint.time_added.as_ref().map_or(now, |time| time.0);
    let matching = tolerations.iter().filter(|toleration| {
        toleration.effect.as_deref() == Some("NoExecute") && tolerates(toleration, taint)
    });
    let mut shortest = None;
    for toleration in matching {
        let seconds = toleration.toleration_seconds?.max(0);
        shortest = Some(shortest.map_or(seconds, |shortest: i64| shortest.min(seconds)));
    }
    let lasts = SignedDuration::from_secs(shortest.unwrap_or(0));
    Some(since.checked_add(lasts).unwrap_or(Timestamp::MAX))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(name: &str, node: Option<&str>, generation: i64, taints: Value) -> Arc<ResourceSlice> {
        let pool = json!({"name": "p", "generation": generation});
        let devices = json!([{"name": "x", "taints": taints}, {"name": "y"}]);
        let spec = json!({"driver": "d", "pool": pool, "nodeName": node, "devices": devices});
        Arc::new(serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap())
    }

    fn taints(effect: &str) -> Value {
        json!([{"key": "k", "value": "v", "effect": effect, "timeAdded": "1970-01-01T00:10:00Z"}])
    }

    fn ends(slices: &[Arc<ResourceSlice>], device: &str, tolerations: Value) -> Option<i64> {
        let mut pools = Pools::default();
        slices.iter().for_each(|slice| pools.insert(slice));
        let result = json!({"driver": "d", "pool": "p", "device": device, "tolerations": tolerations});
        let now = Timestamp::from_second(1000).unwrap();
        due(&json!({"devices": {"results": [result]}}), &pools, "n", now).map(Timestamp::as_second)
    }

    #[test]
    fn pods_are_evicted_when_the_first_toleration_expires() {
        let tainted = [slice("a", Some("n"), 1, taints("NoExecute"))];
        let tolerates = |fields: Value| {
            let mut toleration = json!({"key": "k", "operator": "Exists", "effect": "NoExecute"});
            toleration.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            toleration
        };
        let seconds = |seconds: i64| tolerates(json!({"tolerationSeconds": seconds}));
        let cases = [
            (json!(null), Some(600)),
            (json!([tolerates(json!({}))]), None),
            (json!([seconds(300)]), Some(900)),
            (json!([seconds(300), seconds(60)]), Some(660)),
            (json!([seconds(300), tolerates(json!({}))]), None),
            (json!([seconds(-5)]), Some(600)),
            (json!([tolerates(json!({"effect": ""}))]), Some(600)),
            (json!([tolerates(json!({"key": "other"}))]), Some(600)),
        ];
        for (tolerations, expected) in cases {
            assert_eq!(ends(&tainted, "x", tolerations.clone()), expected, "{tolerations}");
        }
        assert_eq!(ends(&tainted, "y", json!([])), None);
        assert_eq!(ends(&[slice("a", None, 1, taints("NoSchedule"))], "x", json!([])), None);
    }

    #[test]
    fn only_the_newest_slices_that_the_node_can_use_count() {
        let all = slice("all", None, 1, taints("NoExecute"));
        let other = slice("b", Some("other"), 9, taints("NoExecute"));
        let newer = slice("c", Some("n"), 2, json!([]));
        assert_eq!(ends(std::slice::from_ref(&all), "x", json!([])), Some(600));
        assert_eq!(ends(std::slice::from_ref(&other), "x", json!([])), None, "another node has the slice");
        assert_eq!(ends(&[all, other, newer], "x", json!([])), None, "the taint is of an earlier generation");
    }

    #[test]
    fn tainted_slices_are_counted() {
        let mut pools = Pools::default();
        let (tainted, plain) = (slice("a", None, 1, taints("NoExecute")), slice("a", None, 2, json!([])));
        for (slice, is_tainted) in [(&tainted, true), (&tainted, true), (&plain, false), (&tainted, true)] {
            pools.insert(slice);
            assert_eq!(pools.are_tainted(), is_tainted);
        }
        pools.remove(&tainted);
        assert!(!pools.are_tainted() && pools.slices.is_empty());
    }
}
