//! The task of one watch: it follows etcd, and after a disconnection resumes at its last revision.
//!
//! States: connecting, and following. After a failure the task backs off and connects to the next member. If missed
//! commits are compacted, the task lists all entries and sends them as [`Event::Resync`]. Then it continues after the
//! revision of the list.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use coracle_backoff::Backoff;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming};

use super::{
    Keys, Shared, api,
    api::{
        WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse, event::EventType,
        watch_client::WatchClient, watch_request::RequestUnion,
    },
    connection::{Member, classify, error_text},
    revision_of, signed, unsigned,
};
use crate::{
    Commit, Error, Event, Health, Range, ReadablePage, Unreadable, UnreadableEntry, codec::FailedServices,
};

/// Maximum size of a response, in bytes.
const MAX_RESPONSE: usize = 1 << 30;
/// Maximum duration until etcd confirms a watch.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// First back-off between attempts to connect. It doubles with each attempt, up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// Maximum duration for which a key management service is not called again after it has failed. Each call can delay all
/// later commits up to the timeout of the service.
const SERVICE_PAUSE: Duration = Duration::from_secs(30);
/// Interval of requests for progress while a reader waits.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// The state of a watch.
pub(super) struct Follower {
    shared: Arc<Shared>,
    prefix: String,
    /// All commits up to this revision were sent.
    sent: u64,
    events: mpsc::UnboundedSender<Event>,
    /// The newest revision that a reader waits for.
    expected: watch::Receiver<u64>,
    /// Key management services that have failed. They are not called before `paused_until`, which is in the past while
    /// no service has failed.
    failed_services: FailedServices,
    paused_until: Instant,
}

/// The reason why a stream ended.
enum End {
    /// The consumer has dropped the watch.
    Unused,
    /// The commits after `sent` are compacted.
    Compacted,
    /// The member hangs. Another member has replaced it.
    Hanging,
    Failed(Error),
}

/// A change in a response of etcd.
enum Change {
    Commit(Commit),
    /// The new value cannot be decrypted.
    Unreadable(UnreadableEntry),
}

// === impl Change ===

impl Change {
    fn revision(&self) -> u64 {
        match self {
            Self::Commit(commit) => commit.revision,
            Self::Unreadable(entry) => entry.modified,
        }
    }
}

// === impl Follower ===

impl Follower {
    pub(super) fn new(
        shared: Arc<Shared>,
        prefix: &str,
        after: u64,
        events: mpsc::UnboundedSender<Event>,
    ) -> Self {
        let expected = shared.connection.expected();
        let (failed_services, paused_until) = (FailedServices::default(), Instant::now());
        Self {
            shared,
            prefix: prefix.to_owned(),
            sent: after,
            events,
            expected,
            failed_services,
            paused_until,
        }
    }

    /// Follows etcd until the consumer drops the watch.
    pub(super) async fn run(mut self) {
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        loop {
            let before = self.sent;
            let Member { index, channel, hang } = self.shared.connection.member();
            let hangs = Box::pin(hang.reported(index));
            let error = match self.follow(WatchClient::new(channel), hangs).await {
                End::Unused => return,
                End::Hanging => continue,
                End::Compacted => match self.resync().await {
                    Ok(()) => continue,
                    Err(error) => error,
                },
                End::Failed(error) => error,
            };
            self.shared.connection.advance(index);
            self.shared.connection.record(Health::Failed(error.to_string()));
            if self.sent > before {
                backoff.reset();
            }
            tracing::debug!(%error, "the watch of etcd is interrupted");
            if !self.wait_to_retry(&mut backoff).await {
                return;
            }
        }
    }

    /// Waits before the next attempt. Returns false if the consumer has dropped the watch. If the data of etcd was
    /// replaced, no attempt can succeed, so the task makes no further attempts.
    async fn wait_to_retry(&self, backoff: &mut Backoff) -> bool {
        if self.shared.connection.is_replaced() {
            self.events.closed().await;
            return false;
        }
        tokio::select! {
            // Cancel-safe: both futures only wait.
            () = tokio::time::sleep(backoff.next_delay()) => true,
            () = self.events.closed() => false,
        }
    }

