//! `/healthz`, `/livez` and `/readyz`: each has sub-paths for its checks and the parameter `verbose`.

use coracle_store::Health;

use crate::{
    reply::{self, Reply},
    request::RequestInfo,
    state::State,
};

/// A named check. It returns the reason of a failure.
type Check = (&'static str, fn(&State) -> Result<(), String>);

/// A store that refuses writes recovers on its own and answers reads, so it does not fail `/livez`.
const ALIVE: &[Check] = &[("ping", passed), ("log", passed), ("etcd", passed)];
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
/// Steps of the start with upstream's names, which probes and monitoring look for. The server answers requests after all
/// of them, so they have passed.
const STARTED: &[Check] = &[
    ("poststarthook/start-apiserver-admission-initializer", passed),
    ("poststarthook/generic-apiserver-start-informers", passed),
    ("poststarthook/start-apiextensions-informers", passed),
    ("poststarthook/start-apiextensions-controllers", passed),
    ("poststarthook/crd-informer-synced", passed),
    ("poststarthook/bootstrap-controller", passed),
    ("poststarthook/start-system-namespaces-controller", passed),
    ("poststarthook/start-service-ip-repair-controllers", passed),
    ("poststarthook/rbac/bootstrap-roles", passed),
    ("poststarthook/scheduling/bootstrap-system-priority-classes", passed),
    ("poststarthook/priority-and-fairness-config-producer", passed),
    ("poststarthook/start-cluster-authentication-info-controller", passed),
    ("poststarthook/start-kube-aggregator-informers", passed),
    ("poststarthook/apiservice-registration-controller", passed),
    ("poststarthook/apiservice-status-local-available-controller", passed),
    ("poststarthook/apiservice-status-remote-available-controller", passed),
    ("poststarthook/kube-apiserver-autoregistration", passed),
    ("autoregister-completion", passed),
    ("poststarthook/apiservice-openapi-controller", passed),
    ("poststarthook/storage-readiness", passed),
];

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

/// The response, if the path is a health check.
pub(crate) fn find(state: &State, info: &RequestInfo) -> Option<Reply> {
    let mut parts = info.path.trim_matches('/').split('/');
    let name = parts.next()?;
    let checks = match name {
        "healthz" | "livez" => ALIVE,
        "readyz" => READY,
        _ => return None,
    };
    let checks: Vec<Check> = checks.iter().chain(STARTED).copied().collect();
    let run = |check_name: &str, check: fn(&State) -> Result<(), String>| {
        let result = check(state);
        state.metrics.health_checks.checked(check_name, name, result.is_ok());
        result
    };
    if parts.next().is_some() {
        let one = info.path.trim_matches('/').split_once('/')?.1;
        let (one, check) = checks.iter().find(|(check, _)| *check == one)?;
        return Some(match run(one, *check) {
            Ok(()) => reply::text(200, "ok"),
            Err(_withheld) => reply::text(500, "internal server error: reason withheld\n"),
        });
    }
    let excluded = info.query.all("exclude");
    let mut lines = String::new();
    let mut healthy = true;
    for (check_name, check) in &checks {
        if excluded.iter().any(|one| one == check_name) {
            lines += &format!("[+]{check_name} excluded: ok\n");
            continue;
        }
        match run(check_name, *check) {
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
