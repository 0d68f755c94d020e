//! Checks of the rules of a definition: their types, the use of the old state, and the estimated cost.

use coracle_cel::{Bounds, Environment, Limits, Program, Type, escape};
use serde_json::{Map, Value};

use super::{check_kind, environment, failure};
use crate::rule_cost::TotalCost;
use crate::schema::{RuleText, Schema};
use crate::violation::{Path, Violations};
use crate::{bounds, types};

/// Checks the rules of a definition. Each must compile and must not cost too much. It may use `oldSelf` only where a
/// part of the object can be matched with its old state.
pub(crate) fn validate(schema: &Schema, path: &Path, violations: &mut Violations) {
    let mut checker = Checker { violations, total: TotalCost::default() };
    let root = Node { path: path.clone(), unkeyed_list: None, bounds: None, count: Some(1) };
    checker.node(schema, true, &root);
    checker.total.report(path, checker.violations);
}

struct Checker<'v> {
    violations: &'v mut Violations,
    total: TotalCost,
}

/// Properties of a schema node that follow from the schema above it.
struct Node<'a> {
    path: Path,
    /// The path of the outermost list above this node whose elements have no keys.
    unkeyed_list: Option<&'a Path>,
    /// The sizes of the values, if the sizes of the node above are known.
    bounds: Option<&'a Bounds>,
    /// Maximum number of values of the node in an object. `None` if a list or map above has no limit.
    count: Option<u64>,
}

/// The values that a rule checks.
struct Scope<'a> {
    kind: &'a Type,
    bounds: &'a Bounds,
    /// Maximum number of values in an object.
    count: u64,
    unkeyed_list: Option<&'a Path>,
}

// === impl Checker ===

impl Checker<'_> {
    fn node(&mut self, schema: &Schema, resource: bool, node: &Node<'_>) {
        let own = match node.bounds {
            None if !schema.rules.is_empty() => bounds::of_schema(schema, resource),
            _ => None,
        };
        let bounds = node.bounds.or(own.as_ref());
        if !schema.rules.is_empty() {
            self.rules(schema, resource, node, bounds);
        }
        let count = node.count.zip(bounds::max_elements(schema));
        let count = count.map(|(count, factor)| count.saturating_mul(factor));
        let items = bounds.and_then(|bounds| bounds.items.as_deref());
        if let Some(item) = schema.item() {
            let keyed = schema.list_type.as_deref() == Some("map");
            let unkeyed_list = node.unkeyed_list.or((!keyed).then_some(&node.path));
            let inner = Node { path: node.path.field("items"), unkeyed_list, bounds: items, count };
            self.node(item, item.embedded, &inner);
        }
        for (name, property) in &schema.properties {
            let bounds = bounds.and_then(|bounds| bounds.fields.get(escape::escape(name)?.as_str()));
            let path = node.path.field("properties").key(name);
            let inner = Node { path, unkeyed_list: node.unkeyed_list, bounds, count };
            self.node(property, property.embedded, &inner);
        }
        if let Some(additional) = schema.additional_schema() {
            let path = node.path.field("additionalProperties");
            let inner = Node { path, unkeyed_list: node.unkeyed_list, bounds: items, count };
            self.node(additional, additional.embedded, &inner);
        }
    }

    fn rules(&mut self, schema: &Schema, resource: bool, node: &Node<'_>, bounds: Option<&Bounds>) {
        let kind = types::of_schema(schema, resource);
        for (index, text) in schema.rules.iter().enumerate() {
            let place = node.path.field("x-kubernetes-validations").index(index);
            let (Some(kind), Some(bounds)) = (&kind, bounds) else {
                self.violations.invalid(&place, &"".into(), "rules need a schema with a type");
                continue;
            };
            let count = node.count.unwrap_or_else(|| bounds::max_values(bounds.min_length));
            self.rule(text, &Scope { kind, bounds, count, unkeyed_list: node.unkeyed_list }, &place);
        }
    }

    fn rule(&mut self, text: &RuleText, scope: &Scope<'_>, place: &Path) {
        let environment = environment(text, scope.kind);
        let rule = place.field("rule");
        let program = match compile(&text.rule, &environment, scope.bounds, &Type::Bool) {
            Ok((program, cost)) => {
                let cost = cost.map(|cost| cost.saturating_mul(scope.count));
                self.cost(&rule, "estimated rule cost", cost);
                program
            }
            Err(detail) => {
                self.violations.invalid(&rule, &rule_json(text), &detail);
                return;
            }
        };
        self.message(text, &environment, scope.bounds, place);
        if program.uses("oldSelf") {
            if let Some(unkeyed_list) = scope.unkeyed_list {
                let detail = format!(
                    "oldSelf cannot be used on the uncorrelatable portion of the schema within {unkeyed_list}"
                );
                self.violations.invalid(&rule, &text.rule.clone().into(), &detail);
            }
        } else if let Some(optional) = text.optional_old_self {
            let detail = "may not be set if oldSelf is not used in rule";
            self.violations.invalid(&place.field("optionalOldSelf"), &optional.into(), detail);
        }
    }

    /// Checks the messageExpression. It is evaluated at most once, so its cost is not multiplied by the number of
    /// values.
    fn message(&mut self, text: &RuleText, environment: &Environment, bounds: &Bounds, place: &Path) {
        if text.message_expression.is_empty() {
            return;
        }
        let place = place.field("messageExpression");
        match compile(&text.message_expression, environment, bounds, &Type::String) {
            Ok((_, cost)) => self.cost(&place, "estimated messageExpression cost", cost),
            Err(detail) => {
                let detail = detail.replacen("compilation failed", "messageExpression compilation failed", 1);
                let detail = detail.replacen("cel expression", "messageExpression", 1);
                let detail = detail.replacen("a bool", "a string", 1);
                self.violations.invalid(&place, &rule_json(text), &detail);
            }
        }
    }

    /// Counts an estimated cost. An unknown cost is accepted: the cost of the evaluation has a limit, too.
    fn cost(&mut self, path: &Path, name: &str, cost: Option<u64>) {
        if let Some(cost) = cost {
            self.total.add(path, name, cost, self.violations);
        }
    }
}

/// Compiles an expression and estimates its cost.
fn compile(
    source: &str,
    environment: &Environment,
    bounds: &Bounds,
    expected: &Type,
) -> Result<(Program, Option<u64>), String> {
    let limits = Limits { variable: None, bounds };
    let compiled = Program::compile_with_cost(source, environment, limits);
    let (program, cost) = compiled.map_err(|error| failure(&error))?;
    check_kind(&program, expected)?;
    Ok((program, cost))
}

fn rule_json(text: &RuleText) -> Value {
    let mut map = Map::new();
    let fields = [
        ("rule", &text.rule),
        ("message", &text.message),
        ("messageExpression", &text.message_expression),
        ("fieldPath", &text.field_path),
    ];
    for (name, value) in fields {
        if !value.is_empty() || name == "rule" {
            map.insert(name.to_owned(), value.clone().into());
        }
    }
    if let Some(reason) = &text.reason {
        map.insert("reason".to_owned(), reason.clone().into());
    }
    if let Some(optional) = text.optional_old_self {
        map.insert("optionalOldSelf".to_owned(), optional.into());
    }
    Value::Object(map)
}
