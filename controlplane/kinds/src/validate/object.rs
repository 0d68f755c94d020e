//! Namespaces, leases.

use serde_json::Value;

use super::{Causes, Path, format, items, meta, text};

pub(crate) fn namespace(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    let path = Path::root("spec").field("finalizers");
    for (_, finalizer) in items(&object["spec"]["finalizers"]) {
        let name = text(finalizer);
        let problems = format::qualified_name(name);
        let is_plain = problems.is_empty() && meta::is_plain_finalizer(name);
        causes.format(&path, name, problems);
        if is_plain {
            causes.invalid(&path, finalizer, meta::PLAIN_FINALIZER);
        }
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
}
