//! Evaluation. Each step adds to the cost as in cel-go; at the limit the evaluation ends.

mod range;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use self::range::Range;
use crate::cost_meter::CostMeter;
use crate::environment::SHARED;
use crate::eval_error::{EvalError, Evaluated};
use crate::functions;
use crate::operators;
use crate::parse::{Comprehension, Expr, Kind, ListItem, Literal, MapEntry, OptionalMap, StructureField};
use crate::session::Session;
use crate::value::{Key, Structure, Value};

/// The state of one evaluation.
pub(crate) struct Evaluator<'a, 'v> {
    variables: &'v [(&'a str, Value<'a>)],
    session: Option<&'v Session<'a>>,
    scopes: Vec<(&'a str, Value<'a>)>,
    meter: CostMeter,
}

impl<'a, 'v> Evaluator<'a, 'v> {
    pub(crate) fn new(
        variables: &'v [(&'a str, Value<'a>)],
        session: Option<&'v Session<'a>>,
        limit: u64,
    ) -> Evaluator<'a, 'v> {
        Evaluator { variables, session, scopes: Vec::new(), meter: CostMeter::new(limit) }
    }

    /// The cost so far.
    pub(crate) fn cost(&self) -> u64 {
        self.meter.cost()
    }

    pub(crate) fn eval(&mut self, expr: &'a Expr) -> Evaluated<'a> {
        match &expr.kind {
            Kind::Literal(literal) => Ok(constant(literal)),
            Kind::Ident(name) => {
                self.meter.charge(1)?;
                let value = self.variable(name)?;
                self.meter.copied(value)
            }
            Kind::Select { operand, field, test } => {
                if let Some(session) = self.session
                    && matches!(&operand.kind, Kind::Ident(name) if &**name == SHARED && !self.is_variable(name))
                {
                    return if *test { Ok(Value::Bool(true)) } else { self.shared(session, field) };
                }
                if let Some((root, name)) = functions::signatures::qualified_type(expr)
                    && !self.is_variable(root)
                {
                    return self.meter.charge(1).map(|()| Value::Type(name));
                }
                let value = self.eval(operand)?;
                self.meter.charge(1)?;
                if *test {
                    Ok(Value::Bool(has(&value, field)))
                } else {
                    self.meter.copied(select(&value, field)?)
                }
            }
            Kind::Call { name, target, args } => self.call(name, target.as_deref(), args),
            Kind::List(items) => self.list(items),
            Kind::Map(entries) => self.map(entries),
            Kind::Structure { name, fields } => self.structure(name, fields),
            Kind::Comprehension(inner) => self.comprehension(inner),
            Kind::Bind { name, value, body, optional } => self.bind(name, value, body, *optional),
        }
    }

    /// A shared value: the stored value or, at the first use, the result of its expression.
    fn shared(&mut self, session: &Session<'a>, name: &str) -> Evaluated<'a> {
        self.meter.charge(1)?;
        if let Some(known) = session.known(name) {
            return known.and_then(|value| self.meter.copied(value));
        }
        let Some((name, program)) = session.shared().find(name) else {
            return Err(EvalError::Failed(format!("no such key: {name}")));
        };
        // The variables of loops around the use are not in the scope of the expression.
        let scopes = std::mem::take(&mut self.scopes);
        let result = self.eval(program.expr());
        self.scopes = scopes;
        if result != Err(EvalError::CostLimit) {
            session.keep(name, result.clone());
        }
        result
    }

    fn structure(&mut self, name: &'a str, fields: &'a [StructureField]) -> Evaluated<'a> {
        self.meter.charge(40 + u64::try_from(fields.len()).unwrap_or(u64::MAX))?;
        let mut made = Structure::new(name);
        for StructureField { name: field, value, optional } in fields {
            match self.eval(value)? {
                Value::Optional(None) if *optional => {}
                Value::Optional(Some(inner)) if *optional => made.set(field, (*inner).clone()),
                value => made.set(field, value),
            }
        }
        Ok(Value::Structure(Arc::new(made)))
    }

    fn variable(&self, name: &'a str) -> Evaluated<'a> {
        let local = self.scopes.iter().rev().find(|(known, _)| *known == name);
        if let Some((_, value)) = local.or_else(|| self.variables.iter().find(|(known, _)| *known == name)) {
            return Ok(value.clone());
        }
        functions::signatures::type_value(name)
            .map(Value::Type)
            .ok_or_else(|| EvalError::Failed(format!("no such attribute(s): {name}")))
    }

    fn is_variable(&self, name: &str) -> bool {
        self.scopes.iter().any(|(known, _)| *known == name)
            || self.variables.iter().any(|(known, _)| *known == name)
    }

    fn list(&mut self, items: &'a [ListItem]) -> Evaluated<'a> {
        self.meter.charge(u64::try_from(items.len()).unwrap_or(u64::MAX).max(10))?;
        let mut list = Vec::with_capacity(items.len());
        for ListItem { expr, optional } in items {
            match self.eval(expr)? {
                Value::Optional(inner) if *optional => list.extend(inner.map(|inner| (*inner).clone())),
                value => list.push(value),
            }
        }
        Ok(Value::list(list))
    }

    fn map(&mut self, entries: &'a [MapEntry]) -> Evaluated<'a> {
        self.meter.charge(30 + u64::try_from(entries.len()).unwrap_or(u64::MAX))?;
        let mut map = BTreeMap::new();
        for MapEntry { key, value, optional } in entries {
            let key = self.eval(key)?;
            // Charges the copy of the key's text.
            self.meter.charge(key.cost_size() / 10)?;
            let key = Key::of(&key).ok_or_else(|| EvalError::Failed("unsupported key type".to_owned()))?;
            let value = match self.eval(value)? {
                Value::Optional(None) if *optional => continue,
                Value::Optional(Some(inner)) if *optional => (*inner).clone(),
                value => value,
            };
            map.insert(key, value);
        }
        Ok(Value::Map(Arc::new(map)))
    }

    fn call(&mut self, name: &'a str, target: Option<&'a Expr>, args: &'a [Expr]) -> Evaluated<'a> {
        if let Some(result) = self.partial_operator(name, args) {
            return result;
        }
        let space = target.and_then(|target| match &target.kind {
            Kind::Ident(space) if !self.is_variable(space) => Some(&**space),
            _ => None,
        });
        let mut values = Vec::with_capacity(args.len() + 1);
        let namespaced = space.map(|space| format!("{space}.{name}"));
        let namespaced = namespaced.filter(|name| functions::signatures::is_known(name));
        if let (Some(target), None) = (target, &namespaced) {
            values.push(self.eval(target)?);
            // `or` and `orValue` evaluate their argument only if it is needed.
            if let (Some(Value::Optional(Some(inner))), "or" | "orValue") = (values.first(), name) {
                return if name == "or" {
                    Ok(values[0].clone())
                } else {
                    self.meter.copied((**inner).clone())
                };
            }
        }
        for arg in args {
            values.push(self.eval(arg)?);
        }
        let result = match namespaced {
            Some(name) => functions::call(&mut self.meter, &name, values, false),
            None => match operators::apply(&mut self.meter, name, &values) {
                Some(result) => result,
                None => functions::call(&mut self.meter, name, values, target.is_some()),
            },
        };
        // The text of an error is charged: it can contain an argument, and a loop can ignore the error and repeat the
        // call.
        if let Err(EvalError::Failed(text)) = &result {
            self.meter.charge(u64::try_from(text.len() / 10).unwrap_or(u64::MAX))?;
        }
        result
    }

    /// Applies an operator that may leave an argument unevaluated. `None` for other names.
    fn partial_operator(&mut self, name: &str, args: &'a [Expr]) -> Option<Evaluated<'a>> {
        Some(match (name, args) {
            ("_&&_", [left, right]) => self.logic(left, right, false),
            ("_||_", [left, right]) => self.logic(left, right, true),
            ("_?:_" | "_?_:_", [condition, yes, no]) => match self.eval(condition) {
                Ok(Value::Bool(true)) => self.eval(yes),
                Ok(Value::Bool(false)) => self.eval(no),
                Ok(_) => Err(EvalError::NoOverload),
                Err(error) => Err(error),
            },
            ("@not_strictly_false", [condition]) => match self.eval(condition) {
                Err(EvalError::CostLimit) => Err(EvalError::CostLimit),
                Ok(Value::Bool(false)) => Ok(Value::Bool(false)),
                _ => Ok(Value::Bool(true)),
            },
            ("_?._" | "_[?_]", [operand, key]) => self.optional_element(operand, key),
            _ => return None,
        })
    }

    /// `operand.?field` and `operand[?index]`.
    fn optional_element(&mut self, operand: &'a Expr, key: &'a Expr) -> Evaluated<'a> {
        let (operand, key) = (self.eval(operand)?, self.eval(key)?);
        self.meter.charge(1 + key.cost_size() / 10)?;
        self.meter.copied(optional_index(&operand, &key))
    }

    /// `&&` and `||`: an error of one side is ignored if the other side decides.
    fn logic(&mut self, left: &'a Expr, right: &'a Expr, decisive: bool) -> Evaluated<'a> {
        let first = self.eval(left);
        if matches!(first, Ok(Value::Bool(value)) if value == decisive) || first == Err(EvalError::CostLimit)
        {
            return first;
        }
        let second = self.eval(right);
        match (first, second) {
            (_, Ok(Value::Bool(value))) if value == decisive => Ok(Value::Bool(value)),
            (_, Err(EvalError::CostLimit)) => Err(EvalError::CostLimit),
            (Ok(Value::Bool(_)), Ok(Value::Bool(_))) => Ok(Value::Bool(!decisive)),
            (Err(error), _) | (Ok(_), Err(error)) => Err(error),
            _ => Err(EvalError::NoOverload),
        }
    }

    fn bind(
        &mut self,
        name: &'a str,
        value: &'a Expr,
        body: &'a Expr,
        optional: Option<OptionalMap>,
    ) -> Evaluated<'a> {
        let mut bound = self.eval(value)?;
        if optional.is_some() {
            bound = match bound {
                Value::Optional(Some(inner)) => self.meter.copied((*inner).clone())?,
                Value::Optional(None) => return Ok(Value::Optional(None)),
                _ => return Err(EvalError::NoOverload),
            };
        }
        self.scopes.push((name, bound));
        let result = self.eval(body);
        self.scopes.pop();
        Ok(match optional {
            Some(OptionalMap::Wrap) => Value::optional(Some(result?)),
            _ => result?,
        })
    }

    fn comprehension(&mut self, inner: &'a Comprehension) -> Evaluated<'a> {
        let range = self.eval(&inner.range)?;
        // Charges the collection of the keys of a map.
        self.meter.charge(if range.is_map() { range.keys_cost() } else { 0 })?;
        let range = Range::new(range)?;
        let init = self.eval(&inner.init)?;
        let base = self.scopes.len();
        self.scopes.push((&inner.accumulator, init));
        let outcome = self.iterate(inner, &range, base);
        self.scopes.truncate(base + 1);
        let result = outcome.and_then(|()| self.eval(&inner.result));
        self.scopes.truncate(base);
        result
    }

    fn iterate(&mut self, inner: &'a Comprehension, range: &Range<'a>, base: usize) -> Result<(), EvalError> {
        // An error is kept until a later element decides the result, as in `exists`.
        let mut failure = None;
        for index in 0..range.length {
            self.meter.charge(1)?;
            self.enter(inner, range, index)?;
            if failure.is_none() && matches!(self.eval(&inner.condition)?, Value::Bool(false)) {
                return Ok(());
            }
            let next = self.step(inner, base);
            self.scopes.truncate(base + 1);
            match next {
                Err(EvalError::CostLimit) => return Err(EvalError::CostLimit),
                Err(error) if is_quantifier(inner) => failure = failure.or(Some(error)),
                Err(error) => return Err(error),
                Ok(value) if failure.is_none() => self.scopes[base].1 = value,
                Ok(value) if decides(inner, &value) => {
                    self.scopes[base].1 = value;
                    return Ok(());
                }
                Ok(_) => {}
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Declares the variables of an iteration.
    fn enter(&mut self, inner: &'a Comprehension, range: &Range<'a>, index: usize) -> Result<(), EvalError> {
        let (first, second) = match &inner.second {
            None => (range.element(index), None),
            Some(name) => {
                let (key, value) = range.entry(index);
                (key, Some((name, value)))
            }
        };
        let first = self.meter.copied(first)?;
        self.scopes.push((&inner.variable, first));
        if let Some((name, value)) = second {
            let value = self.meter.copied(value)?;
            self.scopes.push((name, value));
        }
        Ok(())
    }

    /// Evaluates the step of one iteration. A list or map to which the step only appends is changed in place.
    fn step(&mut self, inner: &'a Comprehension, base: usize) -> Evaluated<'a> {
        let accumulator = &*inner.accumulator;
        let is_accumulator = |expr: &Expr| matches!(&expr.kind, Kind::Ident(name) if &**name == accumulator);
        let (condition, added) = match &inner.step.kind {
            Kind::Call { name, args, .. } if &**name == "_?_:_" => match args.as_slice() {
                [condition, yes, no] if is_accumulator(no) => (Some(condition), yes),
                _ => return self.eval(&inner.step),
            },
            _ => (None, &inner.step),
        };
        let addition = match &added.kind {
            Kind::Call { name, args, .. } => match (&**name, args.as_slice()) {
                ("_+_", [left, Expr { kind: Kind::List(items), .. }]) if is_accumulator(left) => {
                    match items.as_slice() {
                        [ListItem { expr, optional: false }] => Addition::Item(expr),
                        _ => return self.eval(&inner.step),
                    }
                }
                ("@map_insert", [_, key, value]) => Addition::Entry(key, value),
                ("@map_insert", [_, entries]) => Addition::Entries(entries),
                _ => return self.eval(&inner.step),
            },
            _ => return self.eval(&inner.step),
        };
        if let Some(condition) = condition {
            match self.eval(condition)? {
                Value::Bool(true) => {}
                Value::Bool(false) => return Ok(std::mem::replace(&mut self.scopes[base].1, Value::Null)),
                _ => return Err(EvalError::NoOverload),
            }
        }
        self.meter.charge(12)?;
        self.append(&addition, base)
    }

    fn append(&mut self, addition: &Addition<'a>, base: usize) -> Evaluated<'a> {
        let new = match addition {
            Addition::Item(item) => vec![(Value::Null, self.eval(item)?)],
            Addition::Entry(key, value) => vec![(self.eval(key)?, self.eval(value)?)],
            Addition::Entries(entries) => {
                let entries = self.eval(entries)?;
                self.meter.charge(entries.cost_size().saturating_add(entries.keys_cost()))?;
                let keys = entries.keys().ok_or(EvalError::NoOverload)?;
                let found = |key: Value<'a>| entries.get(&key).map(|value| (key, value));
                let new: Vec<_> = keys.into_iter().filter_map(found).collect();
                self.meter
                    .charge(new.iter().map(|(_, value)| value.copy_cost()).fold(0, u64::saturating_add))?;
                new
            }
        };
        let mut accumulator = std::mem::replace(&mut self.scopes[base].1, Value::Null);
        for (key, value) in new {
            self.meter.charge(key.cost_size() / 10)?;
            match &mut accumulator {
                Value::List(list) => Arc::make_mut(list).push(value),
                Value::Map(map) => {
                    let key =
                        Key::of(&key).ok_or_else(|| EvalError::Failed("unsupported key type".to_owned()))?;
                    if map.contains_key(&key) {
                        return Err(EvalError::Failed(format!("insert failed: key '{key}' already exists")));
                    }
                    Arc::make_mut(map).insert(key, value);
                }
                _ => return Err(EvalError::NoOverload),
            }
        }
        Ok(accumulator)
    }
}

/// The expression that one step of a loop appends to the result.
enum Addition<'a> {
    Item(&'a Expr),
    Entry(&'a Expr, &'a Expr),
    Entries(&'a Expr),
}

/// Whether the loop is `all` or `exists`.
fn is_quantifier(inner: &Comprehension) -> bool {
    matches!(&inner.step.kind, Kind::Call { name, .. } if matches!(&**name, "_&&_" | "_||_"))
}

/// Whether a value decides a quantifier: true for `exists`, false for `all`.
fn decides(inner: &Comprehension, value: &Value<'_>) -> bool {
    let wanted = matches!(&inner.step.kind, Kind::Call { name, .. } if &**name == "_||_");
    matches!(value, Value::Bool(found) if *found == wanted)
}

impl PartialEq for Value<'_> {
    /// Equality for tests and for comparisons of a whole result, for example with an error. Expressions use
    /// [`Value::equals`].
    fn eq(&self, other: &Self) -> bool {
        self.to_json() == other.to_json() && self.type_name() == other.type_name()
    }
}

fn constant<'a>(literal: &'a Literal) -> Value<'a> {
    match literal {
        Literal::Null => Value::Null,
        Literal::Bool(value) => Value::Bool(*value),
        Literal::Int(value) => Value::Int(*value),
        Literal::Uint(value) => Value::Uint(*value),
        Literal::Double(value) => Value::Double(*value),
        Literal::String(value) => Value::String(Cow::Borrowed(value)),
        Literal::Bytes(value) => Value::Bytes(Arc::clone(value)),
    }
}

fn select<'a>(value: &Value<'a>, field: &str) -> Evaluated<'a> {
    match value {
        Value::Optional(None) => Ok(Value::Optional(None)),
        Value::Optional(Some(inner)) => Ok(Value::optional(inner.field(field))),
        value if value.is_map() || matches!(value, Value::Structure(_) | Value::Access(_)) => {
            value.field(field).ok_or_else(|| EvalError::Failed(format!("no such key: {field}")))
        }
        _ => Err(EvalError::NoOverload),
    }
}

fn has(value: &Value<'_>, field: &str) -> bool {
    match value {
        Value::Optional(Some(inner)) => inner.has_field(field),
        value => value.has_field(field),
    }
}

fn optional_index<'a>(operand: &Value<'a>, index: &Value<'a>) -> Value<'a> {
    let inner = match operand {
        Value::Optional(None) => return Value::Optional(None),
        Value::Optional(Some(inner)) => inner,
        other => other,
    };
    let found = match index {
        Value::Int(index) if !inner.is_map() => {
            usize::try_from(*index).ok().and_then(|index| inner.at(index))
        }
        key => inner.get(key),
    };
    Value::optional(found)
}