    /// Follows one member until the stream ends, or until `hangs` ends.
    async fn follow(
        &mut self,
        client: WatchClient<tonic::transport::Channel>,
        mut hangs: Pin<Box<impl Future<Output = ()>>>,
    ) -> End {
        // If a watch starts above etcd's revision, etcd sends no events until it reaches the start. The watch would
        // miss the commits below the start.
        let newest = self.shared.revision().await;
        let checked = newest.and_then(|newest| self.shared.connection.check_revision(self.sent, newest));
        if let Err(error) = checked {
            return End::Failed(error);
        }
        let (requests, stream) = mpsc::channel(4);
        let opened = tokio::select! {
            // Cancel-safe: a stream that is dropped before it is open has no events yet.
            opened = self.open(client, &requests, ReceiverStream::new(stream)) => opened,
            () = &mut hangs => return End::Hanging,
        };
        let mut responses = match opened {
            Ok(responses) => responses,
            Err(error) => return End::Failed(error),
        };
        let mut next_request = Instant::now();
        loop {
            let waits = *self.expected.borrow_and_update() > self.sent;
            let progress = async {
                if waits {
                    tokio::time::sleep_until(next_request).await;
                } else {
                    // This cannot fail: the sender is in the connection, and this task holds the connection.
                    let _ = self.expected.changed().await;
                }
            };
            tokio::select! {
                // Cancel-safe: a response is received completely or not at all.
                response = responses.message() => match response {
                    Ok(Some(response)) => {
                        if let Err(end) = self.receive(response) {
                            return end;
                        }
                    }
                    Ok(None) => return End::Failed(Error::Unavailable { detail: "the watch ended".to_owned() }),
                    Err(status) => return End::Failed(failed(&status)),
                },
                // Cancel-safe: the future only waits.
                () = progress => {
                    if waits {
                        next_request = Instant::now() + PROGRESS_INTERVAL;
                        let _ = requests.try_send(request(RequestUnion::ProgressRequest(WatchProgressRequest {})));
                    } else {
                        // Wait first, because usually a commit arrives before a request for progress is needed.
                        next_request = Instant::now() + PROGRESS_INTERVAL / 5;
                    }
                }
                // Cancel-safe: the futures only wait.
                () = &mut hangs => return End::Hanging,
                () = self.events.closed() => return End::Unused,
            }
        }
    }

    /// Opens the stream and waits until etcd confirms the watch.
    async fn open(
        &self,
        client: WatchClient<tonic::transport::Channel>,
        requests: &mpsc::Sender<WatchRequest>,
        stream: ReceiverStream<WatchRequest>,
    ) -> Result<Streaming<WatchResponse>, Error> {
        let key = self.shared.keys.outer(&self.prefix);
        let range_end = Keys::end_of(key.clone());
        let create = WatchCreateRequest { key, range_end, start_revision: signed(self.sent + 1) };
        let _ = requests.try_send(request(RequestUnion::CreateRequest(create)));
        let mut request = Request::new(stream);
        // With this header, a member without a leader ends the watch. Otherwise the member would serve an old state
        // forever.
        request.metadata_mut().insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
        let mut client = client.max_decoding_message_size(MAX_RESPONSE);
        let opened = async {
            let mut responses = client.watch(request).await?.into_inner();
            match responses.message().await? {
                Some(created) if created.created && !created.canceled => Ok(responses),
                Some(other) => Err(Status::unavailable(other.cancel_reason)),
                None => Err(Status::unavailable("the watch ended")),
            }
        };
        let opened = timeout(OPEN_TIMEOUT, opened).await;
        let opened = opened.unwrap_or_else(|_elapsed| Err(Status::unavailable("opening a watch timed out")));
        let responses = opened.map_err(|status| failed(&status))?;
        self.shared.connection.record(Health::Good);
        Ok(responses)
    }

    /// Sends the events of a response.
    fn receive(&mut self, response: WatchResponse) -> Result<(), End> {
        if response.compact_revision > 0 {
            return Err(End::Compacted);
        }
        if response.canceled {
            return Err(End::Failed(Error::Unavailable { detail: response.cancel_reason }));
        }
        if response.events.is_empty() {
            let revision = revision_of(response.header.as_ref());
            return self.send_if_newer(revision);
        }
        let mut last = self.sent;
        let mut changes = Vec::new();
        let mut failed_services = self.failed_services();
        for event in response.events {
            let change = self.change(&mut failed_services, event);
            changes.extend(change.filter(|change| change.revision() > self.sent));
        }
        self.set_failed_services(failed_services);
        let mut changes = changes.into_iter().peekable();
        while let Some(change) = changes.next() {
            let event = match change {
                // This event does not complete its revision. Only a commit or a progress event does.
                Change::Unreadable(entry) => Event::Unreadable(entry),
                Change::Commit(mut commit) => {
                    last = commit.revision;
                    // `guard_follows` makes the consumer wait for the guard's commit, so it is set only if that commit
                    // is in `changes`.
                    let is_guard =
                        |next: &Change| matches!(next, Change::Commit(next) if next.revision == last);
                    commit.guard_follows = changes.peek().is_some_and(is_guard);
                    Event::Commit(Arc::new(commit))
                }
            };
            self.events.send(event).map_err(|_closed| End::Unused)?;
        }
        // The events of one revision are in one response.
        self.sent = last;
        Ok(())
    }

