//! The gate between a pod's sandbox and its containers: the containers start after the pod's policies are in the
//! kernel.
//!
//! If the API server cannot be reached at the agent's start, the policies are unknown. Then the record of the
//! namespaces with policies decides: pods of these namespaces wait, other pods start. Without a record the policies
//! were never listed, so all pods wait. While the API server responds, and no request for the policies has failed, all
//! pods wait for the list. The list may contain the first policy of a namespace.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use coracle_network_policy::PodFacts;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::api_health::ApiHealth;

/// Maximum wait of a pod in a namespace with policies, and of all pods while the first list of policies is expected.
/// After this time, the start of the pod fails with an error and is retried.
const RESTRICTED_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum wait of a pod in a namespace without recorded policies, while the policies are unknown and their list is not
/// expected. After this time, the pod starts. Before the first list, the time counts from the first pod that waits. So
/// after a boot without the API server, later pods and the containers after an init container do not wait again.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Minimum of the wait that [`TIMEOUT`] limits. The task of network policies can answer in this time.
const MIN_TIMEOUT: Duration = Duration::from_millis(250);
/// Delay before a failed write of the record is retried. A full disk can make the write fail.
const WRITE_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Maximum size in bytes of the record.
const RECORD_MAX: u64 = 64 << 20;

/// Entry of the record while there are policies of the whole cluster: they may select pods of every namespace. No
/// namespace has this name.
pub(crate) const EVERY_NAMESPACE: &str = "*";

/// A request to the task of network policies.
pub(crate) enum Request {
    /// The pod's sandbox has these addresses. `done` is answered when its policies are in the kernel.
    Admit { facts: PodFacts, done: oneshot::Sender<()> },
    /// The pod's sandbox was removed.
    Release { uid: String },
}

/// The policies of a pod are not in the kernel yet.
#[derive(Debug, thiserror::Error)]
#[error("network policies of the namespace {namespace} are not enforced yet: {cause}")]
pub(crate) struct NotEnforced {
    namespace: String,
    cause: String,
    /// The request, which is answered later.
    pub(crate) pending: PendingAdmission,
}

/// A request that the task of network policies has not answered within the limit.
#[derive(Debug)]
pub(crate) struct PendingAdmission(Option<oneshot::Receiver<()>>);

/// Makes pods wait until their policies are in the kernel; cheap to clone. Without the task of network policies no pod
/// waits.
#[derive(Clone)]
pub(crate) struct PolicyGate {
    node_name: String,
    requests: Option<mpsc::UnboundedSender<Request>>,
    restricted: Restricted,
    /// Health of the API server. Before its first response it counts as unreachable.
    health: ApiHealth,
    /// Time at which the first pod in a namespace without recorded policies began to wait.
    first_wait: Arc<OnceLock<Instant>>,
}

/// The recorded namespaces with policies.
#[derive(Clone)]
pub(crate) struct Restricted {
    record: PathBuf,
    /// None while there is no readable record: then every namespace counts as restricted.
    namespaces: Arc<RwLock<Option<BTreeSet<String>>>>,
    /// The reason why policies are not in the kernel, if the task of network policies has an error.
    cause: Arc<Mutex<Option<String>>>,
    /// Time of the last write, if it failed. The record on disk is then older than `namespaces`.
    failed: Arc<Mutex<Option<Instant>>>,
    /// Whether the policies were listed since the agent's start.
    are_listed: Arc<AtomicBool>,
}

/// The side of the gate that the network policy task holds.
pub(crate) struct GateEnd {
    pub(crate) requests: mpsc::UnboundedReceiver<Request>,
    pub(crate) restricted: Restricted,
}

/// A gate, and the side of it that the network policy task holds. Without a record (`None`) policies are not enforced.
pub(crate) fn gate(node_name: &str, record: Option<&Path>) -> (PolicyGate, Option<GateEnd>) {
    let restricted = Restricted::load(record.unwrap_or(Path::new("")));
    let mut gate = PolicyGate {
        node_name: node_name.to_owned(),
        requests: None,
        restricted: restricted.clone(),
        health: ApiHealth::default(),
        first_wait: Arc::default(),
    };
    if record.is_none() {
        return (gate, None);
    }
    let (requests, received) = mpsc::unbounded_channel();
    gate.requests = Some(requests);
    (gate, Some(GateEnd { requests: received, restricted }))
}

