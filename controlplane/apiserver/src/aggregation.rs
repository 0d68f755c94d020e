//! Aggregation: group versions that other servers in the cluster serve.
//!
//! | part | module |
//! |---|---|
//! | TLS, with the certificate for which the other server trusts the `X-Remote-*` headers | `client` |
//! | sends requests | `forward` |
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
mod v3_conversion;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use v3_conversion::fuzz as fuzz_conversion;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::ArcSwap;
use serde_json::{Value, json};

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
    version_priority: i64,
    /// The TLS configuration, or the reason why it is invalid.
    tls: Result<Arc<rustls::ClientConfig>, String>,
    /// Identifies the connection: service and TLS settings as text.
    connection: String,
    /// The APIResourceList of the last check. `None` if the server is unavailable.
    resources: Mutex<Option<Arc<Value>>>,
    documents: Arc<openapi::Documents>,
}

/// The service in front of another server: `spec.service` of an APIService.
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
        all.sort_by(|a, b| (&a.group, -a.version_priority).cmp(&(&b.group, -b.version_priority)));
        all
    }
}

// === impl Remote ===

impl Remote {
    /// Reads an API service.
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
            version_priority: spec["versionPriority"].as_i64().unwrap_or(0),
            tls: client::tls(front_proxy, spec),
            connection: json!([service, spec["caBundle"], spec["insecureSkipTLSVerify"]]).to_string(),
            resources: Mutex::new(None),
            documents: Arc::default(),
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

    /// Whether both have the same service and TLS settings.
    pub(crate) fn has_connection_of(&self, other: &Self) -> bool {
        self.connection == other.connection
    }

    /// The APIResourceList, if the server is available.
    pub(crate) fn resources(&self) -> Option<Arc<Value>> {
        self.resources.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Keeps the resources and documents of `former`, which has the same connection. Other fields, such as priorities,
    /// may differ.
    pub(crate) fn after(self, former: &Self) -> Self {
        let resources = Mutex::new(former.resources());
        Self { resources, documents: former.documents.clone(), ..self }
    }

    pub(crate) fn set_resources(&self, resources: Option<Value>) {
        *self.resources.lock().unwrap_or_else(PoisonError::into_inner) = resources.map(Arc::new);
    }
}
