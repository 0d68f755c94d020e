//! Devices with binding conditions: a pod is bound after the drivers have set the conditions of its devices. Source:
//! `PreBind`, `PostFilter` and `isClaimReadyForBinding` of upstream's plugin DynamicResources.

use std::time::Duration;

use coracle_events::printable;
use coracle_values::object::{Key, ObjectExt};
use coracle_values::string_list::texts;
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use serde_json::Value;

use super::bind::{self, UnusableClaim};
use super::object::{Claim, DeviceCondition};
use super::places::is_reachable;
use super::{Devices, NOT_AVAILABLE, State};
use crate::config::{DEVICE_TIMEOUT, Profile};
use crate::node_properties::NodeProperties;
use crate::object::Pod;
use crate::volumes::bind::BindError;

/// Maximum bytes of a driver's message in an event.
const MESSAGE_MAX: usize = 512;

/// Waits until the drivers have set the binding conditions of the pod's devices. Calls `on_wait` before it waits.
pub(crate) async fn wait(
    client: &Client,
    devices: &Devices,
    pod: &Pod,
    claims: &[Key],
    on_wait: impl FnOnce(),
) -> Result<(), BindError> {
    if !devices.has_conditions(claims) {
        return Ok(());
    }
    on_wait();
    let timeout = devices.lock().timeout(pod);
    let ready = wait_until_ready(devices, claims, timeout).await.map_err(BindError::DeviceConditions);
    if ready.is_err() {
        bind::unreserve(client, devices, pod, claims).await;
    }
    ready
}

async fn wait_until_ready(devices: &Devices, claims: &[Key], timeout: SignedDuration) -> Result<(), String> {
    let mut changes = devices.changes();
    let limit = Timestamp::now().checked_add(timeout).unwrap_or(Timestamp::MAX);
    loop {
        changes.borrow_and_update();
        let (waits_for, left) = match devices.readiness(claims, timeout, Timestamp::now(), limit)? {
            Readiness::Ready => return Ok(()),
            Readiness::Waits { claim, left } => (claim, left),
        };
        match tokio::time::timeout(left, changes.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_stopped)) => return Err("the scheduler is stopping".to_owned()),
            Err(_elapsed) => return Err(timed_out(&waits_for)),
        }
    }
}

/// The progress of the binding conditions of a pod's claims.
#[derive(Debug, PartialEq, Eq)]
enum Readiness {
    Ready,
    /// A claim is not ready. `left` is the time until the pod's devices are released.
    Waits {
        claim: String,
        left: Duration,
    },
}

// === impl Devices ===

impl Devices {
    /// Sets the timeouts of the profiles.
    pub(crate) fn set_timeouts(&self, profiles: &[Profile]) {
        let timeouts = profiles.iter().map(|profile| (profile.name.clone(), profile.device_timeout));
        self.lock().timeouts = timeouts.collect();
    }

    /// Whether a device of these claims has binding conditions.
    fn has_conditions(&self, claims: &[Key]) -> bool {
        let state = self.lock();
        // The watch may have delivered an older state of the claim, without its allocation. So read the chosen
        // allocation.
        let mut allocations = claims.iter().filter_map(|key| state.allocation(key));
        allocations.any(|allocation| conditional(allocation).next().is_some())
    }

    /// The progress of the claims now. The pod waits until `limit` at most. The error is upstream's message.
    fn readiness(
        &self,
        claims: &[Key],
        timeout: SignedDuration,
        now: Timestamp,
        limit: Timestamp,
    ) -> Result<Readiness, String> {
        let state = self.lock();
        for key in claims {
            let claim = state.claims.get(key);
            let claim = claim.ok_or_else(|| format!("resourceclaim {:?} not found", key.name))?;
            if is_ready(claim)? {
                continue;
            }
            // The watch may not have delivered the allocation yet.
            let deadline = deadline(claim, timeout).unwrap_or(limit).min(limit);
            return match Duration::try_from(now.duration_until(deadline)) {
                Ok(left) if !left.is_zero() => Ok(Readiness::Waits { claim: key.name.clone(), left }),
                _ => Err(timed_out(&key.name)),
            };
        }
        Ok(Readiness::Ready)
    }