// === impl PolicyGate ===

impl PolicyGate {
    /// The gate that makes pods wait for the first list of policies while the API server responds.
    pub(crate) fn with_health(self, health: ApiHealth) -> Self {
        Self { health, ..self }
    }

    /// Waits until the policies of a pod with these addresses are in the kernel.
    ///
    /// # Errors
    /// When the policies are not in the kernel within the limit. There is no error if the namespace has no policies and
    /// the first list is not expected.
    pub(crate) async fn admit(&self, pod: &Pod, ips: &[IpAddr]) -> Result<(), NotEnforced> {
        let Some(requests) = &self.requests else { return Ok(()) };
        let Some(mut facts) = PodFacts::of(pod, &self.node_name) else { return Ok(()) };
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        facts.ips = ips.to_vec();
        let (done, mut answered) = oneshot::channel();
        // If there is no receiver, the agent is stopping.
        let _ = requests.send(Request::Admit { facts, done });
        let is_restricted = self.restricted.has(&namespace);
        let limit = if is_restricted { RESTRICTED_TIMEOUT } else { self.unrestricted_timeout() };
        let mut answer = tokio::time::timeout(limit, &mut answered).await;
        if answer.is_err() && !is_restricted && self.expects_list() {
            answer = tokio::time::timeout(RESTRICTED_TIMEOUT - limit, &mut answered).await;
        }
        // The policies may have been listed in the meantime.
        if matches!(answer, Ok(Ok(()))) || !(is_restricted || self.must_wait(&namespace)) {
            return Ok(());
        }
        let pending = PendingAdmission(answer.is_err().then_some(answered));
        Err(NotEnforced { namespace, cause: self.restricted.cause(), pending })
    }

    /// Maximum wait of a pod in a namespace without recorded policies, from now on.
    fn unrestricted_timeout(&self) -> Duration {
        let waited = self.first_wait.get_or_init(Instant::now).elapsed();
        match self.restricted.are_listed.load(Ordering::Acquire) {
            true => TIMEOUT,
            false => TIMEOUT.saturating_sub(waited).max(MIN_TIMEOUT),
        }
    }

    /// Whether the first list of policies is expected: the list has not arrived yet, the API server responds, and no
    /// request for the list has failed.
    fn expects_list(&self) -> bool {
        !self.restricted.are_listed.load(Ordering::Acquire)
            && !self.restricted.is_failing()
            && self.health.has_responded()
    }

    /// Whether a pod of the namespace must wait for its policies. The list is checked first: if it arrives between the
    /// two checks, the second one finds the listed namespaces.
    fn must_wait(&self, namespace: &str) -> bool {
        self.expects_list() || self.restricted.has(namespace)
    }

    /// Notes a pod that an earlier agent has started, with the addresses of its sandbox. So its policies stay in force
    /// until its release, even if its object is deleted before its containers have ended.
    pub(crate) fn note_running(&self, pod: &Pod, ips: &[IpAddr]) {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        let facts = PodFacts::of(pod, &self.node_name).filter(|_| node == Some(self.node_name.as_str()));
        if let (Some(requests), Some(mut facts)) = (&self.requests, facts) {
            facts.ips = ips.to_vec();
            // Nothing waits for the answer.
            let _ = requests.send(Request::Admit { facts, done: oneshot::channel().0 });
        }
    }

    /// Removes the entry of a pod whose sandbox is removed.
    pub(crate) fn release(&self, uid: &str) {
        if let Some(requests) = &self.requests {
            let _ = requests.send(Request::Release { uid: uid.to_owned() });
        }
    }
}

// === impl PendingAdmission ===

impl PendingAdmission {
    /// Waits until the pod's policies are in the kernel. Returns at most once, and never while the agent is stopping.
    /// Cancel safe.
    pub(crate) async fn enforced(&mut self) {
        if let Some(answered) = &mut self.0 {
            let answer = answered.await;
            self.0 = None;
            if answer.is_ok() {
                return;
            }
        }
        std::future::pending().await
    }
}

// === impl Restricted ===

