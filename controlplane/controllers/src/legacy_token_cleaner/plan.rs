//! The next action on the Secret of a legacy token, and the time at which it is due.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;

use crate::account_token::plan::{account_name, is_of};
use crate::object::{ObjectExt, Secret, ServiceAccount};

/// Label with the day (UTC) of the token's last use.
const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";
/// Label with the day on which the token became invalid.
pub(super) const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";
const DAY: Duration = Duration::from_secs(24 * 3600);

/// An action on a Secret that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Mark the token as invalid. Afterwards the API server refuses the token.
    Invalidate,
    /// Delete the Secret: its token was invalid for the whole period.
    Delete,
}

/// The next action on a Secret, and the time at which it is due. `None` if no action is ever due.
///
/// The period begins at the latest of these times: the creation of the Secret, and the ends of the days that its labels
/// name.
pub(super) fn next(secret: &Secret, period: Duration) -> Option<(Action, Timestamp)> {
    if secret.is_being_deleted() {
        return None;
    }
    let label = |name: &str| secret.metadata.labels.as_ref()?.get(name).map(String::as_str);
    let created = secret.metadata.creation_timestamp.as_ref()?.0;
    let mut due = after(created, period)?;
    if let Some(day) = label(LAST_USED) {
        // As upstream, a malformed day means that the last use is unknown: the Secret is never due.
        due = due.max(after_day(day, period)?);
    }
    match label(INVALID_SINCE).and_then(start_of) {
        Some(since) => Some((Action::Delete, due.max(after(since, DAY + period)?))),
        None => Some((Action::Invalidate, due)),
    }
}

/// The end of a period that begins at the end of a day. `None` if the day is malformed, or the time is too far in the
/// future.
pub(super) fn after_day(day: &str, period: Duration) -> Option<Timestamp> {
    after(start_of(day)?, DAY + period)
}

/// The first second of a day in UTC.
fn start_of(day: &str) -> Option<Timestamp> {
    let is_day = day.len() == "2026-01-01".len();
    is_day.then(|| format!("{day}T00:00:00Z").parse().ok()).flatten()
}

fn after(time: Timestamp, period: Duration) -> Option<Timestamp> {
    let seconds = i64::try_from(period.as_secs()).ok()?;
    Timestamp::from_second(time.as_second().saturating_add(seconds)).ok()
}

/// The day of a time in UTC, as in the labels.
pub(super) fn day(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d").to_string()
}

/// Whether Kubernetes generated the Secret: its service account lists it in `secrets`. A Secret that a user created may
/// be in use outside of the cluster.
pub(super) fn is_generated(secret: &Secret, account: Option<&ServiceAccount>) -> bool {
    account.is_some_and(|account| {
        account_name(secret) == Some(account.name())
            && is_of(secret, account)
            && account.secrets.iter().flatten().any(|named| named.name.as_deref() == Some(secret.name()))
    })
}

/// Names of the Secrets to which a pod refers.
pub(super) fn secrets_of(pod: &Value) -> Vec<&str> {
    let spec = &pod["spec"];
    let pulls = list(spec, "imagePullSecrets").map(|pull| &pull["name"]);
    let volumes = list(spec, "volumes").flat_map(volume_secrets);
    let containers = ["containers", "initContainers", "ephemeralContainers"];
    let containers = containers.into_iter().flat_map(|field| list(spec, field));
    let environment = containers.flat_map(|container| {
        let whole = list(container, "envFrom").map(|from| &from["secretRef"]["name"]);
        whole.chain(list(container, "env").map(|env| &env["valueFrom"]["secretKeyRef"]["name"]))
    });
    pulls.chain(volumes).chain(environment).filter_map(Value::as_str).collect()
}

