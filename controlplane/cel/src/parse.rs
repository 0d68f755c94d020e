//! Parses expressions with the crate `cel` and converts its tree into a compact tree of bounded depth.

mod scan;
mod sort_by;
mod two_variables;

use cel::common::ast::{EntryExpr, Expr as Ast, IdedExpr, LiteralValue, SourceInfo, StructExpr};
use cel::parser::Parser;

use two_variables::MacroCall;

/// Maximum length of an expression in bytes.
const MAX_LENGTH: usize = 16 * 1024;

/// Maximum depth of an expression. Recursive code over expressions relies on this limit.
const MAX_DEPTH: usize = 200;

/// Maximum depth of calls in the parser.
const MAX_RECURSION: u16 = 96;

/// Stack of the parser's thread in bytes. The tree of a chain such as `1+1+1…` is as deep as the chain is long.
const STACK: usize = 128 << 20;

/// An expression with its offset in the source.
#[derive(Clone, Debug)]
pub(crate) struct Expr {
    pub(crate) kind: Kind,
    pub(crate) at: u32,
}

/// The node types of the syntax tree.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Literal(Literal),
    Ident(Box<str>),
    Select {
        operand: Box<Expr>,
        field: Box<str>,
        test: bool,
    },
    Call {
        name: Box<str>,
        target: Option<Box<Expr>>,
        args: Vec<Expr>,
    },
    List(Vec<ListItem>),
    Map(Vec<MapEntry>),
    /// `Object.spec{replicas: 1}`.
    Structure {
        name: Box<str>,
        fields: Vec<StructureField>,
    },
    Comprehension(Box<Comprehension>),
    /// `cel.bind(name, value, body)`. With `optional` the value is unwrapped (`optMap`).
    Bind {
        name: Box<str>,
        value: Box<Expr>,
        body: Box<Expr>,
        optional: Option<OptionalMap>,
    },
}

/// An element of a list.
#[derive(Clone, Debug)]
pub(crate) struct ListItem {
    pub(crate) expr: Expr,
    /// Whether the element is left out if it is `optional.none()`: `[?value]`.
    pub(crate) optional: bool,
}

/// An entry of a map.
#[derive(Clone, Debug)]
pub(crate) struct MapEntry {
    pub(crate) key: Expr,
    pub(crate) value: Expr,
    /// Whether the entry is left out if the value is `optional.none()`: `{?key: value}`.
    pub(crate) optional: bool,
}

/// A field of a structure.
#[derive(Clone, Debug)]
pub(crate) struct StructureField {
    pub(crate) name: Box<str>,
    pub(crate) value: Expr,
    /// Whether the field is left out if the value is `optional.none()`: `{?field: value}`.
    pub(crate) optional: bool,
}

/// The treatment of the result of `optMap` and `optFlatMap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OptionalMap {
    Wrap,
    Flat,
}

/// A constant.
#[derive(Clone, Debug)]
pub(crate) enum Literal {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(Box<str>),
    Bytes(std::sync::Arc<[u8]>),
}

/// A loop over a list or a map.
#[derive(Clone, Debug)]
pub(crate) struct Comprehension {
    pub(crate) range: Expr,
    pub(crate) variable: Box<str>,
    pub(crate) second: Option<Box<str>>,
    pub(crate) accumulator: Box<str>,
    pub(crate) init: Expr,
    pub(crate) condition: Expr,
    pub(crate) step: Expr,
    pub(crate) result: Expr,
}

/// Parses an expression. The error is the message for the client.
pub(crate) fn parse(source: &str) -> Result<Expr, String> {
    if source.len() > MAX_LENGTH {
        return Err(format!("expression is longer than {MAX_LENGTH} bytes"));
    }
    scan::check(source)?;
    std::thread::scope(|scope| {
        let work = || parse_here(source);
        match std::thread::Builder::new()
            .name("cel-parser".to_owned())
            .stack_size(STACK)
            .spawn_scoped(scope, work)
        {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err("the parser failed".to_owned())),
            Err(error) => Err(format!("cannot start the parser: {error}")),
        }
    })
}

