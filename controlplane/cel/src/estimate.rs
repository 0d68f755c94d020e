//! Static estimate of the cost of an expression: the highest cost for all values within known sizes.
//!
//! Source: `cel-go/checker/cost.go` (version 0.26), for the environment of Kubernetes 1.36. The numbers must be
//! upstream's, because they determine the accepted definitions.

mod bounds;
mod call;
mod library;
mod size;

pub use bounds::{Bounds, Limits};

use bounds::{Origin, Step};
use size::{Size, count};

use crate::check::Types;
use crate::parse::{Comprehension, Expr, Kind, ListItem, Literal, MapEntry, OptionalMap};
use crate::types::Type;

/// The base costs of new lists, maps and objects.
const NEW_LIST: u64 = 10;
const NEW_MAP: u64 = 30;
const NEW_STRUCTURE: u64 = 40;

/// A cost of at least this value comes from values of unknown size.
const UNBOUNDED: u64 = u64::MAX / 1000;

/// Returns the highest cost. `None` if it depends on the size of a value whose type is unknown here. Upstream may know
/// the type, so the expression must not be refused.
pub(crate) fn estimate(expr: &Expr, types: &Types, limits: Limits<'_>) -> Option<u64> {
    let mut estimator = Estimator { types, limits, locals: Vec::new(), is_vague: false };
    let cost = estimator.part(expr).cost;
    (!estimator.is_vague || cost < UNBOUNDED).then_some(cost)
}

struct Estimator<'a> {
    types: &'a Types,
    limits: Limits<'a>,
    locals: Vec<Local<'a>>,
    /// Whether the estimate depends on a value whose type and size are unknown.
    is_vague: bool,
}

/// A part of the expression.
#[derive(Clone, Copy)]
struct Part<'a> {
    expr: &'a Expr,
    kind: &'a Type,
    /// Highest cost of its evaluation.
    cost: u64,
    origin: Origin<'a>,
    size: Option<Size>,
    entries: Option<Entries>,
}

/// Sizes of the entries of a list or map that the expression makes.
#[derive(Clone, Copy)]
struct Entries {
    is_list: bool,
    key: Size,
    value: Size,
}

/// A variable that the expression declares.
struct Local<'a> {
    name: &'a str,
    origin: Origin<'a>,
    size: Option<Size>,
    entries: Option<Entries>,
}

/// The parts of `cel.bind`.
struct Binding<'a> {
    name: &'a str,
    value: &'a Expr,
    body: &'a Expr,
    optional: Option<OptionalMap>,
}

// === impl Estimator ===

impl<'a> Estimator<'a> {
    fn part(&mut self, expr: &'a Expr) -> Part<'a> {
        match &expr.kind {
            Kind::Literal(literal) => self.computed(expr, 0, Some(Size::exactly(literal_size(literal)))),
            Kind::Ident(name) => self.ident(expr, name),
            Kind::Select { operand, field, test } => self.select(expr, operand, field, *test),
            Kind::Call { name, target, args } => self.call(expr, name, target.as_deref(), args),
            Kind::List(items) => self.list(expr, items),
            Kind::Map(entries) => self.map(expr, entries),
            Kind::Structure { fields, .. } => {
                let costs = fields.iter().map(|field| self.part(&field.value).cost);
                let cost = costs.fold(NEW_STRUCTURE, u64::saturating_add);
                self.computed(expr, cost, None)
            }
            Kind::Comprehension(inner) => self.comprehension(expr, inner),
            Kind::Bind { name, value, body, optional } => {
                self.bind(expr, Binding { name, value, body, optional: *optional })
            }
        }
    }

    /// A value that the expression computes. Numbers and other values without a length have the size 1.
    fn computed(&self, expr: &'a Expr, cost: u64, size: Option<Size>) -> Part<'a> {
        let kind = self.types.of(expr);
        let size = size.or_else(|| type_size(kind));
        Part { expr, kind, cost, origin: Origin::Computed, size, entries: None }
    }

    /// The size of a value. An unknown size counts as the largest possible size.
    fn known(&mut self, part: &Part<'_>) -> Size {
        part.size.unwrap_or_else(|| {
            self.is_vague |= *part.kind == Type::Dyn;
            Size::UNKNOWN
        })
    }

    fn ident(&self, expr: &'a Expr, name: &str) -> Part<'a> {
        let kind = self.types.of(expr);
        let local = self.locals.iter().rev().find(|local| local.name == name);
        let (origin, size, entries) = match local {
            Some(local) => (local.origin, local.size, local.entries),
            None => (self.limits.variable(name), None, None),
        };
        let size = origin.size().or_else(|| type_size(kind)).or(size);
        Part { expr, kind, cost: 1, origin, size, entries }
    }

    fn select(&mut self, expr: &'a Expr, operand: &'a Expr, field: &str, test: bool) -> Part<'a> {
        let inner = self.part(operand);
        if test {
            return self.computed(expr, inner.cost, None);
        }
        let has_cost =
            matches!(inner.kind, Type::Map(_) | Type::KeyedMap(..) | Type::Object(_) | Type::Structure(_));
        let kind = self.types.of(expr);
        let origin = self.limits.below(inner.origin, &Step::Field(field));
        let size = origin.size().or_else(|| type_size(kind));
        let cost = inner.cost.saturating_add(u64::from(has_cost));
        Part { expr, kind, cost, origin, size, entries: None }
    }

    fn list(&mut self, expr: &'a Expr, items: &'a [ListItem]) -> Part<'a> {
        let (mut cost, mut value) = (NEW_LIST, None);
        for item in items {
            let part = self.part(&item.expr);
            cost = cost.saturating_add(part.cost);
            value = union(value, self.known(&part));
        }
        let value = value.unwrap_or(Size::exactly(0));
        let entries = Entries { is_list: true, key: Size::exactly(1), value };
        let size = Size::exactly(count(items.len()));
        Part { entries: Some(entries), ..self.computed(expr, cost, Some(size)) }
    }

    fn map(&mut self, expr: &'a Expr, entries: &'a [MapEntry]) -> Part<'a> {
        let (mut cost, mut keys, mut values) = (NEW_MAP, None, None);
        for MapEntry { key, value, .. } in entries {
            let (key, value) = (self.part(key), self.part(value));
            cost = cost.saturating_add(key.cost).saturating_add(value.cost);
            keys = union(keys, self.known(&key));
            values = union(values, self.known(&value));
        }
        let none = Size::exactly(0);
        let made = Entries { is_list: false, key: keys.unwrap_or(none), value: values.unwrap_or(none) };
        let size = Size::exactly(count(entries.len()));
        Part { entries: Some(made), ..self.computed(expr, cost, Some(size)) }
    }

