//! Certificates are renewed when they are due, and as often as it takes.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Client;
use tokio::sync::watch;

use super::JoinError;
use super::client::Current;
use super::files::{Files, ServingFile};
use super::request::{self, Failure, Identity, Wanted};
use super::serving::Serving;

const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(60);
/// Where the certificate is about to end.
const SHORTEST_RETRY: Duration = Duration::from_secs(1);
/// How long a request is waited for, and at last how seldom others follow those that are refused: as the kubelet has
/// it. A person may have to approve, and each request stays in the cluster for a day.
const PATIENCE: Duration = Duration::from_secs(15 * 60);
/// How long after its end a certificate may still be replaced before that is given up.
const GRACE: Duration = Duration::from_secs(5);
/// After a success nothing is asked for so long, or for a quarter of a shorter certificate's time: to a clock that is ahead,
/// every certificate is due as soon as it is there.
const LEAST_PAUSE: Duration = Duration::from_secs(15 * 60);
/// The timer's clock stands still while the machine sleeps, so a long wait is cut.
const LONGEST_WAIT: Duration = Duration::from_secs(12 * 3600);

/// Keeps the client certificate alive, for ever. With one that is over nothing can be asked: somebody is told what to do.
pub(super) async fn client(current: &Arc<Current>, files: &Files, node: &str) {
    let wanted = Wanted::client(node);
    loop {
        let before = current.identity();
        sleep_until_due(&before).await;
        let client = current.client();
        let identity = tokio::select! {
            identity = obtain(&client, &wanted, Some(&before)) => identity,
            never = tell_when_over(&before, node) => match never {},
        };
        // In use first: should the disk be full, the node at least lives on until it is restarted.
        told(current.replace(identity.clone()).and(files.write_client(&identity)));
        tracing::info!(user = wanted.user, until = %identity.until(), "renewed the client certificate");
        pause(&identity).await;
    }
}

/// Gets the serving certificate, and keeps it alive and true to the node's addresses, for ever.
pub(super) async fn serving(
    client: impl Fn() -> Client,
    file: &ServingFile,
    (serving, node): (&Serving, &str),
    mut addresses: watch::Receiver<Vec<IpAddr>>,
) {
    loop {
        let wanted = Wanted::serving(node, addresses.borrow_and_update().clone());
        let before = serving.identity().filter(|identity| wanted.is_met_by(identity));
        if let Some(identity) = &before {
            // Both only wait: nothing is lost when the other is first.
            tokio::select! {
                () = sleep_until_due(identity) => {}
                () = changed(&mut addresses) => continue,
            }
        }
        let client = client();
        tokio::select! {
            // A request for addresses that are not the node's any more is left to the cluster, which removes it.
            () = changed(&mut addresses) => {}
            identity = obtain(&client, &wanted, before.as_ref()) => {
                told(serving.replace(identity.clone()).and(file.write(&identity)));
                tracing::info!(user = wanted.user, until = %identity.until(), "the serving certificate is there");
                tokio::select! {
                    () = pause(&identity) => {}
                    () = changed(&mut addresses) => {}
                }
            }
        }
    }
}

/// Returns when the addresses change; never, when nobody is left to change them.
async fn changed(addresses: &mut watch::Receiver<Vec<IpAddr>>) {
    if addresses.changed().await.is_err() {
        std::future::pending().await
    }
}

fn told(kept: Result<(), JoinError>) {
    if let Err(error) = kept {
        tracing::error!(%error, "cannot keep a new certificate");
    }
}

async fn sleep_until_due(identity: &Identity) {
    // Spread, so that nodes that joined together do not all renew together.
    sleep_until(identity.renewal(rand::random_range(0.7..0.9))).await;
}

async fn sleep_until(due: Timestamp) {
    while let Some(left) =
        Duration::try_from(due.duration_since(Timestamp::now())).ok().filter(|left| !left.is_zero())
    {
        tokio::time::sleep(left.min(LONGEST_WAIT)).await;
    }
}

