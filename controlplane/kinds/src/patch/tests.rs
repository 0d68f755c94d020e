//! Cases for the patches.

use serde_json::json;

use super::*;

const POD: &str = "io.k8s.api.core.v1.Pod";
const DEPLOYMENT: &str = "io.k8s.api.apps.v1.Deployment";

fn check(schema: &str, original: Value, patch: Value, expect: Value) {
    assert_eq!(strategic(schema, &original, &patch), Ok(expect), "for {patch}");
}

fn names(list: &[&str]) -> Vec<Value> {
    list.iter().map(|name| json!({"name": name})).collect()
}

#[test]
fn lists_merge_by_their_key() {
    check(
        POD,
        json!({"spec": {"containers": [{"name": "a", "image": "x", "env": [{"name": "E", "value": "1"}]}, {"name": "b"}]}}),
        json!({"spec": {"containers": [{"name": "a", "image": "y", "env": [{"name": "F", "value": "2"}]}]}}),
        json!({"spec": {"containers": [{"name": "a", "image": "y", "env": [
            {"name": "F", "value": "2"}, {"name": "E", "value": "1"}]}, {"name": "b"}]}}),
    );
}

#[test]
fn an_initializer_that_is_removed_leaves_the_others() {
    let object = |pending: Value| json!({"metadata": {"initializers": {"pending": pending}}});
    let patch = |item: Value| object(json!([item]));
    for schema in [POD, DEPLOYMENT] {
        let both = object(json!(names(&["a", "b"])));
        let rest = object(json!(names(&["b"])));
        check(schema, both.clone(), patch(json!({"$patch": "delete", "name": "a"})), rest.clone());
        check(schema, rest, patch(json!({"$patch": "delete", "name": "b"})), object(json!([])));
        check(schema, both.clone(), patch(json!({"name": "a"})), both);
    }
}

#[test]
fn ports_merge_by_container_port_alone() {
    check(
        POD,
        json!({"spec": {"containers": [{"name": "a", "ports": [{"containerPort": 80, "protocol": "TCP"}]}]}}),
        json!({"spec": {"containers": [{"name": "a", "ports": [{"containerPort": 80, "protocol": "UDP"}]}]}}),
        json!({"spec": {"containers": [{"name": "a", "ports": [{"containerPort": 80, "protocol": "UDP"}]}]}}),
    );
}

#[test]
fn atomic_lists_are_replaced() {
    check(
        POD,
        json!({"spec": {"tolerations": [{"key": "a"}], "containers": [{"name": "c", "args": ["1", "2"]}]}}),
        json!({"spec": {"tolerations": [{"key": "b"}], "containers": [{"name": "c", "args": ["3"]}]}}),
        json!({"spec": {"tolerations": [{"key": "b"}], "containers": [{"name": "c", "args": ["3"]}]}}),
    );
}

#[test]
fn null_removes_and_does_not_add() {
    check(
        DEPLOYMENT,
        json!({"metadata": {"annotations": {"a": "1", "b": "2"}}, "spec": {"paused": true}}),
        json!({"metadata": {"annotations": {"a": null}, "labels": {"x": null, "y": "z"}}, "spec": {"paused": null, "replicas": null}}),
        json!({"metadata": {"annotations": {"b": "2"}, "labels": {"y": "z"}}, "spec": {}}),
    );
}

#[test]
fn elements_are_deleted_and_lists_replaced_by_directive() {
    let original = json!({"spec": {"containers": names(&["a", "b", "c"])}});
    let with = |list: &[&str]| json!({"spec": {"containers": names(list)}});
    check(
        POD,
        original.clone(),
        json!({"spec": {"containers": [{"name": "b", "$patch": "delete"}]}}),
        with(&["a", "c"]),
    );
    check(
        POD,
        original.clone(),
        json!({"spec": {"containers": [{"$patch": "replace"}, {"name": "z"}]}}),
        with(&["z"]),
    );
    check(POD, original.clone(), json!({"spec": {"$patch": "delete"}}), json!({"spec": {}}));
    check(
        POD,
        original,
        json!({"spec": {"$patch": "replace", "nodeName": "n"}}),
        json!({"spec": {"nodeName": "n"}}),
    );
}

#[test]
fn set_element_order_orders_the_merged_list() {
    check(
        POD,
        json!({"spec": {"containers": names(&["a", "b", "c"])}}),
        json!({"spec": {"$setElementOrder/containers": names(&["c", "d", "a"]), "containers": names(&["d"])}}),
        json!({"spec": {"containers": names(&["b", "c", "d", "a"])}}),
    );
    check(
        POD,
        json!({"spec": {"containers": names(&["a", "b"])}}),
        json!({"spec": {"$setElementOrder/containers": names(&["b"]), "containers": [{"name": "a", "$patch": "delete"}]}}),
        json!({"spec": {"containers": names(&["b"])}}),
    );
}

#[test]
fn elements_of_primitive_lists_are_added_and_deleted() {
    let original = json!({"metadata": {"finalizers": ["a", "b", "c"]}});
    check(
        POD,
        original.clone(),
        json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["b"]}}),
        json!({"metadata": {"finalizers": ["a", "c"]}}),
    );
    check(
        POD,
        original,
        json!({"metadata": {"finalizers": ["d"], "$setElementOrder/finalizers": ["a", "b", "c", "d"]}}),
        json!({"metadata": {"finalizers": ["a", "b", "c", "d"]}}),
    );
}