    /// Takes the services that have failed. After the pause the result is empty, so all services are called again.
    fn failed_services(&mut self) -> FailedServices {
        let failed = std::mem::take(&mut self.failed_services);
        if Instant::now() >= self.paused_until { FailedServices::default() } else { failed }
    }

    /// Keeps the services that have failed. The pause begins with the first failure.
    fn set_failed_services(&mut self, failed: FailedServices) {
        let now = Instant::now();
        if now >= self.paused_until && !failed.is_empty() {
            self.paused_until = now + SERVICE_PAUSE;
        }
        self.failed_services = failed;
    }

    fn send_if_newer(&mut self, revision: u64) -> Result<(), End> {
        if revision <= self.sent {
            return Ok(());
        }
        self.sent = revision;
        self.events.send(Event::Progress(revision)).map_err(|_closed| End::Unused)
    }

    /// The change of an event. `None` if the key of the event does not belong to this store.
    fn change(&self, failed: &mut FailedServices, event: api::Event) -> Option<Change> {
        let is_deletion = event.r#type() == EventType::Delete;
        let kv = event.kv?;
        let key = self.shared.keys.inner(&kv.key)?;
        let (revision, created) = (unsigned(kv.mod_revision), unsigned(kv.create_revision));
        let value = if is_deletion {
            None
        } else {
            match self.shared.opened(failed, key, kv.value) {
                Ok(value) => Some(value),
                // One unreadable value must not stop the watch of all other values.
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::error!(
                        %error,
                        cause,
                        revision,
                        "cannot read a changed value in etcd, keeping the previous one"
                    );
                    let unreadable = Unreadable { key: key.into(), modified: revision, error };
                    return Some(Change::Unreadable(unreadable.entry()));
                }
            }
        };
        Some(Change::Commit(Commit { revision, key: key.into(), value, created, guard_follows: false }))
    }

    async fn resync(&mut self) -> Result<(), Error> {
        let range = Range { prefix: self.prefix.clone(), ..Range::default() };
        let ReadablePage { page, unreadable } = self.shared.list_readable(&range).await?;
        tracing::warn!(
            after = self.sent,
            revision = page.revision,
            "the watch of etcd missed compacted commits"
        );
        // Only the first error is logged, because there may be thousands of errors.
        if let Some(Unreadable { key, error, .. }) = unreadable.first() {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            let values = unreadable.len();
            tracing::error!(%key, %error, cause, values, "cannot read values in etcd, keeping the previous ones");
        }
        let unreadable = unreadable.iter().map(Unreadable::entry).collect();
        self.sent = page.revision;
        // If the consumer has dropped the watch, the next stream ends.
        let _ = self.events.send(Event::Resync { page, unreadable });
        Ok(())
    }
}

fn request(union: RequestUnion) -> WatchRequest {
    WatchRequest { request_union: Some(union) }
}

fn failed(status: &Status) -> Error {
    match classify(status) {
        error @ Error::Unavailable { .. } => error,
        _ => Error::Unavailable { detail: error_text(status) },
    }
}

#[cfg(test)]
mod tests {
    use coracle_sealing::Keys as SealingKeys;

    use super::*;
    use crate::{
        Sealing,
        codec::{
            EntryCodec,
            tests::{SEALED_BY_SERVICE, with_absent_service},
        },
        etcd::{Keys as Names, connection::Connection, leases::Leases, range::Found},
    };

