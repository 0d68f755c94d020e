//! Static check: names, fields, functions and types. An unknown type is `dyn`; the evaluation checks it.

use std::collections::HashMap;
use std::sync::Arc;

use crate::access::{AUTHORIZER, RESOURCE_CHECK};
use crate::environment::{CompileError, Environment, SHARED};
use crate::functions::signatures::{self, Found};
use crate::parse::{
    Comprehension, Expr, Kind, ListItem, Literal, MapEntry, OptionalMap, Position, StructureField, position,
};
use crate::types::{DYN, Type};
use crate::value::structure;

/// Returns the type of the expression.
pub(crate) fn check(expr: &Expr, environment: &Environment, source: &str) -> Result<Type, CompileError> {
    Checker { environment, source, scopes: Vec::new(), types: None }.kind(expr)
}

/// Returns the types of the expression and of its parts.
pub(crate) fn check_parts(
    expr: &Expr,
    environment: &Environment,
    source: &str,
) -> Result<Types, CompileError> {
    let types = Some(HashMap::new());
    let mut checker = Checker { environment, source, scopes: Vec::new(), types };
    checker.kind(expr)?;
    Ok(Types(checker.types.unwrap_or_default()))
}

/// The types of the parts of an expression, by the addresses of the parts.
pub(crate) struct Types(HashMap<*const Expr, Type>);

struct Checker<'a> {
    environment: &'a Environment,
    source: &'a str,
    scopes: Vec<(&'a str, Type)>,
    /// The types of all parts, if the caller needs them.
    types: Option<HashMap<*const Expr, Type>>,
}

type Checked = Result<Type, CompileError>;

impl Types {
    /// The type of a part.
    pub(crate) fn of(&self, expr: &Expr) -> &Type {
        self.0.get(&std::ptr::from_ref(expr)).unwrap_or(&DYN)
    }

    /// Whether the part has a type. The first part of a function name such as `sets.contains` has none.
    pub(crate) fn has(&self, expr: &Expr) -> bool {
        self.0.contains_key(&std::ptr::from_ref(expr))
    }
}

impl<'a> Checker<'a> {
    fn kind(&mut self, expr: &'a Expr) -> Checked {
        let kind = self.infer(expr)?;
        if let Some(types) = &mut self.types {
            types.insert(std::ptr::from_ref(expr), kind.clone());
        }
        Ok(kind)
    }

    fn infer(&mut self, expr: &'a Expr) -> Checked {
        match &expr.kind {
            Kind::Literal(literal) => Ok(literal_type(literal)),
            Kind::Ident(name) => self.ident(expr, name),
            Kind::Select { operand, field, test } => {
                if self.is_shared(operand) {
                    let Some(kind) = self.environment.find_shared(field) else {
                        return Err(self.error(expr, &format!("undefined field '{field}'")));
                    };
                    return Ok(if *test { Type::Bool } else { kind.clone() });
                }
                if signatures::qualified_type(expr).is_some_and(|(root, _)| !self.declares(root)) {
                    return Ok(Type::Type);
                }
                let kind = self.kind(operand)?;
                let field = self.field(expr, &kind, field)?;
                Ok(if *test { Type::Bool } else { field })
            }
            Kind::Call { name, target, args } => {
                let before = self.scopes.len();
                if &**name == "format" {
                    self.scopes.push((MIXED, Type::Dyn));
                }
                let kind = self.call(expr, name, target.as_deref(), args);
                self.scopes.truncate(before);
                kind
            }
            Kind::List(items) => self.list(items),
            Kind::Map(entries) => self.map(entries),
            Kind::Structure { name, fields } => self.structure(expr, name, fields),
            Kind::Comprehension(inner) => self.comprehension(inner),
            Kind::Bind { name, value, body, optional } => {
                let bound = self.kind(value)?;
                let bound = if optional.is_some() { unwrap(bound) } else { bound };
                let result = self.scoped(&[(name, bound)], body)?;
                Ok(match optional {
                    Some(OptionalMap::Wrap) => Type::Optional(Arc::new(result)),
                    _ => result,
                })
            }
        }
    }

    fn list(&mut self, items: &'a [ListItem]) -> Checked {
        let mut kind = None;
        for ListItem { expr: item, optional } in items {
            let found = self.kind(item)?;
            let found = if *optional { unwrap(found) } else { found };
            self.same_type(item, kind.as_ref(), &found)?;
            kind = Some(join(kind, found));
        }
        Ok(Type::list(kind.unwrap_or(Type::Dyn)))
    }

