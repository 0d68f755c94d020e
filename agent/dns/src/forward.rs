//! Forwarder for names outside the cluster: sends queries to other servers, and caches their answers.
//!
//! Concurrent equal questions share one query. Otherwise each repeated question would give an attacker another chance
//! to forge the answer. An expired answer is used while the servers are slow or down (RFC 8767). A frequently used
//! answer is renewed before it expires.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_connections::Share;
use hickory_proto::op::{Message, OpCode, ResponseCode};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::answer::{LargeAnswer, ServerAnswer};
use crate::cache::{Cache, Cached, Question};
use crate::exchange::{ANSWER_TIMEOUT, Received, Requester, exchange};
use crate::large::{LargeMessages, NO_CLIENT, SMALL_BYTES, SMALL_RECORDS};
use crate::limit::Permit;
use crate::metrics::{CacheCounts, ForwarderState, Metrics, ServerMetricsByAddress};
use crate::servers::{Server, Servers, StubDomain};
use crate::summary::Summary;

/// Maximum wait for a new answer before an expired one is used.
const STALE_AFTER: Duration = Duration::from_millis(500);
/// Divisor of the maximum of concurrent queries. A renewal of a cached answer starts only if fewer than an eighth of
/// the maximum are pending. A renewal needs no permit of a client. Without this limit, clients could cause any number
/// of renewals.
const RENEWALS_PART: usize = 8;

/// The answer to a pending query. `None` before it arrives. All waiting clients share it.
type Outcome = watch::Receiver<Option<ServerAnswer>>;

/// The servers to which names outside the cluster are forwarded, and the cache of their answers.
pub struct Upstream {
    servers: Servers,
    cache: Mutex<Cache>,
    pending: Mutex<HashMap<Question, Outcome>>,
    /// Maximum concurrent queries. Each query has a socket.
    max_pending: usize,
    pub(crate) large: LargeMessages,
    pub(crate) metrics: Arc<Metrics>,
}

/// The reason why a server gave no answer.
enum NoAnswer {
    /// The exchange with the server failed.
    Exchange(io::Error),
    /// The server did not respond in time.
    Timeout,
}

/// Removes a question from the pending queries when dropped.
struct PendingQuery {
    upstream: Arc<Upstream>,
    question: Question,
    /// The client that has started the query. The memory for an answer by TCP counts for this client.
    client: IpAddr,
}

impl Drop for PendingQuery {
    fn drop(&mut self) {
        self.upstream.pending().remove(&self.question);
    }
}

// === impl Upstream ===

impl ForwarderState for Upstream {
    fn cache_counts(&self) -> CacheCounts {
        let cache = self.cache();
        CacheCounts { entries: cache.counts(), evictions: cache.evictions() }
    }

    fn servers(&self) -> ServerMetricsByAddress {
        self.servers.metrics()
    }
}

