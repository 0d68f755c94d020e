//! Fits a set of owned fields to a schema that changed since the set was written.

use crate::{
    field_set::FieldSet,
    schema::{Schema, Type, TypeId},
};

/// The set, where the parts of a value that is atomic now are replaced by the value.
pub(crate) fn reconcile(schema: &Schema, of: TypeId, fields: &FieldSet) -> FieldSet {
    let mut fitted = FieldSet::default();
    for (element, member, below) in fields.nodes() {
        let part = schema.below(of, element);
        if matches!(schema.get(part), Type::Atomic) && !below.is_empty() {
            fitted.insert_element(element.clone());
            continue;
        }
        if member {
            fitted.insert_element(element.clone());
        }
        fitted.insert_below(element, reconcile(schema, part, below));
    }
    fitted
}
