//! Connections to etcd's members. One member is used. If it does not respond, another member replaces it.

use std::{
    error::Error as _,
    future::Future,
    io::ErrorKind,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use coracle_error_chain::chain;
use tokio::sync::watch;
use tonic::{
    Code, ConnectError, Response, Status,
    transport::{Channel, Endpoint},
};

use super::{
    EtcdTls,
    api::{
        CompactionRequest, CompactionResponse, LeaseGrantRequest, LeaseGrantResponse, RangeRequest,
        RangeResponse, RequestOp, TxnRequest, TxnResponse, kv_client::KvClient, lease_client::LeaseClient,
        request_op,
    },
    channels::Channels,
    hang::{self, HangNotice, Hangs, is_unreachable},
};
use crate::{Error, Health};

/// Maximum duration of a request. etcd's own timeout is seven seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(8);
/// Maximum size of a response in bytes: a page of the largest objects that etcd accepts.
const MAX_RESPONSE: usize = 1 << 30;

/// The members of etcd.
pub(super) struct Connection {
    channels: Channels,
    /// Index of the channel in use.
    current: AtomicUsize,
    health: Mutex<Health>,
    /// Time at which requests began to fail. `None` if the last request succeeded.
    failing_since: Mutex<Option<Instant>>,
    /// The revision that every watch must reach. etcd has confirmed it.
    expected: watch::Sender<u64>,
    /// The reason why etcd is not used any more: its revision has fallen.
    replaced: OnceLock<String>,
    hangs: Hangs,
}

/// The member that is used.
pub(super) struct Member {
    pub(super) index: usize,
    pub(super) channel: Channel,
    /// Waits for a report that the member hangs.
    pub(super) hang: HangNotice,
}

/// The effect of a request on the database.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// The request may be repeated, and does not show whether the database accepts writes.
    Repeatable,
    /// A transaction that only deletes. A full database accepts it.
    Deletion,
    /// A transaction that needs space.
    Growth,
}

// === impl Connection ===

impl Connection {
    pub(super) fn new(servers: &[String], tls: Option<&EtcdTls>) -> Result<Self, Error> {
        Ok(Self {
            channels: Channels::new(servers, tls)?,
            hangs: Hangs::new(servers.len()),
            current: AtomicUsize::new(0),
            health: Mutex::new(Health::Good),
            failing_since: Mutex::new(None),
            expected: watch::Sender::new(0),
            replaced: OnceLock::new(),
        })
    }

    pub(super) async fn range(&self, request: RangeRequest) -> Result<RangeResponse, Error> {
        let call = |channel| {
            let request = request.clone();
            async move { KvClient::new(channel).max_decoding_message_size(MAX_RESPONSE).range(request).await }
        };
        self.call(Effect::Repeatable, call).await
    }

    pub(super) async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, Error> {
        let is_put = |one: &RequestOp| matches!(one.request, Some(request_op::Request::RequestPut(_)));
        let effect = if request.success.iter().any(is_put) { Effect::Growth } else { Effect::Deletion };
        let call = |channel| {
            let request = request.clone();
            async move { KvClient::new(channel).txn(request).await }
        };
        self.call(effect, call).await
    }

    pub(super) async fn compact(&self, request: CompactionRequest) -> Result<CompactionResponse, Error> {
        let call = |channel: Channel| async move { KvClient::new(channel).compact(request).await };
        self.call(Effect::Repeatable, call).await
    }

    pub(super) async fn grant(&self, request: LeaseGrantRequest) -> Result<LeaseGrantResponse, Error> {
        let call = |channel: Channel| async move { LeaseClient::new(channel).lease_grant(request).await };
        self.call(Effect::Repeatable, call).await
    }

    /// Sends a request to the current member. If the member does not respond, tries the other members. Other members
    /// are tried only if the request was not sent yet, or may be repeated.
    async fn call<T, F>(&self, effect: Effect, call: impl Fn(Channel) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.check_data()?;
        let mut last = None;
        for _ in 0..self.channels.all().len() {
            let Member { index, channel, hang } = self.member();
            let hang = (effect == Effect::Repeatable).then_some(hang);
            match self.response(index, hang, call(channel)).await {
                Ok(response) => {
                    // A full database still serves reads and deletions. So their success does not mean that the
                    // database accepts writes.
                    if effect == Effect::Growth || !matches!(self.health(), Health::Full { .. }) {
                        self.record(Health::Good);
                    }
                    return Ok(response.into_inner());
                }
                Err(status) => {
                    if !is_unreachable(&status) {
                        return Err(self.refused(&status));
                    }
                    self.advance(index);
                    let may_repeat = effect == Effect::Repeatable || is_unsent(&status);
                    last = Some(status);
                    if !may_repeat {
                        break;
                    }
                }
            }
        }
        let detail = last.as_ref().map_or_else(String::new, error_text);
        self.record(Health::Failed(detail.clone()));
        Err(Error::Unavailable { detail })
    }

