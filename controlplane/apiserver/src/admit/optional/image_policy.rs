//! A webhook decides whether the images of a pod may run (ImageReview of `imagepolicy.k8s.io/v1alpha1`).
//!
//! Source: `plugin/pkg/admission/imagepolicy`. The limits of `remote.rs` apply to the call. The annotation
//! `alpha.image-policy.k8s.io/failed-open` is not set on the pod. Upstream sets it only on the copy of the pod that
//! validation gets, so the annotation is lost there, too.

mod config;
mod review;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use serde_json::Value;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::review::fuzz;
use self::{config::Settings, review::Status};
use super::forbidden;
use crate::{
    admit::{Admission, Admit, Attributes, Operation, config::PluginConfigs},
    error::Result,
    remote::{
        Remote,
        cache::{Outcome, ResponseCache, key},
    },
};

/// Prefix of the keys of audit annotations.
const AUDIT_PREFIX: &str = "imagepolicywebhook.image-policy.k8s.io/";
/// Timeout of a call, including all attempts.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of cached acceptances, and of cached refusals.
const MAX_CACHED: usize = 1024;

/// The plugin. It has no webhook while the plugin is disabled.
#[derive(Default)]
pub(in crate::admit) struct ImagePolicyWebhook(Option<Webhook>);

struct Webhook {
    remote: Remote,
    settings: Settings,
    responses: ResponseCache<Arc<Status>>,
}

#[async_trait]
impl Admit for ImagePolicyWebhook {
    async fn validate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let is_write = matches!(attributes.operation, Operation::Create | Operation::Update);
        let is_part = matches!(attributes.subresource, "" | "ephemeralcontainers");
        match &self.0 {
            Some(webhook) if is_write && is_part && attributes.kind.is("", "Pod") => {
                let spec = review::spec(object, attributes.subresource, attributes.namespace);
                webhook.decide(spec, attributes).await.map_err(|why| forbidden(attributes, why))
            }
            _ => Ok(()),
        }
    }

    fn is_local(&self) -> bool {
        false
    }
}

// === impl ImagePolicyWebhook ===

impl ImagePolicyWebhook {
    /// Reads the settings and the kubeconfig file of the webhook.
    ///
    /// # Errors
    /// There is no configuration, or the configuration or the kubeconfig file is invalid.
    pub(in crate::admit) fn read(configs: &mut PluginConfigs) -> std::result::Result<Self, String> {
        let settings = Settings::read(configs)?;
        let path = &settings.kubeconfig;
        let remote = Remote::read(path, TIMEOUT).map_err(|why| format!("{}: {why}", path.display()))?;
        let remote = remote.with_retry_backoff(settings.retry_backoff);
        Ok(Self(Some(Webhook { remote, settings, responses: ResponseCache::with_max_entries(MAX_CACHED) })))
    }
}

// === impl Webhook ===

impl Webhook {
    /// Accepts or refuses the pod. The error is the reason of the refusal.
    async fn decide(&self, spec: Value, attributes: &Attributes<'_>) -> std::result::Result<(), String> {
        let annotate = |name: &str, value: &str| {
            if let Some(record) = attributes.audit {
                record.annotate(&format!("{AUDIT_PREFIX}{name}"), value);
            }
        };
        match self.status(spec).await {
            Ok(status) => {
                for (name, value) in &status.audit_annotations {
                    annotate(name, value);
                }
                status.decision()
            }
            Err(why) if self.settings.default_allow => {
                tracing::warn!(why, "the image policy webhook failed open");
                annotate("failed-open", "true");
                Ok(())
            }
            Err(why) => {
                tracing::warn!(why, "the image policy webhook failed");
                Err(why)
            }
        }
    }

    /// The webhook's response, from the cache or from a call. The error is the failure of the call.
    async fn status(&self, spec: Value) -> std::result::Result<Arc<Status>, String> {
        let cache_key = key(&[spec.to_string().as_bytes()]);
        if let Some(status) = self.responses.get(&cache_key) {
            return Ok(status);
        }
        let response = self.remote.post(&review::request(spec)).await?;
        let status = Arc::new(Status::read(&response)?);
        let (outcome, ttl) = if status.allowed {
            (Outcome::Accepted, self.settings.allow_ttl)
        } else {
            (Outcome::Refused, self.settings.deny_ttl)
        };
        self.responses.insert(cache_key, status.clone(), outcome, ttl);
        Ok(status)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use serde_json::json;

    use super::*;
    use crate::remote::tests::Hook;

    fn webhook(hook: &Hook, more: &str) -> Webhook {
        let text = format!("imagePolicy: {{kubeConfigFile: {:?}, {more}}}", hook.file());
        let mut configs = PluginConfigs::parse(&text, Path::new("")).unwrap();
        ImagePolicyWebhook::read(&mut configs).unwrap().0.unwrap()
    }

    fn image_spec(image: &str) -> Value {
        review::spec(&json!({"spec": {"containers": [{"image": image}]}}), "", "default")
    }

    #[tokio::test]
    async fn responses_are_cached_for_their_ttl() {
        let hook = Hook::start(|review| {
            let allowed = review["spec"]["containers"][0]["image"] == "good";
            (200, json!({"status": {"allowed": allowed, "reason": "bad image"}}).to_string())
        })
        .await;
        let webhook = webhook(&hook, "denyTTL: -1");
        for _ in 0..2 {
            assert!(webhook.status(image_spec("good")).await.unwrap().allowed);
            let refused = webhook.status(image_spec("bad")).await.unwrap();
            let why = "image policy webhook backend denied one or more images: bad image";
            assert_eq!(refused.decision().unwrap_err(), why);
        }
        // With a time to live of -1, refusals are not cached.
        assert_eq!(hook.count(), 3);
        let sent = hook.bodies.lock().unwrap()[0].clone();
        let expected = json!({"apiVersion": "imagepolicy.k8s.io/v1alpha1", "kind": "ImageReview", "metadata": {},
            "spec": {"containers": [{"image": "good"}], "namespace": "default"}, "status": {"allowed": false}});
        assert_eq!(sent, expected);
    }

    #[tokio::test]
    async fn a_failing_webhook_is_called_five_times_and_its_error_is_returned() {
        let hook = Hook::start(|_| (500, String::new())).await;
        let why = webhook(&hook, "retryBackoff: -1").status(image_spec("good")).await.unwrap_err();
        assert!(why.contains("responded with 500"), "{why}");
        assert_eq!(hook.count(), 5);
        let wrong =
            Hook::start(|_| (200, json!({"kind": "Pod", "status": {"allowed": true}}).to_string())).await;
        assert!(webhook(&wrong, "").status(image_spec("good")).await.is_err());
    }

    #[test]
    fn the_kubeconfig_must_be_usable() {
        let read = |text: &str| {
            let mut configs = PluginConfigs::parse(text, Path::new("")).unwrap();
            ImagePolicyWebhook::read(&mut configs).err().unwrap()
        };
        assert!(read("imagePolicy: {kubeConfigFile: missing}").contains("cannot read missing"));
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config");
        let text = "clusters: [{name: c, cluster: {server: 'http://192.0.2.1'}}]\ncontexts: [{name: x, context: {cluster: c}}]\n";
        fs::write(&file, text).unwrap();
        let refused = read(&format!("imagePolicy: {{kubeConfigFile: {file:?}}}"));
        assert!(refused.contains("must be an https URL"), "{refused}");
    }
}
