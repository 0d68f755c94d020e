//! Type checking of validating policies: compiles their expressions with the types of the kinds that they match.
//!
//! Source: `policy/validating/typechecking.go`. The result is advice to the author of a policy. It does not affect
//! requests.

use std::collections::BTreeMap;

use coracle_cel::{Environment, Program, Type};
use serde_json::Value;

use crate::environment::typed;

/// Maximum bytes of expressions that are compiled for one policy. An expression counts once for each kind. Expressions
/// above the limit are not checked.
const MAX_SOURCE_BYTES: usize = 1 << 20;

/// Maximum bytes of the error of one expression for one kind. A longer error is truncated, because an error quotes its
/// expression.
const MAX_ERROR_BYTES: usize = 4 << 10;

/// Maximum bytes of all warnings of one policy. Later warnings are left out.
const MAX_WARNING_BYTES: usize = 128 << 10;

/// A kind that a policy matches.
#[derive(Clone, Debug)]
pub struct TypedKind {
    /// The name in warnings: `apps/v1, Kind=Deployment`.
    pub name: String,
    /// The type of its objects.
    pub object: Type,
}

/// A warning about an expression of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpressionWarning {
    /// The field of the expression: `spec.validations[0].expression`.
    pub field: String,
    /// One paragraph for each kind that the expression does not fit.
    pub warning: String,
}

/// Checks the validations and the message expressions of a policy's `spec` with the types of these kinds. `params` is
/// the type of the parameters, or `None` without a `paramKind`. Returns a warning for each expression that does not
/// fit. The types of custom resources may be large, so the iterator yields one kind at a time.
pub fn check_types(
    spec: &Value,
    kinds: impl IntoIterator<Item = TypedKind>,
    params: Option<&Type>,
) -> Vec<ExpressionWarning> {
    let mut checker = Checker { source_left: MAX_SOURCE_BYTES, warnings_left: MAX_WARNING_BYTES };
    // The text of each warning, by the index of the validation and the field. It has a paragraph for each kind.
    let mut found: BTreeMap<(usize, &str), String> = BTreeMap::new();
    for TypedKind { name, object } in kinds {
        let environment = checker.environment(spec, object, params);
        for (place, source) in expressions(spec) {
            if let Some(paragraph) = checker.paragraph(&name, source, &environment) {
                let warning = found.entry(place).or_default();
                if !warning.is_empty() {
                    warning.push('\n');
                }
                warning.push_str(&paragraph);
            }
        }
    }
    let warning = |((index, field), warning): ((usize, &str), String)| ExpressionWarning {
        field: format!("spec.validations[{index}].{field}"),
        warning,
    };
    found.into_iter().map(warning).collect()
}

