//! Consistency of the table: definitions, cells and columns, names.

use super::*;
use crate::schema::model::schemas;

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
        let mut object = serde_json::json!({"metadata": {"name": "x"}});
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
