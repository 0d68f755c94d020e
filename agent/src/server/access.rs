//! Authentication by bearer token and authorization of callers, both by the API server.
//!
//! A TokenReview checks a token and a SubjectAccessReview checks a permission; both are cached as in the kubelet. The
//! API server itself and administrators are authorized by their certificate, so that they get responses during an
//! outage.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use coracle_connections::LogLimit;
use coracle_error_chain::chain;
use http::{HeaderMap, StatusCode, header};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::Api;
use kube::api::PostParams;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use super::respond::Refused;
use super::route::Route;

/// Time to live in the cache of a valid and of an invalid token.
const VALID_TOKEN_TTL: Duration = Duration::from_secs(120);
const INVALID_TOKEN_TTL: Duration = Duration::from_secs(10);
/// Time to live in the cache of a granted and of a denied permission, as in the kubelet.
const GRANTED_TTL: Duration = Duration::from_secs(300);
const DENIED_TTL: Duration = Duration::from_secs(30);
/// Capacity of each cache.
const CAPACITY: usize = 1024;
/// Maximum concurrent reviews: callers without a valid token must not exhaust the API server.
const REVIEWS: usize = 16;
/// Timeout of one review, with its wait for a permit.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a token in bytes.
const TOKEN_MAX: usize = 16 << 10;

/// An authenticated caller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct User {
    pub(super) name: String,
    pub(super) uid: Option<String>,
    pub(super) groups: Vec<String>,
    pub(super) extra: BTreeMap<String, Vec<String>>,
}

/// The permission that a request needs: a verb on one of these subresources of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RequiredPermission {
    pub(super) verb: &'static str,
    pub(super) subresources: &'static [&'static str],
}

/// Reviews tokens and permissions by the API server, and caches the results.
pub struct Access {
    client: kube::Client,
    node: String,
    tokens: Cache<[u8; 32], Option<User>>,
    decisions: Cache<(User, &'static str, &'static str), bool>,
    permits: Semaphore,
    token_failures: LogLimit,
    access_failures: LogLimit,
}

struct Cache<K, V>(Mutex<HashMap<K, (Instant, V)>>);

// === impl RequiredPermission ===

impl RequiredPermission {
    /// The permission is derived from the route and not from the path. So no spelling of a path is authorized as one
    /// resource and served as another. Streams need `create` with every method: a WebSocket begins with GET.
    pub(super) fn of(method: &http::Method, route: Option<&Route>) -> Self {
        let verb = match *method {
            http::Method::POST => "create",
            http::Method::PUT => "update",
            http::Method::PATCH => "patch",
            http::Method::DELETE => "delete",
            _ => "get",
        };
        let (verb, subresources): (_, &[&str]) = match route {
            Some(Route::Healthz) => (verb, &["healthz", "proxy"]),
            Some(Route::Configz) => (verb, &["configz", "proxy"]),
            Some(Route::Statusz) => (verb, &["statusz"]),
            // The flags are as confidential as the configuration.
            Some(Route::Flagz) => (verb, &["configz"]),
            Some(Route::Pods | Route::RunningPods) => (verb, &["pods", "proxy"]),
            Some(Route::StatsSummary) => (verb, &["stats"]),
            Some(
                Route::Metrics
                | Route::MetricsResource
                | Route::MetricsCadvisor
                | Route::MetricsProbes
                | Route::MetricsSlis,
            ) => (verb, &["metrics"]),
            Some(Route::Checkpoint(_)) => (verb, &["checkpoint"]),
            Some(Route::NodeLogs { .. }) => (verb, &["log"]),
            Some(Route::Exec(_) | Route::Attach(_) | Route::PortForward { .. }) => ("create", &["proxy"]),
            Some(Route::Logs { .. }) | None => (verb, &["proxy"]),
        };
        Self { verb, subresources }
    }
}

/// The token of a request.
pub(super) fn token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    let is_token = scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() && token.len() <= TOKEN_MAX;
    is_token.then_some(token)
}

// === impl Access ===

impl Access {
    /// Access to the kubelet API of this node.
    #[must_use]
    pub fn new(client: kube::Client, node: &str) -> Self {
        let node = node.to_owned();
        Self {
            client,
            node,
            tokens: Cache::new(),
            decisions: Cache::new(),
            permits: Semaphore::new(REVIEWS),
            token_failures: LogLimit::default(),
            access_failures: LogLimit::default(),
        }
    }

    /// The name of this node in the API.
    pub(super) fn node(&self) -> &str {
        &self.node
    }

