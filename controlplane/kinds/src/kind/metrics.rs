//! The resources of `metrics.k8s.io`: usage of nodes and pods. The API server computes them for each request.

use std::sync::Arc;

use coracle_managed_fields::{Schema, TypeId};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::cause::Causes;
use crate::resource::{Resource, ResourceNames, Strategy, Text};
use crate::schema::{FieldValidation, Parsed, SchemaError};
use crate::table;

/// API group.
pub(super) const GROUP: &str = "metrics.k8s.io";
const VERSION: &str = "v1beta1";

/// The rules of objects that clients can only read.
struct ReadOnly {
    /// Usage of one object.
    usage: fn(&Value) -> [Value; 2],
}

/// The resources NodeMetrics and PodMetrics.
pub(super) fn resources() -> [Resource; 2] {
    let mut nodes = resource("NodeMetrics", "nodes", json!({"usage": usage_schema()}), |object| {
        [object["usage"]["cpu"].clone(), object["usage"]["memory"].clone()]
    });
    let container = json!({
        "type": "object",
        "required": ["name", "usage"],
        "properties": {"name": {"type": "string"}, "usage": usage_schema()},
    });
    let pods = resource(
        "PodMetrics",
        "pods",
        json!({"containers": {"type": "array", "items": container}}),
        |object| [sum(object, "cpu"), sum(object, "memory")],
    );
    nodes.namespaced = false;
    [nodes, pods]
}

fn resource(
    kind: &'static str,
    plural: &'static str,
    mut own: Value,
    usage: fn(&Value) -> [Value; 2],
) -> Resource {
    let schema = format!("io.k8s.metrics.pkg.apis.metrics.v1beta1.{kind}");
    let names = ResourceNames {
        group: GROUP.into(),
        version: VERSION.into(),
        kind: kind.into(),
        plural: plural.into(),
    };
    let mut resource = Resource::new(names, schema, Arc::new(ReadOnly { usage }));
    let meta = "#/components/schemas/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";
    let common = json!({
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"allOf": [{"$ref": meta}], "default": {}},
        "timestamp": {"type": "string", "format": "date-time"},
        "window": {"type": "string"},
    });
    if let (Some(own), Value::Object(common)) = (own.as_object_mut(), common) {
        own.extend(common);
    }
    resource.definition = Some(Arc::new(json!({
        "type": "object",
        "properties": own,
        "x-kubernetes-group-version-kind": [{"group": GROUP, "version": VERSION, "kind": kind}],
    })));
    // As in metrics-server, the singular name is empty, so that `pod` still means the core resource.
    resource.singular = Text::from("");
    resource.verbs = vec![Text::from("get"), Text::from("list")];
    resource.columns = COLUMNS.iter().map(table::Column::definition).collect::<Vec<_>>().into();
    resource
}

const COLUMNS: &[table::Column] = &[
    table::NAME,
    table::string("cpu", "CPU usage."),
    table::string("memory", "Memory usage."),
    table::string("window", "Duration over which the CPU usage is the mean."),
];

fn usage_schema() -> Value {
    json!({"type": "object", "additionalProperties": {"type": "string"}})
}

/// The sum of one usage over the containers, in the unit that the API server writes.
fn sum(object: &Value, name: &str) -> Value {
    let containers = object["containers"].as_array().into_iter().flatten();
    let texts: Vec<&str> = containers.filter_map(|one| one["usage"][name].as_str()).collect();
    let unit = texts.first().map_or("", |text| text.trim_start_matches(|one: char| one.is_ascii_digit()));
    let numbers = texts.iter().filter_map(|text| text.strip_suffix(unit)?.parse::<u64>().ok());
    format!("{}{unit}", numbers.fold(0_u64, u64::saturating_add)).into()
}

// === impl ReadOnly ===

impl Strategy for ReadOnly {
    fn decode(
        &self,
        parsed: Parsed,
        _validation: FieldValidation,
    ) -> Result<(Value, Vec<String>), SchemaError> {
        Ok((parsed.value, Vec::new()))
    }

    fn default(&self, _object: &mut Value) {}

    fn prepare_create(&self, _object: &mut Value) {}

    fn validate(&self, _causes: &mut Causes, _new: &Value, _old: Option<&Value>) {}

    fn validate_status(&self, _causes: &mut Causes, _new: &Value, _old: &Value) {}

    fn cells(&self, object: &Value, _now: Timestamp) -> Vec<Value> {
        let [cpu, memory] = (self.usage)(object);
        vec![object["metadata"]["name"].clone(), cpu, memory, object["window"].clone()]
    }

    fn ownership(&self) -> Option<(&Schema, TypeId)> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usage_of_a_pod_is_the_sum_of_its_containers() {
        let [_, pods] = resources();
        let container = |cpu: &str| json!({"name": "c", "usage": {"cpu": cpu, "memory": "4Ki"}});
        let pod = json!({"metadata": {"name": "p"}, "window": "10s", "containers": [container("5n"), container("7n")]});
        let cells = pods.strategy().cells(&pod, Timestamp::UNIX_EPOCH);
        assert_eq!(cells, [json!("p"), json!("12n"), json!("8Ki"), json!("10s")]);
        assert!(!pods.is_stored() && pods.namespaced);
    }
}
