//! The mode `Webhook`: a remote server decides on SubjectAccessReviews. Its decisions are cached.
//!
//! Source: `k8s.io/apiserver/plugin/pkg/authorizer/webhook`.

use std::{path::Path, time::Duration};

use coracle_connections::LogLimit;
use coracle_values::CollectMap;
use futures::future::Either;
use serde_json::{Value, json};

use super::{
    AccessAttributes, Authorizer, Deciding, Decision, RulesScope, UserRules, Verdict,
    condition::MatchConditions, selectors,
};
use crate::remote::{
    Remote,
    cache::{Outcome, ResponseCache, key},
};

/// Maximum bytes of a review whose response is cached.
const MAX_CACHED_REVIEW: usize = 10_000;
/// Maximum bytes of a reason. Longer reasons are truncated.
const MAX_REASON: usize = 1024;

/// The settings of one webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WebhookSettings {
    /// Name of the webhook in messages.
    pub(crate) name: String,
    pub(crate) timeout: Duration,
    /// Time to live of cached decisions that allow a request. Zero disables the cache.
    pub(crate) authorized: Duration,
    pub(crate) unauthorized: Duration,
    /// `v1` or `v1beta1`.
    pub(crate) version: String,
    /// Whether a failed call denies the request. Otherwise the next authorizer decides.
    pub(crate) denies_on_failure: bool,
}

/// A webhook.
pub(super) struct Webhook {
    settings: WebhookSettings,
    remote: Remote,
    conditions: MatchConditions,
    decisions: ResponseCache<Decision>,
    failures: LogLimit,
}

// === impl Webhook ===

impl Webhook {
    /// Reads the webhook's kubeconfig file.
    ///
    /// # Errors
    /// The kubeconfig file cannot be used.
    pub(super) fn new(
        settings: WebhookSettings,
        file: &Path,
        conditions: MatchConditions,
    ) -> Result<Self, String> {
        let remote = Remote::read(file, settings.timeout)?;
        let (decisions, failures) = (ResponseCache::new(), LogLimit::default());
        Ok(Self { settings, remote, conditions, decisions, failures })
    }

    /// The decision if no call is needed: from the cache, or from the match conditions.
    fn known_decision(&self, spec: &Value) -> Option<Decision> {
        match self.conditions.matches(spec) {
            Ok(true) => self.decisions.get(&key(&[spec.to_string().as_bytes()])),
            Ok(false) => Some(Decision::no_opinion("")),
            Err(reason) => Some(self.failure(&reason)),
        }
    }

    async fn review(&self, spec: Value) -> Decision {
        let text = spec.to_string();
        let request = json!({
            "apiVersion": format!("authorization.k8s.io/{}", self.settings.version),
            "kind": "SubjectAccessReview",
            "metadata": {},
            "spec": spec,
        });
        let answered = self.remote.post(&request).await;
        let answer = match answered.and_then(|answer| decision(&answer["status"])) {
            Ok(answer) => answer,
            Err(reason) => return self.failure(&reason),
        };
        if text.len() <= MAX_CACHED_REVIEW {
            let (outcome, lasts) = match answer.verdict {
                Verdict::Allow => (Outcome::Accepted, self.settings.authorized),
                _ => (Outcome::Refused, self.settings.unauthorized),
            };
            self.decisions.insert(key(&[text.as_bytes()]), answer.clone(), outcome, lasts);
        }
        answer
    }

    fn failure(&self, reason: &str) -> Decision {
        if let Some(suppressed) = self.failures.allow_without_source() {
            tracing::warn!(
                webhook = self.settings.name,
                reason,
                suppressed,
                "the authorization webhook failed"
            );
        }
        // The client must not learn details of the webhook.
        let verdict = if self.settings.denies_on_failure { Verdict::Deny } else { Verdict::NoOpinion };
        Decision { verdict, reason: "the authorization webhook failed".into() }
    }
}

impl Authorizer for Webhook {
    fn authorize<'a>(&'a self, attributes: &'a AccessAttributes<'a>) -> Deciding<'a> {
        let spec = spec(attributes, &self.settings.version);
        match self.known_decision(&spec) {
            Some(decision) => decision.ready(),
            None => Either::Right(Box::pin(self.review(spec))),
        }
    }

    fn add_rules(&self, _: &RulesScope<'_>, found: &mut UserRules) {
        found.unlisted.push("webhook");
    }
}

