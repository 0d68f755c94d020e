//! The API server: its parts, and the path of a request through them.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use coracle_connections::Slot;
use coracle_kinds::{Resource, Resources};
use coracle_store::Store;
use http::{HeaderMap, Method, Request};
use hyper::upgrade::OnUpgrade;
use rustls_pki_types::CertificateDer;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    admit::{Admission, PodSecurityConfig},
    authn::{Authenticators, User, legacy_use, service_account::Tokens},
    authz::{self, Authorizers, Question, impersonation},
    backup, body, bootstrap,
    cache::Cache,
    call::{Call, Warnings},
    custom_resources, documents,
    error::{ApiError, Result},
    freshness, health,
    in_flight::{self, BodyMemory, InFlight},
    media,
    registry::{Registry, RegistryError},
    reply::{self, Reply},
    request::RequestInfo,
    service_range::ServiceRange,
    sub, verb,
    write::Part,
};

/// Configuration of the API server.
pub struct ApiserverConfig {
    /// The address by which pods and nodes reach this server.
    pub advertise: SocketAddr,
    /// Address range of services. The first address is this server's own.
    pub service_range: ServiceRange,
    /// Key that signs service-account tokens: PKCS#8, P-256.
    pub service_account_key: Vec<u8>,
    /// Issuer of tokens: a URL.
    pub issuer: String,
    /// File of static tokens.
    pub token_file: Option<PathBuf>,
    /// TLS for requests to kubelets.
    pub kubelet: KubeletTls,
    /// Configuration of the admission plugins, in upstream's form.
    pub admission_file: Option<PathBuf>,
    /// Maximum duration of a request that is not long-running, and then of its response.
    pub request_timeout: Duration,
}

/// TLS for requests to kubelets: the client certificate, and the CA of the kubelets' certificates.
#[derive(Clone)]
pub struct KubeletTls(pub Arc<rustls::ClientConfig>);

