//! `/healthz`, `/livez` and `/readyz`: each has a sub-path for each check, and the parameters `verbose` and `exclude`.

use coracle_store::Health;

use crate::{
    reply::{self, Reply},
    request::RequestInfo,
    state::State,
};

/// A check: its name and its subject.
type Check = (&'static str, Subject);

/// The subject of a check.
#[derive(Clone, Copy)]
enum Subject {
    /// The server itself: the check passes if the server responds.
    Server,
    /// Whether the store accepts writes.
    Store,
    /// Whether etcd responds. With the embedded store the check passes.
    Etcd,
    /// Whether etcd responds, or the embedded store accepts writes.
    EtcdOrStore,
    /// The same as [`Subject::EtcdOrStore`], with the timeout for readiness.
    EtcdReadiness,
    /// Whether the key management services respond.
    Encryption,
    /// Whether the server is not shutting down.
    Shutdown,
}

/// The checks of `/livez` and `/healthz`. An embedded store that refuses writes recovers on its own and still serves
/// reads, so it does not fail `/livez`.
const LIVENESS_CHECKS: &[Check] =
    &[("ping", Subject::Server), ("log", Subject::Server), ("etcd", Subject::Etcd)];
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
    ("ping", Subject::Server),
    ("log", Subject::Server),
    ("store", Subject::Store),
    // Upstream's names: probes use them in paths and exclusions.
    ("etcd", Subject::EtcdOrStore),
    ("etcd-readiness", Subject::EtcdReadiness),
    ("informer-sync", Subject::Server),
    ("shutdown", Subject::Shutdown),
];

/// The check of the key management services. It exists if services encrypt the store. As upstream, a failure of this
/// check does not fail `/livez`, because a restart does not repair a service.
///
/// The check also succeeds if the services respond but single objects cannot be decrypted. The keys of these objects
/// may be lost for ever, and the server serves the other objects.
const SERVICES: Check = ("kms-providers", Subject::Encryption);

// === impl Subject ===

impl Subject {
    /// Runs the check.
    ///
    /// # Errors
    /// The reason why the check fails.
    async fn check(self, state: &State) -> Result<(), String> {
        let (etcd, probes) = (state.store.is_shared(), &state.store_monitor);
        match self {
            Self::Etcd | Self::EtcdOrStore if etcd => probes.health.check(&state.store).await,
            Self::EtcdReadiness if etcd => probes.readiness.check(&state.store).await,
            Self::Server | Self::Etcd => Ok(()),
            Self::Store | Self::EtcdOrStore | Self::EtcdReadiness => store(state),
            Self::Encryption => encryption(state),
            Self::Shutdown => shutdown(state),
        }
    }
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
    state.encryption_health.as_ref().map_or(Ok(()), |health| (health.0)())
}

/// The checks of an endpoint: `healthz`, `livez` or `readyz`. `None` for other names.
fn checks(state: &State, endpoint: &str) -> Option<(&'static str, Vec<Check>)> {
    let (endpoint, own) = match endpoint {
        "healthz" => ("healthz", LIVENESS_CHECKS),
        "livez" => ("livez", LIVENESS_CHECKS),
        "readyz" => ("readyz", READY),
        _ => return None,
    };
    let services = (endpoint != "livez" && state.encryption_health.is_some()).then_some(SERVICES);
    let started = STARTED.iter().map(|&step| -> Check { (step, Subject::Server) });
    Some((endpoint, own.iter().copied().chain(services).chain(started).collect()))
}

/// The paths of single checks.
pub(crate) fn paths(state: &State) -> impl Iterator<Item = String> {
    let endpoints = ["healthz", "livez", "readyz"].into_iter().filter_map(move |name| checks(state, name));
    endpoints.flat_map(|(name, checks)| checks.into_iter().map(move |(check, _)| format!("/{name}/{check}")))
}

/// The response to a request for a health check. `None` for other paths.
pub(crate) async fn find(state: &State, info: &RequestInfo) -> Option<Reply> {
    let path = info.path.trim_matches('/');
    let (name, one) = path.split_once('/').map_or((path, None), |(name, one)| (name, Some(one)));
    let (name, checks) = checks(state, name)?;
    if let Some(one) = one {
        let (_, subject) = checks.iter().find(|(check, _)| *check == one)?;
        return Some(match subject.check(state).await {
            Ok(()) => reply::text(200, "ok"),
            Err(_withheld) => reply::text(500, "internal server error: reason withheld\n"),
        });
    }
    let excluded = info.query.all("exclude");
    let mut lines = String::new();
    let mut healthy = true;
    for &(check_name, subject) in &checks {
        if excluded.iter().any(|one| one == check_name) {
            lines += &format!("[+]{check_name} excluded: ok\n");
            continue;
        }
        let result = subject.check(state).await;
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