impl Upstream {
    /// Forwards to the servers of `resolv_conf` and of stub domains. The file is read again when it changes. `own` has
    /// the addresses of this server. Queries are never sent to these addresses.
    #[must_use]
    pub fn new(resolv_conf: PathBuf, own: Vec<IpAddr>, stubs: &[StubDomain], metrics: Arc<Metrics>) -> Self {
        let servers = Servers::new(resolv_conf, own, stubs);
        let max_pending = Share::DnsQuestions.count();
        let (cache, pending, large) = (Mutex::default(), Mutex::default(), LargeMessages::new());
        Self { servers, cache, pending, max_pending, large, metrics }
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<Question, Outcome>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the question is a probe of this node that another server forwarded back. Such a server is not queried
    /// for some time.
    pub(crate) fn detect_loop(&self, question: &Question) -> bool {
        self.servers.detect_loop(&question.name, question.kind)
    }

    /// A cached answer that has not expired.
    pub(crate) fn cached(self: &Arc<Self>, question: &Question) -> Option<ServerAnswer> {
        let cached = self.cache().get(question);
        match cached {
            Some(Cached::Fresh { answer, is_due }) => {
                self.metrics.cache_hit(answer.is_positive());
                if is_due && self.query(question, &mut None).is_some() {
                    self.metrics.prefetched();
                }
                Some(answer)
            }
            Some(Cached::Stale(_)) | None => {
                self.metrics.cache_missed();
                None
            }
        }
    }

    /// An expired answer, for a client without a permit for a query.
    pub(crate) fn expired(&self, question: &Question) -> Option<ServerAnswer> {
        let cached = self.cache().get(question);
        match cached? {
            Cached::Stale(answer) => {
                self.metrics.served_stale();
                Some(answer)
            }
            // A query of another client has stored its answer since the caller's look-up.
            Cached::Fresh { answer, .. } => Some(answer),
        }
    }

    /// Maximum concurrent queries for clients. The rest of the maximum is for renewals.
    pub(crate) fn max_of_clients(&self) -> usize {
        self.max_pending - self.max_pending / RENEWALS_PART
    }

    /// Queries the servers. An expired answer is used if the servers are slow or down. The query may then last longer
    /// than this call, and keeps the client's permit to its end. Otherwise a client could start any number of queries
    /// for expired names whose servers do not respond.
    pub(crate) async fn resolve(self: &Arc<Self>, question: Question, permit: Permit) -> ServerAnswer {
        let stale = match self.cache().get(&question) {
            // A query for the same question has stored its answer since the caller's look-up.
            Some(Cached::Fresh { answer, .. }) => return answer,
            Some(Cached::Stale(answer)) => Some(answer),
            None => None,
        };
        // The call itself keeps the permit if it joins a pending query.
        let mut permit = Some(permit);
        let outcome = self.query(&question, &mut permit);
        let Some(stale) = stale else {
            return wait(outcome).await.unwrap_or_else(server_failure);
        };
        let servers = self.servers.of(&question.name);
        let limit = if servers.iter().any(|server| server.is_up()) { STALE_AFTER } else { Duration::ZERO };
        match timeout(limit, wait(outcome)).await {
            Ok(Some(answer)) if is_useful(answer.code()) => answer,
            Ok(_) | Err(_) => {
                self.metrics.served_stale();
                stale
            }
        }
    }

    /// Starts a query, or joins the pending query. A new query takes the permit. A query without a permit is a renewal.
    /// `None` if the limit of pending queries is reached.
    fn query(self: &Arc<Self>, question: &Question, permit: &mut Option<Permit>) -> Option<Outcome> {
        let mut pending = self.pending();
        if let Some(outcome) = pending.get(question) {
            return Some(outcome.clone());
        }
        let most = if permit.is_some() { self.max_pending } else { self.max_pending / RENEWALS_PART };
        if pending.len() >= most {
            return None;
        }
        let permit = permit.take();
        let (result, outcome) = watch::channel(None);
        pending.insert(question.clone(), outcome.clone());
        let client = permit.as_ref().map_or(NO_CLIENT, Permit::client);
        let own = PendingQuery { upstream: Arc::clone(self), question: question.clone(), client };
        tokio::spawn(async move {
            let answer = own.upstream.query_servers(&own.question, own.client).await;
            // Remove the query and its permit before the waiting clients continue. A later question finds the answer in
            // the cache.
            drop((own, permit));
            result.send_replace(Some(answer));
        });
        Some(outcome)
    }

    /// Queries the servers in order until one returns a usable answer.
    async fn query_servers(self: &Arc<Self>, question: &Question, client: IpAddr) -> ServerAnswer {
        let servers = self.servers.of(&question.name);
        if !servers.is_empty() && servers.iter().all(|server| !server.is_up()) {
            self.metrics.servers_down();
        }
        let (mut truncated, mut is_failure) = (None, false);
        for server in servers {
            self.probe(&server);
            server.metrics.queried();
            let sent_at = Instant::now();
            match self.ask(server.address, question, client).await {
                Ok(received) => {
                    let Summary { code, is_truncated, .. } = received.summary;
                    server.succeeded();
                    server.metrics.responded(code, sent_at.elapsed());
                    match (is_useful(code), is_truncated) {
                        (true, false) => return self.store(question, received),
                        // Try the next server: it may answer by TCP.
                        (true, true) => {
                            truncated = truncated.or_else(|| Some(first_records(received.message)))
                        }
                        (false, _) => is_failure |= code == ResponseCode::ServFail,
                    }
                }
                Err(NoAnswer::Exchange(error)) => {
                    tracing::debug!(server = %server.address, %error, "cannot query a DNS server");
                    server.failed();
                    server.metrics.failed();
                }
                Err(NoAnswer::Timeout) => {
                    tracing::debug!(server = %server.address, "a DNS server did not respond");
                    if server.timed_out(sent_at) {
                        server.metrics.failed();
                    }
                }
            }
        }
        if let Some(answer) = truncated {
            return answer;
        }
        if is_failure {
            self.cache().put_failure(question.clone());
        }
        server_failure()
    }

    /// Stores an answer in the cache, and returns it for the reply.
    fn store(&self, question: &Question, Received { mut message, bytes, summary }: Received) -> ServerAnswer {
        let (bytes, ttls): (Arc<[u8]>, _) = (bytes.into(), summary.ttls());
        self.cache().put(question.clone(), &message, summary, Arc::clone(&bytes));
        if bytes.len() > SMALL_BYTES {
            return ServerAnswer::Large(LargeAnswer::new(bytes, summary.code, ttls));
        }
        ttls.apply(&mut message);
        ServerAnswer::Decoded(Arc::new(message))
    }

    /// Queries one server.
    async fn ask(
        &self,
        server: SocketAddr,
        question: &Question,
        client: IpAddr,
    ) -> Result<Received, NoAnswer> {
        let requester = Requester { client, large: &self.large };
        match timeout(ANSWER_TIMEOUT, exchange(server, question, requester)).await {
            Ok(received) => received.map_err(NoAnswer::Exchange),
            Err(_elapsed) => Err(NoAnswer::Timeout),
        }
    }

    /// Probes once whether a server forwards queries to this server.
    fn probe(self: &Arc<Self>, server: &Arc<Server>) {
        let Some(question) = server.probe() else { return };
        let (upstream, address) = (Arc::clone(self), server.address);
        tokio::spawn(async move {
            let requester = Requester { client: NO_CLIENT, large: &upstream.large };
            // The answer is ignored. A loop is detected when the probe arrives at this server.
            let _answer = timeout(ANSWER_TIMEOUT, exchange(address, &question, requester)).await;
        });
    }
}

/// Waits for the answer. `None` if the query's task ended without an answer.
async fn wait(outcome: Option<Outcome>) -> Option<ServerAnswer> {
    let mut outcome = outcome?;
    let answered = outcome.wait_for(Option::is_some).await.ok()?;
    answered.clone()
}

/// The first records of a truncated answer. A reply by UDP has no room for more records.
fn first_records(mut message: Message) -> ServerAnswer {
    message.answers.truncate(SMALL_RECORDS);
    message.authorities.truncate(SMALL_RECORDS);
    message.additionals.clear();
    ServerAnswer::Decoded(Arc::new(message))
}

fn server_failure() -> ServerAnswer {
    ServerAnswer::Decoded(Arc::new(Message::error_msg(0, OpCode::Query, ResponseCode::ServFail)))
}

/// Whether the response is final. After a failure or a refusal the next server is queried. An extended code of EDNS,
/// such as `BADVERS`, is not final. It refers to the query of the forwarder, not to the query of the client. A client
/// without EDNS cannot receive such a code.
fn is_useful(code: ResponseCode) -> bool {
    code.high() == 0 && !matches!(code, ResponseCode::ServFail | ResponseCode::Refused | ResponseCode::NotImp)
}

#[cfg(test)]
mod tests;