impl Restricted {
    fn load(record: &Path) -> Self {
        let namespaces = read(record);
        if let Err(error) = namespaces.as_ref()
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(
                %error,
                record = %record.display(),
                "the record of namespaces with network policies is unreadable: all pods wait for their policies"
            );
        }
        let namespaces = Arc::new(RwLock::new(namespaces.ok()));
        Self {
            record: record.to_owned(),
            namespaces,
            cause: Arc::default(),
            failed: Arc::default(),
            are_listed: Arc::default(),
        }
    }

    /// Sets why policies are not in the kernel. `None` if no operation has failed.
    pub(crate) fn explain(&self, cause: Option<String>) {
        *self.cause.lock().unwrap_or_else(PoisonError::into_inner) = cause;
    }

    fn cause(&self) -> String {
        let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner).clone();
        cause.unwrap_or_else(|| "the API server or nftables does not respond".to_owned())
    }

    /// Whether an operation has failed, so that policies are not in the kernel.
    fn is_failing(&self) -> bool {
        self.cause.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The path of the record.
    pub(crate) fn record(&self) -> &Path {
        &self.record
    }

    /// Whether a namespace has policies according to the record.
    pub(crate) fn has(&self, namespace: &str) -> bool {
        let namespaces = self.namespaces.read().unwrap_or_else(PoisonError::into_inner);
        namespaces
            .as_ref()
            .is_none_or(|namespaces| namespaces.contains(namespace) || namespaces.contains(EVERY_NAMESPACE))
    }

    /// Replaces the namespaces by the namespaces of listed policies, and writes the record if they differ.
    pub(crate) async fn set(&self, namespaces: BTreeSet<String>) {
        let is_same =
            self.namespaces.read().unwrap_or_else(PoisonError::into_inner).as_ref() == Some(&namespaces);
        if !is_same {
            *self.namespaces.write().unwrap_or_else(PoisonError::into_inner) = Some(namespaces.clone());
        }
        // Set the flag after the namespaces, so that a thread that reads the flag also reads the new namespaces.
        self.are_listed.store(true, Ordering::Release);
        match is_same {
            true => self.retry().await,
            false => self.write(namespaces).await,
        }
    }

    /// Retries a failed write of the record after [`WRITE_RETRY_DELAY`].
    pub(crate) async fn retry(&self) {
        let failed = *self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.is_none_or(|failed| failed.elapsed() < WRITE_RETRY_DELAY) {
            return;
        }
        let namespaces = self.namespaces.read().unwrap_or_else(PoisonError::into_inner).clone();
        self.write(namespaces.unwrap_or_default()).await;
    }

    async fn write(&self, namespaces: BTreeSet<String>) {
        let record = self.record.clone();
        let write = move || {
            let text = serde_json::to_vec(&namespaces).unwrap_or_default();
            let written = crate::private_file::replace(&record, &text);
            written.inspect_err(|_| empty_outdated(&record, &namespaces))
        };
        let written = coracle_threads::spawn_blocking(write).await;
        let written = written.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        let failed = written.is_err().then(Instant::now);
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = failed;
        if let Err(error) = written {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                record = %self.record.display(),
                "cannot record the namespaces with network policies, retrying"
            );
        }
    }
}

/// Reads the record. `NotFound` means that the policies were never listed.
fn read(record: &Path) -> io::Result<BTreeSet<String>> {
    let text = crate::bounded::read(record, RECORD_MAX)?;
    serde_json::from_slice(&text).map_err(io::Error::from)
}