/// Not at once: to a clock that is ahead, a certificate is over that the cluster takes.
async fn tell_when_over(identity: &Identity, node: &str) -> Infallible {
    sleep_until(identity.until()).await;
    tokio::time::sleep(GRACE).await;
    let error = JoinError::Expired { node: node.to_owned(), at: identity.until().to_string() };
    tracing::error!(%error, "the cluster cannot be asked for another");
    std::future::pending().await
}

/// By the timer's clock, which is not the one that may be wrong.
async fn pause(identity: &Identity) {
    tokio::time::sleep(LEAST_PAUSE.min(identity.lasts() / 4)).await;
}

/// Asks until a certificate is there, in place of one that still lasts; anew only when a request was refused or has not
/// been answered for long.
async fn obtain(client: &Client, wanted: &Wanted, before: Option<&Identity>) -> Identity {
    let mut retry = FIRST_RETRY;
    loop {
        let asked = async {
            let key = request::new_key().map_err(Failure::Join)?;
            request::certificate(client, wanted, &key, PATIENCE).await
        };
        let error = match asked.await {
            Ok(identity) => return identity,
            Err(error) => error,
        };
        let signer = wanted.signer;
        tracing::warn!(%error, user = wanted.user, signer, "no certificate yet, asking again");
        let longest = match error.is_of_request() {
            true => PATIENCE,
            false => longest_retry(before.map(|before| before.left(Timestamp::now()))),
        };
        tokio::time::sleep(retry.min(longest)).await;
        retry = (retry * 2).min(PATIENCE);
    }
}

/// How long to wait at most until the control plane is called again that could not be reached: when it comes back before
/// the certificate is over, it is to be heard in time.
fn longest_retry(left: Option<Duration>) -> Duration {
    let left = left.filter(|left| !left.is_zero());
    left.map_or(LAST_RETRY, |left| (left / 4).clamp(SHORTEST_RETRY, LAST_RETRY))
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

    /// An API in which nobody approves; how many requests there were.
    fn nobody_approves(status: Value) -> (Client, Arc<Mutex<u32>>) {
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
        let (client, count) = nobody_approves(status);
        let wanted = Wanted::serving("a", Vec::new());
        let within = Duration::from_secs(60 * minutes);
        assert!(tokio::time::timeout(within, obtain(&client, &wanted, None)).await.is_err());
        *count.lock().unwrap()
    }

    /// A certificate that is over by this machine's clock, as long as it may last.
    fn over(until: (i32, u8, u8)) -> Identity {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(until.0, until.1, until.2);
        Identity::new(params.self_signed(&key).unwrap().pem(), key.serialize_pem()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_ahead_does_not_make_a_node_ask_all_the_time() {
        for until in [(2021, 1, 1), (2020, 1, 2)] {
            let began = tokio::time::Instant::now();
            let identity = over(until);
            sleep_until_due(&identity).await;
            pause(&identity).await;
            assert_eq!(began.elapsed().as_secs(), 15 * 60);
        }
        let began = tokio::time::Instant::now();
        pause(&over((2020, 1, 1))).await;
        assert!(began.elapsed().is_zero(), "no longer than it could last");
    }

    #[test]
    fn the_nearer_the_end_the_more_often_the_control_plane_is_called() {
        let of = |seconds| longest_retry(Some(Duration::from_secs(seconds))).as_secs();
        assert_eq!([of(90 * 24 * 3600), of(240), of(40), of(3), of(0)], [60, 60, 10, 1, 60]);
        assert_eq!(longest_retry(None), LAST_RETRY);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_nobody_answers_is_waited_for() {
        assert_eq!(requests_within(14, json!({})).await, 1);
        assert_eq!(requests_within(59, json!({})).await, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_are_followed_by_ever_fewer_requests() {
        let denied = json!({"conditions": [{"type": "Denied", "status": "True", "message": "no"}]});
        assert!(requests_within(24 * 60, denied).await < 110, "each is kept for a day");
    }
}
