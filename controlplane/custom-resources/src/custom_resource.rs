//! One version of a custom resource: its schema, its compiled rules and its subresources.

use coracle_cel::Type;
use serde_json::Value;

use crate::definition::{Definition, Scale, Version};
use crate::json_path::JsonPath;
use crate::rules::{Rules, State};
use crate::schema::{Schema, SchemaError};
use crate::violation::{Path, Violations};
use crate::{TooManyDefaults, check, default, embedded, list_type, prune, types, work};

/// One version of a custom resource.
#[derive(Debug)]
pub struct CustomResource {
    schema: Schema,
    rules: Option<Rules>,
    has_status: bool,
    scale: Option<Scale>,
    keeps_unknown: bool,
}

// === impl CustomResource ===

impl CustomResource {
    /// Compiles a version of a definition.
    ///
    /// # Errors
    /// The schema is too large or too deep.
    pub fn new(definition: &Definition, version: &Version) -> Result<CustomResource, SchemaError> {
        Ok(Self::without_rules(definition, version)?.with_rules())
    }

    /// A version of a definition without its rules in CEL.
    ///
    /// # Errors
    /// The schema is too large or too deep.
    pub fn without_rules(definition: &Definition, version: &Version) -> Result<CustomResource, SchemaError> {
        let schema = version.schema().map(Schema::parse).transpose()?.unwrap_or_default();
        Ok(CustomResource {
            schema,
            rules: None,
            has_status: version.has_status(),
            scale: version.scale().cloned(),
            keeps_unknown: definition.spec.preserve_unknown_fields,
        })
    }

    /// Compiles the rules in CEL.
    #[must_use]
    pub fn with_rules(self) -> CustomResource {
        CustomResource { rules: Rules::compile(&self.schema), ..self }
    }

    /// Whether the schema has rules in CEL.
    pub fn has_rules(&self) -> bool {
        self.rules.is_some()
    }

    /// The schema.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The type of the objects in CEL. `metadata` is the type of their metadata. `None` if the schema has no type.
    pub fn cel_type(&self, metadata: &Type) -> Option<Type> {
        types::of_resource(&self.schema, metadata)
    }

    /// Whether the rules in CEL may take more than about a millisecond for an object. For a short object, the rules are
    /// evaluated until their cost exceeds that time. The old object is given for an update.
    pub fn has_heavy_rules(&self, object: &Value, old: Option<&Value>) -> bool {
        let Some(rules) = &self.rules else { return false };
        let state = State { value: object, old };
        !work::is_short([object].into_iter().chain(old))
            || rules.cost_more(state, &self.schema, work::MAX_LIGHT_COST)
    }

    /// Whether the pruning, defaulting and validation of an object may take more than about a millisecond. The time of
    /// rules in CEL is not included. The old object is given for an update.
    pub fn is_heavy(&self, object: &Value, old: Option<&Value>) -> bool {
        work::is_heavy([object].into_iter().chain(old), &self.schema)
    }

    /// Whether `/status` is served.
    pub fn has_status(&self) -> bool {
        self.has_status
    }

    /// Removes unknown fields, and unknown metadata of embedded resources. Returns their paths, sorted.
    pub fn prune(&self, object: &mut Value, violations: &mut Violations) -> Vec<String> {
        let mut paths = embedded::coerce(object, &self.schema, violations);
        if !self.keeps_unknown {
            paths.extend(prune::prune(object, &self.schema));
        }
        paths.sort();
        paths
    }

    /// Sets the defaults.
    ///
    /// # Errors
    /// The defaults of the object need too much memory.
    pub fn default(&self, object: &mut Value) -> Result<(), TooManyDefaults> {
        default::default(object, &self.schema)
    }

    /// Whether the object has all defaults. After [`default`](Self::default) has failed, some are missing.
    pub fn has_all_defaults(&self, object: &Value) -> bool {
        default::is_complete(object, &self.schema)
    }

    /// Validates a new object, or an update if the old object is given.
    pub fn validate(&self, object: &Value, old: Option<&Value>, violations: &mut Violations) {
        self.validate_schema(object, old, violations);
        self.validate_rules(object, old, violations);
    }

    /// Does the same as [`validate`](Self::validate) without the rules in CEL.
    pub fn validate_schema(&self, object: &Value, old: Option<&Value>, violations: &mut Violations) {
        check::check(object, old, &self.schema, "", violations);
        self.validate_scale(object, violations);
        embedded::validate(object, &self.schema, violations);
        self.validate_lists(object, old, violations);
    }

    /// Validates an update of `/status`.
    pub fn validate_status(&self, object: &Value, old: &Value, violations: &mut Violations) {
        self.validate_status_schema(object, old, violations);
        self.validate_status_rules(object, old, violations);
    }

