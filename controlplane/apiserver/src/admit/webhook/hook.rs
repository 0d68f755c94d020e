//! One webhook of a configuration. Pure.

use std::{sync::Arc, time::Duration};

use coracle_admission_policies::Conditions;
use serde_json::Value;

use super::super::matching::Matching;

/// Default port of a service.
const PORT: u16 = 443;

/// One webhook, parsed.
#[expect(clippy::struct_excessive_bools, reason = "independent properties of a webhook")]
pub(in crate::admit) struct Hook {
    pub(crate) name: String,
    pub(super) matching: Matching,
    pub(crate) conditions: Conditions,
    pub(crate) target: Target,
    /// The TLS configuration, or why there is none.
    pub(crate) tls: Result<Arc<rustls::ClientConfig>, String>,
    pub(crate) timeout: Duration,
    /// Whether a failed call fails the request.
    pub(crate) fails: bool,
    /// Whether it may be called for a dry run.
    pub(crate) dry_run: bool,
    /// Whether it is called again when a later webhook has changed the object.
    pub(crate) again: bool,
    /// Version of the AdmissionReview.
    pub(crate) version: &'static str,
}

/// Where a webhook listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Url { host: String, port: u16, path: String },
    Service { namespace: String, name: String, port: u16, path: String },
}

// === impl Hook ===

impl Hook {
    /// Reads a webhook of a configuration, which is validated and has its defaults.
    pub(crate) fn read(hook: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let seconds = hook["timeoutSeconds"].as_u64().unwrap_or(10);
        let versions = hook["admissionReviewVersions"].as_array().into_iter().flatten();
        let version = versions.filter_map(Value::as_str).find(|version| matches!(*version, "v1" | "v1beta1"));
        Self {
            name: text(&hook["name"]),
            matching: Matching::of_webhook(hook),
            conditions: Conditions::read(&hook["matchConditions"], false),
            target: Target::read(&hook["clientConfig"]),
            tls: super::client::tls(&text(&hook["clientConfig"]["caBundle"])),
            timeout: Duration::from_secs(seconds),
            fails: hook["failurePolicy"] != "Ignore",
            dry_run: matches!(hook["sideEffects"].as_str(), Some("None" | "NoneOnDryRun")),
            again: hook["reinvocationPolicy"] == "IfNeeded",
            version: if version == Some("v1beta1") { "v1beta1" } else { "v1" },
        }
    }
}

// === impl Target ===

impl Target {
    fn read(config: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let service = &config["service"];
        if service.is_object() {
            let path = text(&service["path"]);
            let port = service["port"].as_u64().and_then(|port| u16::try_from(port).ok());
            return Self::Service {
                namespace: text(&service["namespace"]),
                name: text(&service["name"]),
                port: port.unwrap_or(PORT),
                path: if path.is_empty() { "/".to_owned() } else { path },
            };
        }
        let uri: http::Uri = text(&config["url"]).parse().unwrap_or_default();
        Self::Url {
            host: uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(PORT),
            path: uri.path().to_owned(),
        }
    }

    /// The URL in messages.
    pub(crate) fn url(&self, seconds: u64) -> String {
        match self {
            Self::Url { host, port, path } => format!("https://{host}:{port}{path}?timeout={seconds}s"),
            Self::Service { namespace, name, port, path } => {
                format!("https://{name}.{namespace}.svc:{port}{path}?timeout={seconds}s")
            }
        }
    }

    pub(crate) fn path(&self) -> &str {
        match self {
            Self::Url { path, .. } | Self::Service { path, .. } => path,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_target_is_a_service_or_a_url() {
        let url = Target::read(&json!({"url": "https://[2001:db8::1]:8443/hook"}));
        assert_eq!(url, Target::Url { host: "2001:db8::1".into(), port: 8443, path: "/hook".into() });
        let service = Target::read(&json!({"service": {"namespace": "n", "name": "s", "port": 443}}));
        assert_eq!(service.url(5), "https://s.n.svc:443/?timeout=5s");
    }
}
