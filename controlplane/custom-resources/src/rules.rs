//! Rules in CEL (`x-kubernetes-validations`): compiled with the schema, evaluated for each object.

mod definition;

use std::collections::BTreeMap;

use coracle_cel::{CompileError, Environment, EvalError, Program, Type, Value as Cel};
use serde_json::Value;

pub(crate) use definition::validate;

use crate::check::key_of;
use crate::field_path;
use crate::schema::{RuleText, Schema};
use crate::types;
use crate::violation::{Path, Violations};

/// Maximum cost of all rules of one object (`RuntimeCELCostBudget`).
const MAX_COST: u64 = 10_000_000;

/// Cost of the preparation of one evaluation, without its texts. A rule such as `true` costs nothing else.
const PREPARATION: u64 = 10;

/// Maximum length of the result of a messageExpression in bytes.
const MAX_MESSAGE: usize = 5 * 1024;

/// The new and the old state of an object, or of a part of it.
#[derive(Clone, Copy)]
pub(crate) struct State<'a> {
    pub(crate) value: &'a Value,
    pub(crate) old: Option<&'a Value>,
}

/// The compiled rules of a schema node and of those below it.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    rules: Vec<Rule>,
    kind: Option<Type>,
    items: Option<Box<Rules>>,
    properties: BTreeMap<Box<str>, Rules>,
    additional: Option<Box<Rules>>,
}

#[derive(Debug)]
struct Rule {
    text: RuleText,
    program: Result<Program, String>,
    message: Option<Program>,
    field: Option<String>,
    uses_old: bool,
}

fn environment(text: &RuleText, kind: &Type) -> Environment {
    let old = match text.optional_old_self {
        Some(true) => Type::Optional(std::sync::Arc::new(kind.clone())),
        _ => kind.clone(),
    };
    Environment::default().variable("self", kind.clone()).variable("oldSelf", old)
}

fn compile(source: &str, environment: &Environment, expected: &Type) -> Result<Program, String> {
    let program = Program::compile(source, environment).map_err(|error| failure(&error))?;
    check_kind(&program, expected)?;
    Ok(program)
}

/// The message of an expression that cannot be compiled.
fn failure(error: &CompileError) -> String {
    format!("compilation failed: {error}")
}

fn check_kind(program: &Program, expected: &Type) -> Result<(), String> {
    // An expression of dynamic type is checked when it is evaluated.
    if program.kind() != expected && *program.kind() != Type::Dyn {
        let word = if *expected == Type::Bool { "bool" } else { "string" };
        return Err(format!("cel expression must evaluate to a {word}"));
    }
    Ok(())
}

// === impl Rules ===

impl Rules {
    /// Compiles the rules of a schema. `None` if it has no rules.
    pub(crate) fn compile(schema: &Schema) -> Option<Rules> {
        Rules::node(schema, true)
    }

    fn node(schema: &Schema, resource: bool) -> Option<Rules> {
        if !schema.has_rules() {
            return None;
        }
        let kind = types::of_schema(schema, resource);
        let rules = match &kind {
            Some(kind) => schema.rules.iter().map(|text| Rule::new(text, kind, schema)).collect(),
            None => Vec::new(),
        };
        let below = |schema: &Schema| Rules::node(schema, schema.embedded);
        let properties = schema.properties.iter();
        Some(Rules {
            rules,
            kind,
            items: schema.item().and_then(below).map(Box::new),
            properties: properties
                .filter_map(|(name, property)| Some((name.clone(), below(property)?)))
                .collect(),
            additional: schema.additional_schema().and_then(below).map(Box::new),
        })
    }

    /// Evaluates the rules for the state of an object. `at` is the path of the object; empty for a whole resource.
    pub(crate) fn evaluate(&self, state: State<'_>, schema: &Schema, at: &Path, violations: &mut Violations) {
        let mut run = Run { budget: MAX_COST, is_trial: false, violations };
        // If the budget is used up, a violation reports that.
        let _ = run.node(self, schema, Part { state, path: at, unchanged: false });
    }

    /// Whether an evaluation for the state of an object costs more than `limit`. It ends at that cost.
    pub(crate) fn cost_more(&self, state: State<'_>, schema: &Schema, limit: u64) -> bool {
        let mut violations = Violations::default();
        let mut run = Run { budget: limit, is_trial: true, violations: &mut violations };
        run.node(self, schema, Part { state, path: &Path::default(), unchanged: false }).is_err()
    }

