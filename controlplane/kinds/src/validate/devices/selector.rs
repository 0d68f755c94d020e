//! Selectors of devices in CEL. Source: `dynamic-resource-allocation/cel/compile.go`.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use coracle_cel::{Bounds, Environment, Field, Limits, ObjectType, Program, Type};
use coracle_values::CollectMap;

/// Maximum estimated cost of a selector (`CELSelectorExpressionMaxCost`).
const MAX_COST: u64 = 1_000_000;

/// Maximum number of attributes, or of capacities, of a device.
const MAX_ATTRIBUTES: u64 = 32;

/// Maximum length of the name of an attribute, without its domain.
const MAX_NAME: u64 = 32;

/// Maximum length of a domain or of the name of a driver.
const MAX_DOMAIN: u64 = 63;

/// Maximum length of an attribute that is a text.
const MAX_TEXT: u64 = 64;

static ENVIRONMENT: LazyLock<Environment> =
    LazyLock::new(|| Environment::default().variable("device", device()));

static BOUNDS: LazyLock<Bounds> = LazyLock::new(bounds);

/// The reason why a selector is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// The expression does not compile or has another type.
    Invalid(String),
    /// The expression compiles, but the estimate of its cost is too high.
    TooCostly,
}

/// The problem of a selector expression. `None` if it is valid. An unknown cost is accepted: the cost of the evaluation
/// has a limit, too.
pub(super) fn problem(expression: &str) -> Option<Problem> {
    match estimated(expression) {
        Err(error) => Some(Problem::Invalid(error)),
        Ok(cost) => cost.filter(|cost| *cost > MAX_COST).map(|_cost| Problem::TooCostly),
    }
}

/// Compiles an expression and returns its estimated cost.
fn estimated(expression: &str) -> Result<Option<u64>, String> {
    let limits = Limits { variable: Some("device"), bounds: &BOUNDS };
    let (program, cost) = Program::compile_with_cost(expression, &ENVIRONMENT, limits)
        .map_err(|error| format!("compilation failed: {error}"))?;
    match program.kind() {
        // The type of an attribute is known only at evaluation.
        Type::Bool | Type::Dyn => Ok(cost),
        kind => Err(format!("must evaluate to bool or the unknown type, not {kind}")),
    }
}

/// The sizes of a device.
fn bounds() -> Bounds {
    let boxed = |bounds: Bounds| Some(Box::new(bounds));
    let map = |key: u64, value: Bounds| Bounds {
        items: boxed(value),
        keys: boxed(Bounds::leaf(key, 2)),
        ..Bounds::leaf(MAX_ATTRIBUTES, 2)
    };
    let text = Bounds::leaf(MAX_TEXT, 1);
    // Upstream's estimate knows the size of `attributes[domain].name`, but not the size of `capacity[domain].name`.
    let attributes = Bounds { other_fields: boxed(text.clone()), ..map(MAX_NAME, text) };
    let fields = [
        ("driver", Bounds::leaf(MAX_DOMAIN, 2)),
        ("allowMultipleAllocations", Bounds::leaf(1, 4)),
        ("attributes", map(MAX_DOMAIN, attributes)),
        ("capacity", map(MAX_DOMAIN, map(MAX_NAME, Bounds::leaf(0, 8)))),
    ];
    let fields = fields.into_iter().map(|(name, bounds)| (name.into(), bounds));
    Bounds { fields: fields.collect_map(), ..Bounds::leaf(0, 2) }
}

