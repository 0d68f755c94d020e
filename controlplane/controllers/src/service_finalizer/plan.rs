//! Decides about the finalizer of LoadBalancer services, as upstream's service controller does. No I/O.

use serde_json::{Value, json};

use crate::object::{ObjectExt, Service};

/// Finalizer of services that have a load balancer. Source: `LoadBalancerCleanupFinalizer`.
const FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";

/// Annotation of a service: the class of the controller that holds the finalizer. Controllers of other classes use the
/// same finalizer. The annotation keeps the class, because a service has no class after a change of its type.
const HOLDER: &str = "coracle.dev/load-balancer-finalizer";

/// The patch that adds the finalizer for a class. `None` if the service has it, or is being deleted: the API server
/// refuses new finalizers then.
pub(crate) fn hold(service: &Service, class: &str) -> Option<Value> {
    let is_held = has_finalizer(service) && service.annotation(HOLDER) == Some(class);
    if is_held || service.is_being_deleted() {
        return None;
    }
    let all = others(service).chain([FINALIZER]).collect();
    Some(patch(service, all, class.into()))
}

/// The patch that removes the finalizer of a class. `None` if the finalizer must stay, or belongs to another
/// controller. `is_served` tells whether the controller of this class serves the service.
pub(crate) fn release(service: &Service, class: &str, is_served: bool) -> Option<Value> {
    is_due(service, class, is_served).then(|| patch(service, others(service).collect(), Value::Null))
}

/// Whether the controller of a class must remove the finalizer: the service is being deleted, or the controller does
/// not serve it any more.
pub(crate) fn is_due(service: &Service, class: &str, is_served: bool) -> bool {
    let is_holder = service.annotation(HOLDER) == Some(class);
    if !is_served {
        return is_holder;
    }
    // Users can change the annotation, or another controller served this service before. No other controller removes
    // the finalizer then. Source: `needsCleanup`.
    service.is_being_deleted() && (is_holder || has_finalizer(service))
}

fn has_finalizer(service: &Service) -> bool {
    service.metadata.finalizers.iter().flatten().any(|name| name == FINALIZER)
}

/// The other finalizers of a service.
fn others(service: &Service) -> impl Iterator<Item = &str> {
    service.metadata.finalizers.iter().flatten().map(String::as_str).filter(|name| *name != FINALIZER)
}

/// A patch of finalizers and annotation. It applies only to this version of the service.
fn patch(service: &Service, finalizers: Vec<&str>, holder: Value) -> Value {
    json!({"metadata": {
        "uid": service.uid(),
        "resourceVersion": service.metadata.resource_version,
        "finalizers": finalizers,
        "annotations": {HOLDER: holder},
    }})
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASS: &str = "coracle.dev/address-pool";

    /// A service with these finalizers, and with this holder.
    fn service(finalizers: &[&str], holder: Option<&str>, is_deleted: bool) -> Service {
        let deleted = is_deleted.then_some("2026-01-01T00:00:00Z");
        let annotations = holder.map(|class| json!({HOLDER: class}));
        serde_json::from_value(
            json!({"metadata": {"namespace": "n", "name": "s", "uid": "u", "resourceVersion": "7",
            "finalizers": finalizers, "annotations": annotations, "deletionTimestamp": deleted}}),
        )
        .unwrap()
    }

    fn finalizers(patch: &Value) -> &Value {
        &patch["metadata"]["finalizers"]
    }

    #[test]
    fn a_served_service_gets_the_finalizer_once() {
        let held = hold(&service(&["x"], None, false), CLASS).unwrap();
        assert_eq!(finalizers(&held), &json!(["x", FINALIZER]));
        assert_eq!(held["metadata"]["annotations"], json!({HOLDER: CLASS}));
        assert_eq!(held["metadata"]["resourceVersion"], "7");
        assert_eq!(hold(&service(&[FINALIZER], Some(CLASS), false), CLASS), None);
        assert_eq!(hold(&service(&[], None, true), CLASS), None, "the API server would refuse it");
    }

    #[test]
    fn a_finalizer_of_a_former_controller_is_taken_over() {
        for holder in [None, Some("coracle.dev/node-addresses")] {
            let taken = hold(&service(&[FINALIZER, "x"], holder, false), CLASS).unwrap();
            assert_eq!(finalizers(&taken), &json!(["x", FINALIZER]));
            assert_eq!(taken["metadata"]["annotations"], json!({HOLDER: CLASS}));
        }
    }

    #[test]
    fn a_deleted_service_is_released() {
        let released = release(&service(&["x", FINALIZER], Some(CLASS), true), CLASS, true).unwrap();
        assert_eq!(finalizers(&released), &json!(["x"]));
        assert_eq!(released["metadata"]["annotations"], json!({HOLDER: null}));
        for holder in [None, Some("coracle.dev/node-addresses"), Some("written by a user")] {
            let deleted = service(&[FINALIZER], holder, true);
            assert_eq!(finalizers(&release(&deleted, CLASS, true).unwrap()), &json!([]), "{holder:?}");
        }
        assert_eq!(release(&service(&[FINALIZER], Some(CLASS), false), CLASS, true), None, "it is served");
        assert_eq!(release(&service(&["x"], None, true), CLASS, true), None, "it has no finalizer");
    }

    #[test]
    fn a_service_that_is_not_served_any_more_is_released() {
        for is_deleted in [false, true] {
            let released = release(&service(&[FINALIZER], Some(CLASS), is_deleted), CLASS, false).unwrap();
            assert_eq!(finalizers(&released), &json!([]));
        }
        assert!(
            release(&service(&[], Some(CLASS), false), CLASS, false).is_some(),
            "the annotation is removed"
        );
    }

    #[test]
    fn finalizers_of_other_controllers_stay() {
        for is_deleted in [false, true] {
            assert_eq!(release(&service(&[FINALIZER], None, is_deleted), CLASS, false), None);
            let other = service(&[FINALIZER], Some("coracle.dev/node-addresses"), is_deleted);
            assert_eq!(release(&other, CLASS, false), None);
        }
    }
}