    /// A claim whose devices can be released: nodes refused the pod because of these devices. Source: `PostFilter`.
    /// `why` is the message about the pod.
    pub(crate) fn releasable(
        &self,
        pod: &Pod,
        why: &str,
        nodes: &[&NodeProperties],
    ) -> Option<UnusableClaim> {
        let state = self.lock();
        if let Some(former) = state.former_claim(pod).and_then(|key| state.claims.get(key)) {
            return Some(UnusableClaim { claim: former.clone(), is_former: true });
        }
        if !why.contains(NOT_AVAILABLE) {
            return None;
        }
        let (now, timeout) = (Timestamp::now(), state.timeout(pod));
        let names = super::claim_names(pod).filter_map(|(_, name)| name.ok().flatten());
        let claims = names.filter_map(|name| state.claims.get(&Key::new(pod.namespace(), name)));
        let mut unavailable = claims.filter(|claim| {
            let Some(allocation) = &claim.status.allocation else { return false };
            let selector = super::selector_of(allocation);
            let is_unreachable = |node: &NodeProperties| !is_reachable(selector.as_ref(), node);
            claim.is_free_for(pod)
                && (has_failed(claim, now, timeout) || nodes.iter().copied().any(is_unreachable))
        });
        unavailable.next().map(|claim| UnusableClaim { claim: claim.clone(), is_former: false })
    }
}

// === impl State ===

impl State {
    /// Maximum time that the pod waits, from the profile of its scheduler.
    pub(super) fn timeout(&self, pod: &Pod) -> SignedDuration {
        self.timeouts.get(pod.scheduler()).copied().unwrap_or(DEVICE_TIMEOUT)
    }
}

// === impl Claim ===

impl Claim {
    /// Whether no other pod uses the claim.
    pub(super) fn is_free_for(&self, pod: &Pod) -> bool {
        self.status.reserved_for.iter().all(|user| user["uid"] == pod.uid())
    }
}

fn timed_out(claim: &str) -> String {
    format!("device binding timeout: claim={claim}")
}

/// Whether the devices of an allocated claim failed, or their conditions were not set in time. Then the claim is
/// allocated again.
pub(super) fn has_failed(claim: &Claim, now: Timestamp, timeout: SignedDuration) -> bool {
    match is_ready(claim) {
        Ok(is_ready) => !is_ready && deadline(claim, timeout).is_some_and(|deadline| deadline < now),
        Err(_) => true,
    }
}

