//! Selectors of devices in CEL. Source: `dynamic-resource-allocation/cel/compile.go`.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use coracle_cel::{Environment, Field, ObjectType, Program, Type};

static ENVIRONMENT: LazyLock<Environment> =
    LazyLock::new(|| Environment::default().variable("device", device()));

/// The error of a selector expression. `None` if it is valid.
pub(super) fn problem(expression: &str) -> Option<String> {
    match Program::compile(expression, &ENVIRONMENT) {
        Err(error) => Some(format!("compilation failed: {error}")),
        // The type of an attribute is known only at evaluation.
        Ok(program) if matches!(program.kind(), Type::Bool | Type::Dyn) => None,
        Ok(program) => Some(format!("must evaluate to bool or the unknown type, not {}", program.kind())),
    }
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
    let fields: BTreeMap<_, _> = fields.collect();
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
        assert_eq!(problem("1").as_deref(), Some("must evaluate to bool or the unknown type, not int"));
        for expression in ["object.spec == 1", "device.driver ==", ""] {
            assert!(
                problem(expression).is_some_and(|text| text.starts_with("compilation failed: ")),
                "{expression}"
            );
        }
    }
}
