use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::{
    MAX_LISTED,
    path::Scalar,
    schema::{Field, Key, Type},
};

const VERSION: &str = "apps/v1";
const EARLY: &str = "2026-01-01T00:00:00Z";
const LATE: &str = "2026-01-02T00:00:00Z";

/// A kind with a map, a keyed list with a default key, a set, an atomic list and scalars.
fn schema() -> (Schema, TypeId) {
    let mut schema = Schema::default();
    let scalar = schema.add(Type::Scalar);
    let atomic = schema.add(Type::Atomic);
    let map = schema.add(Type::Map { fields: [].into(), other: Some(scalar) });
    let set = schema.add(Type::Set);
    let fields = |list: &[(&str, TypeId)]| {
        let field = |(name, of): &(&str, TypeId)| {
            (Box::from(*name), Field { of: *of, absent_is_empty: matches!(*name, "metadata" | "spec") })
        };
        list.iter().map(field).collect()
    };
    let port = schema.add(Type::Map {
        fields: fields(&[("number", scalar), ("protocol", scalar), ("name", scalar)]),
        other: None,
    });
    let default = Some(Scalar::Text("TCP".into()));
    let keys = [Key { name: "number".into(), default: None }, Key { name: "protocol".into(), default }];
    let ports = schema.add(Type::Keyed { keys: keys.into(), element: port });
    let spec = schema.add(Type::Map {
        fields: fields(&[
            ("replicas", scalar),
            ("image", scalar),
            ("ports", ports),
            ("zones", set),
            ("args", atomic),
            ("selector", map),
        ]),
        other: None,
    });
    let metadata = schema.add(Type::Map {
        fields: fields(&[("name", scalar), ("uid", scalar), ("labels", map), ("annotations", map)]),
        other: None,
    });
    let root = schema.add(Type::Map {
        fields: fields(&[
            ("apiVersion", scalar),
            ("kind", scalar),
            ("metadata", metadata),
            ("spec", spec),
            ("status", map),
        ]),
        other: None,
    });
    (schema, root)
}

/// An object and its managers. Its methods change both as requests to the API server do.
struct Stored {
    schema: (Schema, TypeId),
    object: Value,
    managers: Managers,
}

impl Stored {
    fn new() -> Stored {
        Stored {
            schema: schema(),
            object: json!({"apiVersion": VERSION, "kind": "Web"}),
            managers: Managers::default(),
        }
    }

    fn run<T>(&self, now: &str, act: impl FnOnce(&Updater<'_, SingleVersion<'_>>) -> T) -> T {
        let versions = SingleVersion { api_version: VERSION, schema: &self.schema.0, of: self.schema.1 };
        let mut ignored = FieldSet::default();
        ignored.insert(&[PathElement::field("status")]);
        act(&Updater { versions: &versions, api_version: VERSION, subresource: "", ignored: &ignored, now })
    }

    fn apply_at(&mut self, now: &str, manager: &str, force: bool, spec: &Value) -> Result<(), ApplyError> {
        let config = json!({"apiVersion": VERSION, "kind": "Web", "metadata": {"name": "w"}, "spec": spec});
        self.apply_config(now, manager, force, &config)
    }

    fn apply_config(
        &mut self,
        now: &str,
        manager: &str,
        force: bool,
        config: &Value,
    ) -> Result<(), ApplyError> {
        let request = ApplyRequest { live: &self.object, config, manager, force };
        let applied = self.run(now, |updater| updater.apply(request, self.managers.clone()))?;
        (self.object, self.managers) = (applied.object, applied.managers);
        self.object["metadata"]["uid"] = "1".into();
        Ok(())
    }

    fn apply(&mut self, manager: &str, spec: &Value) -> Result<(), ApplyError> {
        self.apply_at(EARLY, manager, false, spec)
    }

    fn update(&mut self, manager: &str, change: impl FnOnce(&mut Value)) {
        let mut new = self.object.clone();
        change(&mut new);
        let request = UpdateRequest { live: &self.object, new: &new, manager };
        self.managers = self.run(LATE, |updater| updater.update(request, self.managers.clone()));
        self.object = new;
        self.object["metadata"]["uid"] = "1".into();
    }

    fn owned_by(&self, manager: &str) -> Value {
        let owned = self.managers.iter().find(|(id, _)| id.name == manager);
        owned.map_or(Value::Null, |(_, owned)| owned.fields.to_json())
    }

