//! Validation of CustomResourceDefinitions, by `coracle-custom-resources`.

use coracle_custom_resources::{Violations, validate};
use serde_json::Value;

use super::{Cause, Causes};

/// Validates a definition, or an update if the old definition is given.
pub(crate) fn definition(causes: &mut Causes, new: &Value, old: Option<&Value>) {
    let mut violations = Violations::default();
    match old {
        Some(old) => validate::update(new, old, &mut violations),
        None => validate::create(new, &mut violations),
    }
    add(causes, violations);
}

/// Validates an update of `/status`.
pub(crate) fn status(causes: &mut Causes, new: &Value) {
    let mut violations = Violations::default();
    validate::update_status(new, &mut violations);
    add(causes, violations);
}

/// Adds the violations of a definition or of a custom resource.
pub(super) fn add(causes: &mut Causes, violations: Violations) {
    for violation in violations.into_list() {
        causes.push(Cause { reason: violation.reason, field: violation.field, message: violation.message });
    }
}
