//! Macros with two variables: index and element of a list, key and value of a map. Source:
//! `cel-go/ext/comprehensions.go`.

use super::{Comprehension, Expr, Kind, ListItem, Literal};

/// The name of the result in the expansion. No expression can contain it.
pub(super) const RESULT: &str = "@result";

/// A macro.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Macro {
    All,
    Exists,
    ExistsOne,
    TransformList,
    TransformMap,
    TransformMapEntry,
}

/// The macro with this name and this number of arguments after the variables.
pub(super) fn find(name: &str, arguments: usize) -> Option<Macro> {
    Some(match (name, arguments) {
        ("all", 1) => Macro::All,
        ("exists", 1) => Macro::Exists,
        ("existsOne" | "exists_one", 1) => Macro::ExistsOne,
        ("transformList", 1 | 2) => Macro::TransformList,
        ("transformMap", 1 | 2) => Macro::TransformMap,
        ("transformMapEntry", 1 | 2) => Macro::TransformMapEntry,
        _ => return None,
    })
}

/// The call of a macro.
pub(super) struct MacroCall {
    pub(super) kind: Macro,
    pub(super) range: Expr,
    pub(super) first: Box<str>,
    pub(super) second: Box<str>,
    /// The optional filter and the expression.
    pub(super) args: Vec<Expr>,
    /// Position of the call in the source.
    pub(super) at: u32,
}

/// Expands the call of a macro to its loop.
pub(super) fn expand(call: MacroCall) -> Option<Kind> {
    let MacroCall { kind, range, first, second, mut args, at } = call;
    let node = |kind: Kind| Expr { kind, at };
    let literal = |value: Literal| node(Kind::Literal(value));
    let result = || node(Kind::Ident(RESULT.into()));
    let call = |name: &str, args: Vec<Expr>| node(Kind::Call { name: name.into(), target: None, args });
    let body = args.pop()?;
    let filter = args.pop();
    let always = || literal(Literal::Bool(true));
    let (init, condition, step, outcome) = match kind {
        Macro::All => (
            literal(Literal::Bool(true)),
            call("@not_strictly_false", vec![result()]),
            call("_&&_", vec![result(), body]),
            result(),
        ),
        Macro::Exists => (
            literal(Literal::Bool(false)),
            call("@not_strictly_false", vec![call("!_", vec![result()])]),
            call("_||_", vec![result(), body]),
            result(),
        ),
        Macro::ExistsOne => (
            literal(Literal::Int(0)),
            always(),
            call("_?_:_", vec![body, call("_+_", vec![result(), literal(Literal::Int(1))]), result()]),
            call("_==_", vec![result(), literal(Literal::Int(1))]),
        ),
        Macro::TransformList => {
            let grown =
                call("_+_", vec![result(), node(Kind::List(vec![ListItem { expr: body, optional: false }]))]);
            (node(Kind::List(Vec::new())), always(), filtered(filter, grown, result(), at), result())
        }
        Macro::TransformMap => {
            let entry = vec![result(), node(Kind::Ident(first.clone())), body];
            let grown = call("@map_insert", entry);
            (node(Kind::Map(Vec::new())), always(), filtered(filter, grown, result(), at), result())
        }
        Macro::TransformMapEntry => {
            let grown = call("@map_insert", vec![result(), body]);
            (node(Kind::Map(Vec::new())), always(), filtered(filter, grown, result(), at), result())
        }
    };
    Some(Kind::Comprehension(Box::new(Comprehension {
        range,
        variable: first,
        second: Some(second),
        accumulator: RESULT.into(),
        init,
        condition,
        step,
        result: outcome,
    })))
}

fn filtered(filter: Option<Expr>, grown: Expr, same: Expr, at: u32) -> Expr {
    match filter {
        Some(filter) => Expr {
            kind: Kind::Call { name: "_?_:_".into(), target: None, args: vec![filter, grown, same] },
            at,
        },
        None => grown,
    }
}
