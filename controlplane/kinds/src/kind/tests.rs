//! Consistency of the table: definitions, cells and columns, names.

use coracle_pod_rules as pods;
use serde_json::{Value, json};

use super::*;
use crate::schema::model::schemas;
use crate::{defaults, validate};

#[test]
fn every_kind_has_a_definition() {
    for kind in KINDS {
        assert!(schemas().find(kind.schema).is_some(), "{}", kind.schema);
        assert_eq!(schema_of(&kind.api_version(), kind.kind), Some(kind.schema));
        let resource = by_resource(kind.group, kind.version, kind.plural).unwrap();
        assert_eq!((&*resource.kind, resource.api_version()), (kind.kind, &*kind.api_version()));
    }
    for (_, _, schema) in VIRTUAL {
        assert!(schemas().find(schema).is_some(), "{schema}");
    }
}

#[test]
fn cells_and_columns_agree_on_an_empty_object() {
    let now = jiff::Timestamp::from_second(1_700_000_000).unwrap();
    for kind in KINDS {
        let mut object = json!({"metadata": {"name": "x"}});
        (kind.rules.defaults)(&mut object);
        assert_eq!((kind.rules.cells)(&object, now).len(), kind.rules.columns.len(), "{}", kind.kind);
    }
}

#[test]
fn names_are_qualified_by_their_group() {
    let deployments = by_resource("apps", "v1", "deployments").unwrap();
    assert_eq!(deployments.qualified_resource(), "deployments.apps");
    assert_eq!(deployments.qualified_kind(), "Deployment.apps");
    assert_eq!(by_kind("v1", "Pod").unwrap().qualified_resource(), "pods");
}

fn pod_manifest(metadata: &Value, spec: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "unknown": 1})
}

#[test]
fn the_table_has_the_rules_of_pods() {
    let kind = by_kind("v1", "Pod").unwrap();
    assert_eq!(schema_of("v1", "Pod"), Some(pods::DEFINITION));
    let good = json!({"containers": [{"name": "c", "image": "i"}]});
    let cases = [
        (json!({"name": "p", "namespace": "n"}), good.clone(), true),
        (json!({"name": "P_", "namespace": "n"}), good.clone(), false),
        (json!({"name": "p", "namespace": "n", "finalizers": ["plain"]}), good.clone(), false),
        (json!({"name": "p"}), good, false),
        (json!({"name": "p", "namespace": "n"}), json!({"containers": []}), false),
    ];
    for (metadata, spec, is_valid) in cases {
        let mut pod = pods::decode(pod_manifest(&metadata, &spec)).unwrap();
        assert!(pod.get("unknown").is_none(), "{pod}");
        let mut by_table = pod.clone();
        pods::apply_defaults(&mut pod);
        defaults::apply(kind, &mut by_table);
        assert_eq!(pod, by_table);
        assert_eq!(pods::violations(&pod), validate::create(kind, &pod));
        assert_eq!(pods::violations(&pod).is_empty(), is_valid, "{pod}");
    }
    let wrong = pod_manifest(&json!({"name": "p"}), &json!({"containers": 1}));
    assert!(pods::decode(wrong).is_err());
}
