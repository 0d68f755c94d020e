//! Opens a server: creates the services from the configuration, then the default objects, and starts the controllers.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_kinds::initializers;
use coracle_store::Store;
use futures::future::{BoxFuture, LocalBoxFuture};
use http::{HeaderValue, StatusCode};
use tokio_util::sync::CancellationToken;

use super::{
    Apiserver,
    reload::{self, AuthenticationFile},
};
use crate::{
    admit::{Admission, PluginConfigs, Plugins},
    aggregation::Remotes,
    allocate::Allocator,
    authn::{
        Authenticators, IssuerConfig, OidcConfig, Sources, User,
        legacy_use::{self, LabelRequest, TokenUseQueue},
        service_account::Tokens,
        token_keys::TokenKeys,
    },
    authz::Authorizers,
    bootstrap,
    browsers::{AllowedOrigins, Browsers},
    cache::Cache,
    component_pages::ComponentPages,
    config::{ApiserverConfig, OpenError, ServerOptions, open_audit},
    controllers::{
        aggregation, custom_resources, flow_control, initialization, policy_status, quota_status, unreadable,
        usage_history,
    },
    drain::Drain,
    error::ApiError,
    flow_control::FlowControl,
    in_flight::InFlight,
    initialization::Initialization,
    large_requests::LargeRequests,
    merged_openapi::Merged,
    metrics::Metrics,
    namespace_creator::NamespaceCreator,
    quota_locks::Locks,
    registry::Registry,
    state::State,
    store_probe::StoreMonitor,
    usage_history::UsageHistory,
    usage_samples::Samples,
    write_turns::WriteTurns,
};

impl Apiserver {
    /// Loads the objects, and creates missing default objects. Must be called within a tokio runtime. Cancelling
    /// `stopping` ends the server, after the configured delay.
    ///
    /// The future is boxed, because the crate of the caller would otherwise compile the tasks of the server.
    ///
    /// # Errors
    /// [`OpenError`] if the store, a key or a file cannot be used.
    pub fn open(
        config: ApiserverConfig,
        store: Arc<dyn Store>,
        stopping: CancellationToken,
    ) -> LocalBoxFuture<'static, Result<Self, OpenError>> {
        Box::pin(Self::open_parts(config, store, stopping))
    }

    async fn open_parts(
        mut config: ApiserverConfig,
        store: Arc<dyn Store>,
        stopping: CancellationToken,
    ) -> Result<Self, OpenError> {
        let shutdown = CancellationToken::new();
        let drain = config.options.send_retry_after.then(Arc::<Drain>::default);
        let delay = ShutdownDelay {
            delay: config.shutdown_delay,
            drain: drain.clone(),
            drain_limit: config.request_timeout,
        };
        coracle_threads::spawn(delay.run(stopping.clone(), shutdown.clone()));
        let (cache, watch) = Cache::load(&*store).await.map_err(OpenError::Store)?;
        let cache = Arc::new(cache);
        coracle_threads::spawn(Arc::clone(&cache).follow(watch));
        let authorizers = Authorizers::new(config.authorization.clone()).map_err(OpenError::Authorization)?;
        let (token_uses, used) = legacy_use::queue();
        let (authenticators, file) = authenticators(&mut config, authorizers.allows_all(), token_uses)?;
        let files = reload::Files { authorization: config.authorization.file.clone(), authentication: file };
        let services = Services { store, cache, authorizers: Arc::new(authorizers), authenticators };
        let state = state(config, services, drain, stopping, shutdown)?;
        serve_initializers(&state).await.map_err(OpenError::Bootstrap)?;
        bootstrap::run(&state).await.map_err(OpenError::Bootstrap)?;
        start_controllers(&state, files).await;
        let weak = Arc::downgrade(&state);
        let send = move |request| send_as_controllers(weak.clone(), request);
        coracle_threads::spawn(legacy_use::record(Arc::downgrade(&state.cache), used, send));
        coracle_threads::spawn(quota_status::write_statuses(Arc::downgrade(&state)));
        unreadable::load_later(&state);
        coracle_threads::spawn(unreadable::read_again(Arc::downgrade(&state)));
        Ok(Self { state })
    }
}

/// The services that the other services need.
struct Services {
    store: Arc<dyn Store>,
    cache: Arc<Cache>,
    authorizers: Arc<Authorizers>,
    authenticators: Authenticators,
}

