//! Selectors of devices: expressions in CEL over the variable `device`.
//!
//! Source: `dynamic-resource-allocation/cel`.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use coracle_cel::{Environment, Field, Key, ObjectType, Program, Type, Value as Cel};
use coracle_values::CollectMap;
use coracle_values::Quantity;
use serde_json::Value;

use super::object::Device;

/// Values by domain and name, for expressions such as `device.attributes["domain"].name`.
type Domains = BTreeMap<String, BTreeMap<Key, Cel<'static>>>;

static ENVIRONMENT: LazyLock<Environment> = LazyLock::new(|| {
    let by_domain = || Type::Map(Arc::new(Type::Map(Arc::new(Type::Dyn))));
    let fields = [
        ("driver", Type::String),
        ("attributes", by_domain()),
        ("capacity", by_domain()),
        ("allowMultipleAllocations", Type::Bool),
    ];
    let fields = fields.map(|(name, kind)| (name.into(), Field { name: name.into(), kind }));
    let device = ObjectType::new("kubernetes.DRADevice", fields.into());
    Environment::default().variable("device", Type::Object(Arc::new(device)))
});

/// Compiles a selector. The error is upstream's text.
pub(super) fn compile(source: &str) -> Result<Program, String> {
    let program =
        Program::compile(source, &ENVIRONMENT).map_err(|error| format!("compilation failed: {error}"))?;
    match program.kind().to_string().as_str() {
        "bool" | "dyn" => Ok(program),
        other => Err(format!("must evaluate to bool, not {other}")),
    }
}

/// Whether the expression selects the device, and the cost of the evaluation.
pub(super) fn selects(program: &Program, driver: &str, device: &Device) -> (Result<bool, String>, u64) {
    let attributes = domains(driver, &device.attributes, attribute);
    let capacity = domains(driver, &device.capacity, |value| {
        let text = value["value"].as_str()?;
        Quantity::parse(text).ok().map(Cel::Quantity)
    });
    let fields = [
        ("driver", Cel::String(driver.to_owned().into())),
        ("attributes", map(attributes)),
        ("capacity", map(capacity)),
        ("allowMultipleAllocations", Cel::Bool(device.is_shared())),
    ];
    let fields: BTreeMap<Key, Cel<'static>> =
        fields.into_iter().map(|(name, value)| (Key::String(name.to_owned()), value)).collect_map();
    let (result, cost) = program.evaluate(&[("device", Cel::Map(Arc::new(fields)))]);
    let selected = match result {
        Ok(Cel::Bool(selected)) => Ok(selected),
        Ok(_) => Err("CEL expression did not return a bool".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    (selected, cost)
}

fn attribute(value: &Value) -> Option<Cel<'static>> {
    let text = |name: &str| value[name].as_str();
    if let Some(number) = value["int"].as_i64() {
        Some(Cel::Int(number))
    } else if let Some(flag) = value["bool"].as_bool() {
        Some(Cel::Bool(flag))
    } else if let Some(text) = text("string") {
        Some(Cel::String(text.to_owned().into()))
    } else {
        text("version")?.parse().ok().map(|version| Cel::Semver(Arc::new(version)))
    }
}

/// Values by domain and name. Names without a domain belong to the driver.
fn domains(
    driver: &str,
    values: &BTreeMap<String, Value>,
    read: impl Fn(&Value) -> Option<Cel<'static>>,
) -> Domains {
    let mut found = Domains::new();
    for (name, value) in values {
        let (domain, name) = name.split_once('/').unwrap_or((driver, name));
        if let Some(value) = read(value) {
            found.entry(domain.to_owned()).or_default().insert(Key::String(name.to_owned()), value);
        }
    }
    found
}

fn map(domains: Domains) -> Cel<'static> {
    let entries = domains.into_iter().map(|(domain, names)| (Key::String(domain), Cel::Map(Arc::new(names))));
    Cel::Map(Arc::new(entries.collect_map()))
}
