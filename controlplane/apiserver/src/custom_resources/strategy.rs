//! Rules for the objects of a custom resource version.

use std::time::Instant;

use coracle_cel::Type;
use coracle_custom_resources::columns::PrinterColumn;
use coracle_custom_resources::{CustomResource, Violations, write_whole_numbers};
use coracle_kinds::cel_type::metadata_type;
use coracle_kinds::resource::Strategy;
use coracle_kinds::schema::{self, FieldValidation, Parsed, SchemaError};
use coracle_kinds::table::age_of;
use coracle_kinds::validate::{Causes, Path, add_violations};
use coracle_managed_fields::{Schema, TypeId};
use jiff::Timestamp;
use serde_json::Value;

use super::ownership;
use crate::{cel_metrics, offload};

/// Evaluates rules in CEL, and counts the evaluation. `evaluate` returns whether it evaluated any rule.
fn measure(evaluate: impl FnOnce() -> bool) {
    let began = Instant::now();
    if evaluate() {
        cel_metrics::evaluated(began.elapsed());
    }
}

/// The rules of one version.
pub(super) struct CustomStrategy {
    version: String,
    kind: String,
    rules: CustomResource,
    columns: Vec<PrinterColumn>,
    ownership: (Schema, TypeId),
    has_defaults: bool,
}

// === impl CustomStrategy ===

impl CustomStrategy {
    pub(super) fn new(
        version: &str,
        kind: &str,
        rules: CustomResource,
        columns: Vec<PrinterColumn>,
    ) -> CustomStrategy {
        let (ownership, has_defaults) = (ownership::of_schema(rules.schema()), rules.schema().has_defaults());
        CustomStrategy {
            version: version.to_owned(),
            kind: kind.to_owned(),
            rules,
            columns,
            ownership,
            has_defaults,
        }
    }

    fn problem(&self, problem: String) -> SchemaError {
        SchemaError::Decode { kind: self.kind.clone(), version: self.version.clone(), problem }
    }

    fn decode_here(
        &self,
        parsed: Parsed,
        validation: FieldValidation,
    ) -> Result<(Value, Vec<String>), SchemaError> {
        let Parsed { mut value, duplicates, .. } = parsed;
        if !value.is_object() {
            return Err(self.problem("json: cannot unmarshal a value that is not an object".to_owned()));
        }
        write_whole_numbers(&mut value);
        let mut notes = duplicates;
        notes.extend(schema::decode_metadata(&mut value).map_err(|problem| self.problem(problem))?);
        let mut violations = Violations::default();
        let unknown = self.rules.prune(&mut value, &mut violations);
        if let Some(violation) = violations.as_slice().first() {
            return Err(self.problem(format!("{}: {}", violation.field, violation.message)));
        }
        notes.extend(unknown.iter().map(|path| format!("unknown field \"{path}\"")));
        match validation {
            FieldValidation::Ignore => Ok((value, Vec::new())),
            FieldValidation::Strict if !notes.is_empty() => {
                Err(self.problem(format!("strict decoding error: {}", notes.join(", "))))
            }
            FieldValidation::Warn | FieldValidation::Strict => Ok((value, notes)),
        }
    }
}

impl Strategy for CustomStrategy {
    fn decode(
        &self,
        parsed: Parsed,
        validation: FieldValidation,
    ) -> Result<(Value, Vec<String>), SchemaError> {
        let is_heavy = self.rules.is_heavy(&parsed.value, None);
        offload::run(is_heavy, || self.decode_here(parsed, validation))
    }

    fn default(&self, object: &mut Value) {
        let is_heavy = self.rules.is_heavy(object, None);
        // Defaults beyond the memory limit are omitted. The validation then refuses the object. The cache holds its
        // lock when it completes stored objects.
        let _ = offload::run_with_locks(is_heavy, || self.rules.default(object));
    }

    fn prepare_create(&self, object: &mut Value) {
        if self.rules.has_status()
            && let Some(map) = object.as_object_mut()
        {
            map.remove("status");
        }
    }

