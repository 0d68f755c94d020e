//! Maintains an APIService for each group version that this server serves.

use std::sync::{Arc, Weak};
use std::time::Duration;

use coracle_kinds::{
    Resource, Resources,
    discovery::{CUSTOM_PRIORITY, group_priority},
};
use serde_json::{Value, json};

use crate::{
    call::Call,
    error::Result,
    field_manager::Writer,
    state::State,
    verb::delete,
    write::{self, text},
};

const MANAGED: &str = "kube-aggregator.kubernetes.io/automanaged";
/// Delay after an error. A failed store changes no resources, so a timer starts the next attempt.
const RETRY: Duration = Duration::from_secs(5);
/// Reconciles after each change of the set of served resources, until the server stops.
pub(super) async fn run(state: Weak<State>, kind: Arc<Resource>) {
    let Some(mut sets) = state.upgrade().map(|state| state.registry.subscribe()) else { return };
    loop {
        let set = sets.borrow_and_update().clone();
        let Some(strong) = state.upgrade() else { return };
        let reconciled = reconcile(&strong, &kind, &set).await;
        let shutdown = strong.shutdown.clone();
        drop(strong);
        let retry = async {
            match reconciled {
                Ok(()) => std::future::pending().await,
                Err(error) => {
                    tracing::warn!(error = %error, "cannot register the group versions of this server");
                    tokio::time::sleep(RETRY).await;
                }
            }
        };
        // Cancel-safe: a dropped wait for a change loses no change.
        tokio::select! {
            changed = sets.changed() => if changed.is_err() { return },
            () = retry => {}
            () = shutdown.cancelled() => return,
        }
    }
}

async fn reconcile(state: &Arc<State>, kind: &Arc<Resource>, set: &Resources) -> Result<()> {
    let wanted: Vec<Value> = set
        .group_versions()
        .iter()
        .filter(|version| &*version.group != "apiregistration.k8s.io")
        .map(|version| api_service(&version.group, &version.version))
        .collect();
    for object in &wanted {
        if state.cache.get(kind, "", text(object, "name")).is_none() {
            let call = Call::internal(state, kind.clone(), object);
            match write::create(&call, object.clone(), Writer::Update).await {
                Err(error) if error.reason != "AlreadyExists" => return Err(error),
                _ => {}
            }
        }
    }
    for found in state.cache.list(kind, "") {
        let object = found.value();
        let is_managed =
            object["metadata"]["labels"][MANAGED].is_string() && object["spec"]["service"].is_null();
        if is_managed && !wanted.iter().any(|wanted| text(wanted, "name") == found.name()) {
            let call = Call::internal(state, kind.clone(), &object);
            match delete::one(&call, found.name(), &delete::Options::default()).await {
                Err(error) if error.code != 404 => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Priority of a version of a built-in group, as upstream. Later versions of a group come first.
fn version_priority(group: &str, version: &str) -> i64 {
    match (group, version) {
        ("", _) => 1,
        ("flowcontrol.apiserver.k8s.io" | "resource.k8s.io", _) => 21,
        (_, "v2") => 30,
        _ => 15,
    }
}

fn api_service(group: &str, version: &str) -> Value {
    let priority = group_priority(group);
    let (version_priority, managed) = match priority {
        Some(_) => (version_priority(group, version), "onstart"),
        None => (100, "true"),
    };
    let mut spec = json!({"version": version, "groupPriorityMinimum": priority.unwrap_or(CUSTOM_PRIORITY),
        "versionPriority": version_priority});
    if let (false, Some(spec)) = (group.is_empty(), spec.as_object_mut()) {
        spec.insert("group".to_owned(), group.into());
    }
    json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "spec": spec,
        "metadata": {"name": format!("{version}.{group}"), "labels": {MANAGED: managed}}})
}

#[cfg(test)]
mod tests {
    use super::*;

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