/// The expressions of the validations, by the index of the validation and the field.
fn expressions(spec: &Value) -> impl Iterator<Item = ((usize, &'static str), &str)> {
    let validations = spec["validations"].as_array().into_iter().flatten().enumerate();
    validations.flat_map(|(index, validation)| {
        ["expression", "messageExpression"].into_iter().filter_map(move |field| {
            let source = validation[field].as_str().filter(|source| !source.is_empty())?;
            Some(((index, field), source))
        })
    })
}

struct Checker {
    /// Remaining bytes of expressions that may be compiled.
    source_left: usize,
    /// Remaining bytes for the texts of warnings.
    warnings_left: usize,
}

// === impl Checker ===

impl Checker {
    /// The variables for a kind. As upstream, a variable of the policy that does not compile has the type `dyn`.
    fn environment(&mut self, spec: &Value, object: Type, params: Option<&Type>) -> Environment {
        let mut environment = typed(object, params.cloned());
        for variable in spec["variables"].as_array().into_iter().flatten() {
            let name = variable["name"].as_str().unwrap_or_default();
            let source = variable["expression"].as_str().unwrap_or_default();
            let compiled = self.may_compile(source).then(|| Program::compile(source, &environment).ok());
            match compiled.flatten() {
                Some(program) => environment.shared(name, &program),
                None => environment.shared_of_any_type(name),
            }
        }
        environment
    }

    /// The paragraph of a warning about an expression for one kind. `None` if the expression fits the kind, or if a
    /// limit is reached.
    fn paragraph(&mut self, kind: &str, source: &str, environment: &Environment) -> Option<String> {
        self.may_compile(source).then_some(())?;
        let mut error = Program::compile(source, environment).err()?.to_string();
        error.truncate(error.floor_char_boundary(MAX_ERROR_BYTES));
        let paragraph = format!("{kind}: {error}\n");
        // A line end separates the paragraph from an earlier paragraph.
        self.warnings_left = self.warnings_left.checked_sub(paragraph.len() + 1)?;
        Some(paragraph)
    }

    /// Whether another expression may be compiled. Counts its bytes.
    fn may_compile(&mut self, source: &str) -> bool {
        let left = self.source_left.checked_sub(source.len());
        self.source_left = left.unwrap_or(0);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        sync::{Arc, Weak},
    };

    use coracle_cel::{Field, ObjectType};
    use serde_json::json;

    use super::*;

    fn object(fields: &[(&str, Type)]) -> Type {
        let field = |(name, kind): &(&str, Type)| {
            (Box::from(*name), Field { name: Box::from(*name), kind: kind.clone() })
        };
        let fields: BTreeMap<_, _> = fields.iter().map(field).collect();
        Type::Object(Arc::new(ObjectType::new("object", fields)))
    }

    fn kind(name: &str, replicas: Type) -> TypedKind {
        let name = format!("apps/v1, Kind={name}");
        TypedKind { name, object: object(&[("spec", object(&[("replicas", replicas)]))]) }
    }

    fn warnings(spec: &Value) -> Vec<ExpressionWarning> {
        check_types(spec, vec![kind("Deployment", Type::Int), kind("StatefulSet", Type::Int)], None)
    }

    #[test]
    fn an_expression_that_does_not_fit_has_a_paragraph_for_each_kind() {
        let spec = json!({"validations": [
            {"expression": "object.spec.replicas > 1", "messageExpression": "'x: ' + object.spec.replicas"},
            {"expression": "object.spec.replicas > '1'"}]});
        let found = warnings(&spec);
        let fields: Vec<&str> = found.iter().map(|warning| &*warning.field).collect();
        assert_eq!(fields, ["spec.validations[0].messageExpression", "spec.validations[1].expression"]);
        let plus = "found no matching overload for '_+_' applied to '(string, int)'";
        assert!(found[0].warning.contains(plus), "{}", found[0].warning);
        let warning = &found[1].warning;
        let paragraphs: Vec<&str> = warning.split("\n\n").collect();
        assert_eq!(paragraphs.len(), 2, "{warning}");
        for (paragraph, kind) in paragraphs.into_iter().zip(["Deployment", "StatefulSet"]) {
            assert!(paragraph.starts_with(&format!("apps/v1, Kind={kind}: ERROR: <input>:1:")), "{warning}");
            let error = "found no matching overload for '_>_' applied to '(int, string)'\n";
            assert!(paragraph.contains(error), "{warning}");
            assert!(paragraph.contains(" | object.spec.replicas > '1'\n"), "{warning}");
        }
        assert!(warning.ends_with("^\n"), "{warning}");
    }

    #[test]
    fn kinds_that_the_expression_fits_are_not_mentioned() {
        let spec = json!({"validations": [{"expression": "object.spec.replicas > '1'"}]});
        let kinds = || vec![kind("Deployment", Type::Int), kind("Other", Type::String)];
        let found = check_types(&spec, kinds(), None);
        assert!(found[0].warning.starts_with("apps/v1, Kind=Deployment: "), "{}", found[0].warning);
        assert!(!found[0].warning.contains("Other"), "{}", found[0].warning);
        let unknown = json!({"validations": [{"expression": "object.spec.maxRetries < 1"}]});
        assert!(check_types(&unknown, kinds(), None)[0].warning.contains("undefined field 'maxRetries'"));
    }

    #[test]
    fn variables_and_parameters_have_types() {
        let spec = json!({
            "variables": [
                {"name": "n", "expression": "object.spec.replicas"},
                {"name": "broken", "expression": "object.nothing"}],
            "validations": [
                {"expression": "variables.n > '1'"}, {"expression": "variables.broken > '1'"},
                {"expression": "params.max > '1'"}, {"expression": "authorizer.group('') != null"}]});
        let params = object(&[("max", Type::Int)]);
        let checked = |params: &Type| -> Vec<String> {
            let found = check_types(&spec, vec![kind("Deployment", Type::Int)], Some(params));
            found.into_iter().map(|warning| warning.field).collect()
        };
        let field = |index: usize| format!("spec.validations[{index}].expression");
        assert_eq!(checked(&params)[..2], [field(0), field(2)]);
        assert_eq!(checked(&Type::Dyn)[0], field(0));
        assert!(!checked(&Type::Dyn).contains(&field(2)));
    }

    #[test]
    fn long_errors_are_cut_and_many_are_left_out() {
        let long = format!("object.spec.replicas > '{}'", "é".repeat(2100));
        let validations: Vec<Value> = (0..40).map(|_| json!({"expression": long})).collect();
        let found = warnings(&json!({ "validations": validations }));
        let bytes: usize = found.iter().map(|warning| warning.warning.len()).sum();
        assert!(found.len() > 1 && found.len() < 40 && bytes <= MAX_WARNING_BYTES, "{bytes}");
        assert!(found[0].warning.len() <= 2 * (MAX_ERROR_BYTES + 100));
    }

    #[test]
    fn only_the_type_of_one_kind_is_in_memory_at_a_time() {
        let former = Cell::new(Weak::<ObjectType>::new());
        let kinds = ["A", "B", "C"].into_iter().map(|name| {
            assert!(former.take().upgrade().is_none(), "the former type before {name}");
            let kind = kind(name, Type::Int);
            let Type::Object(object) = &kind.object else { unreachable!() };
            former.set(Arc::downgrade(object));
            kind
        });
        let spec = json!({"variables": [{"name": "o", "expression": "object.spec"}],
            "validations": [{"expression": "variables.o.replicas > '1'"}]});
        assert_eq!(check_types(&spec, kinds, None)[0].warning.matches("Kind=").count(), 3);
    }

    #[test]
    fn expressions_above_the_limit_are_not_checked() {
        let mut checker = Checker { source_left: 10, warnings_left: 10 };
        assert!(checker.may_compile("12345") && checker.may_compile("12345"));
        assert!(!checker.may_compile("1"));
        let mut checker = Checker { source_left: 10, warnings_left: 10 };
        assert!(!checker.may_compile("12345678901") && !checker.may_compile("1"));
    }
}
