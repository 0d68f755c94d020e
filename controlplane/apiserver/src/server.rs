//! The path of a request through the API server.

use std::{net::IpAddr, sync::Arc, time::Instant};

use bytes::Bytes;
use coracle_admission_policies::RequestCost;
use coracle_kinds::{Resource, Resources};
use http::{HeaderMap, Method, Request, header};
use http_body::Body as _;
use tokio::sync::watch;

use crate::{
    aggregated,
    audit::Record,
    authn::User,
    authz::{AccessAttributes, impersonation},
    backup,
    call::Call,
    client_upgrade::ClientUpgrade,
    compression, counted_body, deadline, documents,
    error::{ApiError, Result},
    flow_control::Seats,
    freshness, health,
    in_flight::{self, BodyMemory, WatchPermit},
    metrics, pretty,
    registry::RegistryError,
    reply::{self, Reply},
    request::RequestInfo,
    request_body, request_owner,
    short_lived::ShortLived,
    state::State,
    waits,
    warnings::Warnings,
};
pub(crate) use request_seats::SLOW_CLIENT;

/// The API server.
#[derive(Clone)]
pub struct Apiserver {
    pub(crate) state: Arc<State>,
}

/// The client's address. The listener attaches it to requests.
#[derive(Clone, Copy)]
pub(crate) struct PeerAddress(pub(crate) IpAddr);

/// The parts of an authenticated request besides its user and attributes.
struct Incoming {
    method: Method,
    headers: HeaderMap,
    body: reply::Body,
    memory: BodyMemory,
    upgrade: ClientUpgrade,
    record: Option<Arc<Record>>,
    /// Whether the request comes from a caller in this process.
    is_local: bool,
    /// Whether the request needs no permit of a large request: the caller is in this process, or a member of
    /// `system:masters`. Impersonation does not change this.
    is_exempt: bool,
    peer: Option<IpAddr>,
}

impl Apiserver {
    /// Adds all versions of one custom resource, or replaces its former versions. They are served when this returns.
    ///
    /// # Errors
    /// [`RegistryError`] if a built-in resource has the name, or the stored objects cannot be read.
    pub async fn add_resource(&self, versions: &[Arc<Resource>]) -> std::result::Result<(), RegistryError> {
        let state = &self.state;
        state.registry.add(&state.cache, &*state.store, versions).await
    }

    /// Removes all versions of a custom resource. Its watches end; stored objects stay in the store.
    pub async fn remove_resource(&self, group: &str, plural: &str) {
        self.state.registry.remove(&self.state.cache, group, plural).await;
    }

    /// Returns a receiver of the set of served resources. Each change of the set notifies it.
    #[must_use]
    pub fn resources(&self) -> watch::Receiver<Arc<Resources>> {
        self.state.registry.subscribe()
    }

    /// Returns a receiver of the store's revision. Each change of the revision notifies it.
    #[must_use]
    pub fn revisions(&self) -> watch::Receiver<u64> {
        self.state.cache.revisions()
    }

