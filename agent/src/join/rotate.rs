//! Renewal of certificates.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use coracle_backoff::Backoff;
use jiff::Timestamp;
use kube::Client;
use tokio::sync::watch;

use super::client::Current;
use super::error::JoinError;
use super::files::{Files, ServingFile};
use super::request::{self, Failure, Identity, RequestedIdentity};
use super::serving::Serving;

/// First back-off after a failed request. It doubles up to [`MAX_BACKOFF`], after denied requests up to
/// [`REQUEST_TIMEOUT`].
const FIRST_BACKOFF: Duration = Duration::from_millis(200);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Minimum of the maximum back-off, which decreases shortly before the certificate expires.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
/// Timeout of one request, and maximum back-off after denied requests, as in the kubelet. An administrator may have to
/// approve, and each request stays in the cluster for a day.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// After the end of a certificate, its replacement is awaited for this time before an error is logged.
const EXPIRY_GRACE: Duration = Duration::from_secs(5);
/// Minimum time between two rotations, or a quarter of the validity if that is shorter. With a clock that is ahead,
/// every new certificate would be due at once.
const MIN_ROTATION_INTERVAL: Duration = Duration::from_secs(15 * 60);
/// Maximum length of one sleep: the timer's clock stops while the machine is suspended.
const MAX_SLEEP: Duration = Duration::from_secs(12 * 3600);

/// Renews the client certificate before it expires. Runs until dropped. An expired certificate cannot authenticate a
/// request. After the expiry, an error with advice is logged.
pub(super) async fn client(current: &Arc<Current>, files: &Files, node: &str) {
    let wanted = RequestedIdentity::client(node);
    loop {
        let before = current.identity();
        sleep_until_due(&before).await;
        let client = current.client();
        let identity = tokio::select! {
            identity = obtain(&client, &wanted, Some(&before), &current.failures) => identity,
            never = log_expiry(&before, node) => match never {},
        };
        // The certificate is used before it is written: with a full disk the node continues until its restart.
        log_failure(current.replace(identity.clone()).and(files.write_client(&identity)));
        tracing::info!(user = wanted.user, until = %identity.not_after(), "renewed the client certificate");
        wait_min_interval(&identity).await;
    }
}

/// Obtains the serving certificate, and renews it before its end and after each change of the node's addresses. Runs
/// until dropped.
pub(super) async fn serving(
    client: impl Fn() -> Client,
    file: &ServingFile,
    serving: &Serving,
    node: &str,
    mut addresses: watch::Receiver<Vec<IpAddr>>,
) {
    loop {
        let wanted = RequestedIdentity::serving(node, addresses.borrow_and_update().clone());
        let before = serving.identity().filter(|identity| wanted.is_satisfied_by(identity));
        if let Some(identity) = &before {
            // Both arms are cancel-safe: they only wait.
            tokio::select! {
                () = sleep_until_due(identity) => {}
                () = changed(&mut addresses) => continue,
            }
        }
        let client = client();
        tokio::select! {
            // The request for outdated addresses is abandoned; the cluster removes it.
            () = changed(&mut addresses) => {}
            identity = obtain(&client, &wanted, before.as_ref(), &serving.failures) => {
                log_failure(serving.replace(identity.clone()).and(file.write(&identity)));
                tracing::info!(user = wanted.user, until = %identity.not_after(), "obtained the serving certificate");
                tokio::select! {
                    () = wait_min_interval(&identity) => {}
                    () = changed(&mut addresses) => {}
                }
            }
        }
    }
}

/// Returns when the addresses change. Never returns if the sender of addresses was dropped.
async fn changed(addresses: &mut watch::Receiver<Vec<IpAddr>>) {
    if addresses.changed().await.is_err() {
        std::future::pending().await
    }
}

fn log_failure(stored: Result<(), JoinError>) {
    if let Err(error) = stored {
        tracing::error!(%error, "cannot store a new certificate");
    }
}

async fn sleep_until_due(identity: &Identity) {
    // The random fraction spreads the renewals of nodes that joined at the same time.
    sleep_until(identity.renewal_time(rand::random_range(0.7..0.9))).await;
}

async fn sleep_until(due: Timestamp) {
    while let Some(left) =
        Duration::try_from(due.duration_since(Timestamp::now())).ok().filter(|left| !left.is_zero())
    {
        tokio::time::sleep(left.min(MAX_SLEEP)).await;
    }
}

/// Logs an error after the end of the certificate. The grace covers a clock that is ahead of the cluster's clock.
async fn log_expiry(identity: &Identity, node: &str) -> Infallible {
    sleep_until(identity.not_after()).await;
    tokio::time::sleep(EXPIRY_GRACE).await;
    let error = JoinError::Expired { node: node.to_owned(), at: identity.not_after().to_string() };
    tracing::error!(%error, "cannot renew the client certificate");
    std::future::pending().await
}

/// Waits for the minimum time between rotations. A change of the wall clock does not affect the wait.
async fn wait_min_interval(identity: &Identity) {
    tokio::time::sleep(MIN_ROTATION_INTERVAL.min(identity.lifetime() / 4)).await;
}