    /// Waits for the response of a member, at most [`REQUEST_TIMEOUT`], and until `hang` has a report of the member. A
    /// request that may not be repeated at another member has no `hang`, because its response may still come.
    async fn response<T>(
        &self,
        index: usize,
        hang: Option<HangNotice>,
        request: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<Response<T>, Status> {
        let hangs = async {
            match hang {
                Some(hang) => tokio::select! {
                    // Cancel-safe: a check that is dropped has no effect.
                    () = hang.reported(index) => {}
                    () = self.suspect(index) => {}
                },
                None => {
                    self.suspect(index).await;
                    std::future::pending().await
                }
            }
        };
        tokio::select! {
            // The other futures only wait. If they end, the request is cancelled.
            biased;
            response = request => response,
            () = hangs => Err(Status::unavailable("the member does not respond")),
            () = tokio::time::sleep(REQUEST_TIMEOUT) => Err(Status::unavailable("request timed out")),
        }
    }

    /// Replaces a member that has not responded for a while, if another member responds. Never ends if the member was
    /// not replaced, because the caller waits for a response meanwhile.
    async fn suspect(&self, index: usize) {
        let channels = self.channels.all();
        if channels.len() > 1 {
            tokio::time::sleep(hang::SUSPECT_AFTER).await;
            // Many requests can wait for the same member, and one check is enough.
            let _checking = self.hangs.check().await;
            if self.current_of(channels.len()) == index
                && let Some(other) = hang::replacement(&channels, index).await
                && self.replace(index, other)
            {
                let servers = self.channels.servers();
                tracing::warn!(member = ?servers.get(index), other = ?servers.get(other), "a member of etcd hangs");
                self.hangs.report(index);
                return;
            }
        }
        std::future::pending().await
    }

    /// The error of a request that the server refused.
    fn refused(&self, status: &Status) -> Error {
        let error = classify(status);
        match &error {
            Error::Quota => self.record(Health::Full { free: 0 }),
            Error::Unavailable { detail } if status.code() != Code::NotFound => {
                self.record(Health::Failed(detail.clone()));
            }
            _ => {}
        }
        error
    }

    /// The member that is used.
    pub(super) fn member(&self) -> Member {
        // The notice must be older than the choice of the member. Otherwise a report between them is missed.
        let hang = self.hangs.notice();
        let channels = self.channels.all();
        let index = self.current_of(channels.len());
        let channel = channels.get(index).or(channels.first()).cloned();
        // The constructor refuses an empty list.
        let channel = channel.unwrap_or_else(|| Endpoint::from_static("http://localhost").connect_lazy());
        Member { index, channel, hang }
    }

    /// The index of the member in use. `count` is the number of members.
    fn current_of(&self, count: usize) -> usize {
        self.current.load(Ordering::Acquire) % count.max(1)
    }

    /// Uses the member `other` in place of `from`. Returns false if `from` is not used any more.
    fn replace(&self, from: usize, other: usize) -> bool {
        self.current.compare_exchange(from, other, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Replaces a member that does not respond by the next member. An expired certificate can be the cause.
    pub(super) fn advance(&self, from: usize) {
        self.replace(from, (from + 1) % self.channels.all().len());
        self.channels.reload_if_due();
    }

    /// The channels to all members.
    pub(super) fn channels(&self) -> &Channels {
        &self.channels
    }

    pub(super) fn health(&self) -> Health {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records the state that a request or a watch found. Changes are logged.
    pub(super) fn record(&self, found: Health) {
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        // An etcd that must not be used does not become healthy again.
        let found = self.replaced.get().map_or(found, |detail| Health::Failed(detail.clone()));
        if *health == found {
            return;
        }
        match (&*health, &found) {
            (Health::Failed(_), Health::Failed(_)) => {}
            (_, Health::Good) => tracing::info!("etcd serves requests again"),
            (_, other) => tracing::warn!(state = ?other, "etcd does not serve all requests"),
        }
        let mut since = self.failing_since.lock().unwrap_or_else(PoisonError::into_inner);
        *since = matches!(found, Health::Failed(_)).then(|| since.unwrap_or_else(Instant::now));
        *health = found;
    }

    /// Duration for which all requests have failed. `None` if the last request succeeded.
    pub(super) fn unreachable_for(&self) -> Option<Duration> {
        let since = self.failing_since.lock().unwrap_or_else(PoisonError::into_inner);
        since.map(|since| since.elapsed())
    }

    /// Makes every watch reach a revision.
    pub(super) fn expect_progress(&self, revision: u64) {
        self.expected.send_if_modified(|expected| {
            let is_newer = revision > *expected;
            *expected = revision.max(*expected);
            is_newer
        });
    }

    /// The newest revision that etcd has confirmed.
    pub(super) fn confirmed(&self) -> u64 {
        *self.expected.borrow()
    }

    /// Checks the revision of a linearizable read, which began when etcd had confirmed `confirmed`. A lower revision
    /// means that etcd has other data, such as an older snapshot. The cache and the clients know later revisions than
    /// etcd, so they would miss commits. Therefore etcd is not used any more, until the process is started again.
    pub(super) fn check_revision(&self, confirmed: u64, found: u64) -> Result<(), Error> {
        if found >= confirmed {
            return Ok(());
        }
        let detail = format!(
            "its revision has fallen from {confirmed} to {found}, so its data was replaced; restart all control planes"
        );
        if self.replaced.set(detail.clone()).is_ok() {
            tracing::error!(confirmed, found, "the data of etcd was replaced; restart all control planes");
            self.record(Health::Failed(detail));
        }
        self.check_data()
    }

    /// Whether the data of etcd was replaced. Then no request succeeds until the process is started again.
    pub(super) fn is_replaced(&self) -> bool {
        self.replaced.get().is_some()
    }

    /// Refuses requests if the data of etcd was replaced.
    fn check_data(&self) -> Result<(), Error> {
        match self.replaced.get() {
            Some(detail) => Err(Error::Unavailable { detail: detail.clone() }),
            None => Ok(()),
        }
    }

    /// The revision that every watch must reach.
    pub(super) fn expected(&self) -> watch::Receiver<u64> {
        self.expected.subscribe()
    }
}

/// The store's error for a status of etcd. Source of the texts: etcd's `api/v3rpc/rpctypes/error.go`.
pub(super) fn classify(status: &Status) -> Error {
    let text = status.message();
    match status.code() {
        Code::OutOfRange if text.contains("compacted") => Error::Compacted { oldest: 0 },
        Code::ResourceExhausted if text.contains("database space exceeded") => Error::Quota,
        Code::InvalidArgument if text.contains("request is too large") => Error::TooLarge,
        Code::ResourceExhausted if text.contains("message larger than max") => Error::TooLarge,
        _ => Error::Unavailable { detail: error_text(status) },
    }
}

/// Whether the request was not sent, because the connection could not be established.
fn is_unsent(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<ConnectError>() {
            return true;
        }
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return matches!(
                io.kind(),
                ErrorKind::ConnectionRefused
                    | ErrorKind::HostUnreachable
                    | ErrorKind::NetworkUnreachable
                    | ErrorKind::AddrNotAvailable
            );
        }
        source = error.source();
    }
    false
}

/// The message of a status with its causes.
pub(super) fn error_text(status: &Status) -> String {
    match status.source() {
        Some(source) => format!("{}: {}", status.message(), chain(source)),
        None => status.message().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_of_etcd_are_classified() {
        let of = |code, text: &str| classify(&Status::new(code, text));
        let compacted = of(Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted");
        assert!(matches!(compacted, Error::Compacted { .. }));
        let full = of(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded");
        assert!(matches!(full, Error::Quota));
        let large = of(Code::InvalidArgument, "etcdserver: request is too large");
        assert!(matches!(large, Error::TooLarge));
        let leader = of(Code::Unavailable, "etcdserver: leader changed");
        assert!(matches!(leader, Error::Unavailable { detail } if detail.contains("leader changed")));
    }

    #[test]
    fn a_write_is_repeated_only_if_no_connection_was_made() {
        let of = |error| is_unsent(&Status::from_error(error));
        assert!(of(Box::new(ConnectError("timed out".into()))));
        let established = std::io::Error::from(ErrorKind::TimedOut);
        assert!(!of(Box::new(established)) && !is_unsent(&Status::unavailable("leader changed")));
    }

    #[tokio::test]
    async fn an_https_server_needs_an_authority() {
        let error = Connection::new(&["https://127.0.0.1:2379".to_owned()], None).err().unwrap();
        assert!(error.to_string().contains("authority"), "{error}");
        assert!(Connection::new(&[], None).is_err());
    }

    #[tokio::test]
    async fn the_time_of_failures_begins_with_the_first_and_ends_with_a_success() {
        let connection = Connection::new(&["http://127.0.0.1:1".to_owned()], None).unwrap();
        let since = || *connection.failing_since.lock().unwrap();
        assert_eq!(connection.unreachable_for(), None);
        connection.record(Health::Failed("first".to_owned()));
        let first = since();
        connection.record(Health::Failed("second".to_owned()));
        assert!(first.is_some() && since() == first);
        assert!(connection.unreachable_for().is_some());
        connection.record(Health::Full { free: 0 });
        assert_eq!(connection.unreachable_for(), None, "a full database serves reads");
    }

    #[tokio::test]
    async fn after_a_revision_that_has_fallen_etcd_is_not_used() {
        let connection = Connection::new(&["http://127.0.0.1:1".to_owned()], None).unwrap();
        connection.check_revision(5, 5).unwrap();
        assert_eq!(connection.health(), Health::Good);
        assert!(matches!(connection.check_revision(5, 4), Err(Error::Unavailable { .. })));
        connection.record(Health::Good);
        assert!(matches!(connection.health(), Health::Failed(text) if text.contains("restart")));
        assert!(connection.unreachable_for().is_some());
        let refused = connection.txn(TxnRequest::default()).await.unwrap_err().to_string();
        assert!(refused.contains("from 5 to 4"), "{refused}");
    }
}
