//! Default roles and bindings. Missing objects are created, and missing rules and subjects are added to existing
//! objects. Additions of users are kept. Objects without the annotation `autoupdate: true` are not changed.

use std::sync::Arc;

use coracle_kinds::kind::by_kind;
use futures::stream::{self, TryStreamExt as _};
use serde_json::Value;

use super::policy;
use crate::{
    authz::rbac::rule::{Rule, missing},
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    state::State,
    verb::delete,
    write::{self, Part, text},
};

const AUTOUPDATE: &str = "rbac.authorization.kubernetes.io/autoupdate";

/// Number of concurrent writes. The store commits concurrent writes together, so the first start takes less time.
const CONCURRENT_WRITES: usize = 32;

pub(super) async fn run(state: &Arc<State>) -> Result<()> {
    let objects = stream::iter(policy::objects(&state.registry.load()).into_iter().map(Ok));
    objects.try_for_each_concurrent(CONCURRENT_WRITES, |wanted| reconcile(state, wanted)).await
}

async fn reconcile(state: &Arc<State>, wanted: Value) -> Result<()> {
    let words = |field: &str| wanted[field].as_str().unwrap_or_default().to_owned();
    let kind = by_kind(&words("apiVersion"), &words("kind")).ok_or_else(ApiError::no_resource)?;
    let (namespace, name) = (text(&wanted, "namespace"), text(&wanted, "name"));
    let call = Call::internal(state, kind.clone(), &wanted);
    let Some(found) = state.cache.get(kind, namespace, name).map(|object| object.value()) else {
        return write::create(&call, wanted, Writer::Update).await.map(drop);
    };
    if found["metadata"]["annotations"][AUTOUPDATE] != "true" {
        return Ok(());
    }
    if found["roleRef"] != wanted["roleRef"] {
        // The roleRef of a binding is immutable: the binding is deleted and created again.
        delete::one(&call, name, &delete::Options::default()).await?;
        return write::create(&call, wanted.clone(), Writer::Update).await.map(drop);
    }
    if completed(&found, &wanted) == found {
        return Ok(());
    }
    write::update(&call, name, Part::Main, Writer::Update, |old| Ok(completed(old, &wanted))).await.map(drop)
}

/// The existing object, with the labels, annotations, rules and subjects of the default object that it lacked.
fn completed(found: &Value, wanted: &Value) -> Value {
    let mut new = found.clone();
    for map in ["labels", "annotations"] {
        for (key, value) in wanted["metadata"][map].as_object().into_iter().flatten() {
            new["metadata"][map][key] = value.clone();
        }
    }
    if wanted["aggregationRule"].is_object() {
        // The aggregation controller owns the rules of an aggregated role.
        new["aggregationRule"] = wanted["aggregationRule"].clone();
        return new;
    }
    let held = Rule::list(found);
    let wanted_rules = Rule::list(wanted);
    let lacking = missing(held.iter(), &wanted_rules).unwrap_or(wanted_rules);
    append(&mut new, "rules", lacking.iter().map(Rule::json));
    let subjects = wanted["subjects"].as_array().cloned().unwrap_or_default();
    let has = |subject: &Value| found["subjects"].as_array().is_some_and(|all| all.contains(subject));
    append(&mut new, "subjects", subjects.into_iter().filter(|subject| !has(subject)));
    new
}

fn append(object: &mut Value, field: &str, more: impl Iterator<Item = Value>) {
    let more: Vec<Value> = more.collect();
    if more.is_empty() {
        return;
    }
    let mut list = object[field].as_array().cloned().unwrap_or_default();
    list.extend(more);
    object[field] = list.into();
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn missing_parts_are_added_and_additions_of_users_stay() {
        let rule = |verbs: Value| json!({"verbs": verbs, "apiGroups": [""], "resources": ["pods"]});
        let found =
            json!({"metadata": {"name": "r", "labels": {"own": "1"}}, "rules": [rule(json!(["get", "x"]))]});
        let wanted = json!({"metadata": {"labels": {"a": "b"}}, "rules": [rule(json!(["get", "list"]))]});
        let new = completed(&found, &wanted);
        assert_eq!(new["metadata"]["labels"], json!({"own": "1", "a": "b"}));
        assert_eq!(new["rules"], json!([rule(json!(["get", "x"])), rule(json!(["list"]))]));
        assert_eq!(completed(&new, &wanted), new);
        let group = |name: &str| json!({"kind": "Group", "name": name});
        let (found, wanted) =
            (json!({"subjects": [group("a")]}), json!({"subjects": [group("b"), group("a")]}));
        assert_eq!(completed(&found, &wanted)["subjects"], json!([group("a"), group("b")]));
    }
}