    /// The user of a token for the API server's audience. A token for another audience is unknown.
    pub(super) async fn authenticate(&self, token: &str) -> Result<User, Refused> {
        let unauthorized = || Refused(StatusCode::UNAUTHORIZED, "Unauthorized".to_owned());
        let key = Sha256::digest(token.as_bytes()).into();
        let known = match self.tokens.get(&key) {
            Some(known) => known,
            None => {
                let found = self.review_token(token).await.map_err(|error| {
                    if let Some(suppressed) = self.token_failures.allow_without_source() {
                        tracing::warn!(error, suppressed, "cannot review a token for the kubelet API");
                    }
                    unauthorized()
                })?;
                let ttl = if found.is_some() { VALID_TOKEN_TTL } else { INVALID_TOKEN_TTL };
                self.tokens.put(key, found.clone(), ttl);
                found
            }
        };
        known.ok_or_else(unauthorized)
    }

    /// Fails if no subresource is allowed.
    pub(super) async fn authorize(&self, user: &User, needed: RequiredPermission) -> Result<(), Refused> {
        let of = |subresource: &str| {
            format!("user={}, verb={}, resource=nodes, subresource={subresource}", user.name, needed.verb)
        };
        for subresource in needed.subresources.iter().copied() {
            let key = (user.clone(), needed.verb, subresource);
            let allowed = match self.decisions.get(&key) {
                Some(allowed) => allowed,
                None => {
                    let allowed =
                        self.review_access(user, needed.verb, subresource).await.map_err(|error| {
                            if let Some(suppressed) = self.access_failures.allow_without_source() {
                                tracing::warn!(
                                    error,
                                    suppressed,
                                    "cannot review an access to the kubelet API"
                                );
                            }
                            let text = format!("Authorization error ({})", of(subresource));
                            Refused(StatusCode::INTERNAL_SERVER_ERROR, text)
                        })?;
                    self.decisions.put(key, allowed, if allowed { GRANTED_TTL } else { DENIED_TTL });
                    allowed
                }
            };
            if allowed {
                return Ok(());
            }
        }
        // The kubelet's text for a list of subresources.
        let all = needed.subresources.join(" ");
        let message = format!(
            "Forbidden (user={}, verb={}, resource=nodes, subresource(s)=[{all}])\n",
            user.name, needed.verb
        );
        Err(Refused(StatusCode::FORBIDDEN, message))
    }

    async fn review_token(&self, token: &str) -> Result<Option<User>, String> {
        let review = TokenReview {
            spec: TokenReviewSpec { token: token.to_owned(), audiences: None },
            ..TokenReview::default()
        };
        let status = self.create(&review).await?.status.unwrap_or_default();
        let user = status.user.filter(|_| status.authenticated == Some(true));
        Ok(user.map(|user| User {
            name: user.username.unwrap_or_default(),
            uid: user.uid,
            groups: user.groups.unwrap_or_default(),
            extra: user.extra.unwrap_or_default(),
        }))
    }

    async fn review_access(&self, user: &User, verb: &str, subresource: &str) -> Result<bool, String> {
        let attributes = ResourceAttributes {
            verb: Some(verb.to_owned()),
            version: Some("v1".to_owned()),
            resource: Some("nodes".to_owned()),
            subresource: Some(subresource.to_owned()),
            name: Some(self.node.clone()),
            ..ResourceAttributes::default()
        };
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(user.name.clone()),
                uid: user.uid.clone(),
                groups: Some(user.groups.clone()),
                extra: Some(user.extra.clone()),
                resource_attributes: Some(attributes),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let status = self.create(&review).await?.status.unwrap_or_default();
        Ok(status.allowed && status.denied != Some(true))
    }

    async fn create<K>(&self, review: &K) -> Result<K, String>
    where
        K: kube::Resource<DynamicType = (), Scope = kube::core::ClusterResourceScope>
            + serde::Serialize
            + serde::de::DeserializeOwned
            + Clone
            + std::fmt::Debug,
    {
        let review = async {
            let _permit = self.permits.acquire().await.map_err(|closed| closed.to_string())?;
            let api: Api<K> = Api::all(self.client.clone());
            api.create(&PostParams::default(), review).await.map_err(|error| chain(&error))
        };
        tokio::time::timeout(TIMEOUT, review).await.map_err(|_elapsed| "no answer in time".to_owned())?
    }
}

// === impl Cache ===

impl<K: Eq + Hash, V: Clone> Cache<K, V> {
    fn new() -> Self {
        Self(Mutex::default())
    }

