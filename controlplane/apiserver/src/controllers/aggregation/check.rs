//! The check of an aggregated server, and the condition `Available` of its APIService. Source:
//! `AvailableConditionController` of `kube-aggregator/pkg/controllers/status/remote`.

use std::{sync::Arc, time::Duration};

use coracle_kinds::{Resource, kind::by_resource};
use futures::stream::{FuturesUnordered, StreamExt as _};
use http::Response;
use hyper::body::Incoming;
use serde_json::{Value, json};

use crate::{
    aggregation::{
        Discovered, Remote, ServiceReference, available, discovery,
        forward::{Forwarder, resource_list},
        openapi, was_available,
    },
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    state::State,
    target,
    write::{self, Part},
};

/// Maximum duration of an attempt, as upstream. It is also the maximum duration of the read of each document.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// Attempts of a check, as upstream. One success is enough, because some of the endpoints may be broken.
const ATTEMPTS: usize = 5;
/// Time after which the other attempts begin if the first attempt is still running. Upstream begins all at once.
const FIRST_ATTEMPT: Duration = Duration::from_secs(1);
const FAILED_DISCOVERY: &str = "FailedDiscoveryCheck";
/// The reasons why an API service is not available.
pub(super) const REASONS: [&str; 5] =
    [FAILED_DISCOVERY, "ServiceNotFound", "ServicePortError", "EndpointsNotFound", "MissingEndpoints"];

/// The outcome of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Checked {
    /// The server responds, or its service is not ready. No retry is needed before the regular interval.
    Done,
    /// The server does not respond, or the condition could not be written. The next check follows soon.
    Failed,
}

