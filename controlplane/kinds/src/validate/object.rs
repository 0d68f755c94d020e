//! Namespaces, leases.

use serde_json::Value;

use super::{Causes, Path, format, items, meta, text};

pub(crate) fn namespace(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    match old {
        None => finalizers(causes, object, |path, _| path.clone()),
        // Only `/finalize` changes the finalizers. As upstream, its errors have the index of the finalizer.
        Some(old) if old["spec"]["finalizers"] != object["spec"]["finalizers"] => {
            finalizers(causes, object, Path::index);
        }
        Some(_) => {}
    }
}

fn finalizers(causes: &mut Causes, object: &Value, at: fn(&Path, usize) -> Path) {
    let path = Path::root("spec").field("finalizers");
    for (index, finalizer) in items(&object["spec"]["finalizers"]) {
        let (here, name) = (at(&path, index), text(finalizer));
        let problems = format::qualified_name(name);
        let is_plain = problems.is_empty() && meta::is_plain_finalizer(name);
        causes.format(&here, name, problems);
        if is_plain {
            causes.invalid(&here, finalizer, meta::PLAIN_FINALIZER);
        }
    }
}

/// Checks the phase of a namespace: Terminating if it is being deleted, otherwise Active.
pub(super) fn namespace_status(causes: &mut Causes, object: &Value) {
    let is_deleted = !object["metadata"]["deletionTimestamp"].is_null();
    let (phase, detail) = if is_deleted {
        ("Terminating", "may only be 'Terminating' if `deletionTimestamp` is not empty")
    } else {
        ("Active", "may only be 'Active' if `deletionTimestamp` is empty")
    };
    if object["status"]["phase"] != phase {
        let value = text(&object["status"]["phase"]).into();
        causes.invalid(&Path::root("status").field("Phase"), &value, detail);
    }
}

pub(crate) fn lease(causes: &mut Causes, lease: &Value, _old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &lease["spec"]);
    if spec["leaseDurationSeconds"].as_i64().is_some_and(|seconds| seconds <= 0) {
        let detail = "must be greater than 0";
        causes.invalid(&path.field("leaseDurationSeconds"), &spec["leaseDurationSeconds"], detail);
    }
    causes.not_negative(&path.field("leaseTransitions"), &spec["leaseTransitions"]);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::tests::found;

    #[test]
    fn a_released_lease_has_an_empty_holder() {
        let problems = |spec: Value| {
            let mut causes = Causes::default();
            lease(&mut causes, &json!({"spec": spec}), None);
            causes.into_list().len()
        };
        assert_eq!(problems(json!({"holderIdentity": "", "leaseDurationSeconds": 1})), 0);
        assert_eq!(problems(json!({"holderIdentity": "", "leaseDurationSeconds": 0})), 1);
    }

    #[test]
    fn the_phase_of_a_namespace_shows_whether_it_is_deleted() {
        let problems = |phase: &str, deleted: Value| {
            let namespace = json!({"metadata": {"deletionTimestamp": deleted}, "status": {"phase": phase}});
            found(|causes| namespace_status(causes, &namespace))
        };
        assert_eq!(problems("Active", Value::Null), Vec::<String>::new());
        assert_eq!(problems("Terminating", "2026-01-01T00:00:00Z".into()), Vec::<String>::new());
        assert_eq!(
            problems("Terminating", Value::Null),
            [
                "status.Phase: Invalid value: \"Terminating\": may only be 'Active' if `deletionTimestamp` is empty"
            ]
        );
        assert_eq!(problems("Active", "2026-01-01T00:00:00Z".into()).len(), 1);
    }

    #[test]
    fn finalizers_of_a_namespace_are_checked_when_they_change() {
        let of = |finalizer: &str| json!({"spec": {"finalizers": [finalizer]}});
        let fields = |old: Option<&Value>| found(|causes| namespace(causes, &of("plain"), old));
        assert!(fields(None)[0].starts_with("spec.finalizers: "));
        assert!(fields(Some(&of("kubernetes")))[0].starts_with("spec.finalizers[0]: "));
        assert_eq!(fields(Some(&of("plain"))), Vec::<String>::new());
    }
}