    fn spec(&self) -> &Value {
        &self.object["spec"]
    }
}

fn conflicts(result: Result<(), ApplyError>) -> Vec<String> {
    match result.unwrap_err() {
        ApplyError::Conflicts(conflicts) => {
            conflicts.listed().iter().map(|conflict| conflict.path.to_string()).collect()
        }
        other => panic!("{other}"),
    }
}

#[test]
fn an_applier_owns_what_it_applies() {
    let mut stored = Stored::new();
    stored.apply("a", &json!({"replicas": 1, "ports": [{"number": 80, "name": "http"}], "zones": ["x"], "args": ["-v"], "selector": {}})).unwrap();
    let key = r#"k:{"number":80,"protocol":"TCP"}"#;
    assert_eq!(
        stored.owned_by("a"),
        json!({"f:spec": {
            "f:replicas": {}, "f:args": {}, "f:selector": {}, "f:zones": {"v:\"x\"": {}},
            "f:ports": {key: {".": {}, "f:number": {}, "f:name": {}}},
        }})
    );
}

#[test]
fn an_omitted_field_is_removed_unless_another_manager_owns_it() {
    let mut stored = Stored::new();
    stored
        .apply("a", &json!({"replicas": 1, "image": "i", "ports": [{"number": 80}, {"number": 81}]}))
        .unwrap();
    stored.apply("b", &json!({"image": "i", "ports": [{"number": 81, "name": "b"}]})).unwrap();
    stored.apply("a", &json!({"replicas": 1})).unwrap();
    assert_eq!(*stored.spec(), json!({"replicas": 1, "image": "i", "ports": [{"number": 81, "name": "b"}]}));
    stored.apply("b", &json!({})).unwrap();
    // A declared field such as `ports` is removed with its last element.
    assert_eq!(*stored.spec(), json!({"replicas": 1}));
}

#[test]
fn a_field_of_an_updater_stays_when_an_applier_omits_it() {
    let mut stored = Stored::new();
    stored.apply("a", &json!({"replicas": 1, "image": "i"})).unwrap();
    stored.update("hpa", |object| object["spec"]["replicas"] = 5.into());
    stored.apply("a", &json!({"image": "i"})).unwrap();
    assert_eq!(*stored.spec(), json!({"replicas": 5, "image": "i"}));
    assert_eq!(stored.owned_by("hpa"), json!({"f:spec": {"f:replicas": {}}}));
}

#[test]
fn another_value_for_an_owned_field_is_a_conflict() {
    let mut stored = Stored::new();
    stored.apply("a", &json!({"replicas": 1, "image": "i"})).unwrap();
    let paths = conflicts(stored.apply("b", &json!({"replicas": 2})));
    assert_eq!(paths, [".spec.replicas"]);
    stored.update("hpa", |object| object["spec"]["replicas"] = 5.into());
    let error = stored.apply("b", &json!({"replicas": 2})).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Apply failed with 1 conflict: conflict with \"hpa\" using apps/v1: .spec.replicas"
    );
    // The same value is not a conflict: both own the field.
    stored.apply("b", &json!({"replicas": 5})).unwrap();
    assert_eq!(stored.owned_by("b"), stored.owned_by("hpa"));
}

#[test]
fn a_forced_apply_takes_the_field() {
    let mut stored = Stored::new();
    stored.apply("a", &json!({"replicas": 1, "image": "i"})).unwrap();
    stored.apply_at(LATE, "b", true, &json!({"replicas": 2})).unwrap();
    assert_eq!(stored.spec()["replicas"], 2);
    assert_eq!(stored.owned_by("a"), json!({"f:spec": {"f:image": {}}}));
    assert_eq!(stored.owned_by("b"), json!({"f:spec": {"f:replicas": {}}}));
}

#[test]
fn fields_without_a_manager_belong_to_the_manager_before_first_apply() {
    let mut stored = Stored::new();
    stored.object = json!({"apiVersion": VERSION, "kind": "Web", "metadata": {"name": "w", "uid": "1"}, "spec": {"replicas": 1}});
    stored.update("a", |object| object["spec"]["image"] = "i".into());
    assert!(stored.managers.is_empty(), "an update does not begin to track an old object");
    assert_eq!(conflicts(stored.apply("b", &json!({"replicas": 3}))), [".spec.replicas"]);
    stored.apply("b", &json!({"replicas": 1})).unwrap();
    assert_eq!(stored.owned_by(BEFORE_FIRST_APPLY), json!({"f:spec": {"f:image": {}, "f:replicas": {}}}));
}

