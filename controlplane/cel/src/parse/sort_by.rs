//! The macro `sortBy`: sorts a list by a key that is computed from each element. Source: `cel-go/ext/lists.go`.

use super::two_variables::RESULT;
use super::{Comprehension, Expr, Kind, ListItem, Literal};

/// The name of the list in the expansion. No expression can contain it.
const INPUT: &str = "@sortBy";

/// Expands the macro. The list is bound to a name, because it is used twice: for the keys and for the elements.
pub(super) fn expand(list: Expr, variable: Box<str>, key: Expr, at: u32) -> Kind {
    let node = |kind: Kind| Expr { kind, at };
    let ident = |name: &str| node(Kind::Ident(name.into()));
    let item = node(Kind::List(vec![ListItem { expr: key, optional: false }]));
    let step = Kind::Call { name: "_+_".into(), target: None, args: vec![ident(RESULT), item] };
    let keys = Kind::Comprehension(Box::new(Comprehension {
        range: ident(INPUT),
        variable,
        second: None,
        accumulator: RESULT.into(),
        init: node(Kind::List(Vec::new())),
        condition: node(Kind::Literal(Literal::Bool(true))),
        step: node(step),
        result: ident(RESULT),
    }));
    let sorted = Kind::Call {
        name: "@sortByAssociatedKeys".into(),
        target: Some(Box::new(ident(INPUT))),
        args: vec![node(keys)],
    };
    Kind::Bind { name: INPUT.into(), value: Box::new(list), body: Box::new(node(sorted)), optional: None }
}
