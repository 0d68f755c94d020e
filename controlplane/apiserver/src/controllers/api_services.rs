//! Maintains an APIService for each group version that this server serves. Source:
//! `kube-aggregator/pkg/controllers/autoregister`.
//!
//! The APIServices of built-in group versions are created and corrected only at the start of the server. The
//! APIServices of custom resources are also created again after a deletion, and corrected after a change.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use coracle_kinds::{
    Resource, Resources,
    discovery::{CUSTOM_PRIORITY, group_priority, version_priority},
};
use serde_json::{Value, json};

use crate::{
    cache::{Event, Events, Scope, Watcher, prefix_of},
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    state::State,
    verb::delete,
    write::{self, Part, text},
};

const MANAGED: &str = "kube-aggregator.kubernetes.io/automanaged";
/// Delay after an error. A failed store changes no resources, so a timer starts the next attempt.
const RETRY: Duration = Duration::from_secs(5);

/// A write that brings an APIService to its desired state.
#[derive(Debug, PartialEq, Eq)]
enum Action {
    Create,
    Update,
    Delete,
}

/// Reconciles after each change of the set of served resources, and after a change of an APIService that this server
/// maintains, until the server stops.
pub(super) async fn run(state: Weak<State>, kind: Arc<Resource>) {
    let Some(strong) = state.upgrade() else { return };
    let (mut sets, shutdown) = (strong.registry.subscribe(), strong.shutdown.clone());
    drop(strong);
    // The names of the APIServices that are wanted, and of those that were wanted before and may still exist.
    let mut known: HashSet<String> = HashSet::new();
    let (mut events, mut is_start) = (None, true);
    while let Some(strong) = state.upgrade().filter(|state| !state.shutdown.is_cancelled()) {
        let set = sets.borrow_and_update().clone();
        let wanted = wanted(&set);
        let names = || wanted.iter().map(|wanted| text(wanted, "name").to_owned());
        known.extend(names());
        // The watch begins before the reconcile, so that it reports each change that the reconcile misses.
        let mut current = match events.take().map_or_else(|| watch(&strong, &kind), Ok) {
            Ok(current) => current,
            // The stored APIServices cannot be decrypted yet.
            Err(error) if error.code >= 500 => {
                drop(strong);
                let _ = tokio::time::timeout(RETRY, shutdown.cancelled()).await;
                continue;
            }
            Err(_not_served) => return,
        };
        let removable = (!is_start).then_some(&known);
        let reconciled = reconcile(&strong, &kind, &wanted, removable).await;
        drop(strong);
        if reconciled.is_ok() {
            is_start = false;
            known = names().collect();
        }
        let retry = async {
            match reconciled {
                Ok(()) => std::future::pending().await,
                Err(error) => {
                    tracing::warn!(error = %error, "cannot register the group versions of this server");
                    tokio::time::sleep(RETRY).await;
                }
            }
        };
        // Cancel-safe: a dropped wait loses no change. `until_changed` discards only events that need no action.
        let is_watching = tokio::select! {
            changed = sets.changed() => if changed.is_err() { return } else { true },
            is_watching = until_changed(&mut current, &wanted) => is_watching,
            () = retry => true,
            () = shutdown.cancelled() => return,
        };
        events = is_watching.then_some(current);
    }
}

fn watch(state: &State, kind: &Resource) -> Result<Events> {
    let scope = Scope { prefix: prefix_of(kind, ""), ..Scope::default() };
    let (watcher, events) = Watcher::new(scope, false);
    let _current = state.cache.of(kind)?.lock().watch_from_now(watcher, state.cache.revision());
    Ok(events)
}

/// Waits until a change of a wanted APIService needs an action. Returns false if the watch has ended.
///
/// An APIService that is not wanted needs no action: another server may already serve a group version that this server
/// does not serve yet. If this server deleted its APIService, both servers would delete and create it in turn.
async fn until_changed(events: &mut Events, wanted: &[Value]) -> bool {
    while let Some(event) = events.recv().await {
        let Some(object) = event.object() else { continue };
        let wanted = wanted.iter().find(|wanted| text(wanted, "name") == object.name());
        let Some(wanted) = wanted else { continue };
        let current = (!matches!(event, Event::Deleted(_))).then(|| object.value());
        if action(current.as_ref(), Some(wanted), false).is_some() {
            return true;
        }
    }
    false
}

