//! Resources and sets of them.

use std::sync::Arc;

use super::*;
use crate::kind::built_in;

/// A custom resource without rules.
pub(crate) struct Free;

impl Strategy for Free {
    fn decode(&self, parsed: Parsed, _: FieldValidation) -> Result<(Value, Vec<String>), SchemaError> {
        Ok((parsed.value, Vec::new()))
    }

    fn default(&self, _: &mut Value) {}

    fn prepare_create(&self, _: &mut Value) {}

    fn validate(&self, _: &mut Causes, _: &Value, _: Option<&Value>) {}

    fn validate_status(&self, _: &mut Causes, _: &Value, _: &Value) {}

    fn cells(&self, _: &Value, _: Timestamp) -> Vec<Value> {
        Vec::new()
    }

    fn ownership(&self) -> Option<(&Schema, TypeId)> {
        None
    }
}

fn widget(version: &'static str) -> Resource {
    let schema = format!("com.example.{version}.Widget");
    let names = ResourceNames {
        group: "example.com".into(),
        version: version.into(),
        kind: "Widget".into(),
        plural: "widgets".into(),
    };
    Resource::new(names, schema, Arc::new(Free))
}

#[test]
fn a_set_finds_each_version_and_the_stored_one() {
    let stored = Arc::new(widget("v1"));
    let mut beta = widget("v1beta1");
    beta.storage = Some(stored.clone());
    let set = built_in().with(&[Arc::new(beta), stored]).unwrap();
    assert_eq!(
        set.find("example.com", "v1beta1", "widgets").unwrap().stored_as().api_version(),
        "example.com/v1"
    );
    assert_eq!(
        set.find_kind("example.com", "v1", "Widget").unwrap().qualified_resource(),
        "widgets.example.com"
    );
    assert_eq!(set.find_stored("example.com", "widgets").unwrap().api_version(), "example.com/v1");
    let versions: Vec<&str> = set.versions_of("example.com").map(|version| &*version.version).collect();
    assert_eq!(versions, ["v1", "v1beta1"]);
    let served = |set: &Resources, group: &str, plural: &str| -> Vec<String> {
        let found = set.served_versions(set.find(group, "v1", plural).unwrap());
        found.iter().map(|resource| resource.api_version().to_owned()).collect()
    };
    assert_eq!(served(&set, "example.com", "widgets"), ["example.com/v1", "example.com/v1beta1"]);
    assert_eq!(served(&set, "events.k8s.io", "events"), ["v1", "events.k8s.io/v1"]);
    assert!(set.find("", "v1", "pods").is_some());
    let without = set.without("example.com", "widgets");
    assert!(without.find("example.com", "v1", "widgets").is_none());
    assert!(without.find_stored("example.com", "widgets").is_none());
    assert_eq!(without.iter().count(), built_in().iter().count());
}

#[test]
fn a_stored_version_that_is_not_served_is_found() {
    let mut beta = widget("v1beta1");
    beta.storage = Some(Arc::new(widget("v1")));
    let set = built_in().with(&[Arc::new(beta)]).unwrap();
    assert!(set.find("example.com", "v1", "widgets").is_none());
    assert_eq!(set.find_stored("example.com", "widgets").unwrap().api_version(), "example.com/v1");
}

#[test]
fn a_replaced_resource_loses_its_former_versions() {
    let set = built_in().with(&[Arc::new(widget("v1"))]).unwrap();
    let set = set.with(&[Arc::new(widget("v2"))]).unwrap();
    assert!(set.find("example.com", "v1", "widgets").is_none());
    assert!(set.find("example.com", "v2", "widgets").is_some());
}

#[test]
fn a_built_in_resource_can_neither_be_replaced_nor_removed() {
    let names =
        ResourceNames { group: "".into(), version: "v2".into(), kind: "Pod".into(), plural: "pods".into() };
    let pods = Resource::new(names, "x", Arc::new(Free));
    assert_eq!(built_in().with(&[Arc::new(pods)]).err(), Some(Taken("pods".to_owned())));
    assert!(built_in().without("", "pods").find("", "v1", "pods").is_some());
}

#[test]
fn a_change_shares_the_documents_of_other_group_versions() {
    let set = built_in().with(&[Arc::new(widget("v1"))]).unwrap();
    let (old, new) =
        (built_in().group_version("apps", "v1").unwrap(), set.group_version("apps", "v1").unwrap());
    assert!(Arc::ptr_eq(old, new));
}

#[test]
fn a_custom_field_is_read_by_its_path() {
    let object = serde_json::json!({"spec": {"color": "red", "size": 3, "on": true, "list": [1]}});
    let read = |name: &str| SelectableField::at_path(name).read(&object);
    assert_eq!(
        (read("spec.color"), read("spec.size"), read("spec.on")),
        ("red".into(), "3".into(), "true".into())
    );
    assert_eq!((read("spec.list"), read("spec.none.x")), (String::new(), String::new()));
}
