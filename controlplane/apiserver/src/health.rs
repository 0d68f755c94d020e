//! `/healthz`, `/livez` and `/readyz`: each has a sub-path for each check, and the parameters `verbose` and `exclude`.

use coracle_store::Health;

use crate::{
    reply::{self, Reply},
    request::RequestInfo,
    state::State,
};

/// The name of a check and its function, which returns the reason of a failure.
type Check = (&'static str, fn(&State) -> Result<(), String>);

/// The checks of `/livez` and `/healthz`. A store that refuses writes recovers on its own and still serves reads, so it
/// does not fail `/livez`.
const ALIVE: &[Check] = &[("ping", passed), ("log", passed), ("etcd", passed)];
/// Upstream's names of the steps of the server's start. Requests are accepted after these steps, so their checks always
/// pass.
const STARTED: &[&str] = &[
    "poststarthook/start-apiserver-admission-initializer",
    "poststarthook/generic-apiserver-start-informers",
    "poststarthook/priority-and-fairness-config-consumer",
    "poststarthook/priority-and-fairness-filter",
    "poststarthook/priority-and-fairness-config-producer",
    "poststarthook/start-apiextensions-informers",
    "poststarthook/start-apiextensions-controllers",
    "poststarthook/crd-informer-synced",
    "poststarthook/start-system-namespaces-controller",
    "poststarthook/start-cluster-authentication-info-controller",
    "poststarthook/start-legacy-token-tracking-controller",
    "poststarthook/start-service-ip-repair-controllers",
    "poststarthook/rbac/bootstrap-roles",
    "poststarthook/scheduling/bootstrap-system-priority-classes",
    "poststarthook/bootstrap-controller",
    "poststarthook/start-kube-aggregator-informers",
    "poststarthook/apiservice-registration-controller",
    "poststarthook/apiservice-status-local-available-controller",
    "poststarthook/apiservice-status-remote-available-controller",
    "poststarthook/apiservice-discovery-controller",
    "poststarthook/kube-apiserver-autoregistration",
    "autoregister-completion",
    "poststarthook/apiservice-openapi-controller",
    "poststarthook/apiservice-openapiv3-controller",
    "poststarthook/storage-readiness",
];
const READY: &[Check] = &[
    ("ping", passed),
    ("log", passed),
    ("store", store),
    // Upstream's names: probes use them in paths and exclusions.
    ("etcd", store),
    ("etcd-readiness", store),
    ("informer-sync", passed),
    ("shutdown", shutdown),
];

/// The check of the key management services, which exists if services encrypt the store. It also fails while stored objects
/// cannot be decrypted. As upstream, it does not fail
/// `/livez`: a restart does not repair a service.
const SERVICES: Check = ("kms-providers", encryption);

#[expect(clippy::unnecessary_wraps, reason = "the type of all checks")]
fn passed(_state: &State) -> Result<(), String> {
    Ok(())
}

fn shutdown(state: &State) -> Result<(), String> {
    if state.stopping.is_cancelled() { Err("process is shutting down".to_owned()) } else { Ok(()) }
}

fn store(state: &State) -> Result<(), String> {
    match state.store.health() {
        Health::Good => Ok(()),
        Health::Full { free } => Err(format!("database space exceeded: {} MiB free", free >> 20)),
        Health::Failed(detail) => Err(detail),
    }
}

fn encryption(state: &State) -> Result<(), String> {
    state.encryption_health.as_ref().map_or(Ok(()), |health| (health.0)())?;
    let unreadable = state.cache.unreadable();
    unreadable.iter().try_for_each(|resource| resource.check_readable()).map_err(|error| error.message)
}

/// The checks of an endpoint: `healthz`, `livez` or `readyz`. `None` for other names.
fn checks(state: &State, endpoint: &str) -> Option<(&'static str, Vec<Check>)> {
    let (endpoint, own) = match endpoint {
        "healthz" => ("healthz", ALIVE),
        "livez" => ("livez", ALIVE),
        "readyz" => ("readyz", READY),
        _ => return None,
    };
    let services = (endpoint != "livez" && state.encryption_health.is_some()).then_some(SERVICES);
    let started = STARTED.iter().map(|&step| -> Check { (step, passed) });
    Some((endpoint, own.iter().copied().chain(services).chain(started).collect()))
}

/// The paths of single checks.
pub(crate) fn paths(state: &State) -> impl Iterator<Item = String> {
    let endpoints = ["healthz", "livez", "readyz"].into_iter().filter_map(move |name| checks(state, name));
    endpoints.flat_map(|(name, checks)| checks.into_iter().map(move |(check, _)| format!("/{name}/{check}")))
}

/// The response to a request for a health check. `None` for other paths.
pub(crate) fn find(state: &State, info: &RequestInfo) -> Option<Reply> {
    let path = info.path.trim_matches('/');
    let (name, one) = path.split_once('/').map_or((path, None), |(name, one)| (name, Some(one)));
    let (name, checks) = checks(state, name)?;
    if let Some(one) = one {
        let (_, check) = checks.iter().find(|(check, _)| *check == one)?;
        return Some(match check(state) {
            Ok(()) => reply::text(200, "ok"),
            Err(_withheld) => reply::text(500, "internal server error: reason withheld\n"),
        });
    }
    let excluded = info.query.all("exclude");
    let mut lines = String::new();
    let mut healthy = true;
    for &(check_name, check) in &checks {
        if excluded.iter().any(|one| one == check_name) {
            lines += &format!("[+]{check_name} excluded: ok\n");
            continue;
        }
        let result = check(state);
        state.metrics.health.observe(check_name, name, result.is_ok());
        match result {
            Ok(()) => lines += &format!("[+]{check_name} ok\n"),
            // The reason may contain paths of the node. It is only logged, because anonymous clients may read the
            // response.
            Err(reason) => {
                healthy = false;
                tracing::debug!(check = check_name, reason, "health check failed");
                lines += &format!("[-]{check_name} failed: reason withheld\n");
            }
        }
    }
    let is_unknown = |one: &&String| !checks.iter().any(|(check, _)| check == *one);
    if excluded.iter().any(|one| is_unknown(&one)) {
        // The response does not repeat names from the client.
        lines += "warn: some health checks cannot be excluded: no matches\n";
    }
    let verdict = if healthy { "passed" } else { "failed" };
    if healthy && !info.query.has("verbose") {
        return Some(reply::text(200, "ok"));
    }
    lines += &format!("{name} check {verdict}\n");
    Some(reply::text(if healthy { 200 } else { 500 }, lines))
}