fn parse_here(source: &str) -> Result<Expr, String> {
    let parser = Parser::new().max_recursion_depth(MAX_RECURSION).enable_optional_syntax(true);
    let (tree, info) = parser.parse_with_source_info(source).map_err(|errors| errors.to_string())?;
    Converter { info: &info }.expr(&tree, 0)
}

struct Converter<'a> {
    info: &'a SourceInfo,
}

impl Converter<'_> {
    fn expr(&self, tree: &IdedExpr, depth: usize) -> Result<Expr, String> {
        if depth > MAX_DEPTH {
            return Err(format!("expression is nested more than {MAX_DEPTH} levels deep"));
        }
        let below = |tree: &IdedExpr| self.expr(tree, depth + 1);
        let boxed = |tree: &IdedExpr| below(tree).map(Box::new);
        let kind = match &tree.expr {
            Ast::Unspecified => return Err("empty expression".to_owned()),
            Ast::Literal(literal) => Kind::Literal(convert_literal(literal)),
            Ast::Ident(name) => Kind::Ident(name.as_str().into()),
            Ast::Select(select) => Kind::Select {
                operand: boxed(&select.operand)?,
                field: select.field.as_str().into(),
                test: select.test,
            },
            Ast::Call(call) => match self.macros(tree.id, call, depth)? {
                Some(kind) => kind,
                None => Kind::Call {
                    name: call.func_name.as_str().into(),
                    target: call.target.as_deref().map(boxed).transpose()?,
                    args: call.args.iter().map(below).collect::<Result<_, _>>()?,
                },
            },
            Ast::List(list) => {
                let optional = |index: usize| list.optional_indices.contains(&index);
                let items = list.elements.iter().enumerate();
                let items =
                    items.map(|(index, item)| Ok(ListItem { expr: below(item)?, optional: optional(index) }));
                Kind::List(items.collect::<Result<_, String>>()?)
            }
            Ast::Map(map) => {
                let mut entries = Vec::with_capacity(map.entries.len());
                for entry in &map.entries {
                    let EntryExpr::MapEntry(entry) = &entry.expr else {
                        return Err("invalid map".to_owned());
                    };
                    let (key, value) = (below(&entry.key)?, below(&entry.value)?);
                    entries.push(MapEntry { key, value, optional: entry.optional });
                }
                Kind::Map(entries)
            }
            Ast::Struct(object) => self.structure(object, depth)?,
            Ast::Comprehension(inner) => Kind::Comprehension(Box::new(Comprehension {
                range: below(&inner.iter_range)?,
                variable: inner.iter_var.as_str().into(),
                second: inner.iter_var2.as_deref().map(Box::from),
                accumulator: inner.accu_var.as_str().into(),
                init: below(&inner.accu_init)?,
                condition: below(&inner.loop_cond)?,
                step: below(&inner.loop_step)?,
                result: below(&inner.result)?,
            })),
        };
        let at = self.info.offset_for(tree.id).map_or(0, |(start, _)| start);
        Ok(Expr { kind, at })
    }

    fn structure(&self, object: &StructExpr, depth: usize) -> Result<Kind, String> {
        let mut fields = Vec::with_capacity(object.entries.len());
        for entry in &object.entries {
            let EntryExpr::StructField(entry) = &entry.expr else {
                return Err("invalid object".to_owned());
            };
            let value = self.expr(&entry.value, depth + 1)?;
            let name = entry.field.as_str().into();
            fields.push(StructureField { name, value, optional: entry.optional });
        }
        Ok(Kind::Structure { name: object.type_name.as_str().into(), fields })
    }

    /// Macros that the parser leaves as calls.
    fn macros(
        &self,
        id: u64,
        call: &cel::common::ast::CallExpr,
        depth: usize,
    ) -> Result<Option<Kind>, String> {
        if let Some(kind) = self.bind(call, depth)? {
            return Ok(Some(kind));
        }
        if let Some(kind) = self.sort_by(id, call, depth)? {
            return Ok(Some(kind));
        }
        let (Some(target), [first, second, rest @ ..]) = (call.target.as_deref(), call.args.as_slice())
        else {
            return Ok(None);
        };
        let Some(kind) = two_variables::find(&call.func_name, rest.len()) else { return Ok(None) };
        let name = |expr: &IdedExpr| match &expr.expr {
            Ast::Ident(name) => Ok(Box::<str>::from(name.as_str())),
            _ => Err(format!("argument of {}() must be a simple name", call.func_name)),
        };
        let (first, second) = (name(first)?, name(second)?);
        if first == second {
            return Err(format!("the variables of {}() must have different names", call.func_name));
        }
        // In the expansion, the arguments are at most four levels below the call.
        let inner = |expr: &IdedExpr| self.expr(expr, depth + 4);
        let args = rest.iter().map(inner).collect::<Result<Vec<_>, _>>()?;
        let at = self.info.offset_for(id).map_or(0, |(start, _)| start);
        let range = self.expr(target, depth + 1)?;
        Ok(two_variables::expand(MacroCall { kind, range, first, second, args, at }))
    }

    /// The macro `sortBy`, which the parser leaves as a call.
    fn sort_by(
        &self,
        id: u64,
        call: &cel::common::ast::CallExpr,
        depth: usize,
    ) -> Result<Option<Kind>, String> {
        let (Some(target), "sortBy", [variable, key]) =
            (call.target.as_deref(), call.func_name.as_str(), call.args.as_slice())
        else {
            return Ok(None);
        };
        let Ast::Ident(name) = &variable.expr else {
            return Err("argument of sortBy() must be a simple name".to_owned());
        };
        // In the expansion, the key is five levels below the call.
        let key = self.expr(key, depth + 5)?;
        let at = self.info.offset_for(id).map_or(0, |(start, _)| start);
        Ok(Some(sort_by::expand(self.expr(target, depth + 1)?, name.as_str().into(), key, at)))
    }

    /// The macros `cel.bind`, `optMap` and `optFlatMap`, which the parser leaves as calls.
    fn bind(&self, call: &cel::common::ast::CallExpr, depth: usize) -> Result<Option<Kind>, String> {
        let Some(target) = call.target.as_deref() else { return Ok(None) };
        let is_cel = matches!(&target.expr, Ast::Ident(name) if name == "cel");
        let (value, body, optional) = match (call.func_name.as_str(), call.args.as_slice()) {
            ("bind", [_, value, body]) if is_cel => (value, body, None),
            ("optMap", [_, body]) => (target, body, Some(OptionalMap::Wrap)),
            ("optFlatMap", [_, body]) => (target, body, Some(OptionalMap::Flat)),
            _ => return Ok(None),
        };
        let Some(Ast::Ident(name)) = call.args.first().map(|name| &name.expr) else {
            return Err(format!("{}() variable name must be a simple identifier", call.func_name));
        };
        Ok(Some(Kind::Bind {
            name: name.as_str().into(),
            value: Box::new(self.expr(value, depth + 1)?),
            body: Box::new(self.expr(body, depth + 1)?),
            optional,
        }))
    }
}

fn convert_literal(literal: &LiteralValue) -> Literal {
    match literal {
        LiteralValue::Null => Literal::Null,
        LiteralValue::Boolean(value) => Literal::Bool(*value.inner()),
        LiteralValue::Int(value) => Literal::Int(*value.inner()),
        LiteralValue::UInt(value) => Literal::Uint(*value.inner()),
        LiteralValue::Double(value) => Literal::Double(*value.inner()),
        LiteralValue::String(value) => Literal::String(value.inner().into()),
        LiteralValue::Bytes(value) => Literal::Bytes(value.inner().into()),
    }
}

/// A position in a source. Line and column begin at 1.
pub(crate) struct Position<'a> {
    pub(crate) line: usize,
    pub(crate) column: usize,
    /// The text of the line.
    pub(crate) text: &'a str,
}

/// The position of an offset in the source.
pub(crate) fn position(source: &str, at: u32) -> Position<'_> {
    let mut offset = usize::try_from(at).unwrap_or(0);
    for (index, text) in source.split('\n').enumerate() {
        let length = text.chars().count();
        if offset <= length {
            return Position { line: index + 1, column: offset + 1, text };
        }
        offset -= length + 1;
    }
    Position { line: 1, column: 1, text: "" }
}