    /// Handles one request. Callers in this process pass their identity. Other requests are authenticated by
    /// certificate and headers.
    pub async fn handle<B>(
        &self,
        mut request: Request<B>,
        identity: Option<User>,
    ) -> http::Response<reply::Body>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: std::fmt::Display,
    {
        let began = Instant::now();
        let mut upgrade = ClientUpgrade::of(&mut request);
        let (mut parts, body) = request.into_parts();
        let info = RequestInfo::parse(&parts.method, &parts.uri);
        let is_local = identity.is_some();
        let caller = match identity {
            Some(user) => Ok(user),
            None => self.network_caller(&mut parts).await,
        };
        let unauthenticated = parts.extensions.remove::<Arc<BodyMemory>>();
        let (caller, record) = self.record(&parts, &info, caller).await;
        let token = caller.as_ref().ok().and_then(|user| user.recorded_token.clone());
        let is_long = in_flight::is_long_running(&info);
        let counted = metrics::Request::of(&info, &parts.headers, &self.state.registry.load(), is_long);
        let (watch, refusal) = self.watch_permit(caller.as_ref().ok().filter(|_| !is_local), &info);
        let begin = || self.state.begin_long(&counted, watch, caller.as_ref().ok());
        let running = (is_long && !is_local).then(begin);
        upgrade.running.clone_from(&running);
        let is_compressed = self.compresses(&info, &parts.headers);
        let is_indented = !is_long && pretty::is_wanted(&info, &parts.headers);
        let sender = caller.as_ref().map_or("", |user| &user.name);
        let owner: Arc<str> = caller.as_ref().map_or("", in_flight::queued_owner).into();
        let memory = if is_local { BodyMemory::default() } else { self.state.in_flight.body(sender) };
        let incoming = Incoming {
            method: parts.method,
            headers: parts.headers,
            body: request_body::boxed(body),
            memory,
            upgrade,
            record: record.clone(),
            is_local,
            peer: parts.extensions.get::<PeerAddress>().map(|peer| peer.0),
            is_exempt: is_local || caller.as_ref().is_ok_and(|user| user.is_in("system:masters")),
        };
        let answer = self.answer_or_refuse(caller, refusal, info, incoming);
        // The future is boxed, because each layer around the large future of a request would hold a copy on the stack.
        let answer = request_owner::scope(owner, Box::pin(answer));
        let (outcome, waited) = waits::measure(answer).await;
        let reply = outcome.unwrap_or_else(|error| reply::failure(&error));
        let reply = self.count_terminated(reply, &counted);
        let reply = self.record_token_use(reply, token.as_ref(), record.as_deref());
        self.state.metrics.answered(&counted, &reply, began.elapsed(), waited);
        let reply = match record {
            Some(record) => record.respond(reply, is_long).await,
            None => reply,
        };
        // The audit event has the response before indentation and compression.
        let mut reply = reply::uncached(if is_indented { pretty::indented(reply) } else { reply });
        if is_compressed {
            reply = compression::compress_within(self.state.request_timeout, reply).await;
        }
        if is_local { reply } else { self.for_network(reply, running, unauthenticated) }
    }

    /// Counts the request as terminated if the reply has the mark [`metrics::Terminated`].
    fn count_terminated(&self, mut reply: Reply, counted: &metrics::Request) -> Reply {
        if reply.extensions_mut().remove::<metrics::Terminated>().is_some() {
            self.state.metrics.serving.terminated(counted, reply.status().as_u16());
        }
        reply
    }

    /// Whether the response to a request is compressed.
    fn compresses(&self, info: &RequestInfo, headers: &HeaderMap) -> bool {
        self.state.features.response_compression && compression::is_wanted(info, headers)
    }

    /// Completes a response to the network. Adds the header for browsers, and counts a long-running request until its
    /// end. All other responses, and errors in place of a stream, get a time limit. They also hold the memory of a
    /// request whose client is not known.
    fn for_network(
        &self,
        mut reply: Reply,
        running: Option<metrics::LongRunning>,
        unauthenticated: Option<Arc<BodyMemory>>,
    ) -> Reply {
        let is_error = reply.status().as_u16() >= 400 && reply.body().size_hint().exact().is_some();
        if running.is_none() || is_error {
            let limits = reply.extensions_mut().remove::<ShortLived>().unwrap_or_default();
            reply.extensions_mut().insert(limits.with_unauthenticated(unauthenticated));
        }
        if let Some(running) = running {
            reply.extensions_mut().insert(running);
        }
        if let Some(directives) = &self.state.browsers.transport_security {
            reply.headers_mut().insert(header::STRICT_TRANSPORT_SECURITY, directives.clone());
        }
        reply
    }

    /// The permit of a watch, or the error if its user has too many watches. `caller` is `None` for requests that are
    /// not from the network.
    fn watch_permit(
        &self,
        caller: Option<&User>,
        info: &RequestInfo,
    ) -> (Option<WatchPermit>, Option<ApiError>) {
        let Some(caller) = caller.filter(|_| info.verb == "watch") else { return (None, None) };
        let selectors = ["labelSelector", "fieldSelector"].map(|name| info.query.get(name).len());
        let nodes = self.state.cache.count("", "nodes");
        match self.state.in_flight.watch(caller, nodes, selectors.iter().sum()) {
            Ok(permit) => (permit, None),
            Err(error) => (None, Some(error)),
        }
    }