/// The APIServices of all group versions, except the group version of APIServices itself.
fn wanted(set: &Resources) -> Vec<Value> {
    let versions = set.group_versions().iter();
    let named = versions.filter(|version| &*version.group != "apiregistration.k8s.io");
    named.map(|version| api_service(&version.group, &version.version)).collect()
}

/// Creates, corrects and deletes APIServices. `removable` has the names of the APIServices that may be deleted, because
/// this server has served their group versions. `None` at the start of the server: then each managed APIService that is
/// not wanted is deleted.
async fn reconcile(
    state: &Arc<State>,
    kind: &Arc<Resource>,
    wanted: &[Value],
    removable: Option<&HashSet<String>>,
) -> Result<()> {
    let is_start = removable.is_none();
    for object in wanted {
        let name = text(object, "name");
        let current = state.cache.get(kind, "", name).map(|current| current.value());
        if let Some(action) = action(current.as_ref(), Some(object), is_start) {
            apply(state, kind, object, &action).await?;
        }
    }
    // There can be thousands of custom resource definitions, so the names are in a set.
    let names: HashSet<&str> = wanted.iter().map(|wanted| text(wanted, "name")).collect();
    for found in state.cache.list(kind, "") {
        let is_removable = removable.is_none_or(|names| names.contains(found.name()));
        if names.contains(found.name()) || !is_removable {
            continue;
        }
        let object = found.value();
        if let Some(action) = action(Some(&object), None, is_start) {
            apply(state, kind, &object, &action).await?;
        }
    }
    Ok(())
}

/// The action for an APIService. `current` is the stored object, `wanted` is the desired object. An APIService without
/// the label belongs to the user. Unlike upstream, an APIService is not deleted if the user has added a service to it.
fn action(current: Option<&Value>, wanted: Option<&Value>, is_start: bool) -> Option<Action> {
    let is_managed = |object: &Value| {
        let label = &object["metadata"]["labels"][MANAGED];
        *label == "true" || (is_start && *label == "onstart")
    };
    match (current, wanted) {
        (None, wanted) => wanted.filter(|wanted| is_managed(wanted)).map(|_| Action::Create),
        (Some(current), _) if !is_managed(current) => None,
        (Some(current), None) => current["spec"]["service"].is_null().then_some(Action::Delete),
        (Some(current), Some(wanted)) => {
            let fields = ["service", "group", "version", "groupPriorityMinimum", "versionPriority"];
            let is_same = fields.iter().all(|field| current["spec"][*field] == wanted["spec"][*field]);
            (!is_same).then_some(Action::Update)
        }
    }
}

/// Runs an action. `object` is the desired object, or for a deletion the stored object.
async fn apply(state: &Arc<State>, kind: &Arc<Resource>, object: &Value, action: &Action) -> Result<()> {
    let (call, name) = (Call::internal(state, kind.clone(), object), text(object, "name"));
    let written = match action {
        Action::Create => write::create(&call, object.clone(), Writer::Update).await.map(drop),
        Action::Update => {
            let update = |old: &Value| {
                let mut new = old.clone();
                new["spec"] = object["spec"].clone();
                Ok(new)
            };
            write::update(&call, name, Part::Main, Writer::Update, update).await.map(drop)
        }
        Action::Delete => delete::one(&call, name, &delete::Options::default()).await.map(drop),
    };
    match written {
        // Another client has changed the object first. The event of that change causes the next reconcile.
        Err(ApiError { code: 404 | 409, .. }) => Ok(()),
        written => written,
    }
}

