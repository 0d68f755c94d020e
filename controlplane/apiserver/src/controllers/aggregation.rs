//! Watches the APIServices of aggregated servers, and checks that the servers respond.
//!
//! All servers are checked when an APIService changes, and every ten seconds if there is any. The condition `Available`
//! is written when it changes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_kinds::{Resource, kind::by_resource};
use serde_json::{Value, json};

use super::api_services;
use crate::{
    aggregation::{Remote, openapi},
    cache::{Events, Scope, Watcher, prefix_of},
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    state::State,
    write::{self, Part},
};

/// Time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum duration of a check, as upstream.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts two tasks: one registers the group versions of this server, the other checks the aggregated servers.
pub(crate) fn start(state: &Arc<State>) {
    let Some(kind) = by_resource("apiregistration.k8s.io", "v1", "apiservices").cloned() else { return };
    tokio::spawn(api_services::run(Arc::downgrade(state), kind.clone()));
    tokio::spawn(run(Arc::downgrade(state), kind));
}

async fn run(state: Weak<State>, kind: Arc<Resource>) {
    loop {
        let Some(strong) = state.upgrade() else { return };
        let Ok(mut events) = watch(&strong, &kind) else { return };
        let shutdown = strong.shutdown.clone();
        drop(strong);
        loop {
            let Some(strong) = state.upgrade() else { return };
            let any = follow(&strong, &kind).await;
            drop(strong);
            let period = async {
                match any {
                    true => tokio::time::sleep(CHECK_INTERVAL).await,
                    false => std::future::pending().await,
                }
            };
            // Cancel-safe: dropping the receive loses no event.
            tokio::select! {
                event = events.recv() => if event.is_none() { break },
                () = period => {}
                () = shutdown.cancelled() => return,
            }
        }
    }
}

fn watch(state: &Arc<State>, kind: &Arc<Resource>) -> Result<Events> {
    let scope = Scope { prefix: prefix_of(kind, ""), ..Scope::default() };
    let (watcher, events) = Watcher::new(scope, false);
    let _initial = state.cache.of(kind)?.lock().watch_from_now(watcher, state.cache.revision());
    Ok(events)
}

/// Reads the APIServices of other servers and checks each server. Returns whether there is any.
async fn follow(state: &Arc<State>, kind: &Arc<Resource>) -> bool {
    let former = state.remotes.current();
    let mut current = BTreeMap::new();
    for object in state.cache.list(kind, "") {
        let value = object.value();
        if value["spec"]["service"].is_null() {
            continue;
        }
        let mut remote = Remote::read(&state.front_proxy, &value);
        let key = (remote.group.clone(), remote.version.clone());
        if let Some(known) = former.get(&key).filter(|known| remote.has_connection_of(known)) {
            remote = remote.after(known);
        }
        current.insert(key, Arc::new(remote));
    }
    let remotes: Vec<Arc<Remote>> = current.values().cloned().collect();
    state.remotes.replace(current);
    let checks = remotes.iter().map(|remote| check(state, kind, remote));
    futures::future::join_all(checks).await;
    !remotes.is_empty()
}

async fn check(state: &Arc<State>, kind: &Arc<Resource>, remote: &Arc<Remote>) {
    let forwarder = state.forwarder();
    let found = tokio::time::timeout(CHECK_TIMEOUT, forwarder.discover(remote)).await;
    let found = found.unwrap_or_else(|_elapsed| Err("the server does not respond within 5 s".to_owned()));
    let (status, reason, message) = match &found {
        Ok(_) => ("True", "Passed", "all checks passed".to_owned()),
        Err(why) if why.contains("not found") => ("False", "ServiceNotFound", why.clone()),
        Err(why) if why.contains("no endpoints") => ("False", "MissingEndpoints", why.clone()),
        Err(why) => ("False", "FailedDiscoveryCheck", format!("failing or missing response: {why}")),
    };
    if found.is_ok() {
        openapi::refresh(&forwarder, remote);
    }
    remote.set_resources(found.ok());
    let name = format!("{}.{}", remote.version, remote.group);
    let Some(current) = state.cache.get(kind, "", &name).map(|object| object.value()) else { return };
    let condition = json!({"type": "Available", "status": status, "reason": reason, "message": message});
    if is_written(&current, &condition) {
        return;
    }
    let call = Call::internal(state, kind.clone(), &current);
    let written =
        write::update(&call, &name, (Part::Status, Writer::Update), |old| Ok(with(old, &condition)));
    match written.await {
        Ok(_) => {}
        Err(ApiError { code: 404 | 409, .. }) => {}
        Err(error) => tracing::warn!(name, error = %error, "cannot write the status of an API service"),
    }
}

fn available(object: &Value) -> Option<&Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == "Available")
}

fn is_written(object: &Value, condition: &Value) -> bool {
    let fields = ["status", "reason", "message"];
    available(object).is_some_and(|known| fields.iter().all(|field| known[*field] == condition[*field]))
}

/// The object with the condition. The transition time changes only with the status.
fn with(object: &Value, condition: &Value) -> Value {
    let kept = available(object).filter(|known| known["status"] == condition["status"]);
    let since = kept.map_or_else(|| write::now().into(), |known| known["lastTransitionTime"].clone());
    let mut condition = condition.clone();
    condition["lastTransitionTime"] = since;
    let mut object = object.clone();
    // Keep conditions that other programs set.
    let others = object["status"]["conditions"].as_array().into_iter().flatten();
    let mut conditions: Vec<Value> = others.filter(|other| other["type"] != "Available").cloned().collect();
    conditions.insert(0, condition);
    object["status"] = json!({"conditions": conditions});
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_of_others_and_the_time_of_the_same_status_stay() {
        let other = json!({"type": "Other", "status": "True"});
        let known =
            json!({"type": "Available", "status": "True", "reason": "Old", "lastTransitionTime": "t"});
        let object = json!({"status": {"conditions": [other, known]}});
        let condition =
            |status: &str| json!({"type": "Available", "status": status, "reason": "R", "message": "m"});
        let conditions = with(&object, &condition("True"))["status"]["conditions"].take();
        assert_eq!(
            (&conditions[0]["reason"], &conditions[0]["lastTransitionTime"]),
            (&json!("R"), &json!("t"))
        );
        assert_eq!(conditions[1], other);
        assert_ne!(with(&object, &condition("False"))["status"]["conditions"][0]["lastTransitionTime"], "t");
        assert_eq!(with(&json!({}), &condition("True"))["status"]["conditions"][0]["type"], "Available");
    }
}
