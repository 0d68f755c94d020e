//! Watches the APIServices of aggregated servers, and checks that the servers respond.
//!
//! All servers are checked when an APIService changes, and every ten seconds if there is an aggregated server. The
//! condition `Available` is written when it changes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_kinds::{Resource, kind::by_resource};
use serde_json::{Value, json};

use super::api_services;
use crate::{
    aggregation::{Remote, ServiceReference, openapi},
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
/// The reasons why an API service is not available.
const REASONS: [&str; 5] =
    ["FailedDiscoveryCheck", "ServiceNotFound", "ServicePortError", "EndpointsNotFound", "MissingEndpoints"];

/// Starts two tasks: one registers the group versions of this server, the other checks the aggregated servers.
pub(crate) fn start(state: &Arc<State>) {
    let Some(kind) = by_resource("apiregistration.k8s.io", "v1", "apiservices").cloned() else { return };
    coracle_threads::spawn(api_services::run(Arc::downgrade(state), kind.clone()));
    coracle_threads::spawn(run(Arc::downgrade(state), kind));
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

/// Reads the APIServices of other servers and checks each server. Returns whether there is such an APIService.
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
    let removed = former.iter().filter(|(key, _)| !current.contains_key(*key));
    removed.for_each(|(_, remote)| state.metrics.remotes.forget(&remote.object_name(), &REASONS));
    let remotes: Vec<Arc<Remote>> = current.values().cloned().collect();
    state.remotes.replace(current);
    let checks = remotes.iter().map(|remote| check(state, kind, remote));
    futures::future::join_all(checks).await;
    !remotes.is_empty()
}

async fn check(state: &Arc<State>, kind: &Arc<Resource>, remote: &Arc<Remote>) {
    let forwarder = state.forwarder();
    let found = match missing(state, remote) {
        Some(obstacle) => Err(obstacle),
        None => {
            let found = tokio::time::timeout(CHECK_TIMEOUT, forwarder.discover(remote)).await;
            let found =
                found.unwrap_or_else(|_elapsed| Err("the server does not respond within 5 s".to_owned()));
            found.map_err(|why| ("FailedDiscoveryCheck", format!("failing or missing response: {why}")))
        }
    };
    let obstacle = found.as_ref().err().map(|(reason, _)| *reason);
    let (status, reason, message) = match &found {
        Ok(_) => ("True", "Passed", "all checks passed".to_owned()),
        Err((reason, message)) => ("False", *reason, message.clone()),
    };
    if found.is_ok() {
        openapi::refresh(&forwarder, remote);
    }
    remote.set_resources(found.ok());
    let name = remote.object_name();
    let Some(current) = state.cache.get(kind, "", &name).map(|object| object.value()) else { return };
    let condition = json!({"type": "Available", "status": status, "reason": reason, "message": message});
    if is_written(&current, &condition) {
        return;
    }
    if let Some(reason) = obstacle.filter(|_| was_available(&current)) {
        state.metrics.remotes.unavailable(&name, reason);
    }
    let call = Call::internal(state, kind.clone(), &current);
    let written = write::update(&call, &name, Part::Status, Writer::Update, |old| Ok(with(old, &condition)));
    match written.await {
        Ok(_) => {}
        Err(ApiError { code: 404 | 409, .. }) => {}
        Err(error) => tracing::warn!(name, error = %error, "cannot write the status of an API service"),
    }
}

/// The reason and the message of the condition.
type Obstacle = (&'static str, String);

/// The reason and the message why the service of another server is not available. `None` if it is available.
fn missing(state: &State, remote: &Remote) -> Option<Obstacle> {
    let services = by_resource("", "v1", "services")?;
    let slices = by_resource("discovery.k8s.io", "v1", "endpointslices")?;
    let reference = remote.service();
    let namespace = &reference.namespace;
    let service = state.cache.get(services, namespace, &reference.name).map(|service| service.value());
    let slices: Vec<Value> = state.cache.list(slices, namespace).iter().map(|slice| slice.value()).collect();
    missing_in(reference, service.as_ref(), &slices)
}

/// Checks that a service exists. A service of type ClusterIP also needs the port and a ready endpoint. Source:
/// `AvailableConditionController`.
fn missing_in(reference: &ServiceReference, service: Option<&Value>, slices: &[Value]) -> Option<Obstacle> {
    let ServiceReference { namespace, name, port } = reference;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let of = format!("service/{name} in {namespace:?}");
    let Some(service) = service else { return Some(("ServiceNotFound", format!("{of} is not present"))) };
    if service["spec"]["type"] != "ClusterIP" {
        return None;
    }
    let Some(found) = list(&service["spec"]["ports"]).into_iter().find(|one| one["port"] == *port) else {
        return Some(("ServicePortError", format!("{of} is not listening on port {port}")));
    };
    let port_name = |port: &Value| port["name"].as_str().unwrap_or_default().to_owned();
    let wanted = port_name(&found);
    let is_own = |slice: &&Value| slice["metadata"]["labels"]["kubernetes.io/service-name"] == *name;
    let mut own = slices.iter().filter(is_own).peekable();
    if own.peek().is_none() {
        return Some(("EndpointsNotFound", format!("cannot find endpointslices for {of}")));
    }
    let is_ready = |slice: &Value| {
        list(&slice["ports"]).iter().any(|port| port_name(port) == wanted)
            && list(&slice["endpoints"]).iter().any(|endpoint| {
                endpoint["conditions"]["ready"] != false && !list(&endpoint["addresses"]).is_empty()
            })
    };
    let detail = || format!("endpointslices for {of} have no addresses with port name {wanted:?}");
    (!own.any(is_ready)).then(|| ("MissingEndpoints", detail()))
}

fn available(object: &Value) -> Option<&Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == "Available")
}

fn was_available(object: &Value) -> bool {
    available(object).is_some_and(|known| known["status"] == "True")
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
    fn a_service_needs_its_port_and_a_ready_endpoint() {
        let reference = ServiceReference { namespace: "n".to_owned(), name: "s".to_owned(), port: 443 };
        let reason = |service: Option<&Value>, slices: &[Value]| {
            missing_in(&reference, service, slices).map_or("", |(reason, _)| reason)
        };
        let service =
            |kind: &str, port: u16| json!({"spec": {"type": kind, "ports": [{"name": "p", "port": port}]}});
        let slice = |of: &str, port: &str, ready: bool| {
            json!({"metadata": {"labels": {"kubernetes.io/service-name": of}}, "ports": [{"name": port, "port": 8443}],
                "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": ready}}]})
        };
        let good = service("ClusterIP", 443);
        assert_eq!(reason(None, &[]), "ServiceNotFound");
        assert_eq!(reason(Some(&service("ExternalName", 1)), &[]), "");
        assert_eq!(reason(Some(&service("ClusterIP", 1)), &[]), "ServicePortError");
        assert_eq!(reason(Some(&good), &[slice("other", "p", true)]), "EndpointsNotFound");
        assert_eq!(reason(Some(&good), &[slice("s", "q", true), slice("s", "p", false)]), "MissingEndpoints");
        assert_eq!(reason(Some(&good), &[slice("s", "p", false), slice("s", "p", true)]), "");
        let (_, message) = missing_in(&reference, None, &[]).unwrap();
        assert_eq!(message, "service/s in \"n\" is not present");
    }

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

    #[test]
    fn an_object_was_available_if_its_condition_is_true() {
        let object =
            |status: &str| json!({"status": {"conditions": [{"type": "Available", "status": status}]}});
        assert!(was_available(&object("True")));
        assert!(!was_available(&object("False")) && !was_available(&json!({})));
    }
}