/// Names of the Secrets to which a volume of any type refers.
fn volume_secrets(volume: &Value) -> impl Iterator<Item = &Value> {
    let types = volume.as_object().into_iter().flat_map(serde_json::Map::values);
    let named = types.flat_map(|source| {
        [&source["secretName"], &source["secretRef"]["name"], &source["nodePublishSecretRef"]["name"]]
    });
    named.chain(list(&volume["projected"], "sources").map(|source| &source["secret"]["name"]))
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    value[field].as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

    fn secret(labels: Value) -> Secret {
        let annotations =
            json!({"kubernetes.io/service-account.name": "a", "kubernetes.io/service-account.uid": "1"});
        let metadata = json!({"name": "s", "namespace": "n", "creationTimestamp": "2020-01-01T12:00:00Z",
            "labels": labels, "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    #[test]
    fn the_period_of_a_secret_begins_at_its_creation_last_use_or_invalidation() {
        let due =
            |labels: Value| next(&secret(labels), YEAR).map(|(action, time)| (action, time.to_string()));
        let at = |action, time: &str| Some((action, time.to_owned()));
        // 2020 has 366 days.
        assert_eq!(due(json!({})), at(Action::Invalidate, "2020-12-31T12:00:00Z"));
        assert_eq!(due(json!({LAST_USED: "2021-03-01"})), at(Action::Invalidate, "2022-03-02T00:00:00Z"));
        assert_eq!(due(json!({LAST_USED: "2019-01-01"})), at(Action::Invalidate, "2020-12-31T12:00:00Z"));
        let invalid = json!({LAST_USED: "2021-03-01", INVALID_SINCE: "2022-04-01"});
        assert_eq!(due(invalid), at(Action::Delete, "2023-04-02T00:00:00Z"));
        assert_eq!(due(json!({INVALID_SINCE: "soon"})), at(Action::Invalidate, "2020-12-31T12:00:00Z"));
        for unknown in ["yesterday", "2021-3-1", "", "2021-13-01", "9999-12-31"] {
            assert_eq!(due(json!({LAST_USED: unknown})), None, "{unknown}");
        }
        let mut deleted = secret(json!({}));
        deleted.metadata.deletion_timestamp = deleted.metadata.creation_timestamp.clone();
        assert_eq!(next(&deleted, YEAR), None);
    }

    #[test]
    fn a_generated_secret_is_listed_by_its_service_account() {
        let account = |uid: &str, named: &str| -> ServiceAccount {
            let account = json!({"metadata": {"name": "a", "uid": uid}, "secrets": [{}, {"name": named}]});
            serde_json::from_value(account).unwrap()
        };
        let secret = secret(json!({}));
        assert!(is_generated(&secret, Some(&account("1", "s"))));
        assert!(!is_generated(&secret, Some(&account("2", "s"))));
        assert!(!is_generated(&secret, Some(&account("1", "t"))));
        assert!(!is_generated(&secret, None));
    }

    #[test]
    fn a_pod_refers_to_secrets_in_volumes_environment_and_image_pull_secrets() {
        let pod = json!({"spec": {
            "imagePullSecrets": [{"name": "a"}],
            "volumes": [
                {"name": "v", "secret": {"secretName": "b"}},
                {"projected": {"sources": [{"secret": {"name": "c"}}, {"configMap": {"name": "other"}}]}},
                {"csi": {"nodePublishSecretRef": {"name": "d"}}},
                {"flexVolume": {"secretRef": {"name": "e"}}},
                {"azureFile": {"secretName": "f"}},
            ],
            "containers": [{"envFrom": [{"secretRef": {"name": "g"}}]}],
            "initContainers": [{"env": [{"name": "other", "valueFrom": {"secretKeyRef": {"name": "h"}}}]}],
            "ephemeralContainers": [{"envFrom": [{"secretRef": {"name": "i"}}]}],
        }});
        assert_eq!(secrets_of(&pod), ["a", "b", "c", "d", "e", "f", "g", "h", "i"]);
        assert!(secrets_of(&json!({})).is_empty());
    }
}