/// The authenticators, and the file of their configuration, if there is one.
fn authenticators(
    config: &mut ApiserverConfig,
    allows_all: bool,
    token_uses: TokenUseQueue,
) -> Result<(Authenticators, Option<AuthenticationFile>), OpenError> {
    let keys = TokenKeys::new(config.token_signer.take(), &config.service_account_key);
    let (mut issuers, mut audiences) =
        (config.options.token_issuers.clone(), config.options.audiences.clone());
    if issuers.is_empty() {
        issuers.push(config.issuer.clone());
    }
    if audiences.is_empty() {
        audiences.clone_from(&issuers);
    }
    let tokens = Tokens::new(keys.ok_or(OpenError::SigningKey)?, issuers, audiences, token_uses);
    // As upstream, the mode AlwaysAllow refuses anonymous clients, because they would have all permissions.
    let refuses_anonymous = allows_all || !config.anonymous_auth;
    let path = config.authentication_file.as_deref();
    let (mut authentication, file) = AuthenticationFile::open(path, refuses_anonymous)?;
    if let Some(oidc) = &config.oidc {
        authentication.issuers.push(single_issuer(oidc, file.is_some()).map_err(OpenError::Authentication)?);
    }
    let sources = Sources {
        password_file: config.password_file.as_deref(),
        token_file: config.token_file.as_deref(),
        config: authentication,
        token_webhook: config.token_webhook.take(),
        request_header: config.request_header.take(),
        authority: &config.front_proxy.client_authority,
    };
    let authenticators = Authenticators::new(tokens, sources).map_err(OpenError::Authentication)?;
    Ok((authenticators, file))
}

/// The issuer of the oidc settings. An authentication file excludes these settings: a reload would drop the issuer.
pub(super) fn single_issuer(oidc: &OidcConfig, has_file: bool) -> Result<IssuerConfig, String> {
    match has_file {
        true => Err("the authentication configuration excludes the oidc settings".to_owned()),
        false => oidc.issuer(),
    }
}

/// The admission plugins that run.
fn plugins(config: &ApiserverConfig) -> Result<Plugins, OpenError> {
    let configs = match &config.admission_file {
        Some(path) => PluginConfigs::read(path)
            .map_err(|reason| OpenError::AdmissionFile { path: path.clone(), reason })?,
        None => PluginConfigs::default(),
    };
    Plugins::new(configs, &config.admission_plugins).map_err(OpenError::AdmissionPlugins)
}

/// The usage history of containers. `None` if the plugin InitialResources does not run.
fn usage_history(config: &ApiserverConfig) -> Option<Arc<UsageHistory>> {
    let runs = config.admission_plugins.enables("InitialResources");
    runs.then(|| Arc::new(UsageHistory::new(config.initial_resources)))
}

/// All services.
fn state(
    config: ApiserverConfig,
    Services { store, cache, authorizers, authenticators }: Services,
    drain: Option<Arc<Drain>>,
    stopping: CancellationToken,
    shutdown: CancellationToken,
) -> Result<Arc<State>, OpenError> {
    let (plugins, browsers) = (plugins(&config)?, browsers(&config.options)?);
    let (usage_history, auditor) = (usage_history(&config), config.audit.map(open_audit).transpose()?);
    let registry = Arc::new(Registry::new(&config.runtime_config));
    let in_flight = Arc::new(in_flight(&config.options, config.max_in_flight));
    let (metrics, byte_limits) = (Arc::new(Metrics::new()), config.options.byte_limits());
    let initialization = config.admission_plugins.enables("Initializers");
    Ok(Arc::new_cyclic(|itself| State {
        admission: Admission {
            plugins,
            cache: cache.clone(),
            registry: registry.clone(),
            authorizers: authorizers.clone(),
            in_flight: in_flight.clone(),
            metrics: metrics.clone(),
            namespaces: Box::new(NamespaceCreator(itself.clone())),
            initialization: initialization.then(Arc::<Initialization>::default),
            usage_history,
            toleration_seconds: config.options.toleration_seconds,
        },
        allocator: Allocator::new(cache.clone(), config.service_ranges, config.options.node_ports),
        store,
        store_monitor: StoreMonitor::new(config.options.store),
        cache,
        registry,
        authenticators,
        authorizers,
        auditor,
        pages: ComponentPages::new(config.flags),
        advertise: config.advertise,
        kubelet: config.kubelet,
        front_proxy: config.front_proxy,
        remotes: Remotes::default(),
        merged: Arc::<Merged>::default(),
        quota_locks: Locks::default(),
        write_turns: WriteTurns::default(),
        in_flight,
        large_requests: LargeRequests::default(),
        flow_control: FlowControl::new(seats(config.max_in_flight), config.request_timeout),
        metrics,
        component_metrics: config.component_metrics,
        encryption_health: config.encryption_health,
        request_timeout: config.request_timeout,
        features: config.features,
        event_lifetime: config.options.event_lifetime,
        byte_limits,
        max_token_seconds: config.options.max_token_seconds,
        extend_tokens: config.options.extend_tokens,
        min_watch: config.options.min_watch,
        watch_grace: config.options.watch_grace,
        priority_and_fairness: config.options.priority_and_fairness,
        goaway_chance: config.options.goaway_chance,
        external_ips: config.options.external_ips,
        browsers,
        keys_url: config.options.keys_url,
        usage: Samples::default(),
        own_components: config.own_components,
        stopping,
        drain,
        shutdown,
    }))
}

