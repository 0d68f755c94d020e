//! Plans the changes of a ServiceCIDR. No I/O. Source: `pkg/controller/servicecidrs`.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnetwork::IpNetwork;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::object::{ObjectExt, ServiceCIDR};

/// Finalizer that keeps a ServiceCIDR while a service uses it.
pub(crate) const FINALIZER: &str = "networking.k8s.io/service-cidr-finalizer";
/// Minimum time between the deletion request and the removal of the finalizer, so that every API server has observed
/// the request.
const DELETION_GRACE: Duration = Duration::from_secs(10);
const READY: &str = "Kubernetes Service CIDR is ready";
const IN_USE: &str =
    "There are still IPAddresses referencing the ServiceCIDR, please remove them or create a new ServiceCIDR";

/// The action for a ServiceCIDR.
#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    /// Patches the metadata.
    SetFinalizers(Vec<String>),
    /// Patches the status.
    SetStatus(Value),
    /// Plan again after this time.
    Wait(Duration),
}

/// The ranges of a ServiceCIDR.
pub(crate) fn ranges(cidr: &ServiceCIDR) -> impl Iterator<Item = IpNetwork> {
    cidr.spec.cidrs.iter().flatten().filter_map(|range| range.parse().ok())
}

/// Plans a ServiceCIDR. `others` are all other ServiceCIDRs. `first_only_in` returns a service's address that is in a
/// range, but not in the other ranges.
pub(crate) fn plan(
    cidr: &ServiceCIDR,
    others: &[Arc<ServiceCIDR>],
    first_only_in: impl Fn(IpNetwork, &[IpNetwork]) -> Option<IpAddr>,
    now: Timestamp,
) -> Vec<Action> {
    let finalizers = cidr.metadata.finalizers.clone().unwrap_or_default();
    let is_protected = finalizers.iter().any(|finalizer| finalizer == FINALIZER);
    let Some(deleted) = &cidr.metadata.deletion_timestamp else {
        let protect = (!is_protected)
            .then(|| Action::SetFinalizers(finalizers.into_iter().chain([FINALIZER.to_owned()]).collect()));
        return protect.into_iter().chain(status(cidr, "True", "", READY, now)).collect();
    };
    if !is_protected {
        return Vec::new();
    }
    // Only ServiceCIDRs that are not being deleted can take over the addresses.
    let others: Vec<IpNetwork> =
        others.iter().filter(|other| !other.is_being_deleted()).flat_map(|other| ranges(other)).collect();
    if ranges(cidr).any(|range| first_only_in(range, &others).is_some()) {
        return status(cidr, "False", "Terminating", IN_USE, now).into_iter().collect();
    }
    let since = Duration::try_from(now.duration_since(deleted.0)).unwrap_or_default();
    if since < DELETION_GRACE {
        return vec![Action::Wait(DELETION_GRACE - since)];
    }
    vec![Action::SetFinalizers(finalizers.into_iter().filter(|finalizer| finalizer != FINALIZER).collect())]
}

/// The patch of the condition Ready. `None` if it is unchanged.
fn status(cidr: &ServiceCIDR, ready: &str, reason: &str, message: &str, now: Timestamp) -> Option<Action> {
    let conditions = cidr.status.conditions.as_deref().unwrap_or_default();
    let old = conditions.iter().find(|condition| condition.type_ == "Ready");
    if old.is_some_and(|old| old.status == ready && old.reason == reason && old.message == message) {
        return None;
    }
    let same = old.filter(|old| old.status == ready).map(|old| old.last_transition_time.0);
    let since = same.unwrap_or(now).strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let own = json!({"type": "Ready", "status": ready, "reason": reason, "message": message,
        "lastTransitionTime": since});
    let rest = conditions.iter().filter(|condition| condition.type_ != "Ready").map(|other| json!(other));
    Some(Action::SetStatus(json!({"conditions": rest.chain([own]).collect::<Vec<_>>()})))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(name: &str, ranges: &[&str], metadata: Value) -> ServiceCIDR {
        let mut value = json!({"metadata": metadata, "spec": {"cidrs": ranges}, "status": {}});
        value["metadata"]["name"] = name.into();
        serde_json::from_value(value).unwrap()
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn deleted() -> Value {
        json!({"deletionTimestamp": "1970-01-01T00:01:40Z", "finalizers": ["a/b", FINALIZER]})
    }

    /// Plans while a service has the address 10.0.0.1.
    fn with_address(cidr: &ServiceCIDR, others: &[Arc<ServiceCIDR>], second: i64) -> Vec<Action> {
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        let first = |range: IpNetwork, others: &[IpNetwork]| {
            let is_elsewhere = others.iter().any(|other| other.contains(address));
            Some(address).filter(|address| range.contains(*address) && !is_elsewhere)
        };
        plan(cidr, others, first, at(second))
    }

    #[test]
    fn a_new_range_gets_the_finalizer_and_is_ready() {
        let mut new = cidr("a", &["10.0.0.0/24"], json!({"finalizers": ["a/b"]}));
        let actions = with_address(&new, &[], 0);
        assert_eq!(actions[0], Action::SetFinalizers(vec!["a/b".to_owned(), FINALIZER.to_owned()]));
        let Action::SetStatus(status) = &actions[1] else { panic!("{actions:?}") };
        assert_eq!(
            (&status["conditions"][0]["status"], &status["conditions"][0]["message"]),
            (&json!("True"), &json!(READY))
        );
        new.status = serde_json::from_value(status.clone()).unwrap();
        new.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
        assert_eq!(with_address(&new, &[], 9), []);
    }

    #[test]
    fn a_range_with_addresses_is_kept_until_another_range_has_them() {
        let old = cidr("a", &["10.0.0.0/24"], deleted());
        let actions = with_address(&old, &[], 200);
        let [Action::SetStatus(status)] = &actions[..] else { panic!("{actions:?}") };
        let ready = &status["conditions"][0];
        assert_eq!((&ready["status"], &ready["reason"]), (&json!("False"), &json!("Terminating")));
        let wider = Arc::new(cidr("b", &["10.0.0.0/8"], json!({})));
        let released = [Action::SetFinalizers(vec!["a/b".to_owned()])];
        assert_eq!(with_address(&old, &[wider], 200), released);
        let ending = Arc::new(cidr("b", &["10.0.0.0/8"], deleted()));
        assert!(matches!(with_address(&old, &[ending], 200)[..], [Action::SetStatus(_)]));
    }

    #[test]
    fn a_range_without_addresses_ends_after_a_time() {
        let old = cidr("a", &["10.1.0.0/24"], deleted());
        assert_eq!(with_address(&old, &[], 103), [Action::Wait(Duration::from_secs(7))]);
        assert_eq!(with_address(&old, &[], 110), [Action::SetFinalizers(vec!["a/b".to_owned()])]);
        let bare = cidr("a", &["10.1.0.0/24"], json!({"deletionTimestamp": "1970-01-01T00:01:40Z"}));
        assert_eq!(with_address(&bare, &[], 110), []);
    }
}
