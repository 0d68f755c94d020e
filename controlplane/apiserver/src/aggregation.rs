//! Aggregation: group versions that other servers in the cluster serve.
//!
//! | part | module |
//! |---|---|
//! | TLS, with the certificate for which the other server trusts the `X-Remote-*` headers | `client` |
//! | sends requests | `forward` |
//! | idle connections | `pool` |
//! | group versions of other servers in discovery | `discovery` |
//! | OpenAPI documents of other servers | `openapi`, `v3_conversion` |
//! | maintains the API services of the group versions that this server serves itself | `controllers/api_services.rs` |
//! | watches the API services of other servers, checks that they respond | `controllers/aggregation.rs` |
//! | forwards clients' requests | `aggregated.rs` |
//!
//! Only a cluster administrator may create API services. Requests go to endpoints or to the external name of a Service,
//! never to loopback or link-local addresses.

mod client;
pub(crate) mod discovery;
pub(crate) mod forward;
pub(crate) mod openapi;
mod pool;
mod v3_conversion;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use v3_conversion::fuzz as fuzz_conversion;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use arc_swap::ArcSwap;
use coracle_kinds::resource::version_preference;
use serde_json::Value;

pub use client::FrontProxy;

/// Group versions of other servers, by group and version.
#[derive(Default)]
pub(crate) struct Remotes {
    current: ArcSwap<RemoteMap>,
}

/// Servers by group and version.
pub(crate) type RemoteMap = BTreeMap<(String, String), Arc<Remote>>;

/// One group version of another server.
pub(crate) struct Remote {
    pub(crate) group: String,
    pub(crate) version: String,
    service: ServiceReference,
    group_priority: i64,
    version_priority: i64,
    /// The TLS configuration, or the reason why it is invalid.
    tls: Result<Arc<rustls::ClientConfig>, String>,
    observed: Mutex<Observed>,
    documents: Arc<openapi::Documents>,
    pool: Arc<pool::Pool>,
}

/// The result of the last check of a server.
#[derive(Clone, Default)]
struct Observed {
    is_available: bool,
    /// The resources of the server. `None` if the resources could not be read.
    discovered: Option<Discovered>,
}

/// The resources of a group version of another server.
#[derive(Clone, Default)]
pub(crate) struct Discovered {
    /// The list of resources, as in the aggregated discovery document.
    resources: Arc<Value>,
    /// ETag of the server's aggregated document. `None` if the server sent no usable ETag, or if the resources come
    /// from the APIResourceList.
    tag: Option<String>,
}

/// The service in front of another server: `spec.service` of an APIService.
#[derive(PartialEq, Eq)]
pub(crate) struct ServiceReference {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) port: u16,
}

// === impl Remotes ===

impl Remotes {
    /// The server for a path: `/apis/<group>/<version>`, a path below it, or the OpenAPI v3 document of the group
    /// version.
    pub(crate) fn find(&self, path: &str) -> Option<Arc<Remote>> {
        let document = path.strip_prefix("/openapi/v3").filter(|path| path.split('/').count() == 4);
        let mut parts = document.unwrap_or(path).trim_start_matches('/').split('/');
        if parts.next() != Some("apis") {
            return None;
        }
        let (group, version) = (parts.next()?.to_owned(), parts.next()?.to_owned());
        self.current.load().get(&(group, version)).cloned()
    }

    /// All servers, by group and version.
    pub(crate) fn current(&self) -> Arc<RemoteMap> {
        self.current.load_full()
    }

    /// Replaces the set of servers.
    pub(crate) fn replace(&self, current: RemoteMap) {
        self.current.store(Arc::new(current));
    }

    /// All servers by group. Within a group the highest priority comes first.
    pub(crate) fn all(&self) -> Vec<Arc<Remote>> {
        let mut all: Vec<Arc<Remote>> = self.current.load().values().cloned().collect();
        all.sort_by_cached_key(|remote| {
            (remote.group.clone(), -remote.version_priority, version_preference(&remote.version))
        });
        all
    }
}

// === impl Remote ===