/// The decision in a response.
fn decision(status: &Value) -> Result<Decision, String> {
    if !status.is_object() {
        return Err("the response has no status".to_owned());
    }
    // Webhooks may omit a field that is false.
    let flag = |field: &str| match &status[field] {
        Value::Null => Ok(false),
        Value::Bool(flag) => Ok(*flag),
        _ => Err(format!("status.{field} of the response is not a boolean")),
    };
    let (allowed, denied) = (flag("allowed")?, flag("denied")?);
    let reason = status["reason"].as_str().unwrap_or_default();
    let reason = reason[..reason.floor_char_boundary(MAX_REASON)].to_owned();
    let verdict = match (allowed, denied) {
        (true, false) => Verdict::Allow,
        // As upstream, a contradiction is a denial, also without a failure policy that denies.
        (_, true) => Verdict::Deny,
        (false, false) => Verdict::NoOpinion,
    };
    Ok(Decision { verdict, reason: reason.into() })
}

/// Fuzz target: a response of the webhook, in JSON.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(answer) = serde_json::from_slice::<Value>(data) else { return };
    let status = &answer["status"];
    let Ok(found) = decision(status) else { return };
    assert!(found.reason.len() <= MAX_REASON, "{} bytes", found.reason.len());
    let is_allowed = status["allowed"] == true && status["denied"] != true;
    assert_eq!(found.verdict == Verdict::Allow, is_allowed, "{status}");
}

/// The `spec` of the review.
pub(super) fn spec(attributes: &AccessAttributes<'_>, version: &str) -> Value {
    let user = attributes.user;
    let mut spec = json!({"user": user.name});
    // v1beta1 calls this field `group`.
    spec[if version == "v1beta1" { "group" } else { "groups" }] = json!(user.groups);
    if !user.uid.is_empty() {
        spec["uid"] = user.uid.clone().into();
    }
    if !user.extra.is_empty() {
        let extra: serde_json::Map<String, Value> =
            user.extra.iter().map(|(key, values)| (key.to_lowercase(), json!(values))).collect_map();
        spec["extra"] = extra.into();
    }
    let Some(path) = &attributes.info.resource else {
        spec["nonResourceAttributes"] = json!({"path": attributes.info.path, "verb": attributes.verb});
        return spec;
    };
    let fields = [
        ("namespace", path.namespace.as_str()),
        ("verb", attributes.verb),
        ("group", &path.group),
        ("version", &path.version),
        ("resource", &path.resource),
        ("subresource", &path.subresource),
        ("name", &path.name),
    ];
    let fields = fields.into_iter().filter(|(_, value)| !value.is_empty());
    let mut fields: serde_json::Map<String, Value> =
        fields.map(|(field, value)| (field.to_owned(), value.into())).collect_map();
    selectors::add(attributes.info, &mut fields);
    spec["resourceAttributes"] = fields.into();
    spec
}

#[cfg(test)]
mod tests {
    use http::Method;

    use super::*;
    use crate::{authn::User, cache::Cache, remote::tests::Hook, request::RequestInfo};

    fn settings(denies_on_failure: bool) -> WebhookSettings {
        WebhookSettings {
            name: "w".to_owned(),
            timeout: Duration::from_secs(60),
            authorized: Duration::from_secs(300),
            unauthorized: Duration::ZERO,
            version: "v1".to_owned(),
            denies_on_failure,
        }
    }

    fn webhook(hook: &Hook, denies_on_failure: bool, conditions: &Value) -> Webhook {
        let conditions = MatchConditions::compile(conditions).unwrap();
        Webhook::new(settings(denies_on_failure), &hook.file(), conditions).unwrap()
    }

    async fn review(webhook: &Webhook, uri: &str) -> Verdict {
        let info = RequestInfo::parse(&Method::GET, &uri.parse().unwrap());
        let (user, cache) = (User::new("ann", &["dev"]), Cache::new(0));
        webhook
            .authorize(&AccessAttributes { user: &user, verb: info.verb, info: &info, cache: &cache })
            .await
            .verdict
    }

