//! Types of functions and operators.

use std::sync::Arc;

use crate::access::{AUTHORIZER, DECISION, GROUP_CHECK, PATH_CHECK, RESOURCE_CHECK};
use crate::parse::{Expr, Kind};
use crate::types::{CIDR, FORMAT, IP, QUANTITY, SEMVER, Type, URL};

/// The result of a search.
pub(crate) enum Found {
    /// The type of the call.
    Result(Type),
    /// No function has this name.
    Unknown,
    /// The function has no overload for these types.
    Mismatch,
}

/// Types of arguments and results in the table, one letter each.
fn kind(letter: char) -> Type {
    match letter {
        'b' => Type::Bool,
        'i' => Type::Int,
        'u' => Type::Uint,
        'd' => Type::Double,
        's' => Type::String,
        'y' => Type::Bytes,
        'n' => Type::Duration,
        't' => Type::Timestamp,
        'T' => Type::Type,
        'l' => Type::list(Type::Dyn),
        'S' => Type::list(Type::String),
        'm' => Type::KeyedMap(Arc::new(Type::Dyn), Arc::new(Type::Dyn)),
        'o' => Type::Optional(Arc::new(Type::Dyn)),
        'Q' => QUANTITY,
        'U' => URL,
        'I' => IP,
        'C' => CIDR,
        'V' => SEMVER,
        'F' => FORMAT,
        'A' => AUTHORIZER,
        'P' => PATH_CHECK,
        'G' => GROUP_CHECK,
        'R' => RESOURCE_CHECK,
        'D' => DECISION,
        _ => Type::Dyn,
    }
}