    /// Answers a request, or refuses it because of its authentication or the limit on watches.
    async fn answer_or_refuse(
        &self,
        caller: Result<User>,
        refusal: Option<ApiError>,
        info: RequestInfo,
        incoming: Incoming,
    ) -> Result<Reply> {
        match (caller, refusal) {
            (Ok(_), Some(error)) => Ok(terminated(&error)),
            (Ok(user), None) if incoming.is_local => self.answer_as(user, info, incoming).await,
            (Ok(user), None) => self.answer_network(user, info, incoming).await,
            (Err(error), _) => Ok(self.unauthenticated(&error)),
        }
    }

    /// Answers a request from the network. Enforces the request timeout and the limits on requests in flight.
    async fn answer_network(&self, caller: User, info: RequestInfo, incoming: Incoming) -> Result<Reply> {
        let state = &self.state;
        let permit = match state.in_flight.enter(&caller, &info) {
            Ok(permit) => permit,
            Err(error) => return Ok(terminated(&error)),
        };
        if in_flight::is_long_running(&info) {
            return self.answer_as(caller, info, incoming).await;
        }
        let limit = deadline::of_request(&info.query, state.request_timeout)?;
        let (reader, superseded) = (state.in_flight.reader(&caller), &state.cache.superseded);
        let begin = superseded.counted();
        let answer = self.answer_as(caller, info, incoming);
        let mut reply = tokio::time::timeout(limit, answer)
            .await
            .unwrap_or_else(|_elapsed| {
                Ok(terminated(&ApiError::timeout("request did not complete within the allotted timeout", 1)))
            })
            .unwrap_or_else(|error| reply::failure(&error));
        let limits = reply.extensions_mut().remove::<ShortLived>().unwrap_or_default();
        reply.extensions_mut().insert(limits.with_permit(permit));
        reply = counted_body::counted(reply, reader.clone(), superseded, begin);
        reply.extensions_mut().insert(reader);
        Ok(reply)
    }

    /// Answers the request of a caller, or of the user that the caller impersonates.
    async fn answer_as(&self, caller: User, info: RequestInfo, incoming: Incoming) -> Result<Reply> {
        let state = &self.state;
        let sender = impersonation::Caller {
            authorizers: &state.authorizers,
            cache: &state.cache,
            user: &caller,
            info: &info,
            is_constrained: state.features.constrained_impersonation,
            counts: &state.metrics.impersonation,
        };
        let impersonated = impersonation::impersonated(&sender, &incoming.headers).await?;
        if let (Some(record), Some(impersonated)) = (&incoming.record, &impersonated) {
            record.impersonates(&impersonated.user, impersonated.constraint);
        }
        let user = impersonated.map_or(caller, |impersonated| impersonated.user);
        // The future of the answer is boxed, because it has several kilobytes, and two paths contain it.
        if incoming.is_local || !self.state.priority_and_fairness {
            return Box::pin(self.answer(user, info, incoming, &mut None)).await;
        }
        self.answer_with_seats(user, info, incoming).await
    }

    /// Answers a request after its priority level has granted it seats.
    async fn answer_with_seats(&self, user: User, info: RequestInfo, incoming: Incoming) -> Result<Reply> {
        let is_long = in_flight::is_long_running(&info);
        let arrived = Instant::now();
        let (classified, granted) = self.state.flow_control.enter(&user, &info, &self.state.cache).await;
        waits::add(arrived.elapsed());
        let answered = match granted {
            Ok(mut seats) => {
                let reply = Box::pin(self.answer(user, info, incoming, &mut seats)).await;
                reply.map(|reply| (reply, seats))
            }
            Err(error) => Ok((terminated(&error), None)),
        };
        let (mut reply, seats) = answered.unwrap_or_else(|error| (reply::failure(&error), None));
        // The seats of a watch are released here, after its first events are collected.
        if let Some(seats) = seats.filter(|_| !is_long) {
            reply.extensions_mut().insert(ShortLived::with_seats(seats));
        }
        if let Some(classified) = classified {
            classified.mark(&mut reply);
        }
        Ok(reply)
    }