/// The reason and the message of the condition.
type Unavailable = (&'static str, String);

/// Checks a server, and writes the condition if it has changed.
pub(super) async fn run(state: &Arc<State>, kind: &Arc<Resource>, remote: &Arc<Remote>) -> Checked {
    let forwarder = state.forwarder();
    // The check makes a new connection, and endpoints may have changed.
    remote.close_idle();
    let found = match missing(state, remote) {
        Some(obstacle) => Err(obstacle),
        None => discover(&forwarder, remote).await,
    };
    let obstacle = found.as_ref().err().map(|(reason, _)| *reason);
    let condition = match &found {
        Ok(_) => condition("True", "Passed", "all checks passed"),
        Err((reason, message)) => condition("False", reason, message),
    };
    let is_available = found.is_ok();
    remote.observe(found.ok());
    if is_available {
        openapi::refresh(&forwarder, remote);
    }
    let name = remote.object_name();
    let Some(current) = state.cache.get(kind, "", &name).map(|object| object.value()) else {
        return Checked::Done;
    };
    if let Err(error) = write(state, kind, &current, &condition).await {
        tracing::warn!(name, error = %error, "cannot write the status of an APIService");
        return Checked::Failed;
    }
    if let Some(reason) = obstacle.filter(|_| was_available(&current)) {
        state.metrics.remotes.unavailable(&name, reason);
    }
    if obstacle == Some(FAILED_DISCOVERY) { Checked::Failed } else { Checked::Done }
}

/// Requests the APIResourceList. As upstream, a response with a successful status is enough for an available server.
/// `None` if the server is available, but its resources cannot be read.
async fn discover(
    forwarder: &Forwarder,
    remote: &Remote,
) -> std::result::Result<Option<Discovered>, Unavailable> {
    let url = remote.url(&remote.path());
    let failed = |why: String| (FAILED_DISCOVERY, format!("failing or missing response from {url}: {why}"));
    let response = first_success(|| attempt(forwarder, remote)).await.map_err(failed)?;
    let found = resources(forwarder, remote, response).await;
    if let Err(reason) = &found {
        tracing::debug!(url, reason, "cannot read the resources of an APIService");
    }
    Ok(found.ok())
}

/// The resources of a server, from its aggregated document if possible. As upstream, they come from the APIResourceList
/// if the server lacks the document. Unlike upstream, they also come from the list if the document cannot be read or
/// lacks the group version. Some metrics servers do not add their group to the document.
async fn resources(
    forwarder: &Forwarder,
    remote: &Remote,
    response: Response<Incoming>,
) -> std::result::Result<Discovered, String> {
    let late = |_elapsed| Err("the server does not send the document within 5 s".to_owned());
    let list = tokio::time::timeout(CHECK_TIMEOUT, resource_list(response.into_body())).await;
    let document = tokio::time::timeout(CHECK_TIMEOUT, discovery::read(forwarder, remote)).await;
    if let Ok(Ok(Some(found))) = document {
        return Ok(found);
    }
    discovery::of_list(remote, &list.unwrap_or_else(late)?)
}

async fn attempt(forwarder: &Forwarder, remote: &Remote) -> std::result::Result<Response<Incoming>, String> {
    let late = |_elapsed| Err("the server does not respond within 5 s".to_owned());
    tokio::time::timeout(CHECK_TIMEOUT, forwarder.probe(remote)).await.unwrap_or_else(late)
}

/// The first success of [`ATTEMPTS`] attempts, or the last error. If the first attempt succeeds within
/// [`FIRST_ATTEMPT`], it is the only attempt.
async fn first_success<T, F>(attempt: impl Fn() -> F) -> std::result::Result<T, String>
where
    F: Future<Output = std::result::Result<T, String>>,
{
    let mut running = FuturesUnordered::new();
    running.push(attempt());
    let begun = tokio::time::timeout(FIRST_ATTEMPT, running.next()).await;
    let mut last = match begun {
        Ok(Some(Ok(found))) => return Ok(found),
        Ok(Some(Err(why))) => why,
        Ok(None) | Err(_) => String::new(),
    };
    running.extend((1..ATTEMPTS).map(|_number| attempt()));
    while let Some(ended) = running.next().await {
        match ended {
            Ok(found) => return Ok(found),
            Err(why) => last = why,
        }
    }
    Err(last)
}

/// Checks the service of an aggregated server. Returns the reason and the message if it is not available.
fn missing(state: &State, remote: &Remote) -> Option<Unavailable> {
    let services = by_resource("", "v1", "services")?;
    let reference = remote.service();
    let namespace = &reference.namespace;
    let service = state.cache.get(services, namespace, &reference.name).map(|service| service.value());
    let slices = || target::slices_of(&state.cache, namespace, &reference.name).unwrap_or_default();
    missing_in(reference, service.as_ref(), slices)
}

/// Checks that a service exists. A service of type ClusterIP also needs the port and a ready endpoint. `slices` returns
/// the slices of the service.
fn missing_in(
    reference: &ServiceReference,
    service: Option<&Value>,
    slices: impl FnOnce() -> Vec<Value>,
) -> Option<Unavailable> {
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
    let (wanted, slices) = (port_name(&found), slices());
    if slices.is_empty() {
        return Some(("EndpointsNotFound", format!("cannot find endpointslices for {of}")));
    }
    let is_ready = |slice: &Value| {
        let is_wanted = |port: &Value| port_name(port) == wanted && !port["port"].is_null();
        list(&slice["ports"]).iter().any(is_wanted)
            && list(&slice["endpoints"]).iter().any(|endpoint| endpoint["conditions"]["ready"] != false)
    };
    let detail = || format!("endpointslices for {of} have no addresses with port name {wanted:?}");
    (!slices.iter().any(is_ready)).then(|| ("MissingEndpoints", detail()))
}

/// The condition of an APIService without a service.
pub(super) fn local() -> Value {
    condition("True", "Local", "Local APIServices are always available")
}

fn condition(status: &str, reason: &str, message: &str) -> Value {
    json!({"type": "Available", "status": status, "reason": reason, "message": message})
}

/// Writes the condition of an APIService, if the condition has changed. Does nothing if the APIService was deleted or
/// refers to another service meanwhile.
pub(super) async fn write(
    state: &Arc<State>,
    kind: &Arc<Resource>,
    object: &Value,
    condition: &Value,
) -> Result<()> {
    if is_written(object, condition) {
        return Ok(());
    }
    let call = Call::internal(state, kind.clone(), object);
    let name = write::text(object, "name");
    let is_same = |old: &Value| old["spec"]["service"] == object["spec"]["service"];
    let written = write::update(&call, name, Part::Status, Writer::Update, |old| {
        Ok(if is_same(old) { with(old, condition) } else { old.clone() })
    });
    match written.await {
        Ok(_) | Err(ApiError { code: 404 | 409, .. }) => Ok(()),
        Err(error) => Err(error),
    }
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_service_needs_its_port_and_a_ready_endpoint() {
        let reference = ServiceReference { namespace: "n".to_owned(), name: "s".to_owned(), port: 443 };
        let reason = |service: Option<&Value>, slices: &[Value]| {
            missing_in(&reference, service, || slices.to_vec()).map_or("", |(reason, _)| reason)
        };
        let service =
            |kind: &str, port: u16| json!({"spec": {"type": kind, "ports": [{"name": "p", "port": port}]}});
        let slice = |port: &str, ready: bool| {
            json!({"ports": [{"name": port, "port": 8443}],
                "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": ready}}]})
        };
        let good = service("ClusterIP", 443);
        assert_eq!(reason(None, &[]), "ServiceNotFound");
        assert_eq!(reason(Some(&service("ExternalName", 1)), &[]), "");
        assert_eq!(reason(Some(&service("ClusterIP", 1)), &[]), "ServicePortError");
        assert_eq!(reason(Some(&good), &[]), "EndpointsNotFound");
        assert_eq!(reason(Some(&good), &[slice("q", true), slice("p", false)]), "MissingEndpoints");
        let unknown = json!({"ports": [{"name": "p"}], "endpoints": [{"addresses": ["10.0.0.1"]}]});
        assert_eq!(reason(Some(&good), &[unknown]), "MissingEndpoints", "a port without a number");
        assert_eq!(reason(Some(&good), &[slice("p", false), slice("p", true)]), "");
        let (_, message) = missing_in(&reference, None, Vec::new).unwrap();
        assert_eq!(message, "service/s in \"n\" is not present");
    }

    /// An attempt that ends after a time in milliseconds, successfully or not.
    async fn after(time: u64, is_success: bool) -> std::result::Result<u64, String> {
        tokio::time::sleep(Duration::from_millis(time)).await;
        if is_success { Ok(time) } else { Err(format!("failed after {time}")) }
    }

    #[tokio::test(start_paused = true)]
    async fn one_success_of_several_attempts_is_enough() {
        // Duration and success of each attempt; the number of attempts that are made.
        for (attempts, expect, made) in [
            ([(900, true); 5], Ok(900), 1),
            ([(1, false), (20, false), (10, true), (30, false), (5, false)], Ok(10), 5),
            // One of two endpoints hangs.
            ([(60_000, true), (70_000, true), (10, true), (80_000, true), (90_000, true)], Ok(10), 5),
            (
                [(1, false), (2, false), (4, false), (3, false), (1, false)],
                Err("failed after 4".to_owned()),
                5,
            ),
        ] {
            let number = AtomicUsize::new(0);
            let attempt = || {
                let (time, is_success) = attempts[number.fetch_add(1, Ordering::Relaxed)];
                after(time, is_success)
            };
            assert_eq!(first_success(attempt).await, expect);
            assert_eq!(number.load(Ordering::Relaxed), made);
        }
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
}
