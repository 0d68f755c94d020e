//! Checks the defaults in a schema: they must have no unknown fields and must be valid. Source:
//! `apiserver/schema/defaulting/validation.go`.

use crate::schema::Schema;
use crate::violation::{Path, Violations};
use crate::{check, embedded, prune};

/// Checks all defaults. Metadata has no special case: other checks forbid its defaults, except plain strings.
pub(crate) fn validate(schema: &Schema, path: &Path, violations: &mut Violations) {
    if let Some(default) = &schema.default {
        let place = path.field("default");
        let mut pruned = default.clone();
        prune::prune_value(&mut pruned, schema);
        if pruned != *default {
            violations.invalid(&place, default, "must not have unknown fields");
        }
        let before = violations.len();
        embedded::coerce(&mut pruned, schema, violations);
        if violations.len() == before {
            check::check(default, None, schema, place.as_str(), violations);
        }
    }
    if let Some(item) = schema.item() {
        validate(item, &path.field("items"), violations);
    }
    for (name, property) in &schema.properties {
        validate(property, &path.field("properties").key(name), violations);
    }
}