    #[tokio::test]
    async fn permissions_are_cached_and_the_review_has_the_attributes() {
        let hook = Hook::start(|body| {
            let allowed = body["spec"]["resourceAttributes"]["resource"] == "pods";
            (200, json!({"status": {"allowed": allowed, "denied": !allowed}}).to_string())
        })
        .await;
        let webhook = webhook(&hook, false, &json!(null));
        for _ in 0..3 {
            assert_eq!(review(&webhook, "/api/v1/namespaces/a/pods/p/log").await, Verdict::Allow);
        }
        assert_eq!(hook.count(), 1);
        for _ in 0..2 {
            assert_eq!(review(&webhook, "/version").await, Verdict::Deny);
        }
        assert_eq!(hook.count(), 3);
        let first = hook.bodies.lock().unwrap()[0]["spec"].clone();
        let attributes = json!({"namespace": "a", "verb": "get", "version": "v1", "resource": "pods", "name": "p", "subresource": "log"});
        assert_eq!(first["resourceAttributes"], attributes);
        assert_eq!(
            (&first["user"], &first["groups"]),
            (&json!("ann"), &json!(["dev", "system:authenticated"]))
        );
    }

    #[tokio::test]
    async fn a_failing_webhook_allows_nothing() {
        for text in [
            "",
            "{}",
            r#"{"status": {"allowed": "true"}}"#,
            r#"{"status": {"allowed": false, "denied": "true"}}"#,
        ] {
            let hook = Hook::start(move |_| (200, text.to_owned())).await;
            assert_eq!(
                review(&webhook(&hook, true, &json!(null)), "/version").await,
                Verdict::Deny,
                "{text}"
            );
            assert_eq!(
                review(&webhook(&hook, false, &json!(null)), "/version").await,
                Verdict::NoOpinion,
                "{text}"
            );
        }
    }

    #[test]
    fn a_denial_takes_precedence_and_absent_fields_are_false() {
        let verdict = |status: Value| decision(&status).unwrap().verdict;
        assert_eq!(verdict(json!({"allowed": true, "denied": true})), Verdict::Deny);
        assert_eq!(verdict(json!({"denied": true})), Verdict::Deny);
        assert_eq!(verdict(json!({"reason": "no opinion"})), Verdict::NoOpinion);
        assert_eq!(verdict(json!({"allowed": true, "denied": null})), Verdict::Allow);
    }

    #[tokio::test]
    async fn failures_write_one_line_a_minute() {
        let hook = Hook::start(|_| (200, "{}".to_owned())).await;
        let webhook = webhook(&hook, true, &json!(null));
        assert_eq!(review(&webhook, "/version").await, Verdict::Deny);
        assert_eq!(webhook.failures.allow_without_source(), None);
    }

    #[tokio::test]
    async fn requests_that_do_not_match_are_not_sent() {
        let hook = Hook::start(|_| (200, json!({"status": {"allowed": true}}).to_string())).await;
        let selected = json!([{"expression": "request.resourceAttributes.fieldSelector.requirements.exists(one, \
                                              one.key == 'spec.nodeName' && one.operator == 'In' && 'n' in one.values)"}]);
        let of_node = webhook(&hook, false, &selected);
        assert_eq!(
            review(&of_node, "/api/v1/pods?fieldSelector=spec.nodeName%3Dm").await,
            Verdict::NoOpinion
        );
        assert_eq!(hook.count(), 0);
        assert_eq!(review(&of_node, "/api/v1/pods?fieldSelector=spec.nodeName%3Dn").await, Verdict::Allow);
        assert_eq!(hook.count(), 1);
        let only = json!([{"expression": "has(request.resourceAttributes) && request.resourceAttributes.namespace == 'a'"}]);
        let webhook_a = webhook(&hook, true, &only);
        assert_eq!(review(&webhook_a, "/api/v1/namespaces/b/pods").await, Verdict::NoOpinion);
        assert_eq!(review(&webhook_a, "/version").await, Verdict::NoOpinion);
        assert_eq!(hook.count(), 1);
        assert_eq!(review(&webhook_a, "/api/v1/namespaces/a/pods").await, Verdict::Allow);
        // An error in a condition counts as a failure of the webhook.
        let broken = json!([{"expression": "request.resourceAttributes.namespace == 'a'"}]);
        assert_eq!(review(&webhook(&hook, true, &broken), "/version").await, Verdict::Deny);
    }
}