    /// Authorizes and answers a request. `seats` are the seats of the request; a slow client loses them.
    async fn answer(
        &self,
        user: User,
        info: RequestInfo,
        incoming: Incoming,
        seats: &mut Option<Seats>,
    ) -> Result<Reply> {
        let Incoming { method, headers, body, mut memory, upgrade, record, is_exempt, peer, .. } = incoming;
        let state = &self.state;
        let kind = info.resource.as_ref().and_then(|resource| {
            let kind = resource.find(&state.registry.load()).cloned();
            kind.map(|kind| (resource.has_path(kind.namespaced), kind))
        });
        if let Some((false, _)) = kind {
            return route::unknown_path(&state.registry.load(), &info.path);
        }
        let question = AccessAttributes { user: &user, verb: info.verb, info: &info, cache: &state.cache };
        let requester = request_seats::Requester { user: &user, info: &info };
        let authorization = route::authorize(state, &question, &method, record.as_deref());
        request_seats::wait(state, requester, seats, authorization).await?;
        if let Some(remote) = aggregated::server_of(state, &info) {
            let arrived = aggregated::ForwardedRequest {
                user: &user,
                info: &info,
                method: &method,
                headers: &headers,
                body,
                peer,
                audit_id: record.as_ref().map(|record| record.id()),
            };
            let answer = waits::for_server(aggregated::run(state, &remote, arrived, upgrade));
            return waits::holding(seats, answer).await;
        }
        let Some(resource) = info.resource.clone() else { return non_resource(state, &info, &headers).await };
        let Some((_, kind)) = kind else { return route::unknown_path(&state.registry.load(), &info.path) };
        // The server behind a proxy gets the body as a stream.
        let (received, streamed) = match &*resource.subresource {
            "proxy" => (None, body),
            _ => ((method != Method::GET).then_some(body), reply::full("")),
        };
        let body = request_seats::receive(state, received, &mut memory, requester, seats).await?;
        let current = freshness::wait(&*state.store, &state.cache, &info, &kind);
        request_seats::wait(state, requester, seats, current).await?;
        let (warnings, audit) = (Warnings::about(&kind), record);
        let (state, cost) = (state.clone(), RequestCost::default());
        let call = Call { state, user, info, resource, kind, headers, body, warnings, cost, audit };
        if let Some(record) = call.audit.as_ref().filter(|_| call.kind.deprecation.is_some()) {
            record.annotate("k8s.io/deprecated", "true");
        }
        route::check_readable(&call)?;
        let permit = if is_exempt { None } else { request_seats::permit_of(&call, seats).await };
        let run = match call.resource.subresource.is_empty() {
            true => route::resource(&call, &method, upgrade),
            false => route::subresource(&call, &method, upgrade, streamed),
        };
        let reply = request_seats::run(permit, seats, run).await?;
        let reply = reply::warned(reply, &call.warnings.take());
        // The bodies of long-running requests are streams, or come from other servers.
        let is_document = !in_flight::is_long_running(&call.info);
        Ok(if is_document { reply::in_preferred_format(reply, &call.headers) } else { reply })
    }
}

/// The response to a request that a limit of this server ended.
fn terminated(error: &ApiError) -> Reply {
    let mut reply = reply::failure(error);
    reply.extensions_mut().insert(metrics::Terminated);
    reply
}

/// The response to a non-resource path: health, metrics, backup or documents.
async fn non_resource(state: &State, info: &RequestInfo, headers: &HeaderMap) -> Result<Reply> {
    if let Some(reply) = health::find(state, info).await {
        return Ok(reply);
    }
    let sources = metrics::Sources {
        cache: &state.cache,
        in_flight: &state.in_flight,
        flow_control: &state.flow_control,
        auditor: state.auditor.as_deref(),
        remotes: &state.remotes,
        components: state.component_metrics.as_ref(),
        store: &*state.store,
        has_object_counts: state.store_monitor.has_object_counts,
    };
    if let Some(reply) = metrics::find(&state.metrics, &sources, info).await {
        return Ok(reply);
    }
    if let Some(reply) = backup::find(state, info)? {
        return Ok(reply);
    }
    match documents::find(state, info, headers)? {
        Some(reply) => Ok(reply::in_preferred_format(reply, headers)),
        None => route::unknown_path(&state.registry.load(), &info.path),
    }
}

mod cross_origin;
mod identity;
mod open;
mod reload;
mod request_seats;
mod route;
mod token_use;

#[cfg(test)]
mod tests;