#[test]
fn an_update_that_changes_nothing_changes_no_owner_and_no_time() {
    let mut stored = Stored::new();
    stored.update("a", |object| object["spec"] = json!({"image": "i"}));
    let before = stored.managers.clone();
    stored.update("b", |_| {});
    assert_eq!(stored.managers, before);
    stored.apply_at(EARLY, "c", false, &json!({"image": "i"})).unwrap();
    let after_apply = stored.managers.clone();
    stored.apply_at(LATE, "c", false, &json!({"image": "i"})).unwrap();
    assert_eq!(stored.managers, after_apply);
}

#[test]
fn ignored_and_server_fields_have_no_owner() {
    let mut stored = Stored::new();
    stored.update("a", |object| {
        object["metadata"] = json!({"name": "w", "uid": "1", "labels": {"x": "y"}});
        object["status"] = json!({"ready": "yes"});
    });
    assert_eq!(stored.owned_by("a"), json!({"f:metadata": {"f:labels": {".": {}, "f:x": {}}}}));
}

#[test]
fn a_list_has_the_order_of_the_configuration() {
    let mut stored = Stored::new();
    stored.update("a", |object| object["spec"] = json!({"zones": ["1", "a", "2", "b", "3"]}));
    stored.apply("b", &json!({"zones": ["b", "new", "a"]})).unwrap();
    assert_eq!(stored.spec()["zones"], json!(["1", "2", "b", "3", "new", "a"]));
}

#[test]
fn duplicates_and_elements_without_key_are_refused() {
    let mut stored = Stored::new();
    let error = stored.apply("a", &json!({"zones": ["x", "x"]})).unwrap_err();
    assert_eq!(error.to_string(), ".spec.zones: duplicate entries for key [=\"x\"]");
    let error = stored.apply("a", &json!({"ports": [null]})).unwrap_err();
    assert_eq!(error.to_string(), ".spec.ports: associative list with keys may not have a null element");
}

#[test]
fn kubectl_takes_over_the_fields_of_its_client_side_apply() {
    let mut stored = Stored::new();
    let config = json!({"apiVersion": VERSION, "kind": "Web", "spec": {"replicas": 1, "image": "i"}});
    stored.update("kubectl-client-side-apply", |object| {
        object["metadata"] = json!({"name": "w", "annotations": {"kubectl.kubernetes.io/last-applied-configuration": config.to_string()}});
        object["spec"] = config["spec"].clone();
    });
    stored.update("hpa", |object| object["spec"]["replicas"] = 5.into());
    assert_eq!(conflicts(stored.apply(KUBECTL, &json!({"replicas": 2, "image": "j"}))), [".spec.replicas"]);
    stored.apply(KUBECTL, &json!({"image": "j"})).unwrap();
    assert_eq!(*stored.spec(), json!({"replicas": 5, "image": "j"}));
    let annotation = annotation::last_applied(&stored.object).unwrap();
    assert_eq!(serde_json::from_str::<Value>(annotation).unwrap()["spec"], json!({"image": "j"}));
}

#[test]
fn a_list_that_became_atomic_is_owned_as_a_whole() {
    let mut stored = Stored::new();
    let fields = json!({"f:spec": {"f:args": {"v:\"-v\"": {}}, "f:image": {}}});
    stored.object = json!({"apiVersion": VERSION, "kind": "Web", "metadata": {"name": "w", "uid": "1"}, "spec": {"args": ["-v"], "image": "i"}});
    stored.managers =
        Managers::from_json(&json!([{"manager": "a", "operation": "Apply", "apiVersion": VERSION,
        "fieldsType": "FieldsV1", "fieldsV1": fields}]))
        .unwrap();
    stored.update("b", |object| object["spec"]["image"] = "j".into());
    assert_eq!(stored.owned_by("a"), json!({"f:spec": {"f:args": {}}}));
}

#[test]
fn managers_of_a_version_that_is_not_served_are_dropped() {
    let mut stored = Stored::new();
    stored.managers =
        Managers::from_json(&json!([{"manager": "a", "operation": "Update", "apiVersion": "apps/v0",
        "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:image": {}}}}]))
        .unwrap();
    stored.apply("b", &json!({"image": "i"})).unwrap();
    assert_eq!(stored.owned_by("a"), Value::Null);
}