/// Functions: name, whether the first argument is the receiver, overloads as `arguments>result`. In the place of the
/// result, `e` means the element type of the first argument, `1` the type of the first argument, and `w` an optional of
/// this type.
#[rustfmt::skip]
const FUNCTIONS: &[(&str, bool, &[&str])] = &[
    ("size", false, &["s>i", "y>i", "l>i", "m>i"]), ("size", true, &["s>i", "y>i", "l>i", "m>i"]),
    ("contains", true, &["ss>b"]), ("startsWith", true, &["ss>b"]), ("endsWith", true, &["ss>b"]),
    ("matches", true, &["ss>b"]), ("matches", false, &["ss>b"]),
    ("type", false, &["*>T"]), ("dyn", false, &["*>*"]),
    ("int", false, &["i>i", "u>i", "d>i", "s>i", "t>i", "n>i"]), ("uint", false, &["i>u", "u>u", "d>u", "s>u"]),
    ("double", false, &["i>d", "u>d", "d>d", "s>d"]), ("bool", false, &["b>b", "s>b"]),
    ("string", false, &["b>s", "i>s", "u>s", "d>s", "s>s", "y>s", "t>s", "n>s", "I>s", "C>s"]),
    ("bytes", false, &["s>y", "y>y"]),
    ("duration", false, &["s>n", "n>n", "i>n"]), ("timestamp", false, &["s>t", "t>t", "i>t"]),
    ("getFullYear", true, &["t>i", "ts>i"]), ("getMonth", true, &["t>i", "ts>i"]),
    ("getDate", true, &["t>i", "ts>i"]), ("getDayOfMonth", true, &["t>i", "ts>i"]),
    ("getDayOfWeek", true, &["t>i", "ts>i"]), ("getDayOfYear", true, &["t>i", "ts>i"]),
    ("getHours", true, &["t>i", "ts>i", "n>i"]), ("getMinutes", true, &["t>i", "ts>i", "n>i"]),
    ("getSeconds", true, &["t>i", "ts>i", "n>i"]), ("getMilliseconds", true, &["t>i", "ts>i", "n>i"]),
    ("charAt", true, &["si>s"]), ("lowerAscii", true, &["s>s"]), ("upperAscii", true, &["s>s"]), ("trim", true, &["s>s"]),
    ("indexOf", true, &["ss>i", "ssi>i", "l*>i"]), ("lastIndexOf", true, &["ss>i", "ssi>i", "l*>i"]),
    ("join", true, &["S>s", "Ss>s"]), ("replace", true, &["sss>s", "sssi>s"]), ("split", true, &["ss>S", "ssi>S"]),
    ("substring", true, &["si>s", "sii>s"]), ("format", true, &["sl>s"]), ("strings.quote", false, &["s>s"]),
    ("reverse", true, &["s>s", "l>1"]),
    ("find", true, &["ss>s"]), ("findAll", true, &["ss>S", "ssi>S"]),
    ("isSorted", true, &["l>b"]), ("sum", true, &["l>e"]), ("min", true, &["l>e"]), ("max", true, &["l>e"]),
    ("flatten", true, &["l>l", "li>l"]), ("slice", true, &["lii>1"]), ("distinct", true, &["l>1"]),
    ("sort", true, &["l>1"]), ("@sortByAssociatedKeys", true, &["ll>1"]),
    ("lists.range", false, &["i>l"]), ("first", true, &["l>o"]), ("last", true, &["l>o"]),
    ("sets.contains", false, &["ll>b"]), ("sets.equivalent", false, &["ll>b"]), ("sets.intersects", false, &["ll>b"]),
    ("url", false, &["s>U"]), ("isURL", false, &["s>b"]), ("getScheme", true, &["U>s"]), ("getHost", true, &["U>s"]),
    ("getHostname", true, &["U>s"]), ("getPort", true, &["U>s"]), ("getEscapedPath", true, &["U>s"]),
    ("getQuery", true, &["U>m"]),
    ("quantity", false, &["s>Q"]), ("isQuantity", false, &["s>b"]), ("sign", false, &["Q>i"]),
    ("sign", true, &["Q>i"]), ("isInteger", true, &["Q>b"]),
    ("asInteger", true, &["Q>i"]), ("asApproximateFloat", true, &["Q>d"]), ("isGreaterThan", true, &["QQ>b", "VV>b"]),
    ("isLessThan", true, &["QQ>b", "VV>b"]), ("compareTo", true, &["QQ>i", "VV>i"]), ("add", true, &["QQ>Q", "Qi>Q"]),
    ("sub", true, &["QQ>Q", "Qi>Q"]),
    ("ip", false, &["s>I"]), ("isIP", false, &["s>b"]), ("ip.isCanonical", false, &["s>b"]), ("family", true, &["I>i"]),
    ("isUnspecified", true, &["I>b"]), ("isLoopback", true, &["I>b"]), ("isLinkLocalMulticast", true, &["I>b"]),
    ("isLinkLocalUnicast", true, &["I>b"]), ("isGlobalUnicast", true, &["I>b"]),
    ("cidr", false, &["s>C"]), ("isCIDR", false, &["s>b"]), ("containsIP", true, &["CI>b", "Cs>b"]),
    ("containsCIDR", true, &["CC>b", "Cs>b"]), ("ip", true, &["C>I"]), ("masked", true, &["C>C"]),
    ("prefixLength", true, &["C>i"]),
    ("semver", false, &["s>V", "sb>V"]), ("isSemver", false, &["s>b", "sb>b"]), ("major", true, &["V>i"]),
    ("minor", true, &["V>i"]), ("patch", true, &["V>i"]),
    ("format.named", false, &["s>o"]), ("validate", true, &["Fs>o"]),
    ("format.dns1123Label", false, &[">F"]), ("format.dns1123Subdomain", false, &[">F"]),
    ("format.dns1035Label", false, &[">F"]), ("format.qualifiedName", false, &[">F"]),
    ("format.dns1123LabelPrefix", false, &[">F"]), ("format.dns1123SubdomainPrefix", false, &[">F"]),
    ("format.dns1035LabelPrefix", false, &[">F"]), ("format.labelValue", false, &[">F"]), ("format.uri", false, &[">F"]),
    ("format.uuid", false, &[">F"]), ("format.byte", false, &[">F"]), ("format.date", false, &[">F"]),
    ("format.datetime", false, &[">F"]),
    ("optional.of", false, &["*>w"]), ("optional.none", false, &[">o"]), ("optional.ofNonZeroValue", false, &["*>w"]),
    ("hasValue", true, &["o>b"]), ("value", true, &["o>e"]), ("or", true, &["oo>1"]), ("orValue", true, &["o*>e"]),
    ("optional.unwrap", false, &["l>l"]), ("unwrapOpt", true, &["l>l"]),
    ("jsonpatch.escapeKey", false, &["s>s"]),
    ("serviceAccount", true, &["Ass>A"]), ("path", true, &["As>P"]), ("group", true, &["As>G"]),
    ("resource", true, &["Gs>R"]), ("subresource", true, &["Rs>R"]), ("namespace", true, &["Rs>R"]),
    ("name", true, &["Rs>R"]), ("fieldSelector", true, &["Rs>R"]), ("labelSelector", true, &["Rs>R"]),
    ("check", true, &["Ps>D", "Rs>D"]), ("allowed", true, &["D>b"]), ("reason", true, &["D>s"]),
    ("errored", true, &["D>b"]), ("error", true, &["D>s"]),
    ("@map_insert", false, &["m**>m", "mm>m"]),
    ("@not_strictly_false", false, &["b>b"]), ("!_", false, &["b>b"]), ("-_", false, &["i>i", "d>d"]),
    ("_&&_", false, &["bb>b"]), ("_||_", false, &["bb>b"]), ("@in", false, &["*l>b", "*m>b"]),
    ("_+_", false, &["ii>i", "uu>u", "dd>d", "ss>s", "yy>y", "ll>1", "nn>n", "tn>t", "nt>t"]),
    ("_-_", false, &["ii>i", "uu>u", "dd>d", "nn>n", "tn>t", "tt>n"]),
    ("_*_", false, &["ii>i", "uu>u", "dd>d"]), ("_/_", false, &["ii>i", "uu>u", "dd>d"]), ("_%_", false, &["ii>i", "uu>u"]),
];

