//! Costs of calls and operators. With arguments of unknown type a call has the highest cost of all overloads that fit.

use super::bounds::Step;
use super::size::{PATTERN, READ, Size};
use super::{Entries, Estimator, Origin, Part, type_size};
use crate::parse::{Expr, Kind};
use crate::types::Type;

/// A call with its arguments.
pub(super) struct Call<'c, 'a> {
    /// Name, with the namespace: `sets.contains`.
    pub(super) name: &'c str,
    pub(super) target: Option<Part<'a>>,
    pub(super) args: &'c [Part<'a>],
}

/// The cost of a call without its arguments, and the size of its result if the arguments determine it.
pub(super) type Estimate = (u64, Option<Size>);

// === impl Estimator ===

impl<'a> Estimator<'a> {
    pub(super) fn call(
        &mut self,
        expr: &'a Expr,
        name: &str,
        target: Option<&'a Expr>,
        args: &'a [Expr],
    ) -> Part<'a> {
        let args: Vec<Part<'a>> = args.iter().map(|arg| self.part(arg)).collect();
        if let ("dyn", None, [arg]) = (name, target, args.as_slice()) {
            let cost = arg.cost.saturating_add(1);
            return Part { entries: arg.entries, ..self.computed(expr, cost, arg.size) };
        }
        let qualified =
            target.and_then(|target| self.namespace(target)).map(|space| format!("{space}.{name}"));
        let target = match (target, &qualified) {
            (Some(target), None) => Some(self.part(target)),
            _ => None,
        };
        let call = Call { name: qualified.as_deref().unwrap_or(name), target, args: &args };
        let (own, size) = match self.extension(&call) {
            Some(found) => found,
            None => self.core(&call),
        };
        let kind = self.types.of(expr);
        let origin = self.origin(&call);
        let size = size.or_else(|| origin.size()).or_else(|| type_size(kind));
        let cost = call.args_cost().saturating_add(own);
        Part { expr, kind, cost, origin, size, entries: call.entries() }
    }

    /// The namespace of a function such as `sets.contains`. Unlike a variable, it has no type after the type check.
    fn namespace(&self, target: &'a Expr) -> Option<&'a str> {
        match &target.kind {
            Kind::Ident(name) if !self.types.has(target) => Some(name),
            _ => None,
        }
    }

    fn origin(&self, call: &Call<'_, 'a>) -> Origin<'a> {
        match (call.name, call.args) {
            ("_[_]", [operand, _]) if !matches!(operand.kind, Type::Optional(_)) => {
                self.limits.below(operand.origin, &Step::Item)
            }
            _ => Origin::Computed,
        }
    }

    /// The estimate of an operator or function of the language itself. If it has no rule here, its cost is 1.
    fn core(&mut self, call: &Call<'_, 'a>) -> Estimate {
        match (call.name, call.target.as_ref(), call.args) {
            ("_&&_" | "_||_", None, _) => (0, None),
            ("_?:_" | "_?_:_", None, [_, yes, no]) => (0, Some(self.known(yes).union(self.known(no)))),
            ("_[_]", None, [operand, _]) if !matches!(operand.kind, Type::Optional(_)) => {
                (1, operand.entries.map(|made| made.value))
            }
            ("_+_", None, [left, right]) => self.sum(left, right),
            ("_==_" | "_!=_", None, [left, right]) => (self.comparison(left, right), None),
            ("_<_" | "_<=_" | "_>_" | "_>=_", None, [left, right]) if are_texts(left, right) => {
                (any_of(&[left, right], self.comparison(left, right)), None)
            }
            ("@in", None, [_, list]) if list.could_be_list() => (any_of(&[list], self.known(list).max), None),
            ("bytes", None, [text]) if text.could_be(&Type::String) => {
                let size = self.known(text);
                let bytes = Size { min: size.min, max: size.max.wrapping_mul(4) };
                (any_of(&[text], size.cost(READ)), Some(bytes))
            }
            ("string", None, [bytes]) if bytes.could_be(&Type::Bytes) => {
                let size = self.known(bytes);
                (any_of(&[bytes], size.cost(READ)), Some(Size { min: size.min / 4, max: size.max }))
            }
            ("strings.quote", None, [text]) => {
                // An unknown size overflows to zero, as upstream.
                let size = self.known(text);
                let max = size.max.wrapping_mul(2).wrapping_add(2);
                (size.cost(READ), Some(Size { min: size.min.wrapping_add(2), max }))
            }
            ("format", Some(text), [_]) => (self.known(text).cost(READ), None),
            ("startsWith" | "endsWith", Some(_), [part]) => (self.known(part).cost(READ), None),
            ("matches", Some(text), [pattern]) => (self.search(text, pattern), None),
            ("contains", Some(text), [part]) => {
                let cost = self.known(text).cost(READ);
                (cost.saturating_mul(self.known(part).cost(READ)), None)
            }
            _ => (1, None),
        }
    }

    /// The cost of a regular expression on a text. An empty text counts as one character.
    pub(super) fn search(&mut self, text: &Part<'a>, pattern: &Part<'a>) -> u64 {
        let text = self.known(text).plus(Size::exactly(1)).cost(READ);
        text.saturating_mul(self.known(pattern).cost(PATTERN))
    }

    /// The cost of a comparison, which ends with the shorter value.
    fn comparison(&mut self, left: &Part<'a>, right: &Part<'a>) -> u64 {
        let (left, right) = (self.known(left), self.known(right));
        Size::at_most(left.max.min(right.max)).cost(READ)
    }

    /// The sum of numbers, or the concatenation of texts, bytes or lists.
    fn sum(&mut self, left: &Part<'a>, right: &Part<'a>) -> Estimate {
        let is_text = are_texts(left, right);
        let are_lists = left.could_be_list() && right.could_be_list();
        if !is_text && !are_lists {
            return (1, None);
        }
        let size = self.known(left).plus(self.known(right));
        let cost = if is_text { any_of(&[left, right], size.cost(READ)) } else { 1 };
        (cost, Some(size))
    }
}