#[test]
fn a_long_key_in_many_conflicts_is_stored_once_and_cut_in_messages() {
    let schema = Schema::default();
    let versions = SingleVersion { api_version: VERSION, schema: &schema, of: Schema::deduced() };
    let ignored = FieldSet::default();
    let updater =
        Updater { versions: &versions, api_version: VERSION, subresource: "", ignored: &ignored, now: LATE };
    let long = "k".repeat(1_000_000);
    let object = |value: i64| {
        let parts: serde_json::Map<_, _> = (0..20_000).map(|at| (format!("a{at}"), value.into())).collect();
        json!({"apiVersion": VERSION, "kind": "A", "metadata": {"uid": "1"}, "spec": {long.as_str(): parts}})
    };
    let (first, second) = (object(1), object(2));
    let live = json!({"apiVersion": VERSION, "kind": "A", "metadata": {"uid": "1"}});
    let request = ApplyRequest { live: &live, config: &first, manager: "a", force: false };
    let stored = updater.apply(request, Managers::default()).unwrap();
    let request = ApplyRequest { live: &stored.object, config: &second, manager: "b", force: false };
    let error = updater.apply(request, stored.managers).unwrap_err();
    let ApplyError::Conflicts(conflicts) = &error else { panic!("{error}") };
    assert_eq!(conflicts.len(), 20_000);
    let listed = conflicts.listed();
    assert_eq!(listed.len(), MAX_LISTED);
    let (PathElement::Field(one), PathElement::Field(other)) =
        (&listed[0].path.0[1], &listed[MAX_LISTED - 1].path.0[1])
    else {
        panic!("the paths have other elements")
    };
    assert!(Arc::ptr_eq(one, other));
    assert!(error.to_string().len() < 1 << 20);
    assert!(error.to_string().ends_with("and 19500 more"));
}

/// Versions with the same fields. Objects cannot be converted to `apps/v3`.
struct Served<'a>(&'a (Schema, TypeId));

impl Versions for Served<'_> {
    fn schema(&self, api_version: &str) -> Option<(&Schema, TypeId)> {
        matches!(api_version, VERSION | "apps/v2" | "apps/v3").then_some((&self.0.0, self.0.1))
    }

    fn convert<'a>(&self, object: &'a Value, api_version: &str) -> Option<Cow<'a, Value>> {
        if object["apiVersion"] == api_version {
            return Some(Cow::Borrowed(object));
        }
        (api_version != "apps/v3").then(|| {
            let mut converted = object.clone();
            converted["apiVersion"] = api_version.into();
            Cow::Owned(converted)
        })
    }

    fn all_convert(&self) -> bool {
        false
    }
}

/// The entry of a manager in `managedFields`.
fn entry_of(managers: &Managers, name: &str) -> Value {
    let entries = managers.to_json();
    let mut entries = entries.as_array().into_iter().flatten();
    entries.find(|entry| entry["manager"] == name).cloned().unwrap_or_default()
}

#[test]
fn a_field_that_a_manager_owns_in_another_version_is_a_conflict() {
    let (schema, ignored) = (schema(), FieldSet::default());
    let versions = Served(&schema);
    let updater = |api_version| Updater {
        versions: &versions,
        api_version,
        subresource: "",
        ignored: &ignored,
        now: EARLY,
    };
    let config = |api_version: &str, spec: Value| json!({"apiVersion": api_version, "kind": "Web", "metadata": {"name": "w"}, "spec": spec});
    let live = json!({"apiVersion": VERSION, "kind": "Web"});
    let first = config(VERSION, json!({"image": "i", "replicas": 1}));
    let request = ApplyRequest { live: &live, config: &first, manager: "a", force: false };
    let made = updater(VERSION).apply(request, Managers::default()).unwrap();
    let mut live = made.object;
    live["metadata"]["uid"] = "1".into();
    live["apiVersion"] = "apps/v2".into();
    let second = config("apps/v2", json!({"image": "j"}));
    let request = ApplyRequest { live: &live, config: &second, manager: "b", force: false };
    let error = updater("apps/v2").apply(request, made.managers.clone()).unwrap_err();
    let ApplyError::Conflicts(conflicts) = &error else { panic!("{error}") };
    assert_eq!(conflicts.len(), 1);
    assert_eq!(conflicts.listed()[0].path.to_string(), ".spec.image");
    let request = ApplyRequest { force: true, ..request };
    let forced = updater("apps/v2").apply(request, made.managers).unwrap().managers;
    let left = entry_of(&forced, "a");
    assert_eq!(
        (&left["apiVersion"], &left["fieldsV1"]),
        (&json!(VERSION), &json!({"f:spec": {"f:replicas": {}}}))
    );
    assert_eq!(entry_of(&forced, "b")["fieldsV1"], json!({"f:spec": {"f:image": {}}}));
}

