//! Limits the rate of event writes: of all clients together, of a namespace, of a user, or of a source and object.
//!
//! Source: `plugin/pkg/admission/eventratelimit`. Unlike upstream, requests of the group `events.k8s.io` are also
//! limited. They write the same objects, so a client could otherwise evade the limits by such requests.

mod buckets;

use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use coracle_token_bucket::Rate;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use self::buckets::Buckets;
use crate::{
    admit::{
        Admission, Admit, Attributes, Operation,
        config::{PluginConfigs, expect},
    },
    error::{ApiError, Result},
    remote::cache::key,
};

/// Maximum bytes of a key in an error.
const MAX_SHOWN_KEY: usize = 1024;
/// Number of buckets of a limit without `cacheSize`.
const DEFAULT_CACHE_SIZE: usize = 4096;

#[derive(Default)]
pub(in crate::admit) struct EventRateLimit {
    limits: Vec<Limit>,
}

struct Limit {
    scope: Scope,
    buckets: Mutex<Buckets>,
}

/// The requests that share a bucket.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
enum Scope {
    Server,
    Namespace,
    User,
    SourceAndObject,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Config {
    api_version: String,
    kind: String,
    #[serde(default)]
    limits: Vec<LimitConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct LimitConfig {
    #[serde(rename = "type")]
    scope: Scope,
    #[serde(default)]
    qps: i32,
    #[serde(default)]
    burst: i32,
    #[serde(default)]
    cache_size: i32,
}

#[async_trait]
impl Admit for EventRateLimit {
    async fn validate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let is_event = attributes.kind.is("", "Event") || attributes.kind.is("events.k8s.io", "Event");
        let is_write = matches!(attributes.operation, Operation::Create | Operation::Update);
        if !is_event || !is_write || attributes.dry_run {
            return Ok(());
        }
        self.accept(attributes.namespace, &attributes.user.name, object)
    }
}

// === impl EventRateLimit ===

impl EventRateLimit {
    /// Reads the plugin's configuration.
    ///
    /// # Errors
    /// There is no configuration, or the configuration is invalid.
    pub(in crate::admit) fn read(configs: &mut PluginConfigs) -> std::result::Result<Self, String> {
        let Some(config) = configs.take::<Config>("EventRateLimit")? else {
            return Self::of(Vec::new());
        };
        expect("apiVersion", &config.api_version, "eventratelimit.admission.k8s.io/v1alpha1")?;
        expect("kind", &config.kind, "Configuration")?;
        Self::of(config.limits)
    }

    fn of(limits: Vec<LimitConfig>) -> std::result::Result<Self, String> {
        if limits.is_empty() {
            return Err("limits: Invalid value: []: must not be empty".to_owned());
        }
        let limits = limits.into_iter().enumerate();
        let limits = limits.map(|(index, limit)| {
            limit
                .checked()
                .map_err(|why| format!("limits[{index}].{why}"))
                .map(|buckets| Limit { scope: limit.scope, buckets: Mutex::new(buckets) })
        });
        Ok(Self { limits: limits.collect::<std::result::Result<_, _>>()? })
    }

