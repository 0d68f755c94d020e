//! `/healthz`, `/livez`, `/readyz`, each with single checks below it and `?verbose`.

use crate::{
    reply::{self, Reply},
    request::RequestInfo,
    server::State,
};

/// A named check: whether all is well.
type Check = (&'static str, fn(&State) -> bool);

const ALIVE: &[Check] = &[("ping", |_| true), ("log", |_| true)];
const READY: &[Check] =
    &[("ping", |_| true), ("log", |_| true), ("shutdown", |state| !state.shutdown.is_cancelled())];

/// The answer, if the path asks for health.
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
        return Some(if check(state) { reply::text(200, "ok") } else { reply::text(500, "failed") });
    }
    let excluded = info.query.all("exclude");
    let mut lines = String::new();
    let mut healthy = true;
    for (check_name, check) in checks.iter().filter(|(check, _)| !excluded.iter().any(|one| one == check)) {
        let passed = check(state);
        healthy &= passed;
        lines += &format!(
            "[{}]{check_name} {}\n",
            if passed { '+' } else { '-' },
            if passed { "ok" } else { "failed" }
        );
    }
    let verdict = if healthy { "passed" } else { "failed" };
    if healthy && !info.query.has("verbose") {
        return Some(reply::text(200, "ok"));
    }
    lines += &format!("{name} check {verdict}\n");
    Some(reply::text(if healthy { 200 } else { 500 }, lines))
}
