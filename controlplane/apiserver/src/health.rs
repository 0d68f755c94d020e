//! `/healthz`, `/livez` and `/readyz`: each has sub-paths for its checks and the parameter `verbose`.

use coracle_store::Health;

use crate::{
    reply::{self, Reply},
    request::RequestInfo,
    state::State,
};

/// A named check. It returns the reason of a failure.
type Check = (&'static str, fn(&State) -> Result<(), String>);

const ALIVE: &[Check] = &[("ping", |_| Ok(())), ("log", |_| Ok(()))];
/// A store that refuses writes recovers on its own, so it does not fail `/livez`.
const READY: &[Check] = &[
    ("ping", |_| Ok(())),
    ("log", |_| Ok(())),
    ("store", store),
    // Upstream's names: probes use them in paths and exclusions.
    ("etcd", store),
    ("etcd-readiness", store),
    ("shutdown", shutdown),
];

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
    if let Some(one) = parts.next() {
        let (_, check) = checks.iter().find(|(check, _)| *check == one)?;
        return Some(match check(state) {
            Ok(()) => reply::text(200, "ok"),
            Err(_withheld) => reply::text(500, "internal server error: reason withheld\n"),
        });
    }
    let excluded = info.query.all("exclude");
    let mut lines = String::new();
    let mut healthy = true;
    for (check_name, check) in checks {
        if excluded.iter().any(|one| one == check_name) {
            lines += &format!("[+]{check_name} excluded: ok\n");
            continue;
        }
        match check(state) {
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