/// Empties a record that could not be replaced and that lacks one of the namespaces. With an empty record all pods wait
/// after a restart. With the outdated record, pods of the missing namespace would start without its policies. A full
/// disk has room for an empty file.
fn empty_outdated(record: &Path, namespaces: &BTreeSet<String>) {
    let has =
        |recorded: &BTreeSet<String>| recorded.contains(EVERY_NAMESPACE) || namespaces.is_subset(recorded);
    match read(record) {
        Ok(recorded) if has(&recorded) => return,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        _ => {}
    }
    let mut options = OpenOptions::new();
    let opened = options.write(true).create(true).truncate(true).mode(0o600).open(record);
    if let Err(error) = opened.and_then(|file| file.sync_all()) {
        tracing::warn!(
            %error,
            record = %record.display(),
            "cannot empty an outdated record of the namespaces with network policies"
        );
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod() -> Pod {
        serde_json::from_value(
            json!({"metadata": {"uid": "u", "namespace": "n"}, "spec": {"containers": []}}),
        )
        .unwrap()
    }

    #[test]
    fn a_damaged_or_absent_record_restricts_every_namespace() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record");
        assert!(Restricted::load(&record).has("n"), "no record: the policies were never listed");
        std::fs::write(&record, "[]").unwrap();
        assert!(!Restricted::load(&record).has("n"), "there was no policy");
        std::fs::write(&record, "[\"*\"]").unwrap();
        assert!(Restricted::load(&record).has("n"), "policies of the whole cluster were known");
        std::fs::write(&record, "[\"n").unwrap();
        assert!(Restricted::load(&record).has("other"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_that_could_not_be_written_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record");
        let restricted = Restricted::load(&record);
        // A file cannot replace a directory, so the write fails.
        std::fs::create_dir(&record).unwrap();
        restricted.set(["n".to_owned()].into()).await;
        assert!(restricted.has("n"));
        std::fs::remove_dir(&record).unwrap();
        restricted.retry().await;
        tokio::time::advance(WRITE_RETRY_DELAY).await;
        restricted.retry().await;
        let next = Restricted::load(&record);
        assert!(next.has("n") && !next.has("other"));
        std::fs::remove_file(&record).unwrap();
        restricted.set(["n".to_owned()].into()).await;
        assert!(!record.exists(), "written once");
    }

    #[tokio::test]
    async fn a_record_that_lacks_a_namespace_and_cannot_be_replaced_makes_all_pods_wait() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record.json");
        let restricted = Restricted::load(&record);
        // A directory in the place of the temporary file makes the replacement fail, as a full disk does.
        let obstacle = record.with_extension("tmp");
        for recorded in [false, true] {
            if recorded {
                restricted.set(["m".to_owned(), "n".to_owned()].into()).await;
            }
            std::fs::create_dir(&obstacle).unwrap();
            restricted.set(["n".to_owned()].into()).await;
            let next = Restricted::load(&record);
            assert_eq!(next.has("other"), !recorded, "without a record, the namespace is not in it");
            assert!(next.has("n"));
            restricted.set(["n".to_owned(), "o".to_owned()].into()).await;
            assert!(Restricted::load(&record).has("o"));
            std::fs::remove_dir(&obstacle).unwrap();
            restricted.set(BTreeSet::new()).await;
            assert!(!Restricted::load(&record).has("n"));
        }
    }

    #[test]
    fn a_pod_waits_while_the_first_list_shows_policies_of_its_namespace() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record");
        let health = ApiHealth::default();
        health.record_response();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for _ in 0..200 {
            std::fs::write(&record, "[]").unwrap();
            let gate = gate("here", Some(&record)).0.with_health(health.clone());
            let listed = gate.restricted.clone();
            std::thread::scope(|scope| {
                scope.spawn(|| runtime.block_on(listed.set(["n".to_owned()].into())));
                while !gate.restricted.are_listed.load(Ordering::Acquire) {
                    assert!(gate.must_wait("n"));
                }
            });
            assert!(gate.must_wait("n"));
        }
    }

    #[test]
    fn a_pod_of_an_earlier_agent_is_noted_with_the_addresses_of_its_sandbox() {
        let dir = tempfile::tempdir().unwrap();
        let (gate, end) = gate("here", Some(&dir.path().join("record")));
        let mut requests = end.unwrap().requests;
        let ips = [IpAddr::from([10, 42, 0, 2])];
        gate.note_running(&pod(), &ips);
        assert!(requests.try_recv().is_err(), "a pod that is assigned to no node");
        let mut own = pod();
        own.spec.get_or_insert_default().node_name = Some("here".to_owned());
        gate.note_running(&own, &ips);
        let Ok(Request::Admit { facts, .. }) = requests.try_recv() else { panic!("no request") };
        assert_eq!(facts.ips, ips);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_waits_shows_why_its_policies_are_not_enforced() {
        let dir = tempfile::tempdir().unwrap();
        let (gate, ends) = gate("here", Some(&dir.path().join("record")));
        let restricted = ends.unwrap().restricted;
        let shown = async || gate.admit(&pod(), &[]).await.unwrap_err().to_string();
        assert!(shown().await.ends_with("the API server or nftables does not respond"));
        restricted.explain(Some("cannot list things".to_owned()));
        assert_eq!(
            shown().await,
            "network policies of the namespace n are not enforced yet: cannot list things"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn pods_wait_for_the_first_list_while_the_api_server_responds() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record");
        // The last list had no policy.
        std::fs::write(&record, "[]").unwrap();
        let (gate, ends) = gate("here", Some(&record));
        let (health, ends) = (ApiHealth::default(), ends.unwrap());
        let gate = gate.with_health(health.clone());
        assert!(gate.admit(&pod(), &[]).await.is_ok(), "the API server has not responded yet");
        health.record_response();
        assert!(gate.admit(&pod(), &[]).await.is_err(), "the list may have a policy of its namespace");
        health.failed();
        assert!(gate.admit(&pod(), &[]).await.is_ok(), "the API server is unreachable");
        health.record_response();
        ends.restricted.explain(Some("cannot list networkpolicies".to_owned()));
        assert!(gate.admit(&pod(), &[]).await.is_ok(), "the list may never come");
        ends.restricted.explain(None);
        ends.restricted.set(["other".to_owned()].into()).await;
        assert!(gate.admit(&pod(), &[]).await.is_ok(), "the list has no policy of its namespace");
    }

    #[tokio::test(start_paused = true)]
    async fn pods_that_start_later_do_not_wait_longer_for_a_server_that_does_not_respond() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record");
        std::fs::write(&record, "[]").unwrap();
        let (gate, _ends) = gate("here", Some(&record));
        let (pod, began) = (pod(), Instant::now());
        let later = async {
            tokio::time::sleep(TIMEOUT - MIN_TIMEOUT).await;
            gate.admit(&pod, &[]).await
        };
        let (first, later) = tokio::join!(gate.admit(&pod, &[]), later);
        assert!(first.is_ok() && later.is_ok());
        // The clock of this test advances only by the timers.
        let took = began.elapsed();
        assert!((TIMEOUT..TIMEOUT + MIN_TIMEOUT).contains(&took), "{took:?}");
        assert!(gate.admit(&pod, &[]).await.is_ok());
        let more = began.elapsed() - took;
        assert!((MIN_TIMEOUT..TIMEOUT).contains(&more), "{more:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_was_not_answered_in_time_is_answered_later() {
        let dir = tempfile::tempdir().unwrap();
        let (gate, ends) = gate("here", Some(&dir.path().join("record")));
        let mut requests = ends.unwrap().requests;
        let mut pending = gate.admit(&pod(), &[]).await.unwrap_err().pending;
        let Ok(Request::Admit { done, .. }) = requests.try_recv() else { panic!("no request") };
        assert!(futures::FutureExt::now_or_never(pending.enforced()).is_none());
        assert!(done.send(()).is_ok());
        pending.enforced().await;
        assert!(futures::FutureExt::now_or_never(pending.enforced()).is_none(), "it returns once");
    }

    #[tokio::test(start_paused = true)]
    async fn pods_of_recorded_namespaces_wait_for_their_policies() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record");
        let (first, ends) = gate("here", Some(&record));
        assert!(first.admit(&pod(), &[]).await.is_err(), "the policies were never listed");
        let ends = ends.unwrap();
        ends.restricted.set(BTreeSet::new()).await;
        let (next, _ends) = gate("here", Some(&record));
        assert!(next.admit(&pod(), &[]).await.is_ok(), "there were no policies");
        ends.restricted.set(["n".to_owned()].into()).await;
        let (next, ends) = gate("here", Some(&record));
        assert!(next.admit(&pod(), &[]).await.is_err(), "its policies are unknown after a restart");
        let mut requests = ends.unwrap().requests;
        let answer = async {
            while let Some(request) = requests.recv().await {
                if let Request::Admit { done, .. } = request {
                    let _ = done.send(());
                }
            }
        };
        let admit = async { next.admit(&pod(), &[]).await };
        tokio::select! {
            () = answer => {}
            admitted = admit => assert!(admitted.is_ok()),
        }
    }
}