fn api_service(group: &str, version: &str) -> Value {
    let priority = group_priority(group);
    let managed = if priority.is_some() { "onstart" } else { "true" };
    let mut spec = json!({"version": version, "groupPriorityMinimum": priority.unwrap_or(CUSTOM_PRIORITY),
        "versionPriority": version_priority(group, version)});
    if let (false, Some(spec)) = (group.is_empty(), spec.as_object_mut()) {
        spec.insert("group".to_owned(), group.into());
    }
    json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "spec": spec,
        "metadata": {"name": format!("{version}.{group}"), "labels": {MANAGED: managed}}})
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_resource;
    use coracle_store::Commit;

    use super::*;
    use crate::cache::{Cache, encode, key_of};

    #[tokio::test]
    async fn a_group_version_that_only_another_server_serves_causes_no_action() {
        let kind = by_resource("apiregistration.k8s.io", "v1", "apiservices").unwrap();
        let object = api_service("example.com", "v1");
        let mut changed = object.clone();
        changed["spec"]["versionPriority"] = 7.into();
        for (wanted, causes) in [(Vec::new(), false), (vec![object], true)] {
            let cache = Cache::new(1);
            let scope = Scope { prefix: prefix_of(kind, ""), ..Scope::default() };
            let (watcher, mut events) = Watcher::new(scope, false);
            let _current = cache.of(kind).unwrap().lock().watch_from_now(watcher, cache.revision());
            let (key, value) = (key_of(kind, "", "v1.example.com").into(), Some(encode(kind, &changed)));
            cache.apply(&Commit { key, revision: 2, value, created: 2, guard_follows: false });
            // The watch ends after the event.
            drop(cache);
            assert_eq!(until_changed(&mut events, &wanted).await, causes);
        }
    }

    #[test]
    fn only_managed_api_services_are_changed() {
        use Action::{Create, Delete, Update};
        let custom = api_service("example.com", "v1");
        let built_in = api_service("apps", "v1");
        let with = |object: &Value, change: &dyn Fn(&mut Value)| {
            let mut object = object.clone();
            change(&mut object);
            object
        };
        let priority = |object: &mut Value| object["spec"]["versionPriority"] = 7.into();
        let service = |object: &mut Value| object["spec"]["service"] = json!({"namespace": "n", "name": "s"});
        let unmanaged = |object: &mut Value| object["metadata"]["labels"] = json!({});
        let status = |object: &mut Value| object["status"] = json!({"conditions": []});
        let changed = with(&custom, &priority);
        let moved = with(&custom, &service);
        let old = with(&built_in, &priority);
        // Current and wanted object, the action later, and the action at the start.
        for (current, wanted, later, at_start) in [
            (None, Some(&custom), Some(Create), Some(Create)),
            (None, Some(&built_in), None, Some(Create)),
            (Some(&with(&custom, &status)), Some(&custom), None, None),
            (Some(&changed), Some(&custom), Some(Update), Some(Update)),
            (Some(&moved), Some(&custom), Some(Update), Some(Update)),
            (Some(&old), Some(&built_in), None, Some(Update)),
            (Some(&custom), None, Some(Delete), Some(Delete)),
            (Some(&built_in), None, None, Some(Delete)),
            // A user's own server.
            (Some(&moved), None, None, None),
            (Some(&with(&changed, &unmanaged)), Some(&custom), None, None),
            (Some(&with(&custom, &unmanaged)), None, None, None),
        ] {
            assert_eq!(action(current, wanted, false), later, "{current:?} {wanted:?}");
            assert_eq!(action(current, wanted, true), at_start, "{current:?} {wanted:?}");
        }
    }

    #[test]
    fn priorities_equal_upstreams_priorities() {
        let of = |group: &str, version: &str| {
            let spec = &api_service(group, version)["spec"];
            (spec["groupPriorityMinimum"].as_i64(), spec["versionPriority"].as_i64())
        };
        assert_eq!(of("", "v1"), (Some(18_000), Some(1)));
        assert_eq!(of("autoscaling", "v2"), (Some(17_500), Some(30)));
        assert_eq!(of("autoscaling", "v1"), (Some(17_500), Some(15)));
        assert_eq!(of("resource.k8s.io", "v1"), (Some(16_200), Some(21)));
        assert_eq!(of("example.com", "v1"), (Some(1000), Some(100)));
    }
}