    /// The rules of a property.
    pub(crate) fn property(&self, name: &str) -> Option<&Rules> {
        self.properties.get(name)
    }
}

// === impl Rule ===

impl Rule {
    fn new(text: &RuleText, kind: &Type, schema: &Schema) -> Rule {
        let environment = environment(text, kind);
        let program = compile(&text.rule, &environment, &Type::Bool);
        let message = match text.message_expression.as_str() {
            "" => None,
            expression => compile(expression, &environment, &Type::String).ok(),
        };
        let field = match text.field_path.as_str() {
            "" => None,
            path => field_path::resolve(path, schema, true).ok().map(|(path, _)| path.to_string()),
        };
        let uses_old = program.as_ref().is_ok_and(|program| program.uses("oldSelf"));
        Rule { text: text.clone(), program, message, field, uses_old }
    }

    /// The name of the rule in messages.
    fn name(&self) -> &str {
        if self.text.message.is_empty() { self.text.rule.trim() } else { self.text.message.trim() }
    }
}

/// A part of an object.
#[derive(Clone, Copy)]
struct Part<'a> {
    state: State<'a>,
    path: &'a Path,
    /// Whether an enclosing part is unchanged.
    unchanged: bool,
}

impl<'a> Part<'a> {
    fn new(value: &'a Value, old: Option<&'a Value>, path: &'a Path, unchanged: bool) -> Self {
        Self { state: State { value, old }, path, unchanged }
    }
}

struct Run<'a> {
    budget: u64,
    /// Whether only the cost is wanted. The cost then includes the [preparation] of each evaluation. Upstream's cost
    /// does not include it.
    is_trial: bool,
    violations: &'a mut Violations,
}

/// The budget is used up.
struct CostLimitExceeded;