    /// Takes a token from each limit. As upstream, a limit counts the request even if another limit refuses the
    /// request.
    fn accept(&self, namespace: &str, user: &str, event: &Value) -> Result<()> {
        let mut refusals = Vec::new();
        for limit in &self.limits {
            let parts = limit.scope.key_parts(namespace, user, event);
            let bytes: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
            let mut buckets = limit.buckets.lock().unwrap_or_else(PoisonError::into_inner);
            if !buckets.take(key(&bytes), Instant::now()) {
                let shown = parts.concat();
                let shown = &shown[..shown.floor_char_boundary(MAX_SHOWN_KEY)];
                let why = format!("limit reached on type {:?} for key {shown}", limit.scope);
                if !refusals.contains(&why) {
                    refusals.push(why);
                }
            }
        }
        match refusals.as_slice() {
            [] => Ok(()),
            [why] => Err(ApiError::rate_limited(why)),
            several => Err(ApiError::rate_limited(&format!("[{}]", several.join(", ")))),
        }
    }
}

// === impl LimitConfig ===

impl LimitConfig {
    /// Creates the buckets, which are full. The error names the invalid field and the reason.
    fn checked(&self) -> std::result::Result<Buckets, String> {
        for (field, value) in [("burst", self.burst), ("qps", self.qps)] {
            if value <= 0 {
                return Err(format!("{field}: Invalid value: {value}: must be positive"));
            }
        }
        let rate = Rate { per_second: self.qps.into(), burst: self.burst.into() };
        let size = usize::try_from(self.cache_size);
        match (self.scope, size) {
            // One bucket for all requests. As upstream, the size is ignored.
            (Scope::Server, _) => Ok(Buckets::new(rate, 1)),
            (_, Ok(0)) => Ok(Buckets::new(rate, DEFAULT_CACHE_SIZE)),
            (_, Ok(size)) => Ok(Buckets::new(rate, size)),
            (_, Err(_)) => {
                Err(format!("cacheSize: Invalid value: {}: must not be negative", self.cache_size))
            }
        }
    }
}

// === impl Scope ===

impl Scope {
    /// The parts of the key of a request's bucket.
    fn key_parts<'a>(self, namespace: &'a str, user: &'a str, event: &'a Value) -> Vec<&'a str> {
        match self {
            Self::Server => Vec::new(),
            Self::Namespace => vec![namespace],
            Self::User => vec![user],
            Self::SourceAndObject => {
                // The group events.k8s.io names these fields differently.
                let first = |names: [&str; 2]| {
                    names.map(|name| &event[name]).into_iter().find(|value| value.is_object())
                };
                let (source, object) =
                    (first(["source", "deprecatedSource"]), first(["involvedObject", "regarding"]));
                let text = |owner: Option<&'a Value>, field: &str| {
                    owner.and_then(|owner| owner[field].as_str()).unwrap_or_default()
                };
                let source = ["component", "host"].map(|field| text(source, field));
                let object =
                    ["kind", "namespace", "name", "uid", "apiVersion"].map(|field| text(object, field));
                source.into_iter().chain(object).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    const HEAD: &str = "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n\
        - name: EventRateLimit\n  configuration:\n    apiVersion: eventratelimit.admission.k8s.io/v1alpha1\n    \
        kind: Configuration\n    limits: ";

    fn plugin(limits: &str) -> std::result::Result<EventRateLimit, String> {
        EventRateLimit::read(&mut PluginConfigs::parse(&format!("{HEAD}{limits}\n"), Path::new(""))?)
    }

    fn refusal(plugin: &EventRateLimit, namespace: &str, user: &str, event: &Value) -> Option<String> {
        plugin.accept(namespace, user, event).err().map(|error| error.message)
    }

    #[tokio::test(start_paused = true)]
    async fn each_namespace_has_its_own_burst_and_rate() {
        let plugin = plugin("[{type: Namespace, qps: 2, burst: 3}]").unwrap();
        let write = |namespace: &str| refusal(&plugin, namespace, "ann", &json!({}));
        for _ in 0..3 {
            assert_eq!(write("a"), None);
        }
        assert_eq!(write("a").unwrap(), "Too many requests: limit reached on type Namespace for key a");
        assert_eq!(write("b"), None);
        tokio::time::advance(std::time::Duration::from_millis(500)).await;
        assert_eq!(write("a"), None);
        assert!(write("a").is_some());
        tokio::time::advance(std::time::Duration::from_secs(3600)).await;
        assert_eq!((0..10).filter(|_| write("a").is_none()).count(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn all_limits_count_and_all_refusals_are_reported() {
        let plugin = plugin("[{type: Server, qps: 1, burst: 2}, {type: User, qps: 1, burst: 1}]").unwrap();
        assert_eq!(refusal(&plugin, "a", "ann", &json!({})), None);
        let of_user = "Too many requests: limit reached on type User for key ann";
        assert_eq!(refusal(&plugin, "a", "ann", &json!({})).unwrap(), of_user);
        let both = "Too many requests: [limit reached on type Server for key , limit reached on type User for key ann]";
        assert_eq!(refusal(&plugin, "a", "ann", &json!({})).unwrap(), both);
        let error = plugin.accept("a", "bob", &json!({})).unwrap_err();
        assert_eq!((error.code, error.details["retryAfterSeconds"].as_u64()), (429, Some(1)));
    }

    #[tokio::test(start_paused = true)]
    async fn both_groups_of_events_share_the_bucket_of_their_object() {
        let plugin = plugin("[{type: SourceAndObject, qps: 1, burst: 1, cacheSize: 10}]").unwrap();
        let object = json!({"kind": "Pod", "name": "p", "uid": "1"});
        let core = json!({"source": {"component": "kubelet"}, "involvedObject": object});
        let new = json!({"deprecatedSource": {"component": "kubelet"}, "regarding": object});
        let other =
            json!({"source": {"component": "kubelet"}, "involvedObject": {"kind": "Podp", "uid": "1"}});
        assert_eq!(refusal(&plugin, "a", "ann", &core), None);
        assert!(refusal(&plugin, "a", "ann", &new).unwrap().ends_with("for key kubeletPodp1"));
        assert_eq!(refusal(&plugin, "a", "ann", &other), None);
        let long = json!({"source": {"component": "x".repeat(5000)}});
        assert_eq!(refusal(&plugin, "a", "ann", &long), None);
        assert!(refusal(&plugin, "a", "ann", &long).unwrap().len() < MAX_SHOWN_KEY + 100);
    }

    #[test]
    fn invalid_limits_are_refused_with_their_field() {
        for (limits, says) in [
            ("[]", "limits: Invalid value: []: must not be empty"),
            ("[{type: Server, qps: 1}]", "limits[0].burst: Invalid value: 0: must be positive"),
            ("[{type: Server, qps: -1, burst: 1}]", "limits[0].qps: Invalid value: -1: must be positive"),
            ("[{type: User, qps: 1, burst: 1, cacheSize: -1}]", "cacheSize: Invalid value: -1"),
            ("[{type: Pod, qps: 1, burst: 1}]", "unknown variant `Pod`, expected one of `Server`"),
            ("[{type: User, qps: 1, burst: 1, size: 1}]", "unknown field `size`"),
        ] {
            let refused = plugin(limits).err().unwrap();
            assert!(refused.contains(says), "{limits}: {refused}");
        }
        assert!(EventRateLimit::read(&mut PluginConfigs::default()).is_err());
        // The size has no meaning for the one bucket of the server.
        assert!(plugin("[{type: Server, qps: 1, burst: 1, cacheSize: -1}]").is_ok());
    }
}
