//! Costs of the functions of Kubernetes' libraries and of cel-go's extensions.
//!
//! Source: `apiserver/pkg/cel/library/cost.go`, `cel-go/ext/{lists,sets}.go`. Functions with a cost of one are not
//! listed.

use super::call::{Call, Estimate};
use super::size::{READ, Size, scaled};
use super::{Estimator, NEW_LIST, Origin, Part, Step};
use crate::parse::{Kind, Literal};
use crate::types::{CIDR, FORMAT, IP, QUANTITY, SEMVER, Type, URL};

/// Size of an address: 4 or 16 bytes.
const ADDRESS: Size = Size { min: 4, max: 16 };

/// Maximum size of the name of a format (`MaxFormatSize`).
const FORMAT_NAME: Size = Size { min: 1, max: 64 };

/// Cost of a format's regular expression, as a multiple of the cost of reading the text: 128 characters of 0.25 each.
const FORMAT_PATTERN: f64 = 32.0;

// === impl Estimator ===

impl<'a> Estimator<'a> {
    /// The estimate for a function of a library. `None` for other functions.
    pub(super) fn extension(&mut self, call: &Call<'_, 'a>) -> Option<Estimate> {
        match (call.target.as_ref(), call.args) {
            (None, [left, right]) if call.name == "_==_" => self.equality(left, right),
            (None, [left, right]) => {
                self.sets(call.name, left, right).or_else(|| self.reader(call.name, left))
            }
            (None, [arg]) => self.reader(call.name, arg),
            (Some(target), args) => self
                .lists(call.name, target, args)
                .or_else(|| self.texts(call.name, target, args))
                .or_else(|| self.networks(call.name, args)),
            _ => None,
        }
    }

    /// The equality of values of the libraries.
    fn equality(&self, left: &Part<'a>, right: &Part<'a>) -> Option<Estimate> {
        if left.kind != right.kind {
            return None;
        }
        let cost = match left.kind {
            kind if [IP, CIDR, QUANTITY, SEMVER].contains(kind) => 1,
            kind if *kind == FORMAT => FORMAT_NAME.cost(READ),
            kind if *kind == URL => right.size.unwrap_or(Size::exactly(1)).cost(READ),
            _ => return None,
        };
        Some((cost, None))
    }

    /// Functions that read their first argument.
    fn reader(&mut self, name: &str, arg: &Part<'a>) -> Option<Estimate> {
        Some(match name {
            "url" | "jsonpatch.escapeKey" => {
                let size = self.known(arg);
                (size.cost(READ), Some(size))
            }
            "cidr" | "isIP" | "isCIDR" | "ip" | "quantity" | "isQuantity" | "semver" | "isSemver" => {
                (self.known(arg).cost(READ), None)
            }
            "ip.isCanonical" => (self.known(arg).cost(2.0 * READ), None),
            "lists.range" => new_list(1.0, Size::exactly(integer(arg).unwrap_or(u64::MAX))),
            _ => return None,
        })
    }

    fn sets(&mut self, name: &str, left: &Part<'a>, right: &Part<'a>) -> Option<Estimate> {
        let factor = match name {
            "sets.contains" | "sets.intersects" => 1.0,
            "sets.equivalent" => 2.0,
            _ => return None,
        };
        let pairs = self.known(left).times(self.known(right));
        Some((pairs.cost(factor).saturating_add(1), None))
    }