#[test]
fn managers_of_a_version_without_conversion_keep_their_fields() {
    let (schema, ignored) = (schema(), FieldSet::default());
    let versions = Served(&schema);
    let updater =
        Updater { versions: &versions, api_version: VERSION, subresource: "", ignored: &ignored, now: EARLY };
    let fields = json!({"f:spec": {"f:image": {}}});
    let entries = json!([{"manager": "a", "operation": "Update", "apiVersion": "apps/v3", "fieldsType": "FieldsV1",
        "fieldsV1": fields}]);
    let object = |image: &str| json!({"apiVersion": VERSION, "kind": "Web", "metadata": {"name": "w", "uid": "1"}, "spec": {"image": image}});
    let (live, new) = (object("i"), object("j"));
    let request = UpdateRequest { live: &live, new: &new, manager: "b" };
    let managers = updater.update(request, Managers::from_json(&entries).unwrap());
    assert_eq!(entry_of(&managers, "a")["fieldsV1"], fields);
    assert_eq!(entry_of(&managers, "b")["fieldsV1"], fields);
}

#[test]
fn an_omitted_field_that_a_manager_of_a_version_without_conversion_owns_is_not_removed() {
    let (schema, ignored) = (schema(), FieldSet::default());
    let versions = Served(&schema);
    let updater =
        Updater { versions: &versions, api_version: VERSION, subresource: "", ignored: &ignored, now: EARLY };
    let entry = |manager: &str, operation: &str, version: &str, spec: Value| {
        json!({"manager": manager, "operation": operation, "apiVersion": version, "fieldsType": "FieldsV1",
            "fieldsV1": {"f:spec": spec}})
    };
    let entries = json!([
        entry("a", "Apply", VERSION, json!({"f:replicas": {}, "f:image": {}, "f:args": {}})),
        entry("b", "Update", "apps/v3", json!({"f:image": {}})),
        entry("c", "Update", "apps/v4", json!({"f:args": {}})),
    ]);
    let object =
        |spec: Value| json!({"apiVersion": VERSION, "kind": "Web", "metadata": {"name": "w"}, "spec": spec});
    let mut live = object(json!({"replicas": 1, "image": "i", "args": ["x"]}));
    live["metadata"]["uid"] = "1".into();
    let config = object(json!({"replicas": 1}));
    let request = ApplyRequest { live: &live, config: &config, manager: "a", force: false };
    let applied = updater.apply(request, Managers::from_json(&entries).unwrap()).unwrap();
    assert_eq!(applied.object["spec"], json!({"replicas": 1, "image": "i"}), "v4 is not served");
    assert_eq!(entry_of(&applied.managers, "b")["fieldsV1"], json!({"f:spec": {"f:image": {}}}));
}

#[test]
fn fields_that_a_version_without_conversion_removed_do_not_stay_owned() {
    let (schema, ignored) = (schema(), FieldSet::default());
    let versions = Served(&schema);
    let updater =
        Updater { versions: &versions, api_version: VERSION, subresource: "", ignored: &ignored, now: EARLY };
    let entry = |manager: &str, version: &str| {
        json!({"manager": manager, "operation": "Update", "apiVersion": version, "fieldsType": "FieldsV1",
            "fieldsV1": {"f:spec": {"f:replicas": {}}}})
    };
    let entries = json!([entry("a", VERSION), entry("b", "apps/v3")]);
    let object = |spec: Value| json!({"apiVersion": VERSION, "kind": "Web", "metadata": {"name": "w", "uid": "1"}, "spec": spec});
    let (live, new) = (object(json!({})), object(json!({"image": "i"})));
    let request = UpdateRequest { live: &live, new: &new, manager: "a" };
    let managers = updater.update(request, Managers::from_json(&entries).unwrap());
    assert_eq!(entry_of(&managers, "a")["fieldsV1"], json!({"f:spec": {"f:image": {}}}));
    assert_eq!(entry_of(&managers, "b")["fieldsV1"], json!({"f:spec": {"f:replicas": {}}}));
}