    fn validate(&self, causes: &mut Causes, new: &Value, old: Option<&Value>) {
        let mut violations = Violations::default();
        // The caller runs a validation with heavy rules as long work.
        let is_complete = offload::run(self.rules.is_heavy(new, old), || {
            let is_complete = !self.has_defaults || self.rules.has_all_defaults(new);
            if is_complete {
                self.rules.validate_schema(new, old, &mut violations);
                measure(|| self.rules.validate_rules(new, old, &mut violations));
            }
            is_complete
        });
        if !is_complete {
            causes.invalid(&Path::root(""), &Value::Null, "the defaults of the object need too much memory");
        }
        add_violations(causes, violations);
    }

    fn validate_status(&self, causes: &mut Causes, new: &Value, old: &Value) {
        let mut violations = Violations::default();
        let is_heavy = self.rules.is_heavy(new, Some(old));
        offload::run(is_heavy, || {
            self.rules.validate_status_schema(new, old, &mut violations);
            measure(|| self.rules.validate_status_rules(new, old, &mut violations));
        });
        add_violations(causes, violations);
    }

    fn has_long_defaults(&self, object: &Value) -> bool {
        self.has_defaults && self.rules.is_heavy(object, None)
    }

    fn has_long_validation(&self, new: &Value, old: Option<&Value>) -> bool {
        self.rules.is_heavy(new, old) || self.rules.has_heavy_rules(new, old)
    }

    fn completes_stored(&self) -> bool {
        self.has_defaults
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        // A bookmark has no name.
        let name: Value = object["metadata"]["name"].as_str().unwrap_or_default().into();
        let others = self.columns.iter().map(|column| column.cell(object, |at| age_of(at, now)));
        std::iter::once(name).chain(others).collect()
    }

    fn cel_type(&self) -> Option<Type> {
        self.rules.cel_type(&metadata_type())
    }

    fn ownership(&self) -> Option<(&Schema, TypeId)> {
        Some((&self.ownership.0, self.ownership.1))
    }
}

#[cfg(test)]
mod tests {
    use coracle_custom_resources::definition::Definition;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_validation_of_costly_rules_and_the_work_on_large_objects_is_long() {
        let strategy = |spec: Value| {
            let schema = json!({"type": "object", "properties": {"spec": spec}});
            let definition = json!({"spec": {"group": "a.example", "names": {"kind": "Cup"}, "versions": [
                {"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}]}});
            let definition = Definition::parse(&definition).unwrap();
            let rules = CustomResource::new(&definition, definition.version("v1").unwrap()).unwrap();
            CustomStrategy::new("v1", "Cup", rules, Vec::new())
        };
        let text = json!({"type": "string", "pattern": "^[a-z]*$"});
        let rule = json!({"type": "string", "x-kubernetes-validations": [{"rule": "self != 'b'"}]});
        let small = json!({"spec": "a"});
        assert!(!strategy(text.clone()).has_long_validation(&small, None));
        assert!(strategy(text).has_long_validation(&json!({"spec": "a".repeat(1 << 20)}), None));
        assert!(!strategy(rule.clone()).has_long_validation(&small, Some(&small)), "a cheap rule");
        assert!(strategy(rule).has_long_validation(&json!({"spec": "a".repeat(40 << 10)}), Some(&small)));
        let nested = "self.all(x, self.all(y, x != y || x == y))";
        let numbers = json!({"type": "array", "items": {"type": "integer"},
            "x-kubernetes-validations": [{"rule": nested}]});
        let object = |numbers: usize| json!({"spec": vec![1; numbers]});
        assert!(!strategy(numbers.clone()).has_long_validation(&object(5), None));
        assert!(strategy(numbers).has_long_validation(&object(200), None));
        let filled = json!({"type": "array", "items": {"type": "object", "properties": {
            "a": {"type": "string", "default": "b".repeat(1000)}}}});
        let many = json!({"spec": vec![json!({}); 2000]});
        assert!(strategy(filled.clone()).has_long_defaults(&many));
        assert!(!strategy(filled).has_long_defaults(&json!({"spec": [{}]})));
    }
}
