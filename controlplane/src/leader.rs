//! Leader election by a Lease. If several control planes share a store, one of them runs the controllers, and one of
//! them runs the scheduler.
//!
//! States: candidate, leader. A candidate reads the lease at each retry period. It takes a lease that the holder has
//! released, or has not renewed for the lease's duration on the candidate's own clock. A leader that cannot renew its
//! lease within the deadline stops its work, before another server can start. A graceful stop releases the lease. The
//! algorithm and the default durations are taken from `client-go/tools/leaderelection`.

mod plan;

use std::{future::Future, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use plan::{Action, Observation};

/// Maximum duration of the release of a lease.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
const NAMESPACE: &str = "kube-system";

/// Durations of the leader election.
#[derive(Clone, Copy, Debug)]
pub struct LeaderElection {
    /// Time after which another candidate may take a lease that is not renewed. Whole seconds.
    pub lease: Duration,
    /// Time after which a leader that cannot renew its lease stops its work; less than `lease`.
    pub deadline: Duration,
    /// Delay between attempts to take or to renew a lease; less than `deadline`.
    pub retry: Duration,
}

impl Default for LeaderElection {
    fn default() -> Self {
        let [lease, deadline, retry] = [15, 10, 2].map(Duration::from_secs);
        Self { lease, deadline, retry }
    }
}

/// A candidate for a lease.
pub(crate) struct Candidate {
    leases: Api<Lease>,
    name: &'static str,
    identity: String,
    times: LeaderElection,
    observation: Option<Observation>,
}

// === impl Candidate ===

impl Candidate {
    /// A candidate with this identity, which no other process may have.
    pub(crate) fn new(client: Client, name: &'static str, identity: String, times: LeaderElection) -> Self {
        Self { leases: Api::namespaced(client, NAMESPACE), name, identity, times, observation: None }
    }

    /// Runs `work` whenever this process holds the lease. The token that `work` gets is cancelled when the lease is
    /// lost and at the shutdown.
    pub(crate) async fn run<F>(mut self, shutdown: CancellationToken, work: impl Fn(CancellationToken) -> F)
    where
        F: Future<Output = ()>,
    {
        loop {
            let Some(held_since) = self.acquire(&shutdown).await else { return };
            tracing::info!(lease = self.name, identity = self.identity, "acquired the lease of the leader");
            let term = shutdown.child_token();
            let mut working = std::pin::pin!(work(term.clone()));
            tokio::select! {
                // The work ends at the shutdown, or when it fails.
                () = &mut working => {}
                // A renewal that is interrupted may have taken effect, so the release reads the lease again.
                () = self.renew(held_since, &shutdown) => {
                    term.cancel();
                    working.await;
                }
            }
            if !shutdown.is_cancelled() {
                tracing::error!(
                    lease = self.name,
                    "no longer leading: the lease was not renewed in time, or the work ended"
                );
                // Wait before the next attempt. Otherwise work that always ends at once would write the lease without a
                // pause.
                tokio::select! {
                    // Cancel-safe: both futures only wait.
                    () = shutdown.cancelled() => {}
                    () = tokio::time::sleep(self.times.retry) => {}
                }
            }
            if shutdown.is_cancelled() {
                self.release().await;
                return;
            }
        }
    }

    /// Waits until this process holds the lease. Returns the start of the attempt that took the lease. `None` at the
    /// shutdown.
    async fn acquire(&mut self, shutdown: &CancellationToken) -> Option<Instant> {
        loop {
            let attempted = Instant::now();
            let attempt = tokio::time::timeout(self.times.deadline, self.attempt());
            tokio::select! {
                // An interrupted attempt may have taken the lease. It is not renewed, so it expires.
                () = shutdown.cancelled() => return None,
                held = attempt => if matches!(held, Ok(true)) {
                    return Some(attempted);
                },
            }
            tokio::select! {
                // Cancel-safe: both futures only wait.
                () = shutdown.cancelled() => return None,
                () = tokio::time::sleep(self.times.retry) => {}
            }
        }
    }

    /// Renews the lease until that fails for too long, or until the shutdown. The deadline counts from the start of the
    /// last successful attempt, because other candidates may have observed the lease since then.
    async fn renew(&mut self, held_since: Instant, shutdown: &CancellationToken) {
        let mut renewed = held_since;
        loop {
            let deadline = renewed + self.times.deadline;
            tokio::select! {
                // Cancel-safe: both futures only wait.
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep_until(deadline.min(Instant::now() + self.times.retry)) => {}
            }
            let attempted = Instant::now();
            match tokio::time::timeout_at(deadline, self.attempt()).await {
                Ok(true) => renewed = attempted,
                Ok(false) if attempted < deadline && self.may_hold() => {}
                _ => return,
            }
        }
    }

    /// Whether no other process was observed as the holder.
    fn may_hold(&self) -> bool {
        self.observation
            .as_ref()
            .is_none_or(|seen| seen.spec.holder_identity.as_ref() == Some(&self.identity))
    }

    /// One attempt to take or to renew the lease. Returns whether this process holds it.
    async fn attempt(&mut self) -> bool {
        match self.try_hold().await {
            Ok(held) => held,
            Err(error) => {
                tracing::debug!(%error, lease = self.name, "cannot take or renew the lease");
                false
            }
        }
    }

    async fn try_hold(&mut self) -> Result<bool, kube::Error> {
        let found = self.leases.get_opt(self.name).await?;
        let spec = found.as_ref().and_then(|lease| lease.spec.clone());
        self.observation =
            spec.map(|spec| Observation::of(spec, self.observation.take(), Instant::now().into()));
        let transitions = match plan::plan(self.observation.as_ref(), &self.identity, Instant::now().into()) {
            Action::Wait => return Ok(false),
            Action::Take { transitions } => transitions,
            Action::Renew => {
                self.write(found, None).await?;
                return Ok(true);
            }
        };
        self.write(found, Some(transitions)).await?;
        Ok(true)
    }

    /// Writes the lease with this process as its holder. The update fails if another candidate has written the lease
    /// before.
    async fn write(&mut self, found: Option<Lease>, transitions: Option<i32>) -> Result<(), kube::Error> {
        let now = MicroTime(Timestamp::now());
        let metadata = ObjectMeta {
            name: Some(self.name.to_owned()),
            namespace: Some(NAMESPACE.to_owned()),
            ..ObjectMeta::default()
        };
        let is_new = found.is_none();
        let mut lease = found.unwrap_or(Lease { metadata, spec: None });
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds = i32::try_from(self.times.lease.as_secs()).ok();
        spec.renew_time = Some(now.clone());
        if let Some(transitions) = transitions {
            spec.acquire_time = Some(now);
            spec.lease_transitions = Some(transitions);
        }
        let written = if is_new {
            self.leases.create(&PostParams::default(), &lease).await?
        } else {
            self.leases.replace(self.name, &PostParams::default(), &lease).await?
        };
        self.observation = written.spec.map(|spec| Observation::of(spec, None, Instant::now().into()));
        Ok(())
    }

    /// Releases the lease, so that another candidate takes it at its next attempt.
    async fn release(&self) {
        let released = async {
            let Some(mut lease) = self.leases.get_opt(self.name).await? else { return Ok(()) };
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_ref() != Some(&self.identity) {
                return Ok(());
            }
            *spec = LeaseSpec {
                holder_identity: Some(String::new()),
                lease_duration_seconds: Some(1),
                lease_transitions: spec.lease_transitions,
                renew_time: Some(MicroTime(Timestamp::now())),
                acquire_time: spec.acquire_time.clone(),
                ..LeaseSpec::default()
            };
            self.leases.replace(self.name, &PostParams::default(), &lease).await.map(|_| ())
        };
        match tokio::time::timeout(RELEASE_TIMEOUT, released).await {
            Ok(Ok(())) => tracing::info!(lease = self.name, "lease released"),
            Ok(Err::<(), kube::Error>(error)) => {
                tracing::warn!(%error, lease = self.name, "cannot release the lease");
            }
            Err(_elapsed) => tracing::warn!(lease = self.name, "releasing the lease timed out"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{
            Arc, Mutex,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use http::{Method, Request, Response, StatusCode};
    use kube::client::Body;

    use super::*;

    /// A client of a server that stores one lease.
    fn client() -> Client {
        let stored = Arc::<Mutex<Option<Vec<u8>>>>::default();
        let service = tower::service_fn(move |request: Request<Body>| {
            let stored = stored.clone();
            async move {
                let (head, body) = request.into_parts();
                if head.method != Method::GET {
                    let sent = body.collect_bytes().await.unwrap();
                    *stored.lock().unwrap() = Some(sent.to_vec());
                }
                let lease = stored.lock().unwrap().clone();
                let mut response = Response::new(Body::from(lease.clone().unwrap_or_else(|| {
                    br#"{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                        "reason": "NotFound", "message": "not found"}"#
                        .to_vec()
                })));
                if lease.is_none() {
                    *response.status_mut() = StatusCode::NOT_FOUND;
                }
                Ok::<_, Infallible>(response)
            }
        });
        Client::new(service, "default")
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_ends_by_itself_starts_again_after_a_pause() {
        let times = LeaderElection::default();
        let candidate = Candidate::new(client(), "test", "this".to_owned(), times);
        let starts = AtomicUsize::new(0);
        let work = |_term| {
            let started = starts.fetch_add(1, Ordering::Relaxed);
            assert!(started < 100, "no pause");
            std::future::ready(())
        };
        let running = candidate.run(CancellationToken::new(), work);
        assert!(tokio::time::timeout(times.retry * 10, running).await.is_err());
        let started = starts.load(Ordering::Relaxed);
        assert!((5..=11).contains(&started), "{started}");
    }
}