    fn get(&self, key: &K) -> Option<V> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.get(key).filter(|(until, _)| Instant::now() < *until).map(|(_, value)| value.clone())
    }

    fn put(&self, key: K, value: V, time: Duration) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if entries.len() >= CAPACITY {
            entries.retain(|_, (until, _)| now < *until);
        }
        if entries.len() >= CAPACITY {
            entries.clear();
        }
        entries.insert(key, (now + time, value));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::{Value, json};

    use super::*;

    /// An API server that knows one token, with a user that may get `nodes/metrics`; and the number of its reviews.
    fn access() -> (Access, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            counted.fetch_add(1, Ordering::Relaxed);
            async move {
                let body = request.into_body().collect_bytes().await.expect("body");
                let mut review: Value = serde_json::from_slice(&body).expect("json");
                review["status"] = if review["kind"] == "TokenReview" {
                    let good = review["spec"]["token"] == "good" && review["spec"]["audiences"].is_null();
                    json!({"authenticated": good, "user": {"username": "prometheus", "groups": ["g"]}})
                } else {
                    let asked = &review["spec"]["resourceAttributes"];
                    let good = review["spec"]["user"] == "prometheus"
                        && asked["verb"] == "get"
                        && asked["resource"] == "nodes"
                        && asked["name"] == "n1"
                        && asked["subresource"] == "metrics";
                    json!({"allowed": good})
                };
                let answer = http::Response::new(kube::client::Body::from(review.to_string().into_bytes()));
                Ok::<_, std::convert::Infallible>(answer)
            }
        });
        (Access::new(kube::Client::new(service, "default"), "n1"), count)
    }

    #[tokio::test]
    async fn tokens_and_permissions_are_reviewed_once() {
        let (access, count) = access();
        let metrics = RequiredPermission::of(&http::Method::GET, Some(&Route::Metrics));
        for _ in 0..3 {
            let user = access.authenticate("good").await.expect("known");
            assert_eq!(user.name, "prometheus");
            access.authorize(&user, metrics).await.expect("allowed");
        }
        assert_eq!(count.load(Ordering::Relaxed), 2);
        let user = access.authenticate("good").await.expect("known");
        let pods = RequiredPermission::of(&http::Method::GET, Some(&Route::Pods));
        let refused = access.authorize(&user, pods).await.expect_err("refused");
        assert_eq!(refused.0, StatusCode::FORBIDDEN);
        let message = "Forbidden (user=prometheus, verb=get, resource=nodes, subresource(s)=[pods proxy])\n";
        assert_eq!(refused.1, message);
        for _ in 0..3 {
            assert_eq!(access.authenticate("bad").await.expect_err("unknown").0, StatusCode::UNAUTHORIZED);
        }
        // Two for pods (`pods`, then `proxy`), one for the unknown token.
        assert_eq!(count.load(Ordering::Relaxed), 5);
    }

    #[tokio::test]
    async fn failed_reviews_write_one_line_a_minute() {
        let service = tower::service_fn(|_request: http::Request<kube::client::Body>| async {
            let mut answer = http::Response::new(kube::client::Body::from(b"{}".to_vec()));
            *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            Ok::<_, std::convert::Infallible>(answer)
        });
        let access = Access::new(kube::Client::new(service, "default"), "n1");
        let metrics = RequiredPermission::of(&http::Method::GET, Some(&Route::Metrics));
        for _ in 0..3 {
            access.authenticate("good").await.expect_err("no review");
            access.authorize(&User::default(), metrics).await.expect_err("no review");
        }
        assert_eq!(access.token_failures.allow_without_source(), None);
        assert_eq!(access.access_failures.allow_without_source(), None);
    }

    #[test]
    fn streams_need_create_and_unknown_paths_need_proxy() {
        let target = Route::of("/exec/ns/p/c");
        let get = |route: Option<&Route>| RequiredPermission::of(&http::Method::GET, route);
        assert_eq!(get(target.as_ref()), RequiredPermission { verb: "create", subresources: &["proxy"] });
        for spelling in ["//exec/ns/p/c", "/exec/ns/p/c/", "/e%78ec/ns/p/c", "/stats/../exec/ns/p/c"] {
            let route = Route::of(spelling);
            let is_stream = matches!(route, Some(Route::Exec(_)));
            assert!(route.is_none() || is_stream, "{spelling}");
            assert_eq!(get(route.as_ref()).subresources, ["proxy"]);
        }
        assert_eq!(get(Route::of("/stats/summary").as_ref()).subresources, ["stats"]);
        assert_eq!(get(Route::of("/healthz/ping").as_ref()).subresources, ["healthz", "proxy"]);
        assert_eq!(get(Route::of("/runningpods/").as_ref()).subresources, ["pods", "proxy"]);
        assert_eq!(get(Route::of("/logs/syslog").as_ref()).subresources, ["log"]);
        let checkpoint = Route::of("/checkpoint/ns/p/c");
        let needed = RequiredPermission::of(&http::Method::POST, checkpoint.as_ref());
        assert_eq!(needed, RequiredPermission { verb: "create", subresources: &["checkpoint"] });
    }

    #[test]
    fn the_cache_is_bounded() {
        let cache = Cache::<usize, ()>::new();
        (0..3 * CAPACITY).for_each(|key| cache.put(key, (), GRANTED_TTL));
        assert!(cache.0.lock().expect("lock").len() <= CAPACITY);
        cache.put(1, (), Duration::ZERO);
        assert_eq!(cache.get(&1), None);
    }
}