    /// Does the same as [`validate_status`](Self::validate_status) without the rules in CEL.
    pub fn validate_status_schema(&self, object: &Value, old: &Value, violations: &mut Violations) {
        let parts = object.get("status").zip(self.schema.properties.get("status"));
        if let Some((status, schema)) = parts {
            check::check(status, old.get("status"), schema, "status", violations);
        }
        self.validate_scale(object, violations);
        self.validate_lists(object, Some(old), violations);
    }

    /// Evaluates the rules of `/status` in CEL, unless the object has violations that prevent it. Returns whether rules
    /// were evaluated.
    pub fn validate_status_rules(&self, object: &Value, old: &Value, violations: &mut Violations) -> bool {
        let parts = object.get("status").zip(self.schema.properties.get("status"));
        let rules = self.rules.as_ref().and_then(|rules| rules.property("status"));
        let (Some((status, schema)), Some(rules)) = (parts, rules) else { return false };
        if blocked(violations) {
            return false;
        }
        let state = State { value: status, old: old.get("status") };
        rules.evaluate(state, schema, &Path::root("status"), violations);
        true
    }

    /// Validates lists against their type (`x-kubernetes-list-type`). An update is accepted if the lists of the old
    /// object were invalid, too.
    fn validate_lists(&self, object: &Value, old: Option<&Value>, violations: &mut Violations) {
        let mut found = Violations::default();
        list_type::validate(object, &self.schema, &mut found);
        if found.is_empty() {
            return;
        }
        if let Some(old) = old {
            let mut before = Violations::default();
            list_type::validate(old, &self.schema, &mut before);
            if !before.is_empty() {
                return;
            }
        }
        violations.append(found);
    }

    /// Evaluates the rules in CEL. If violations of the object prevent the evaluation, adds a violation about that.
    /// Returns whether rules were evaluated.
    pub fn validate_rules(&self, object: &Value, old: Option<&Value>, violations: &mut Violations) -> bool {
        let Some(rules) = &self.rules else { return false };
        if blocked(violations) {
            let detail = "some validation rules were not checked because the object was invalid; correct the existing \
                          errors to complete validation";
            violations.invalid(&Path::default(), &Value::Null, detail);
            return false;
        }
        rules.evaluate(State { value: object, old }, &self.schema, &Path::default(), violations);
        true
    }

    fn validate_scale(&self, object: &Value, violations: &mut Violations) {
        let Some(scale) = &self.scale else { return };
        for path in [&scale.spec_replicas_path, &scale.status_replicas_path] {
            let value =
                JsonPath::parse(path).and_then(|path| path.first(object).cloned()).unwrap_or(Value::Null);
            let place = Path::root(path);
            match value.as_i64() {
                _ if value.is_null() => {}
                None => {
                    let name = path.trim_start_matches('.');
                    let detail =
                        format!("{name} accessor error: {value} is of the wrong type, expected int64");
                    violations.invalid(&place, &0.into(), &detail);
                }
                Some(count) if count < 0 => {
                    violations.invalid(&place, &value, "should be a non-negative integer");
                }
                Some(count) if count > i64::from(i32::MAX) => {
                    let detail = format!("should be less than or equal to {}", i32::MAX);
                    violations.invalid(&place, &value, &detail);
                }
                Some(_) => {}
            }
        }
        if let Some(path) = &scale.label_selector_path
            && let Some(value) = JsonPath::parse(path).and_then(|path| path.first(object).cloned())
            && !value.is_string()
        {
            let name = path.trim_start_matches('.');
            let detail = format!("{name} accessor error: {value} is of the wrong type, expected string");
            violations.invalid(&Path::root(path), &"".into(), &detail);
        }
    }
}

/// Whether the violations prevent the evaluation of rules. Rules expect the types, required fields and size limits of
/// the schema.
fn blocked(violations: &Violations) -> bool {
    const BLOCKING: &[&str] = &[
        "FieldValueNotSupported",
        "FieldValueRequired",
        "FieldValueTooLong",
        "FieldValueTooMany",
        "FieldValueTypeInvalid",
    ];
    violations.as_slice().iter().any(|violation| BLOCKING.contains(&violation.reason))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rules_are_not_evaluated_for_an_object_with_wrong_types() {
        let definition =
            Definition::parse(&json!({"spec": {"versions": [{"name": "v1", "schema": {"openAPIV3Schema": {
            "type": "object", "properties": {"a": {"type": "integer"}},
            "x-kubernetes-validations": [{"rule": "self.a > 1"}]}}}]}}))
            .unwrap();
        let resource = CustomResource::new(&definition, &definition.spec.versions[0]).unwrap();
        let found = |object: Value| {
            let mut violations = Violations::default();
            resource.validate(&object, None, &mut violations);
            violations.into_list().into_iter().map(|cause| cause.message).collect::<Vec<_>>()
        };
        assert!(found(json!({"a": 2})).is_empty());
        assert_eq!(found(json!({"a": 1})), ["Invalid value: failed rule: self.a > 1"]);
        let messages = found(json!({"a": "x"}));
        assert!(
            messages[1].starts_with("Invalid value: null: some validation rules were not checked"),
            "{messages:?}"
        );
    }
}