impl Remote {
    /// Reads an APIService. As upstream, the server counts as available until the first check if the condition
    /// `Available` is true.
    pub(crate) fn read(front_proxy: &FrontProxy, object: &Value) -> Self {
        let spec = &object["spec"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let service = &spec["service"];
        let port = service["port"].as_u64().and_then(|port| u16::try_from(port).ok()).unwrap_or(443);
        Self {
            group: text(&spec["group"]),
            version: text(&spec["version"]),
            service: ServiceReference {
                namespace: text(&service["namespace"]),
                name: text(&service["name"]),
                port,
            },
            group_priority: spec["groupPriorityMinimum"].as_i64().unwrap_or(0),
            version_priority: spec["versionPriority"].as_i64().unwrap_or(0),
            tls: client::tls(front_proxy, spec),
            observed: Mutex::new(Observed { is_available: was_available(object), discovered: None }),
            documents: Arc::default(),
            pool: Arc::default(),
        }
    }

    /// The name of the APIService object.
    pub(crate) fn object_name(&self) -> String {
        format!("{}.{}", self.version, self.group)
    }

    /// The service in front of the server.
    pub(crate) fn service(&self) -> &ServiceReference {
        &self.service
    }

    /// The path of the APIResourceList. Source: `AvailableConditionController.sync`.
    pub(crate) fn path(&self) -> String {
        match self.group.as_str() {
            "" => format!("/api/{}", self.version),
            group => format!("/apis/{group}/{}", self.version),
        }
    }

    /// The URL of a path, for messages. The host is the name in the server's certificate.
    pub(crate) fn url(&self, path: &str) -> String {
        let ServiceReference { namespace, name, port } = &self.service;
        format!("https://{name}.{namespace}.svc:{port}{path}")
    }

    /// Whether the server passed the last check. Requests to an unavailable server are refused.
    pub(crate) fn is_available(&self) -> bool {
        self.observed().is_available
    }

    /// The resources. `None` if the server is unavailable, or if the resources could not be read.
    fn discovered(&self) -> Option<Discovered> {
        self.observed().discovered.clone()
    }

    /// Stores the result of a check. `None` means that the server is unavailable. `Some(None)` means that the server is
    /// available, but its resources could not be read.
    pub(crate) fn observe(&self, found: Option<Option<Discovered>>) {
        let is_available = found.is_some();
        *self.observed() = Observed { is_available, discovered: found.flatten() };
    }

    /// Replaces `former`, and takes over the result of its last check. So a change of the APIService alone does not
    /// make the server unavailable: the next check decides. The documents are taken over only if the service is the
    /// same. Idle connections are not taken over, because they were verified with the former CA bundle.
    pub(crate) fn after(self, former: &Self) -> Self {
        let mut observed = former.observed().clone();
        let is_same = self.service == former.service;
        let documents = if is_same { former.documents.clone() } else { Arc::default() };
        if let Some(discovered) = observed.discovered.as_mut().filter(|_| !is_same) {
            // The ETag belongs to the former server.
            discovered.tag = None;
        }
        Self { observed: Mutex::new(observed), documents, ..self }
    }

    /// Closes the idle connections.
    pub(crate) fn close_idle(&self) {
        self.pool.clear();
    }

    fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The condition `Available` of an API service.
pub(crate) fn available(object: &Value) -> Option<&Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == "Available")
}

/// Whether the condition `Available` of an API service is true.
pub(crate) fn was_available(object: &Value) -> bool {
    available(object).is_some_and(|known| known["status"] == "True")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn remote(change: impl FnOnce(&mut Value)) -> Remote {
        let service = json!({"namespace": "d", "name": "far", "port": 8443});
        let mut object = json!({"spec": {"group": "far.io", "version": "v1", "service": service}});
        change(&mut object);
        Remote::read(&FrontProxy::default(), &object)
    }

    #[test]
    fn a_server_is_available_by_its_condition_until_the_first_check() {
        let of = |status: &str| {
            remote(|object| {
                object["status"] = json!({"conditions": [{"type": "Available", "status": status}]})
            })
        };
        assert!(of("True").is_available() && !of("False").is_available() && !remote(|_| ()).is_available());
        let remote = of("True");
        remote.observe(None);
        assert!(!remote.is_available());
        // The server responds, but its list cannot be read.
        remote.observe(Some(None));
        assert!(remote.is_available() && remote.discovered().is_none());
    }

    #[test]
    fn a_new_ca_bundle_or_port_refuses_no_requests_before_the_next_check() {
        let former = remote(|_| ());
        let tag = Some("\"1\"".to_owned());
        former.observe(Some(Some(Discovered { tag: tag.clone(), ..Discovered::default() })));
        let known = |remote: &Remote| remote.discovered().map(|discovered| discovered.tag);
        let insecure = remote(|object| object["spec"]["insecureSkipTLSVerify"] = true.into()).after(&former);
        assert_eq!((insecure.is_available(), known(&insecure)), (true, Some(tag)));
        assert!(!Arc::ptr_eq(&insecure.pool, &former.pool), "the new CA bundle is for all connections");
        assert!(Arc::ptr_eq(&insecure.documents, &former.documents));
        let moved = remote(|object| object["spec"]["service"]["port"] = 443.into()).after(&former);
        assert_eq!((moved.is_available(), known(&moved)), (true, Some(None)));
        assert!(!Arc::ptr_eq(&moved.documents, &former.documents));
    }

    #[test]
    fn messages_name_the_service() {
        let far = remote(|_| ());
        assert_eq!(far.url(&far.path()), "https://far.d.svc:8443/apis/far.io/v1");
        assert_eq!(remote(|object| object["spec"]["group"] = "".into()).path(), "/api/v1");
    }
}