    fn comprehension(&mut self, expr: &'a Expr, inner: &'a Comprehension) -> Part<'a> {
        let (range, init) = (self.part(&inner.range), self.part(&inner.init));
        let base = self.locals.len();
        self.declare(&inner.accumulator, &init);
        self.declare_elements(inner, &range);
        let (condition, step) = (self.part(&inner.condition), self.part(&inner.step));
        self.locals.truncate(base + 1);
        let result = self.part(&inner.result);
        self.locals.truncate(base);
        let size = self.known(&range);
        let round = condition.cost.saturating_add(step.cost);
        let cost = [init.cost, result.cost, size.max.saturating_mul(round)]
            .into_iter()
            .fold(range.cost, u64::saturating_add);
        match &inner.init.kind {
            Kind::Literal(_) => self.computed(expr, cost, init.size),
            Kind::List(_) | Kind::Map(_) => {
                Part { entries: step.entries, ..self.computed(expr, cost, Some(size)) }
            }
            _ => self.computed(expr, cost, None),
        }
    }

    fn declare(&mut self, name: &'a str, value: &Part<'a>) {
        self.locals.push(Local { name, origin: value.origin, size: value.size, entries: value.entries });
    }

    /// Declares the variables of a loop: one (element or key), or two (index and element, or key and value).
    fn declare_elements(&mut self, inner: &'a Comprehension, range: &Part<'a>) {
        let is_list = match range.entries {
            Some(entries) => entries.is_list,
            None => matches!(range.kind, Type::List(_)),
        };
        let (key, value) = (range.entries.map(|made| made.key), range.entries.map(|made| made.value));
        match &inner.second {
            None if is_list => self.declare_part(&inner.variable, range, &Step::Item, value),
            None => self.declare_part(&inner.variable, range, &Step::Key, key),
            Some(second) => {
                let step = if is_list { Step::Index } else { Step::Key };
                self.declare_part(&inner.variable, range, &step, key);
                self.declare_part(second, range, &Step::Item, value);
            }
        }
    }

    fn declare_part(&mut self, name: &'a str, range: &Part<'a>, step: &Step<'_>, size: Option<Size>) {
        let origin = self.limits.below(range.origin, step);
        self.locals.push(Local { name, origin, size, entries: None });
    }

    /// `cel.bind`, which upstream expands to a loop over an empty list. For `optMap` it expands to
    /// `value.hasValue() ? optional.of(cel.bind(name, value.value(), body)) : optional.none()`.
    fn bind(&mut self, expr: &'a Expr, binding: Binding<'a>) -> Part<'a> {
        let Binding { name, value, body, optional } = binding;
        let value = self.part(value);
        let base = self.locals.len();
        match optional {
            None => self.declare(name, &value),
            Some(_) => {
                let size = type_size(value.kind);
                self.locals.push(Local { name, origin: Origin::Computed, size, entries: None });
            }
        }
        let body = self.part(body);
        self.locals.truncate(base);
        let bound = NEW_LIST.saturating_add(value.cost).saturating_add(body.cost);
        match optional {
            None => Part { entries: body.entries, ..self.computed(expr, bound, body.size) },
            Some(optional) => {
                // `hasValue()` and `value()` are one call each. `optMap` has another call: `optional.of()`.
                let calls = if optional == OptionalMap::Wrap { 3 } else { 2 };
                let cost = bound.saturating_add(value.cost).saturating_add(calls);
                let size = type_size(self.types.of(expr)).unwrap_or(Size::UNKNOWN);
                self.computed(expr, cost, Some(size))
            }
        }
    }
}

/// The size of the values of a type, if all of them have the same size.
fn type_size(kind: &Type) -> Option<Size> {
    let is_scalar = match kind {
        Type::Bool | Type::Int | Type::Uint | Type::Double | Type::Duration | Type::Timestamp => true,
        Type::Optional(inner) => return type_size(inner),
        _ => false,
    };
    is_scalar.then_some(Size::exactly(1))
}

fn literal_size(literal: &Literal) -> u64 {
    match literal {
        Literal::String(text) => count(text.chars().count()),
        Literal::Bytes(bytes) => count(bytes.len()),
        Literal::Null | Literal::Bool(_) | Literal::Int(_) | Literal::Uint(_) | Literal::Double(_) => 1,
    }
}

fn union(sizes: Option<Size>, size: Size) -> Option<Size> {
    Some(sizes.map_or(size, |sizes| sizes.union(size)))
}

#[cfg(test)]
mod tests;
