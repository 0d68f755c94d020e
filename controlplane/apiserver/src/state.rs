//! The services of a server. All requests share them.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use coracle_store::Store;
use ipnetwork::IpNetwork;
use tokio_util::sync::CancellationToken;

use crate::{
    admit::Admission,
    aggregation::{FrontProxy, Remotes, forward::Forwarder},
    allocate::Allocator,
    audit::Auditor,
    authn::{Authenticators, User},
    authz::Authorizers,
    browsers::Browsers,
    cache::{ByteLimits, Cache},
    component_pages::ComponentPages,
    config::{EncryptionHealth, KubeletTls, ServerFeatures},
    drain::Drain,
    flow_control::FlowControl,
    in_flight::{InFlight, WatchPermit},
    large_requests::LargeRequests,
    merged_openapi::Merged,
    metrics::{ComponentMetrics, LongRunning, Metrics, Request},
    quota_locks::Locks,
    registry::Registry,
    store_probe::StoreMonitor,
    usage_samples::Samples,
    write_turns::WriteTurns,
};

/// The services of a server. Handlers and the write pipeline use them. No service depends on this type.
pub(crate) struct State {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) store_monitor: StoreMonitor,
    pub(crate) cache: Arc<Cache>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) authenticators: Authenticators,
    pub(crate) authorizers: Arc<Authorizers>,
    pub(crate) admission: Admission,
    /// Allocates addresses and ports of services.
    pub(crate) allocator: Allocator,
    /// Locks of namespaces with quotas. A request holds the lock of its namespace from the check of the quotas to the
    /// commit.
    pub(crate) quota_locks: Locks,
    /// Turns of the retries of writes.
    pub(crate) write_turns: WriteTurns,
    pub(crate) auditor: Option<Arc<Auditor>>,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) large_requests: LargeRequests,
    pub(crate) flow_control: FlowControl,
    pub(crate) metrics: Arc<Metrics>,
    /// Metrics of other components in this process.
    pub(crate) component_metrics: Option<ComponentMetrics>,
    /// The state of the key management services that encrypt the store.
    pub(crate) encryption_health: Option<EncryptionHealth>,
    /// `/statusz` and `/flagz`.
    pub(crate) pages: ComponentPages,
    pub(crate) advertise: SocketAddr,
    pub(crate) kubelet: KubeletTls,
    pub(crate) front_proxy: FrontProxy,
    pub(crate) remotes: Remotes,
    pub(crate) merged: Arc<Merged>,
    /// The last usage samples of each node.
    pub(crate) usage: Samples,
    pub(crate) request_timeout: Duration,
    pub(crate) features: ServerFeatures,
    /// Time after which an event is deleted.
    pub(crate) event_lifetime: Duration,
    /// Maximum encoded bytes of the objects in namespaces.
    pub(crate) byte_limits: ByteLimits,
    /// Maximum validity of service account tokens in seconds.
    pub(crate) max_token_seconds: Option<i64>,
    /// Whether tokens of pods with the validity that the plugin ServiceAccount requests are accepted for a year.
    pub(crate) extend_tokens: bool,
    /// Minimum duration of a watch whose request has no timeout; 0: no limit.
    pub(crate) min_watch: Duration,
    /// Time over which the ends of watches are spread at the shutdown.
    pub(crate) watch_grace: Duration,
    /// Whether priority levels limit the requests in flight (API Priority and Fairness).
    pub(crate) priority_and_fairness: bool,
    /// Probability that a request asks its HTTP/2 client to connect again; 0 for never.
    pub(crate) goaway_chance: f64,
    /// The ranges of external IPs that nodes permit. `None` if the server does not know the ranges.
    pub(crate) external_ips: Option<Vec<IpNetwork>>,
    /// The settings for browsers.
    pub(crate) browsers: Browsers,
    /// URL of the keys of service account tokens in the discovery document.
    pub(crate) keys_url: Option<String>,
    /// The parts of the control plane that run in this process.
    pub(crate) own_components: Vec<&'static str>,
    /// Token that is cancelled at the start of the shutdown. `/readyz` then fails, but requests are accepted for the
    /// configured delay.
    pub(crate) stopping: CancellationToken,
    /// Refuses requests between the delay and the end of the listener. `None` if the listener ends after the delay.
    pub(crate) drain: Option<Arc<Drain>>,
    /// Token that is cancelled when the server accepts no more connections. Watches end after their queued events.
    pub(crate) shutdown: CancellationToken,
}

// === impl State ===

impl State {
    /// Counts a long-running request from the network. `watch` is the permit of a watch, or `None` if the request has
    /// no such permit. `caller` is `None` if the client is not authenticated.
    pub(crate) fn begin_long(
        &self,
        request: &Request,
        watch: Option<WatchPermit>,
        caller: Option<&User>,
    ) -> LongRunning {
        // Watches of members of `system:masters` have no permit.
        let new = || caller.map(|caller| self.in_flight.reader(caller));
        let reader = watch.as_ref().map(|permit| permit.reader().clone()).or_else(new);
        self.metrics.serving.begin_long(request, watch, reader)
    }

    /// The client of aggregated servers.
    pub(crate) fn forwarder(&self) -> Forwarder {
        Forwarder { cache: self.cache.clone(), timeout: self.request_timeout }
    }
}