impl Run<'_> {
    fn node(&mut self, rules: &Rules, schema: &Schema, part: Part<'_>) -> Result<(), CostLimitExceeded> {
        let Part { state: State { value, old }, path, unchanged } = part;
        if value.is_null() {
            return Ok(());
        }
        let old = old.filter(|old| !old.is_null());
        // Violations of an unchanged part are accepted, unless the rule compares the part with its old state.
        let unchanged = unchanged || old == Some(value);
        if let Some(kind) = &rules.kind {
            for rule in &rules.rules {
                self.rule(rule, kind, schema, Part::new(value, old, path, unchanged))?;
            }
        }
        match value {
            Value::Array(list) => {
                let (Some(below), Some(item)) = (&rules.items, schema.item()) else { return Ok(()) };
                let known = old_items(old, schema);
                for (index, inner) in list.iter().enumerate() {
                    let before = known
                        .as_ref()
                        .and_then(|known| known.get(&key_of(inner, &schema.list_keys)).copied());
                    self.node(below, item, Part::new(inner, before, &path.index(index), unchanged))?;
                }
            }
            Value::Object(map) => {
                for (name, inner) in map {
                    let before = old.and_then(|old| old.get(name));
                    if let (Some(below), Some(property)) =
                        (rules.properties.get(name.as_str()), schema.properties.get(name.as_str()))
                    {
                        self.node(below, property, Part::new(inner, before, &path.field(name), unchanged))?;
                    } else if let (Some(below), Some(additional)) =
                        (&rules.additional, schema.additional_schema())
                    {
                        self.node(below, additional, Part::new(inner, before, &path.key(name), unchanged))?;
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn rule(
        &mut self,
        rule: &Rule,
        kind: &Type,
        schema: &Schema,
        part: Part<'_>,
    ) -> Result<(), CostLimitExceeded> {
        let Part { state: State { value, old }, path, unchanged } = part;
        let shown = Value::from(&*schema.kind);
        let program = match &rule.program {
            Ok(program) => program,
            Err(error) => {
                self.violations.invalid(path, &shown, &format!("rule compile error: {error}"));
                return Ok(());
            }
        };
        let optional = rule.text.optional_old_self == Some(true);
        if rule.uses_old && old.is_none() && !optional {
            return Ok(());
        }
        if self.is_trial {
            self.charge(preparation(part.state), path, &shown)?;
        }
        let mut variables = vec![("self", Cel::from_json(value, kind))];
        let before = old.map(|old| Cel::from_json(old, kind));
        match (optional, before) {
            (true, before) => variables.push(("oldSelf", Cel::Optional(before.map(std::sync::Arc::new)))),
            (false, Some(before)) => variables.push(("oldSelf", before)),
            (false, None) => {}
        }
        let (result, cost) = program.evaluate_within(&variables, self.budget);
        self.charge(cost, path, &shown)?;
        match result {
            Ok(Cel::Bool(true)) => return Ok(()),
            Ok(Cel::Bool(false)) => {}
            Ok(_) => {
                let detail = format!("'rule did not evaluate to a bool': {}", rule.name());
                self.violations.invalid(path, &shown, &detail);
                return Ok(());
            }
            Err(error) => return self.failed(&error, rule, path, &shown),
        }
        if unchanged && !rule.uses_old {
            return Ok(());
        }
        let detail = match self.message(rule, &variables, path, &shown)? {
            Some(text) => text,
            None if rule.text.message.is_empty() => format!("failed rule: {}", rule.name()),
            None => rule.name().to_owned(),
        };
        self.report(rule, schema, part, &detail);
        Ok(())
    }

    fn charge(&mut self, cost: u64, path: &Path, shown: &Value) -> Result<(), CostLimitExceeded> {
        match self.budget.checked_sub(cost) {
            Some(left) => {
                self.budget = left;
                Ok(())
            }
            None => {
                let detail = "validation failed due to running out of cost budget, no further validation rules will be run";
                self.violations.invalid(path, shown, detail);
                Err(CostLimitExceeded)
            }
        }
    }

    fn failed(
        &mut self,
        error: &EvalError,
        rule: &Rule,
        path: &Path,
        shown: &Value,
    ) -> Result<(), CostLimitExceeded> {
        let name = rule.name();
        let detail = match error {
            EvalError::NoOverload => format!(
                "'{error}': call arguments did not match a supported operator, function or macro signature for rule: \
                 {name}"
            ),
            EvalError::CostLimit => format!(
                "'{error}': no further validation rules will be run due to call cost exceeds limit for rule: {name}"
            ),
            EvalError::Failed(text) => format!("{text} evaluating rule: {name}"),
        };
        self.violations.invalid(path, shown, &detail);
        if *error == EvalError::CostLimit { Err(CostLimitExceeded) } else { Ok(()) }
    }

    /// The result of the messageExpression. `None` if it is not one non-empty line of at most [`MAX_MESSAGE`] bytes. If
    /// the expression uses up the budget, this function reports it as a violation, and the caller does not report the
    /// rule.
    fn message(
        &mut self,
        rule: &Rule,
        variables: &[(&str, Cel<'_>)],
        path: &Path,
        shown: &Value,
    ) -> Result<Option<String>, CostLimitExceeded> {
        let Some(program) = &rule.message else { return Ok(None) };
        let (result, cost) = program.evaluate_within(variables, self.budget);
        let Some(left) = self.budget.checked_sub(cost) else {
            let detail = "messageExpression evaluation failed due to running out of cost budget, \
                no further validation rules will be run";
            self.violations.invalid(path, shown, detail);
            return Err(CostLimitExceeded);
        };
        self.budget = left;
        let Ok(Cel::String(text)) = result else { return Ok(None) };
        let text = text.trim();
        let usable = !text.is_empty() && text.len() <= MAX_MESSAGE && !text.contains('\n');
        Ok(usable.then(|| text.to_owned()))
    }

    fn report(&mut self, rule: &Rule, schema: &Schema, part: Part<'_>, detail: &str) {
        let Part { state: State { value, .. }, path, .. } = part;
        let path = match &rule.field {
            Some(field) => path.field(field),
            None => path.clone(),
        };
        match rule.text.reason.as_deref() {
            Some("FieldValueForbidden") => self.violations.forbidden(&path, detail),
            Some("FieldValueRequired") => self.violations.required(&path, detail),
            Some("FieldValueDuplicate") => self.violations.duplicate(&path, value),
            _ if matches!(&*schema.kind, "object" | "array") => self.violations.invalid_whole(&path, detail),
            _ => self.violations.invalid(&path, value, detail),
        }
    }
}

/// Cost of the preparation of one evaluation. Its texts may be decoded.
fn preparation(state: State<'_>) -> u64 {
    let texts = [Some(state.value), state.old].into_iter().flatten().filter_map(Value::as_str);
    let bytes: usize = texts.map(str::len).sum();
    PREPARATION.saturating_add(u64::try_from(bytes / 10).unwrap_or(u64::MAX))
}

fn old_items<'a>(
    old: Option<&'a Value>,
    schema: &Schema,
) -> Option<std::collections::HashMap<String, &'a Value>> {
    if schema.list_type.as_deref() != Some("map") {
        return None;
    }
    let list = old?.as_array()?;
    Some(list.iter().map(|item| (key_of(item, &schema.list_keys), item)).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(schema: &Value, object: &Value, old: Option<&Value>) -> Vec<String> {
        let schema = Schema::parse(schema).unwrap();
        let mut violations = Violations::default();
        if let Some(rules) = Rules::compile(&schema) {
            rules.evaluate(State { value: object, old }, &schema, &Path::default(), &mut violations);
        }
        violations.as_slice().iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
    }

    fn schema(rules: Value) -> Value {
        json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {
            "min": {"type": "integer"}, "max": {"type": "integer"}}, "x-kubernetes-validations": rules}}})
    }

    #[test]
    fn a_rule_that_fails_is_reported_in_upstreams_words() {
        let object = json!({"spec": {"min": 3, "max": 2}});
        for (rule, expected) in [
            (
                json!({"rule": "self.min <= self.max"}),
                "spec: Invalid value: failed rule: self.min <= self.max",
            ),
            (
                json!({"rule": "self.min <= self.max", "message": "min is larger"}),
                "spec: Invalid value: min is larger",
            ),
            (
                json!({"rule": "self.min <= self.max", "messageExpression": "'%d > %d'.format([self.min, self.max])"}),
                "spec: Invalid value: 3 > 2",
            ),
            (
                json!({"rule": "self.min <= self.max", "reason": "FieldValueForbidden", "fieldPath": ".min", "message": "no"}),
                "spec.min: Forbidden: no",
            ),
            (
                json!({"rule": "self.min / 0 == 1"}),
                "spec: Invalid value: \"object\": division by zero evaluating rule: self.min / 0 == 1",
            ),
        ] {
            assert_eq!(found(&schema(json!([rule])), &object, None), [expected]);
        }
    }

    #[test]
    fn transition_rules_compare_with_the_old_object() {
        let schema = schema(json!([{"rule": "self.min >= oldSelf.min", "message": "min must not shrink"}]));
        let (small, large) = (json!({"spec": {"min": 1}}), json!({"spec": {"min": 2}}));
        assert!(found(&schema, &small, None).is_empty());
        assert!(found(&schema, &large, Some(&small)).is_empty());
        assert_eq!(found(&schema, &small, Some(&large)), ["spec: Invalid value: min must not shrink"]);
    }

    #[test]
    fn unchanged_parts_are_accepted() {
        let schema = schema(json!([{"rule": "self.min < 2"}]));
        let old = json!({"spec": {"min": 5}});
        assert!(found(&schema, &json!({"spec": {"min": 5}, "status": {}}), Some(&old)).is_empty());
        assert_eq!(found(&schema, &json!({"spec": {"min": 6}}), Some(&old)).len(), 1);
    }

    #[test]
    fn an_invalid_object_is_refused_with_every_budget() {
        let rule = json!({"rule": "self.min < 2", "messageExpression": "'min is ' + string(self.min)"});
        let schema = Schema::parse(&schema(json!([rule]))).unwrap();
        let rules = Rules::compile(&schema).unwrap();
        let object = json!({"spec": {"min": 5}});
        for budget in 0..100 {
            let mut violations = Violations::default();
            let mut run = Run { budget, is_trial: false, violations: &mut violations };
            let state = State { value: &object, old: None };
            let path = Path::default();
            let _ = run.node(&rules, &schema, Part { state, path: &path, unchanged: false });
            assert_eq!(violations.len(), 1, "budget {budget}");
        }
    }

    #[test]
    fn many_rules_without_a_cost_exceed_a_limit() {
        let rules = |number: usize| {
            let schema = Schema::parse(&schema(vec![json!({"rule": "true"}); number].into())).unwrap();
            (Rules::compile(&schema).unwrap(), schema)
        };
        let object = json!({"spec": {"min": 5}});
        for (number, exceeds) in [(2, false), (3, true)] {
            let (rules, schema) = rules(number);
            let state = State { value: &object, old: Some(&object) };
            assert_eq!(rules.cost_more(state, &schema, 25), exceeds, "{number} rules");
        }
    }

    #[test]
    fn an_object_with_many_elements_runs_out_of_budget() {
        let schema = json!({"type": "object", "properties": {"l": {"type": "array", "items": {"type": "integer"},
            "x-kubernetes-validations": [{"rule": "self.all(x, self.all(y, x != y || x == y))"}]}}});
        let object = json!({"l": (0..5000).collect::<Vec<i32>>()});
        assert!(found(&schema, &object, None)[0].contains("call cost exceeds limit"));
    }
}