// === impl Call ===

impl Call<'_, '_> {
    /// The highest cost of the target and the arguments. Of the branches of a condition only one is evaluated.
    fn args_cost(&self) -> u64 {
        if let ("_?:_" | "_?_:_", [condition, yes, no]) = (self.name, self.args) {
            return condition.cost.saturating_add(yes.cost.max(no.cost));
        }
        let parts = self.target.iter().chain(self.args);
        parts.map(|part| part.cost).fold(0, u64::saturating_add)
    }

    /// Sizes of the entries of the result.
    fn entries(&self) -> Option<Entries> {
        let (left, right) = match (self.name, self.args) {
            ("_?:_" | "_?_:_", [_, yes, no]) => (yes, no),
            ("_+_", [left, right]) => (left, right),
            _ => return None,
        };
        let (left, right) = (left.entries?, right.entries?);
        let (key, value) = (left.key.union(right.key), left.value.union(right.value));
        Some(Entries { is_list: left.is_list, key, value })
    }
}

// === impl Part ===

impl Part<'_> {
    pub(super) fn could_be(&self, kind: &Type) -> bool {
        self.kind == kind || *self.kind == Type::Dyn
    }

    fn could_be_list(&self) -> bool {
        matches!(self.kind, Type::List(_) | Type::Dyn)
    }
}

/// Whether both parts can be texts, or both can be bytes.
fn are_texts(left: &Part<'_>, right: &Part<'_>) -> bool {
    [Type::String, Type::Bytes].iter().any(|kind| left.could_be(kind) && right.could_be(kind))
}

/// The cost of a call with several overloads. `cost` is the cost of one overload; all others cost one. The others fit
/// only if the types of all arguments are unknown.
fn any_of(args: &[&Part<'_>], cost: u64) -> u64 {
    let fits_others = args.iter().all(|arg| *arg.kind == Type::Dyn);
    if fits_others { cost.max(1) } else { cost }
}
