//! Fits a set of owned fields to a schema that changed since the set was written.

use crate::{
    field_set::{ElementRef, FieldSet},
    schema::{Schema, Type, TypeId},
};

/// Whether the set already fits the schema. Most sets do.
pub(crate) fn fits(schema: &Schema, of: TypeId, fields: &FieldSet) -> bool {
    fields.elements().all(|ElementRef { element, below, .. }| {
        let part = || schema.below(of, element);
        below.is_empty() || (!matches!(schema.get(part()), Type::Atomic) && fits(schema, part(), below))
    })
}

/// The set for the changed schema. If a value is atomic now, the set contains the value instead of its parts.
pub(crate) fn reconcile(schema: &Schema, of: TypeId, fields: &FieldSet) -> FieldSet {
    let mut fitted = FieldSet::default();
    for ElementRef { element, is_member, below } in fields.elements() {
        let part = schema.below(of, element);
        if matches!(schema.get(part), Type::Atomic) && !below.is_empty() {
            fitted.insert_element(element.clone());
            continue;
        }
        if is_member {
            fitted.insert_element(element.clone());
        }
        fitted.insert_below(element, reconcile(schema, part, below));
    }
    fitted
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::schema::Field;

    #[test]
    fn only_a_set_with_parts_of_an_atomic_value_is_rebuilt() {
        let mut schema = Schema::default();
        let atomic = schema.add(Type::Atomic);
        let fields = BTreeMap::from([("list".into(), Field { of: atomic, absent_is_empty: false })]);
        let of = schema.add(Type::Map { fields, other: None });
        let set = |json| FieldSet::from_json(&json).unwrap();
        let whole = set(json!({"f:list": {}, "f:other": {"f:a": {}}}));
        assert!(fits(&schema, of, &whole));
        assert_eq!(reconcile(&schema, of, &whole), whole);
        let parts = set(json!({"f:list": {"f:a": {}}, "f:other": {"f:a": {}}}));
        assert!(!fits(&schema, of, &parts));
        assert_eq!(reconcile(&schema, of, &parts), whole);
    }
}