const TYPE_NAMES: &[(&str, &str)] = &[
    ("bool", "bool"),
    ("int", "int"),
    ("uint", "uint"),
    ("double", "double"),
    ("string", "string"),
    ("bytes", "bytes"),
    ("list", "list"),
    ("map", "map"),
    ("null_type", "null_type"),
    ("type", "type"),
    ("optional_type", "optional_type"),
];

/// Whether a type has this name.
pub(crate) fn is_type_name(name: &str) -> bool {
    type_value(name).is_some()
}

/// The type that a name stands for.
pub(crate) fn type_value(name: &str) -> Option<&'static str> {
    TYPE_NAMES.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

/// The type that a qualified name such as `net.IP` stands for. The first value is the first part of the name, which a
/// variable can hide.
pub(crate) fn qualified_type(expr: &Expr) -> Option<(&str, &'static str)> {
    let Kind::Select { operand, field, test: false } = &expr.kind else { return None };
    let (space, root) = match &operand.kind {
        Kind::Ident(root) => ("", root),
        Kind::Select { operand, field, test: false } => match &operand.kind {
            Kind::Ident(root) => (&**field, root),
            _ => return None,
        },
        _ => return None,
    };
    let name = match (&**root, space, &**field) {
        ("net", "", "IP") => "net.IP",
        ("net", "", "CIDR") => "net.CIDR",
        ("google", "protobuf", "Timestamp") => "google.protobuf.Timestamp",
        ("google", "protobuf", "Duration") => "google.protobuf.Duration",
        _ => return None,
    };
    Some((&**root, name))
}

/// Whether a function or an operator has this name.
pub(crate) fn is_known(name: &str) -> bool {
    FUNCTIONS.iter().any(|(known, _, _)| *known == name)
}