    fn put(key: &str, value: Vec<u8>, revision: i64) -> api::Event {
        let kv = api::KeyValue {
            key: format!("/p/{key}").into_bytes(),
            value,
            mod_revision: revision,
            create_revision: revision,
            ..api::KeyValue::default()
        };
        api::Event { kv: Some(kv), ..api::Event::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn an_etcd_with_other_data_is_not_tried_again() {
        let connection = Connection::new(&["http://127.0.0.1:1".to_owned()], None).unwrap();
        let (keys, codec) = (Names::new("p"), EntryCodec(None));
        let shared = Arc::new(Shared { connection, keys, codec, leases: Leases::default() });
        let (sender, events) = mpsc::unbounded_channel();
        let follower = Follower::new(shared.clone(), "/", 1, sender);
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        assert!(follower.wait_to_retry(&mut backoff).await);
        assert!(shared.connection.check_revision(5, 4).is_err());
        let retries = timeout(Duration::from_secs(3600), follower.wait_to_retry(&mut backoff)).await;
        assert!(retries.is_err());
        drop(events);
        assert!(!follower.wait_to_retry(&mut backoff).await);
    }

    #[tokio::test]
    async fn a_value_that_cannot_be_decrypted_does_not_stop_the_watch_of_others() {
        let directory = tempfile::tempdir().unwrap();
        let keys = |name: &str| SealingKeys::load_or_create(&directory.path().join(name)).unwrap();
        let sealing = Sealing { keys: keys("own"), prefixes: vec!["/secrets/".to_owned()], encryption: None };
        let connection = Connection::new(&["http://127.0.0.1:1".to_owned()], None).unwrap();
        let (keys_in_etcd, codec) = (Names::new("p"), EntryCodec(Some(sealing)));
        let shared = Shared { connection, keys: keys_in_etcd, codec, leases: Leases::default() };
        let (sender, mut events) = mpsc::unbounded_channel();
        let mut follower = Follower::new(Arc::new(shared), "/", 1, sender);
        let foreign = || keys("foreign").seal(b"x", b"/secrets/a").unwrap();
        let events_of = vec![
            put("/secrets/a", foreign(), 2),
            put("/pods/b", b"y".to_vec(), 3),
            put("/secrets/a", foreign(), 3),
        ];
        let response = WatchResponse { events: events_of, ..WatchResponse::default() };
        assert!(follower.receive(response).is_ok());
        let mut found = Found::default();
        let kvs = [put("/secrets/a", foreign(), 2), put("/pods/b", b"y".to_vec(), 3)];
        let kvs = kvs.into_iter().filter_map(|event| event.kv).collect();
        follower.shared.read(kvs, &mut found);
        assert_eq!(found.entries.iter().map(|entry| &*entry.key).collect::<Vec<_>>(), ["/pods/b"]);
        assert_eq!(found.unreadable.iter().map(|one| &*one.key).collect::<Vec<_>>(), ["/secrets/a"]);
        let unreadable =
            |modified: u64| UnreadableEntry { key: "/secrets/a".into(), modified, service: None };
        let Some(Event::Unreadable(first)) = events.recv().await else { panic!("not reported") };
        assert_eq!(first, unreadable(2));
        let Some(Event::Commit(commit)) = events.recv().await else { panic!("no commit") };
        assert_eq!((&*commit.key, commit.revision, commit.guard_follows), ("/pods/b", 3, false));
        let Some(Event::Unreadable(second)) = events.recv().await else { panic!("not reported") };
        assert_eq!(second, unreadable(3));
    }

    /// A call of a service that does not respond delays the watch up to the timeout of the service.
    #[tokio::test(start_paused = true)]
    async fn a_failed_service_is_not_called_again_for_a_while() {
        let directory = tempfile::tempdir().unwrap();
        let follower = |sealing: Sealing| {
            let connection = Connection::new(&["http://127.0.0.1:1".to_owned()], None).unwrap();
            let (keys, codec) = (Names::new("p"), EntryCodec(Some(sealing)));
            let shared = Shared { connection, keys, codec, leases: Leases::default() };
            let (sender, events) = mpsc::unbounded_channel();
            (Follower::new(Arc::new(shared), "/", 1, sender), events)
        };
        let response = |revision: i64| {
            let events = vec![put("/secrets/a", SEALED_BY_SERVICE.to_vec(), revision)];
            WatchResponse { events, ..WatchResponse::default() }
        };
        let service = |event: Option<Event>| match event {
            Some(Event::Unreadable(entry)) => entry.service,
            other => panic!("{other:?}"),
        };
        let (mut first, mut events) = follower(with_absent_service(directory.path()));
        // The pause begins with a failure, not with the first response.
        let readable = vec![put("/pods/b", b"y".to_vec(), 2)];
        assert!(first.receive(WatchResponse { events: readable, ..WatchResponse::default() }).is_ok());
        assert!(matches!(events.recv().await, Some(Event::Commit(_))));
        let almost = SERVICE_PAUSE - Duration::from_secs(1);
        tokio::time::advance(almost).await;
        assert!(first.receive(response(3)).is_ok());
        assert_eq!(service(events.recv().await).as_deref(), Some("p"));
        // This codec has no service, so an error of the service can only come from the kept failure.
        let keys = SealingKeys::load_or_create(&directory.path().join("keys")).unwrap();
        let sealing = Sealing { keys, prefixes: Vec::new(), encryption: None };
        let (mut second, mut events) = follower(sealing);
        (second.failed_services, second.paused_until) = (first.failed_services, first.paused_until);
        tokio::time::advance(almost).await;
        assert!(second.receive(response(4)).is_ok());
        assert_eq!(service(events.recv().await).as_deref(), Some("p"));
        tokio::time::advance(SERVICE_PAUSE - almost).await;
        assert!(second.receive(response(5)).is_ok());
        assert_eq!(service(events.recv().await), None);
    }
}