#[test]
fn retain_keys_drops_the_other_branch() {
    check(
        DEPLOYMENT,
        json!({"spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}}),
        json!({"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}),
        json!({"spec": {"strategy": {"type": "Recreate"}}}),
    );
    check(
        POD,
        json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}),
        json!({"spec": {"volumes": [{"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/x"}}]}}),
        json!({"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]}}),
    );
}

#[test]
fn directives_never_reach_the_object() {
    check(
        DEPLOYMENT,
        json!({}),
        json!({"spec": {"template": {"spec": {"$setElementOrder/containers": names(&["a"]), "containers": [
            {"name": "a", "$retainKeys": ["name"], "image": null}, {"name": "b", "$patch": "delete"}]}}}}),
        json!({"spec": {"template": {"spec": {"containers": names(&["a"])}}}}),
    );
}

#[test]
fn wrong_patches_are_errors() {
    let original = json!({"spec": {"containers": names(&["a", "b"])}});
    let cases = [
        (json!({"spec": {"$patch": "x"}}), "unknown patch type 'x' in map"),
        (
            json!({"spec": {"containers": [{"image": "x"}]}}),
            r#"map: {"image":"x"} does not contain declared merge key: name"#,
        ),
        (
            json!({"spec": {"containers": [{"name": "a", "$patch": "merge"}]}}),
            "merging lists cannot yet be specified in the patch",
        ),
        (json!({"spec": {"$retainKeys": "a"}}), "invalid patch format of retainKeys"),
        (json!([]), "invalid JSON document"),
    ];
    for (patch, expect) in cases {
        assert_eq!(
            strategic(POD, &original, &patch).map_err(|error| error.to_string()),
            Err(expect.to_owned())
        );
    }
}

#[test]
fn json_and_merge_patches_follow_their_standards() {
    let original = json!({"a": {"b": 1}, "c": [1, 2]});
    let patch = json!([{"op": "test", "path": "/a/b", "value": 1}, {"op": "replace", "path": "/a/b", "value": 2}, {"op": "remove", "path": "/c/0"}]);
    assert_eq!(json(&original, &patch), Ok(json!({"a": {"b": 2}, "c": [2]})));
    let failing = json!([{"op": "test", "path": "/a/b", "value": 9}]);
    assert!(matches!(json(&original, &failing), Err(PatchError::Unprocessable(_))));
    assert!(matches!(json(&original, &json!({"op": "test"})), Err(PatchError::Malformed(_))));
    for wrong in
        [json!({"op": "nope", "path": "/a"}), json!({"path": "/a"}), json!({"op": "remove", "path": "a"})]
    {
        assert!(matches!(json(&original, &json!([wrong])), Err(PatchError::Unprocessable(_))), "{wrong}");
    }
    assert_eq!(json(&original, &Value::Null), Ok(original.clone()));
    assert_eq!(merge(&original, &json!({"a": {"b": null, "d": 3}})), Ok(json!({"a": {"d": 3}, "c": [1, 2]})));
    assert!(matches!(merge(&original, &json!([])), Err(PatchError::Malformed(_))));
}

#[test]
fn an_absent_field_is_null_for_json_patches_as_upstream() {
    let original = json!({"a": {"b": 1}, "c": [1]});
    let patched = |patch: Value| json(&original, &json!([patch]));
    let replaced = json!({"a": {"b": 1, "x/y": 2}, "c": [1]});
    assert_eq!(patched(json!({"op": "replace", "path": "/a/x~1y", "value": 2})), Ok(replaced));
    assert_eq!(patched(json!({"op": "test", "path": "/a/x", "value": null})), Ok(original.clone()));
    let copied = json!({"a": {"b": 1, "y": null}, "c": [1]});
    assert_eq!(patched(json!({"op": "copy", "from": "/a/x", "path": "/a/y"})), Ok(copied));
    for refused in [
        json!({"op": "test", "path": "/a/x", "value": 1}),
        json!({"op": "test", "path": "/x/y", "value": null}),
        json!({"op": "replace", "path": "/x/y", "value": 1}),
        json!({"op": "replace", "path": "/c/1", "value": 1}),
        json!({"op": "remove", "path": "/a/x"}),
        json!({"op": "move", "from": "/a/x", "path": "/a/y"}),
    ] {
        assert!(matches!(patched(refused.clone()), Err(PatchError::Unprocessable(_))), "{refused}");
    }
}

#[test]
fn long_lists_merge_in_linear_time() {
    // A search through the list for each element would take hours.
    let container = |at: usize, image: &str| json!({"name": at.to_string(), "image": image});
    let list = |image: &str| (0..100_000).map(|at| container(at, image)).collect::<Vec<_>>();
    let (old, new) = (list("a"), list("b"));
    let order: Vec<Value> = (0..100_000).map(|at| json!({"name": at.to_string()})).collect();
    let patch = json!({"spec": {"$setElementOrder/containers": order, "containers": new}});
    let merged = strategic(POD, &json!({"spec": {"containers": old}}), &patch).unwrap();
    assert_eq!(merged["spec"]["containers"][99_999], container(99_999, "b"));
}