/// The type of a call.
pub(crate) fn find(name: &str, args: &[Type], member: bool) -> Found {
    match (name, args) {
        ("_==_" | "_!=_", [left, right]) => return bool_if(left.fits(right) || right.fits(left)),
        ("_<_" | "_<=_" | "_>_" | "_>=_", [left, right]) => return bool_if(ordered(left, right)),
        ("_?:_" | "_?_:_", [condition, yes, no]) => return conditional(condition, yes, no),
        ("_[_]", [operand, index]) => return index_type(operand, index),
        _ => {}
    }
    if member && !has_fitting_elements(name, args) {
        return Found::Mismatch;
    }
    let mut known = false;
    let mut dynamic = None;
    for (_, _, overloads) in
        FUNCTIONS.iter().filter(|(known, receiver, _)| *known == name && *receiver == member)
    {
        known = true;
        for overload in *overloads {
            let (expected, result) = overload.split_once('>').unwrap_or((overload, "*"));
            let fits = expected.chars().count() == args.len()
                && expected.chars().zip(args).all(|(letter, arg)| arg.fits(&kind(letter)));
            if fits {
                let result = result_type(result, args);
                // With dynamic arguments several overloads fit. Their results differ, so the result is dynamic.
                dynamic = Some(match dynamic {
                    Some(old) if old != result => Type::Dyn,
                    _ => result,
                });
            }
        }
    }
    match dynamic {
        Some(result) => Found::Result(result),
        None if known => Found::Mismatch,
        None => Found::Unknown,
    }
}

/// Whether the elements of a list have a type that the function supports: sums need numbers or durations, and orders
/// need comparable types.
fn has_fitting_elements(name: &str, args: &[Type]) -> bool {
    let list = match name {
        "sum" | "min" | "max" | "isSorted" | "sort" => args.first(),
        "@sortByAssociatedKeys" => args.get(1),
        _ => return true,
    };
    let Some(Type::List(item)) = list else { return true };
    match **item {
        Type::Dyn | Type::Int | Type::Uint | Type::Double | Type::Duration => true,
        Type::Bool | Type::Timestamp | Type::String | Type::Bytes => name != "sum",
        _ => false,
    }
}

fn bool_if(fits: bool) -> Found {
    if fits { Found::Result(Type::Bool) } else { Found::Mismatch }
}

fn ordered(left: &Type, right: &Type) -> bool {
    let number = |kind: &Type| matches!(kind, Type::Int | Type::Uint | Type::Double | Type::Dyn);
    let plain = |kind: &Type| {
        matches!(kind, Type::Bool | Type::String | Type::Bytes | Type::Duration | Type::Timestamp | Type::Dyn)
    };
    (number(left) && number(right)) || (plain(left) && plain(right) && left.fits(right)) || {
        matches!((left, right), (Type::Dyn, other) | (other, Type::Dyn) if number(other) || plain(other))
    }
}

fn conditional(condition: &Type, yes: &Type, no: &Type) -> Found {
    if !condition.fits(&Type::Bool) {
        return Found::Mismatch;
    }
    match (yes.fits(no), no.fits(yes)) {
        _ if yes == no => Found::Result(yes.clone()),
        (true, true) if *yes == Type::Dyn || *no == Type::Dyn => Found::Result(Type::Dyn),
        (true, _) if *yes == Type::Null || *yes == Type::list(Type::Dyn) => Found::Result(no.clone()),
        (_, true) | (true, _) => Found::Result(yes.clone()),
        _ => Found::Mismatch,
    }
}

fn index_type(operand: &Type, index: &Type) -> Found {
    match operand {
        Type::Dyn => Found::Result(Type::Dyn),
        Type::List(item) if index.fits(&Type::Int) => Found::Result(item.checked()),
        Type::Map(value) if index.fits(&Type::String) => Found::Result(value.checked()),
        Type::KeyedMap(key, value) if index.fits(key) => Found::Result(value.checked()),
        Type::Optional(inner) => match index_type(inner, index) {
            Found::Result(kind) => Found::Result(Type::Optional(Arc::new(kind))),
            other => other,
        },
        _ => Found::Mismatch,
    }
}

fn result_type(letter: &str, args: &[Type]) -> Type {
    let first = || args.first().cloned().unwrap_or(Type::Dyn);
    match letter {
        "1" => first(),
        "w" => Type::Optional(Arc::new(first())),
        "e" => match first() {
            Type::List(item) | Type::Optional(item) => item.checked(),
            _ => Type::Dyn,
        },
        letter => letter.chars().next().map_or(Type::Dyn, kind),
    }
}