    fn map(&mut self, entries: &'a [MapEntry]) -> Checked {
        let (mut keys, mut values) = (None, None);
        for MapEntry { key, value, optional } in entries {
            let kind = self.kind(key)?;
            // Without this check, map types as keys could make the text of a type grow exponentially.
            if !matches!(kind, Type::Bool | Type::Int | Type::Uint | Type::String | Type::Dyn) {
                return Err(self.error(key, "unsupported map key type"));
            }
            self.same_type(key, keys.as_ref(), &kind)?;
            keys = Some(join(keys, kind));
            let kind = self.kind(value)?;
            let kind = if *optional { unwrap(kind) } else { kind };
            self.same_type(value, values.as_ref(), &kind)?;
            values = Some(join(values, kind));
        }
        let key = keys.unwrap_or(Type::Dyn);
        Ok(Type::KeyedMap(Arc::new(key), Arc::new(values.unwrap_or(Type::Dyn))))
    }

    /// Checks that an element has the type of the elements before it. `dyn` fits any type.
    fn same_type(&self, expr: &Expr, before: Option<&Type>, kind: &Type) -> Result<(), CompileError> {
        let allows_mixed = || self.scopes.iter().any(|(name, _)| *name == MIXED);
        match before {
            Some(before) if !before.fits(kind) && !kind.fits(before) && !allows_mixed() => {
                Err(self.error(expr, &format!("expected type '{before}' but found '{kind}'")))
            }
            _ => Ok(()),
        }
    }

    /// Whether an expression is `variables`, which has the shared values as fields.
    fn is_shared(&self, operand: &Expr) -> bool {
        let hidden = || self.scopes.iter().any(|(known, _)| *known == SHARED);
        match &operand.kind {
            Kind::Ident(name) => &**name == SHARED && self.environment.has_shared() && !hidden(),
            _ => false,
        }
    }

    fn structure(&mut self, expr: &'a Expr, name: &str, fields: &'a [StructureField]) -> Checked {
        if !self.environment.makes_structures() || !structure::is_known(name) {
            return Err(self.error(expr, &format!("undeclared reference to '{name}' (in container '')")));
        }
        for StructureField { name: field, value, optional } in fields {
            let Some(expected) = structure::field(name, field) else {
                return Err(self.error(value, &format!("undefined field '{field}'")));
            };
            let kind = self.kind(value)?;
            let kind = if *optional { unwrap(kind) } else { kind };
            if !kind.fits(&expected) {
                let message =
                    format!("expected type of field '{field}' is '{expected}' but provided type is '{kind}'");
                return Err(self.error(value, &message));
            }
        }
        Ok(Type::Structure(name.into()))
    }