/// Whether the drivers have set all binding conditions of a claim's devices. The error is upstream's message about a
/// device that failed.
fn is_ready(claim: &Claim) -> Result<bool, String> {
    let Some(allocation) = &claim.status.allocation else { return Ok(false) };
    for result in conditional(allocation) {
        let is_of = |field: &str, value: &str| result[field].as_str() == Some(value);
        let device = claim.status.devices.iter().find(|device| {
            is_of("driver", &device.driver) && is_of("pool", &device.pool) && is_of("device", &device.device)
        });
        let Some(device) = device else { return Ok(false) };
        let when_true = |name: &str| -> Option<&DeviceCondition> {
            device.conditions.iter().find(|one| one.kind == name && one.status == "True")
        };
        if let Some(failed) = texts(&result["bindingFailureConditions"]).find_map(when_true) {
            let reason = printable(&failed.reason, MESSAGE_MAX);
            let (claim, message) = (claim.name(), printable(&failed.message, MESSAGE_MAX));
            return Err(format!(
                "device binding failed: claim={claim}, reason={reason}, message={message:?}"
            ));
        }
        if !texts(&result["bindingConditions"]).all(|name| when_true(name).is_some()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The time at which the devices of a claim with binding conditions are released. `None` without conditions or without
/// an allocation.
fn deadline(claim: &Claim, timeout: SignedDuration) -> Option<Timestamp> {
    let allocation = claim.status.allocation.as_ref()?;
    conditional(allocation).next()?;
    let allocated: Timestamp = allocation["allocationTimestamp"].as_str()?.parse().ok()?;
    allocated.checked_add(timeout).ok()
}

/// The devices of an allocation that have binding conditions.
fn conditional(allocation: &Value) -> impl Iterator<Item = &Value> {
    let results = allocation.pointer("/devices/results").and_then(Value::as_array).into_iter().flatten();
    results.filter(|result| texts(&result["bindingConditions"]).next().is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A claim of a device with the conditions `ok` and `bad`.
    fn claim(conditions: &[(&str, &str)]) -> Claim {
        let conditions = conditions.iter().map(|(kind, status)| {
            json!({"type": kind, "status": status, "reason": "Why", "message": "it \"broke\""})
        });
        let id = json!({"driver": "d", "pool": "p", "device": "x"});
        let (mut result, mut status) = (id.clone(), id);
        result["bindingConditions"] = json!(["ok"]);
        result["bindingFailureConditions"] = json!(["bad"]);
        status["conditions"] = conditions.collect::<Vec<_>>().into();
        let allocation =
            json!({"allocationTimestamp": "2026-01-01T00:00:00Z", "devices": {"results": [result]}});
        let status = json!({"allocation": allocation, "devices": [status]});
        serde_json::from_value(json!({"metadata": {"name": "c", "namespace": "d"}, "status": status}))
            .unwrap()
    }

    #[test]
    fn a_claim_is_ready_when_all_its_conditions_are_true_and_none_failed() {
        assert_eq!(is_ready(&claim(&[])), Ok(false));
        assert_eq!(is_ready(&claim(&[("ok", "False")])), Ok(false));
        assert_eq!(is_ready(&claim(&[("ok", "True"), ("bad", "False")])), Ok(true));
        let failed = "device binding failed: claim=c, reason=Why, message=\"it \\\"broke\\\"\"";
        assert_eq!(is_ready(&claim(&[("ok", "True"), ("bad", "True")])), Err(failed.to_owned()));
        let mut other = claim(&[("ok", "True")]);
        other.status.devices[0].device = "y".to_owned();
        assert_eq!(is_ready(&other), Ok(false), "the status is of another device");
        let mut plain = claim(&[]);
        plain.status.allocation = Some(json!({"devices": {"results": [{"driver": "d"}]}}));
        assert_eq!(is_ready(&plain), Ok(true), "no device has conditions");
    }

    #[test]
    fn a_claim_is_given_up_after_ten_minutes_or_a_failure() {
        let at = |time: &str| time.parse::<Timestamp>().unwrap();
        let (before, after) = (at("2026-01-01T00:10:00Z"), at("2026-01-01T00:10:01Z"));
        let failed = |conditions: &[(&str, &str)], now| has_failed(&claim(conditions), now, DEVICE_TIMEOUT);
        assert!(!failed(&[], before) && failed(&[], after));
        assert!(!failed(&[("ok", "True")], after));
        assert!(failed(&[("bad", "True")], before));
    }

    #[test]
    fn a_pod_waits_for_the_rest_of_the_time() {
        let devices = Devices::default();
        let keys = [claim(&[]).key()];
        let readiness =
            |time: &str| devices.readiness(&keys, DEVICE_TIMEOUT, time.parse().unwrap(), Timestamp::MAX);
        assert!(readiness("2026-01-01T00:04:00Z").unwrap_err().contains("not found"));
        devices.lock().put_claim(claim(&[]));
        let left = Duration::from_secs(360);
        let waits = Readiness::Waits { claim: "c".to_owned(), left };
        assert_eq!(readiness("2026-01-01T00:04:00Z"), Ok(waits));
        let late = readiness("2026-01-01T00:10:00Z").unwrap_err();
        assert_eq!(late, "device binding timeout: claim=c");
        devices.lock().put_claim(claim(&[("ok", "True")]));
        assert_eq!(readiness("2026-01-01T01:00:00Z"), Ok(Readiness::Ready));
    }

    #[tokio::test]
    async fn a_pod_whose_device_failed_releases_its_claim() {
        let devices = Devices::default();
        let claim = claim(&[("bad", "True")]);
        devices.lock().put_claim(claim.clone());
        let (sender, mut patches) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let sender = sender.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                if let Ok(patch) = serde_json::from_slice::<Value>(&body) {
                    sender.send(patch).unwrap();
                }
                let stored = json!({"metadata": {"name": "c", "namespace": "d", "uid": "c", "resourceVersion": "7"},
                    "status": {"reservedFor": [{"uid": "p"}, {"uid": "q"}]}});
                let body = kube::client::Body::from(stored.to_string().into_bytes());
                Ok::<_, std::convert::Infallible>(http::Response::new(body))
            }
        });
        let (client, pod) = (Client::new(service, "d"), crate::fixture::pod("p", json!({})));
        let mut waits = false;
        let result = wait(&client, &devices, &pod, &[claim.key()], || waits = true).await;
        assert!(waits && matches!(&result, Err(BindError::DeviceConditions(why)) if why.contains("claim=c")));
        let patch = patches.recv().await.unwrap();
        assert_eq!(patch["status"], json!({"reservedFor": [{"uid": "q"}]}));
        assert_eq!(patch["metadata"], json!({"uid": "c", "resourceVersion": "7"}));
    }

    /// An API server with the pod `p` on this node. It refuses each change of a claim with a conflict.
    fn server(node: Value, patches: tokio::sync::mpsc::UnboundedSender<Value>) -> Client {
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (node, patches) = (node.clone(), patches.clone());
            async move {
                let is_read = request.method() == http::Method::GET;
                let body = request.into_body().collect_bytes().await.unwrap();
                let (status, answer) = if is_read {
                    let metadata = json!({"name": "p", "namespace": "d", "uid": "p"});
                    (200_u16, json!({"metadata": metadata, "spec": {"nodeName": node}}))
                } else {
                    patches.send(serde_json::from_slice(&body).unwrap()).unwrap();
                    let message = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 409,
                        "reason": "Conflict", "message": "changed"});
                    (409, message)
                };
                let body = kube::client::Body::from(answer.to_string().into_bytes());
                Ok::<_, std::convert::Infallible>(
                    http::Response::builder().status(status).body(body).unwrap(),
                )
            }
        });
        Client::new(service, "d")
    }

    #[tokio::test]
    async fn a_claim_that_has_changed_or_whose_pod_is_bound_keeps_its_devices() {
        let devices = Devices::default();
        let mut failed = claim(&[("bad", "True")]);
        failed.metadata.uid = Some("c".to_owned());
        failed.metadata.resource_version = Some("6".to_owned());
        devices.lock().put_claim(failed);
        let spec = json!({"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]});
        let pod = crate::fixture::pod("p", spec);
        let unusable = devices.releasable(&pod, NOT_AVAILABLE, &[]).unwrap();
        assert!(!unusable.is_former);
        let (sender, mut patches) = tokio::sync::mpsc::unbounded_channel();
        bind::deallocate(&server(json!(null), sender.clone()), &pod, &unusable).await.unwrap();
        let patch = patches.recv().await.unwrap();
        assert_eq!(patch["metadata"], json!({"uid": "c", "resourceVersion": "6"}));
        bind::deallocate(&server(json!("n"), sender.clone()), &pod, &unusable).await.unwrap();
        bind::unreserve(&server(json!("n"), sender), &devices, &pod, &[unusable.key()]).await;
        assert!(patches.try_recv().is_err(), "the pod is bound");
    }

    #[test]
    fn a_pod_waits_although_the_watch_delivers_an_earlier_state_of_its_claim() {
        let devices = Devices::default();
        let (written, mut before) = (claim(&[]), claim(&[]));
        before.status.allocation = None;
        let mut state = devices.lock();
        state.assumed.insert(written.key(), written.status.allocation.clone().unwrap());
        state.put_claim(before);
        drop(state);
        let (keys, now) = ([written.key()], Timestamp::now());
        assert!(devices.has_conditions(&keys));
        let limit = now.checked_add(DEVICE_TIMEOUT).unwrap();
        assert!(matches!(devices.readiness(&keys, DEVICE_TIMEOUT, now, limit), Ok(Readiness::Waits { .. })));
    }
}