/// The limits on requests in flight. If priority levels are in use, they limit the requests of all users.
fn in_flight(options: &ServerOptions, max: [usize; 2]) -> InFlight {
    match options.priority_and_fairness {
        true => InFlight::new(max),
        false => InFlight::new(max).with_total(max),
    }
}

/// The settings for browsers.
fn browsers(options: &ServerOptions) -> Result<Browsers, OpenError> {
    let directives = Some(options.strict_transport_security.as_str());
    let header = directives.filter(|directives| !directives.is_empty()).map(HeaderValue::from_str);
    Ok(Browsers {
        transport_security: header.transpose().map_err(OpenError::TransportSecurity)?,
        origins: AllowedOrigins::new(&options.allowed_origins).map_err(OpenError::AllowedOrigins)?,
    })
}

/// Serves the kind InitializerConfiguration, if the plugin Initializers runs.
async fn serve_initializers(state: &State) -> Result<(), ApiError> {
    if state.admission.initialization.is_none() {
        return Ok(());
    }
    let kinds = [Arc::new(initializers::configurations())];
    let added = state.registry.add(&state.cache, &*state.store, &kinds).await;
    added.map_err(ApiError::internal)
}

/// Starts the controllers that are parts of the server.
async fn start_controllers(state: &Arc<State>, files: reload::Files) {
    flow_control::start(state).await;
    custom_resources::start(state).await;
    policy_status::start(state);
    aggregation::start(state);
    reload::start(state, files);
    if state.admission.initialization.is_some() {
        coracle_threads::spawn(initialization::remove_all_rejected(state.clone()));
    }
    if let Some(history) = &state.admission.usage_history {
        coracle_threads::spawn(usage_history::record(Arc::downgrade(state), history.clone()));
    }
}

/// Sends a request as the control plane's controllers.
fn send_as_controllers(state: Weak<State>, request: LabelRequest) -> BoxFuture<'static, Option<StatusCode>> {
    Box::pin(async move {
        let state = state.upgrade()?;
        Some(Apiserver { state }.handle(request, Some(User::controllers())).await.status())
    })
}

/// The time between the start of a shutdown and the end of the listener.
struct ShutdownDelay {
    /// Time for which all requests are accepted.
    delay: Duration,
    /// Refuses requests after the delay. `None` if the listener ends after the delay.
    drain: Option<Arc<Drain>>,
    /// Maximum time to wait for the requests in flight.
    drain_limit: Duration,
}

impl ShutdownDelay {
    /// Cancels `shutdown` after `stopping` is cancelled and the delay has passed. With `drain`, first waits until the
    /// requests in flight have ended, at most `drain_limit`.
    async fn run(self, stopping: CancellationToken, shutdown: CancellationToken) {
        stopping.cancelled().await;
        tokio::time::sleep(self.delay).await;
        if let Some(drain) = self.drain {
            drain.finish(self.drain_limit).await;
        }
        shutdown.cancel();
    }
}

/// Number of seats of all priority levels together.
fn seats(max: [usize; 2]) -> u64 {
    u64::try_from(max[0].saturating_add(max[1])).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::drain::Begun;

    #[tokio::test(start_paused = true)]
    async fn requests_are_refused_after_the_delay_and_until_those_in_flight_have_ended() {
        let (stopping, shutdown) = (CancellationToken::new(), CancellationToken::new());
        let (drain, second) = (Arc::<Drain>::default(), Duration::from_secs(1));
        let delay =
            ShutdownDelay { delay: 10 * second, drain: Some(drain.clone()), drain_limit: 60 * second };
        let begin = || drain.begin(&Request::get("/version").body(()).unwrap());
        tokio::spawn(delay.run(stopping.clone(), shutdown.clone()));
        stopping.cancel();
        tokio::time::sleep(9 * second).await;
        let Begun::Counted(running) = begin() else { panic!("refused before the end of the delay") };
        tokio::time::sleep(2 * second).await;
        assert!(matches!(begin(), Begun::Refused) && !shutdown.is_cancelled());
        drop(running);
        shutdown.cancelled().await;
        assert!(matches!(begin(), Begun::Refused), "connections that still exist send no further requests");
    }
}