    fn scoped(&mut self, names: &[(&'a str, Type)], body: &'a Expr) -> Checked {
        let before = self.scopes.len();
        self.scopes.extend(names.iter().cloned());
        let result = self.kind(body);
        self.scopes.truncate(before);
        result
    }

    fn ident(&self, expr: &Expr, name: &str) -> Checked {
        if let Some((_, kind)) = self.scopes.iter().rev().find(|(known, _)| *known == name) {
            return Ok(kind.checked());
        }
        if let Some(kind) = self.environment.find(name) {
            return Ok(kind.checked());
        }
        if signatures::is_type_name(name) {
            return Ok(Type::Type);
        }
        Err(self.error(expr, &format!("undeclared reference to '{name}' (in container '')")))
    }

    fn field(&self, expr: &Expr, kind: &Type, name: &str) -> Checked {
        match kind {
            Type::Dyn | Type::Structure(_) => Ok(Type::Dyn),
            kind if *kind == AUTHORIZER && name == "requestResource" => Ok(RESOURCE_CHECK),
            Type::Object(object) => match object.fields.get(name) {
                Some(field) => Ok(field.kind.checked()),
                None => Err(self.error(expr, &format!("undefined field '{name}'"))),
            },
            Type::Map(value) | Type::KeyedMap(_, value) => Ok(value.checked()),
            Type::Optional(inner) => Ok(Type::Optional(Arc::new(self.field(expr, inner, name)?))),
            other => Err(self.error(expr, &format!("type '{other}' does not support field selection"))),
        }
    }

    fn call(&mut self, expr: &'a Expr, name: &str, target: Option<&'a Expr>, args: &'a [Expr]) -> Checked {
        if let Some(qualified) = target.and_then(|target| self.namespace(target, name)) {
            let kinds = self.kinds(args)?;
            return self.signature(expr, &qualified, &kinds, false);
        }
        if matches!(name, "_?._" | "_[?_]")
            && let [operand, index] = args
        {
            let operand = self.kind(operand)?;
            let inner = match (&index.kind, unwrap(operand)) {
                (Kind::Literal(Literal::String(field)), kind) if name == "_?._" => {
                    self.field(expr, &kind, field)?
                }
                (_, kind) => {
                    let index = self.kind(index)?;
                    self.signature(expr, "_[_]", &[kind, index], false)?
                }
            };
            return Ok(Type::Optional(Arc::new(unwrap(inner))));
        }
        if let Some((arg, problem)) = crate::literal::invalid_argument(name, target, args) {
            return Err(self.error(arg, &problem));
        }
        if name == "format"
            && let Some(problem) = crate::literal::format_error(target, args)
        {
            return Err(self.error(expr, &problem));
        }
        let mut kinds = Vec::with_capacity(args.len() + 1);
        if let Some(target) = target {
            kinds.push(self.kind(target)?);
        }
        kinds.extend(self.kinds(args)?);
        self.signature(expr, name, &kinds, target.is_some())
    }

    fn kinds(&mut self, args: &'a [Expr]) -> Result<Vec<Type>, CompileError> {
        args.iter().map(|arg| self.kind(arg)).collect()
    }

    /// The name of a function such as `sets.contains`, unless a variable hides its first part.
    fn namespace(&self, target: &Expr, name: &str) -> Option<String> {
        let Kind::Ident(space) = &target.kind else { return None };
        let qualified = format!("{space}.{name}");
        (!self.declares(space) && signatures::is_known(&qualified)).then_some(qualified)
    }

    /// Whether a variable has this name.
    fn declares(&self, name: &str) -> bool {
        self.scopes.iter().any(|(known, _)| *known == name) || self.environment.find(name).is_some()
    }

    fn signature(&self, expr: &Expr, name: &str, kinds: &[Type], member: bool) -> Checked {
        match signatures::find(name, kinds, member) {
            Found::Result(kind) => Ok(kind),
            Found::Unknown => {
                Err(self.error(expr, &format!("undeclared reference to '{name}' (in container '')")))
            }
            Found::Mismatch => {
                let words: Vec<String> = kinds.iter().map(Type::to_string).collect();
                let applied = match (member, words.split_first()) {
                    (true, Some((target, rest))) => format!("'{target}.({})'", rest.join(", ")),
                    _ => format!("'({})'", words.join(", ")),
                };
                Err(self
                    .error(expr, &format!("found no matching overload for '{name}' applied to {applied}")))
            }
        }
    }

    fn comprehension(&mut self, inner: &'a Comprehension) -> Checked {
        let range = self.kind(&inner.range)?;
        let (first, second) = match &range {
            Type::List(item) if inner.second.is_some() => (Type::Int, (**item).clone()),
            Type::List(item) => ((**item).clone(), Type::Dyn),
            Type::Map(value) => (Type::String, (**value).clone()),
            Type::KeyedMap(key, value) => ((**key).clone(), (**value).clone()),
            Type::Dyn => (Type::Dyn, Type::Dyn),
            other => {
                let message = format!(
                    "expression of type '{other}' cannot be range of a comprehension (must be list, map, or dynamic)"
                );
                return Err(self.error(&inner.range, &message));
            }
        };
        let mut accumulator = self.kind(&inner.init)?;
        let mut names: Vec<(&str, Type)> = vec![(&inner.variable, first)];
        if let Some(name) = &inner.second {
            names.push((name, second));
        }
        names.push((&inner.accumulator, accumulator.clone()));
        let step = self.scoped(&names, &inner.step)?;
        if accumulator == Type::list(Type::Dyn) {
            accumulator = step;
        } else if !step.fits(&accumulator) {
            let message = format!("expected type '{accumulator}' but found '{step}'");
            return Err(self.error(&inner.step, &message));
        }
        self.scoped(&names, &inner.condition)?;
        self.scoped(&[(&inner.accumulator, accumulator)], &inner.result)
    }

    fn error(&self, expr: &Expr, message: &str) -> CompileError {
        let Position { line, column, text } = position(self.source, expr.at);
        let dots = ".".repeat(column.saturating_sub(1));
        CompileError(format!("ERROR: <input>:{line}:{column}: {message}\n | {text}\n | {dots}^"))
    }
}

/// Marker in the scopes while the arguments of `format` are checked: lists there may have elements of several types.
/// The marker is not a valid identifier, so no expression contains it.
const MIXED: &str = "@mixed";

fn literal_type(literal: &Literal) -> Type {
    match literal {
        Literal::Null => Type::Null,
        Literal::Bool(_) => Type::Bool,
        Literal::Int(_) => Type::Int,
        Literal::Uint(_) => Type::Uint,
        Literal::Double(_) => Type::Double,
        Literal::String(_) => Type::String,
        Literal::Bytes(_) => Type::Bytes,
    }
}

/// The common type of elements. `dyn` if their types differ.
fn join(old: Option<Type>, new: Type) -> Type {
    match old {
        None => new,
        Some(old) if old == new => old,
        Some(_) => Type::Dyn,
    }
}

fn unwrap(kind: Type) -> Type {
    match kind {
        Type::Optional(inner) => (*inner).clone(),
        other => other,
    }
}