/// The type of `device`: attributes and capacities by domain and name.
fn device() -> Type {
    let by_name = |of: Type| Type::Map(Arc::new(Type::Map(Arc::new(of))));
    let fields = [
        ("driver", Type::String),
        ("allowMultipleAllocations", Type::Bool),
        ("attributes", by_name(Type::Dyn)),
        ("capacity", by_name(Type::Opaque("kubernetes.Quantity"))),
    ];
    let fields = fields.into_iter().map(|(name, kind)| (name.into(), Field { name: name.into(), kind }));
    let fields: BTreeMap<_, _> = fields.collect_map();
    Type::Object(Arc::new(ObjectType::new("kubernetes.DRADevice", fields)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_are_conditions_on_a_device() {
        let good = [
            "device.driver == 'd'",
            "device.attributes['d.example.com'].model == 'x'",
            "device.attributes['d.example.com'].isBig",
            "device.capacity['d.example.com'].memory.compareTo(quantity('1Gi')) >= 0",
            "cel.bind(d, device.attributes['d'], d.a && d.b)",
        ];
        for expression in good {
            assert_eq!(problem(expression), None, "{expression}");
        }
        let error = "must evaluate to bool or the unknown type, not int";
        assert_eq!(problem("1"), Some(Problem::Invalid(error.to_owned())));
        for expression in ["object.spec == 1", "device.driver ==", ""] {
            let problem = problem(expression);
            assert!(
                matches!(&problem, Some(Problem::Invalid(text)) if text.starts_with("compilation failed: ")),
                "{expression}: {problem:?}"
            );
        }
    }

    /// An expression with 10^7 iterations, each with a search.
    fn expensive() -> String {
        let list = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]";
        let search = "int('1'.find('[0-9]*')) < 100".to_owned();
        ["z5", "z4", "z3", "z2", "z", "y", "x"]
            .into_iter()
            .fold(search, |inner, name| format!("{list}.all({name}, {inner})"))
    }

    #[test]
    fn costs_equal_upstreams_costs() {
        let domain = r#"device.attributes["dra.example.com"]"#;
        let capacity = r#"device.capacity["dra.example.com"]"#;
        for (expression, cost) in [
            (format!(r#"{domain}.noSuchAttr.isGreaterThan(quantity("0"))"#), 6),
            (format!(r#"{domain}["noSuchAttr"].isGreaterThan(quantity("0"))"#), 6),
            (r#""dra.example.com" in device.attributes"#.to_owned(), 3),
            (r#"device.driver == """#.to_owned(), 2),
            (r#"device.driver == "dra.example.com""#.to_owned(), 4),
            (format!("{domain}.name"), 4),
            (format!("cel.bind(dra, {domain}, dra.name)"), 15),
            (format!("{domain}.name > 0"), 5),
            (format!(r#"{domain}.name == "fish""#), 5),
            (format!(r#"{domain}.name.isGreaterThan(semver("0.0.1"))"#), 6),
            (
                format!(r#"{domain}.name.isGreaterThan(semver("v0.0.1", true)) && isSemver("v1.0.0", true)"#),
                7,
            ),
            (format!(r#"{capacity}.name.isGreaterThan(quantity("1Ki"))"#), 6),
            (format!(r#""name" in {capacity} && {capacity}.name.isGreaterThan(quantity("1Ki"))"#), 10),
            (format!(r#"!("name" in {capacity}) || {capacity}.name.isGreaterThan(quantity("1Ki"))"#), 11),
            (format!("{domain}.a && {domain}.b && {domain}.c"), 12),
            (r#"device.attributes.exists_one(x, x == "dra.example.com")"#.to_owned(), 164),
            (format!(r#"{domain}.exists_one(x, x == "services")"#), 133),
            (format!(r#"{domain}.services.split("example").size() >= 2"#), 19),
            (format!(r#"{domain}.services.matches("[^a]?sym")"#), 18),
            (r#"device.capacity.exists_one(x, x == "dra.example.com")"#.to_owned(), 164),
            (format!(r#"{capacity}.exists_one(x, x == "memory")"#), 133),
            ("device.allowMultipleAllocations == true".to_owned(), 3),
            (expensive(), 85_555_551),
        ] {
            assert_eq!(estimated(&expression), Ok(Some(cost)), "{expression}");
        }
    }

    #[test]
    fn a_selector_with_too_high_a_cost_is_refused() {
        assert_eq!(problem(&expensive()), Some(Problem::TooCostly));
    }
}