/// The API server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The store failed.
    #[error("cannot load the cluster's objects")]
    Store(#[source] coracle_store::Error),
    /// The signing key is not a P-256 key.
    #[error("the service-account signing key is not a P-256 key in PKCS#8 form")]
    SigningKey,
    /// The token file cannot be read.
    #[error("cannot read the token file {path}")]
    TokenFile {
        /// Its path.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The configuration of the admission plugins cannot be used.
    #[error("cannot use the admission configuration {path}: {reason}")]
    AdmissionFile {
        /// Its path.
        path: PathBuf,
        /// The invalid field, or the read error.
        reason: String,
    },
    /// The default objects cannot be created.
    #[error("cannot make the first objects of the cluster")]
    Bootstrap(#[source] ApiError),
}

/// The API server.
#[derive(Clone)]
pub struct Apiserver {
    pub(crate) state: Arc<State>,
}

/// The state that all requests share.
pub(crate) struct State {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) cache: Arc<Cache>,
    pub(crate) registry: Registry,
    pub(crate) authenticators: Authenticators,
    pub(crate) authorizers: Authorizers,
    pub(crate) admission: Admission,
    pub(crate) advertise: SocketAddr,
    pub(crate) service_range: ServiceRange,
    pub(crate) kubelet: KubeletTls,
    /// Held while a service's addresses are allocated and stored.
    pub(crate) allocating: Arc<tokio::sync::Mutex<()>>,
    pub(crate) in_flight: InFlight,
    pub(crate) request_timeout: Duration,
    pub(crate) shutdown: CancellationToken,
}

/// The verified client certificate. The listener attaches it to requests.
#[derive(Clone)]
pub(crate) struct PeerCertificate(pub(crate) Arc<CertificateDer<'static>>);

/// Marks a response that must be delivered within the request timeout. Its request counts as in flight until then.
#[derive(Clone, Default)]
pub(crate) struct ShortLived {
    _permit: Option<Arc<in_flight::Permit>>,
}

impl Apiserver {
    /// Loads the objects and creates the default ones. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`OpenError`] if the store, a key or a file cannot be used.
    pub async fn open(
        config: ApiserverConfig,
        store: Arc<dyn Store>,
        shutdown: CancellationToken,
    ) -> std::result::Result<Self, OpenError> {
        let (cache, watch) = Cache::load(&*store).await.map_err(OpenError::Store)?;
        let cache = Arc::new(cache);
        tokio::spawn(Arc::clone(&cache).follow(watch));
        let audiences = vec![config.issuer.clone()];
        let (legacy_uses, used) = legacy_use::queue();
        let tokens = Tokens::new(&config.service_account_key, config.issuer, audiences, legacy_uses);
        let tokens = tokens.ok_or(OpenError::SigningKey)?;
        let path = config.token_file.clone().unwrap_or_default();
        let authenticators = Authenticators::new(config.token_file.as_deref(), tokens)
            .map_err(|source| OpenError::TokenFile { path, source })?;
        let admission = PodSecurityConfig::read(config.admission_file.as_deref())?;
        let state = Arc::new(State {
            store,
            cache,
            registry: Registry::new(),
            authenticators,
            authorizers: Authorizers::new(),
            admission: Admission::new(admission),
            advertise: config.advertise,
            service_range: config.service_range,
            kubelet: config.kubelet,
            allocating: Arc::default(),
            in_flight: InFlight::new(),
            request_timeout: config.request_timeout,
            shutdown,
        });
        bootstrap::run(&state).await.map_err(OpenError::Bootstrap)?;
        custom_resources::start(&state).await;
        tokio::spawn(legacy_use::record(Arc::downgrade(&state), used));
        Ok(Self { state })
    }

    /// Adds all versions of one custom resource, or replaces its former versions. They are served when this returns.
    ///
    /// # Errors
    /// [`RegistryError`] if a built-in resource has the name, or the stored objects cannot be read.
    pub async fn add_resource(&self, versions: &[Arc<Resource>]) -> std::result::Result<(), RegistryError> {
        let state = &self.state;
        state.registry.add((&state.cache, &*state.store), versions).await
    }

    /// Removes all versions of a custom resource. Its watches end; stored objects stay in the store.
    pub async fn remove_resource(&self, group: &str, plural: &str) {
        self.state.registry.remove(&self.state.cache, group, plural).await;
    }

    /// Receives the set of served resources after each change.
    #[must_use]
    pub fn resources(&self) -> watch::Receiver<Arc<Resources>> {
        self.state.registry.subscribe()
    }

    /// Handles one request. Callers in this process pass their identity. Other requests are authenticated by certificate
    /// and headers.
    pub async fn handle<B>(
        &self,
        mut request: Request<B>,
        identity: Option<User>,
    ) -> http::Response<reply::Body>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::fmt::Display,
    {
        let upgrade = hyper::upgrade::on(&mut request);
        let (parts, body) = request.into_parts();
        let info = RequestInfo::parse(&parts.method, &parts.uri);
        let outcome = match identity {
            Some(user) => {
                let user = impersonation::user(&self.state, user, &parts.headers).await;
                let request = (parts.method, parts.headers, body, BodyMemory::default());
                match user {
                    Ok(user) => self.answer(user, info, request, upgrade).await,
                    Err(error) => Err(error),
                }
            }
            None => self.handle_network(parts, info, body, upgrade).await,
        };
        outcome.unwrap_or_else(|error| reply::failure(&error))
    }

    /// Handles a request from the network: authenticates it, and applies the limits on duration and number.
    async fn handle_network<B>(
        &self,
        parts: http::request::Parts,
        info: RequestInfo,
        body: B,
        upgrade: OnUpgrade,
    ) -> Result<Reply>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::fmt::Display,
    {
        let state = &self.state;
        let certificate = parts.extensions.get::<PeerCertificate>().map(|peer| &*peer.0);
        let caller = state.authenticators.identify(&state.cache, certificate, &parts.headers).await?;
        if let Some(slot) = parts.extensions.get::<Arc<Slot>>().filter(|_| !caller.is_anonymous()) {
            slot.prove();
        }
        let permit = state.in_flight.enter(&caller, &info)?;
        let user = impersonation::user(state, caller, &parts.headers).await?;
        let is_long = in_flight::is_long_running(&info);
        let request = (parts.method, parts.headers, body, state.in_flight.body());
        let answer = self.answer(user, info, request, upgrade);
        let mut reply = if is_long {
            answer.await
        } else {
            tokio::time::timeout(state.request_timeout, answer).await.unwrap_or_else(|_elapsed| {
                Err(ApiError::timeout("request did not complete within the allotted timeout", 1))
            })
        }
        .unwrap_or_else(|error| reply::failure(&error));
        if !is_long {
            reply.extensions_mut().insert(ShortLived { _permit: permit.map(Arc::new) });
        }
        Ok(reply)
    }

    async fn answer<B>(
        &self,
        user: User,
        info: RequestInfo,
        (method, headers, body, mut memory): (Method, HeaderMap, B, BodyMemory),
        upgrade: OnUpgrade,
    ) -> Result<Reply>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::fmt::Display,
    {
        let state = &self.state;
        let kind = info.resource.as_ref().and_then(|resource| {
            let kind = resource.find(&state.registry.load()).cloned();
            kind.map(|kind| (resource.has_path(kind.namespaced), kind))
        });
        if let Some((false, _)) = kind {
            return Ok(reply::text(404, "404 page not found\n"));
        }
        let question = Question { user: &user, verb: info.verb, info: &info, cache: &state.cache };
        state.authorizers.authorize(&question).await?;
        if authz::enters_pod(&info) {
            // A WebSocket begins with GET. Source: AuthorizePodWebsocketUpgradeCreatePermission, v1.35.
            state.authorizers.authorize(&Question { verb: "create", ..question }).await?;
        }
        let Some(resource) = info.resource.clone() else {
            if let Some(reply) = health::find(state, &info) {
                return Ok(reply);
            }
            if let Some(reply) = backup::find(state, &info)? {
                return Ok(reply);
            }
            let found = documents::find(state, &info, &headers)?;
            return Ok(found.unwrap_or_else(|| reply::text(404, "404 page not found\n")));
        };
        let Some((_, kind)) = kind else { return Ok(reply::text(404, "404 page not found\n")) };
        let body = if method == Method::GET { Bytes::new() } else { body::read(body, &mut memory).await? };
        freshness::wait(state, info.verb, info.query.get("resourceVersion")).await?;
        let warnings = Warnings::default();
        let call = Call { state: state.clone(), user, info, resource, kind, headers, body, warnings };
        let reply = if call.resource.subresource.is_empty() {
            on_resource(&call).await
        } else {
            on_subresource(&call, &method, upgrade).await
        }?;
        Ok(reply::warned(reply, &call.warnings.take()))
    }
}

async fn on_resource(call: &Call) -> Result<Reply> {
    if !call.kind.has_verb(call.info.verb) {
        return Err(ApiError::method_not_allowed());
    }
    if !call.kind.is_stored() {
        return verb::review::run(call).await;
    }
    match call.info.verb {
        "get" => verb::get::run(call).await,
        "list" => verb::list::run(call).await,
        "watch" => verb::watch::run(call),
        "create" if call.resource.name.is_empty() => verb::create::run(call).await,
        "update" if !call.resource.name.is_empty() => verb::update::run(call, Part::Main).await,
        "patch" if !call.resource.name.is_empty() => verb::patch::run(call, Part::Main).await,
        "delete" => verb::delete::run(call).await,
        "deletecollection" => verb::delete_collection::run(call).await,
        _ => Err(ApiError::method_not_allowed()),
    }
}

async fn on_subresource(call: &Call, method: &Method, upgrade: OnUpgrade) -> Result<Reply> {
    let sub = call.resource.subresource.as_str();
    let row = call.kind.subresource(sub).ok_or_else(ApiError::no_resource)?;
    let verb = call.info.verb;
    if !row.verbs.iter().any(|known| known == verb) {
        return Err(ApiError::method_not_allowed());
    }
    if matches!(sub, "binding" | "eviction" | "token") {
        // Their answers are neither tables nor metadata.
        media::negotiate(&call.headers, &call.info.query, &[])?;
    }
    let (group, resource) = (&*call.kind.group, &*call.kind.plural);
    match (group, resource, sub, verb) {
        (_, _, "status", "get") => verb::get::run(call).await,
        (_, _, "status", "update") => verb::update::run(call, Part::Status).await,
        (_, _, "status", "patch") => verb::patch::run(call, Part::Status).await,
        (_, _, "scale", "get") => sub::scale::get(call).await,
        (_, _, "scale", "update") => sub::scale::update(call).await,
        (_, _, "scale", "patch") => sub::scale::patch(call).await,
        ("", "pods", "ephemeralcontainers", "get") => verb::get::run(call).await,
        ("", "pods", "ephemeralcontainers", "update") => {
            verb::update::run(call, Part::EphemeralContainers).await
        }
        ("", "pods", "ephemeralcontainers", "patch") => {
            verb::patch::run(call, Part::EphemeralContainers).await
        }
        ("certificates.k8s.io", "certificatesigningrequests", "approval", "get") => {
            verb::get::run(call).await
        }
        ("certificates.k8s.io", "certificatesigningrequests", "approval", "update") => {
            verb::update::run(call, Part::Approval).await
        }
        ("certificates.k8s.io", "certificatesigningrequests", "approval", "patch") => {
            verb::patch::run(call, Part::Approval).await
        }
        ("", "pods", "binding", "create") => sub::binding::run(call).await,
        ("", "pods", "eviction", "create") => sub::eviction::run(call).await,
        ("", "pods", "log" | "exec" | "attach" | "portforward", _) => {
            sub::stream::run(call, method, upgrade).await
        }
        ("", "namespaces", "finalize", "update") => sub::finalize::run(call).await,
        ("", "serviceaccounts", "token", "create") => sub::token::run(call).await,
        _ => Err(ApiError::method_not_allowed()),
    }
}

#[cfg(test)]
mod tests;