/// Repeats requests until a certificate is issued. `before` is the certificate to replace. A new request follows only a
/// denied request, or a request that was not answered within the limit. `failures` counts the attempts without a
/// certificate.
async fn obtain(
    client: &Client,
    wanted: &RequestedIdentity,
    before: Option<&Identity>,
    failures: &AtomicU64,
) -> Identity {
    let mut backoff = Backoff::new(FIRST_BACKOFF, REQUEST_TIMEOUT);
    loop {
        let requesting = async {
            let key = request::new_key().map_err(Failure::Join)?;
            request::certificate(client, wanted, &key, REQUEST_TIMEOUT).await
        };
        let error = match requesting.await {
            Ok(identity) => return identity,
            Err(error) => error,
        };
        failures.fetch_add(1, Relaxed);
        let signer = wanted.signer;
        tracing::warn!(%error, user = wanted.user, signer, "cannot obtain a certificate, requesting again");
        let max = match error.is_after_creation() {
            true => REQUEST_TIMEOUT,
            false => max_backoff(before.map(|before| before.remaining(Timestamp::now()))),
        };
        tokio::time::sleep(backoff.next_delay().min(max)).await;
    }
}

/// Maximum back-off while the control plane cannot be reached. If the control plane returns before the certificate's
/// end, a delay of this length still ends in time.
fn max_backoff(left: Option<Duration>) -> Duration {
    let left = left.filter(|left| !left.is_zero());
    left.map_or(MAX_BACKOFF, |left| (left / 4).clamp(MIN_BACKOFF, MAX_BACKOFF))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use bytes::Bytes;
    use futures::StreamExt;
    use futures::stream::BoxStream;
    use http::{Method, Request, Response};
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use serde_json::{Value, json};

    use super::*;

    /// An API in which no request is approved, and the number of requests.
    fn without_approval(status: Value) -> (Client, Arc<Mutex<u32>>) {
        let count = Arc::new(Mutex::new(0));
        let counted = count.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let is_new = *request.method() == Method::POST;
            *counted.lock().unwrap() += u32::from(is_new);
            let one = json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
                "metadata": {"name": "r", "resourceVersion": "1"}, "status": status,
                "spec": {"request": "", "signerName": "kubernetes.io/kubelet-serving"}});
            let list = json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequestList",
                "metadata": {"resourceVersion": "1"}, "items": [one]});
            let body: BoxStream<'static, Result<Frame<Bytes>, Infallible>> =
                match request.uri().query().is_some_and(|query| query.contains("watch=")) {
                    true => futures::stream::pending().boxed(),
                    false => {
                        let answer = if is_new { one } else { list };
                        futures::stream::iter([Ok(Frame::data(Bytes::from(answer.to_string())))]).boxed()
                    }
                };
            async move { Ok::<_, Infallible>(Response::new(StreamBody::new(body))) }
        });
        (Client::new(service, "default"), count)
    }

    async fn requests_within(minutes: u64, status: Value) -> u32 {
        let (client, count) = without_approval(status);
        let wanted = RequestedIdentity::serving("a", Vec::new());
        let within = Duration::from_secs(60 * minutes);
        let failures = AtomicU64::default();
        let obtained = obtain(&client, &wanted, None, &failures);
        assert!(tokio::time::timeout(within, obtained).await.is_err());
        let requests = *count.lock().unwrap();
        // The last request is not answered yet.
        let failures = failures.load(Relaxed);
        assert!(
            (u64::from(requests) - 1..=u64::from(requests)).contains(&failures),
            "{failures} of {requests}"
        );
        requests
    }

    /// A certificate of any validity that has expired by this machine's clock.
    fn over(until: (i32, u8, u8)) -> Identity {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(until.0, until.1, until.2);
        Identity::new(params.self_signed(&key).unwrap().pem(), key.serialize_pem()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_ahead_causes_no_request_loop() {
        for until in [(2021, 1, 1), (2020, 1, 2)] {
            let began = tokio::time::Instant::now();
            let identity = over(until);
            sleep_until_due(&identity).await;
            wait_min_interval(&identity).await;
            assert_eq!(began.elapsed().as_secs(), 15 * 60);
        }
        let began = tokio::time::Instant::now();
        wait_min_interval(&over((2020, 1, 1))).await;
        assert!(began.elapsed().is_zero(), "no longer than it could last");
    }

    #[test]
    fn retries_come_more_often_towards_the_end_of_the_certificate() {
        let of = |seconds| max_backoff(Some(Duration::from_secs(seconds))).as_secs();
        assert_eq!([of(90 * 24 * 3600), of(240), of(40), of(3), of(0)], [60, 60, 10, 1, 60]);
        assert_eq!(max_backoff(None), MAX_BACKOFF);
    }

    #[tokio::test(start_paused = true)]
    async fn an_unanswered_request_is_not_repeated() {
        assert_eq!(requests_within(14, json!({})).await, 1);
        assert_eq!(requests_within(59, json!({})).await, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn denials_are_followed_by_fewer_and_fewer_requests() {
        let denied = json!({"conditions": [{"type": "Denied", "status": "True", "message": "no"}]});
        assert!(requests_within(24 * 60, denied).await < 110, "each is kept for a day");
    }
}