    /// Functions of lists. `indexOf` and `lastIndexOf` are also functions of texts.
    fn lists(&mut self, name: &str, list: &Part<'a>, args: &[Part<'a>]) -> Option<Estimate> {
        Some(match (name, args) {
            ("isSorted" | "sum" | "min" | "max", []) | ("indexOf" | "lastIndexOf", [_, ..]) => {
                (self.traversal(list), None)
            }
            ("join", args) => self.join(list, args.first()),
            ("slice", [start, end]) => {
                let end = integer(end).unwrap_or(self.known(list).max);
                new_list(1.0, Size::exactly(end.saturating_sub(integer(start).unwrap_or(0))))
            }
            ("flatten", []) => new_list(1.0, self.known(list)),
            ("flatten", [depth]) => new_list(integer(depth).unwrap_or(u64::MAX) as f64, self.known(list)),
            ("reverse", []) if *list.kind != Type::String => new_list(1.0, self.known(list)),
            ("distinct", []) => self.pairs(list, 2.0),
            ("sort", []) => self.pairs(list, sort_factor(list)),
            ("@sortByAssociatedKeys", [keys]) => self.pairs(keys, sort_factor(keys)),
            _ => return None,
        })
    }

    /// Comparison of all pairs of elements. The size of the result is upstream's.
    fn pairs(&mut self, list: &Part<'a>, factor: f64) -> Estimate {
        let size = self.known(list);
        new_list(factor, size.times(size))
    }

    /// The cost of a comparison with each element of a list, or with each character of a text.
    fn traversal(&mut self, list: &Part<'a>) -> u64 {
        let size = self.known(list);
        match element_kind(list.kind) {
            Some(Type::String | Type::Bytes) => {
                size.max.saturating_mul(self.element_size(list).cost(READ).saturating_add(1))
            }
            Some(_) => size.max,
            None => size.cost(READ),
        }
    }

    /// The size of the elements of a list that comes from a variable.
    fn element_size(&self, list: &Part<'a>) -> Size {
        match list.origin {
            Origin::Computed => Size::UNKNOWN,
            origin => self.limits.below(origin, &Step::Item).size().unwrap_or(Size::UNKNOWN),
        }
    }

    fn join(&mut self, list: &Part<'a>, separator: Option<&Part<'a>>) -> Estimate {
        let length = self.known(list);
        let mut size = match element_kind(list.kind) {
            Some(_) => length.times(self.element_size(list)),
            None => Size::exactly(0),
        };
        if let Some(separator) = separator {
            let gaps = Size { min: length.min.saturating_sub(1), max: length.max.saturating_sub(1) };
            size = size.plus(self.known(separator).times(gaps));
        }
        (size.cost(READ), Some(size))
    }

    /// Functions of texts, and the check of a format.
    fn texts(&mut self, name: &str, text: &Part<'a>, args: &[Part<'a>]) -> Option<Estimate> {
        Some(match (name, args) {
            ("lowerAscii" | "upperAscii" | "substring" | "trim", _) => {
                let size = self.known(text);
                (size.cost(READ), Some(size))
            }
            ("replace", [from, to, ..]) => {
                let size = self.known(text);
                let result = replaced(size, self.known(from), self.known(to));
                (size.cost(2.0 * READ), Some(result))
            }
            ("split", [_, rest @ ..]) => {
                let size = self.known(text);
                let parts = rest.first().and_then(literal_integer).map(i64::cast_unsigned);
                (size.cost(2.0 * READ), Some(Size::at_most(parts.unwrap_or(size.max))))
            }
            ("find" | "findAll", [pattern, ..]) => {
                let found = Size::at_most(self.known(text).max);
                (self.search(text, pattern), Some(found))
            }
            ("validate", [value]) => (scaled(self.known(value).cost(READ), FORMAT_PATTERN), None),
            _ => return None,
        })
    }

    /// Functions of networks. The argument is an address or a network, or its text.
    fn networks(&mut self, name: &str, args: &[Part<'a>]) -> Option<Estimate> {
        let (comparison, mask) = (ADDRESS.plus(ADDRESS).cost(READ), ADDRESS.cost(READ).saturating_add(1));
        let cost = match name {
            "containsIP" => comparison,
            "containsCIDR" => comparison.saturating_add(mask),
            _ => return None,
        };
        let arg = args.first()?;
        let text = if arg.could_be(&Type::String) { self.known(arg).cost(READ) } else { 0 };
        Some((cost.saturating_add(text), None))
    }
}

/// The cost of a new list of this size.
fn new_list(factor: f64, size: Size) -> Estimate {
    (size.cost(factor).saturating_add(1).saturating_add(NEW_LIST), Some(size))
}

/// The cost of a sort for each pair of elements. For texts it includes the cost of reading them.
fn sort_factor(list: &Part<'_>) -> f64 {
    match element_kind(list.kind) {
        None | Some(Type::String | Type::Bytes | Type::Dyn) => 2.0 + READ,
        Some(_) => 2.0,
    }
}

/// The type of the elements of a list. `None` for other types.
fn element_kind(kind: &Type) -> Option<&Type> {
    match kind {
        Type::List(item) => Some(item),
        _ => None,
    }
}

fn literal_integer(part: &Part<'_>) -> Option<i64> {
    match &part.expr.kind {
        Kind::Literal(Literal::Int(number)) => Some(*number),
        _ => None,
    }
}

/// A number in the expression. Negative numbers count as zero.
fn integer(part: &Part<'_>) -> Option<u64> {
    literal_integer(part).map(|number| u64::try_from(number).unwrap_or(0))
}

/// The size of a text after each part of the size `from` is replaced by a text of the size `to`.
fn replaced(size: Size, from: Size, to: Size) -> Size {
    let parts = |size: u64, part: u64| (size as f64 / part as f64).ceil() as u64;
    let (most, kept_most) = match from.min {
        // An empty part is found before and after each character.
        0 => (size.max.saturating_add(1), size.max),
        part if to.max <= part => (0, size.max),
        part => (parts(size.max, part), 0),
    };
    let (least, kept_least) = match from.max {
        0 => (size.min.saturating_add(1), size.min),
        part if part <= to.min => (0, size.min),
        part => (parts(size.min, part), 0),
    };
    Size { min: least, max: most }.times(to).plus(Size { min: kept_least, max: kept_most })
}
