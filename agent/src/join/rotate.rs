//! Certificates are renewed when they are due, and as often as it takes.

use std::net::IpAddr;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;

use super::JoinError;
use super::client::Current;
use super::files::Files;
use super::request::{self, Identity, Wanted};
use super::serving::Serving;

const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(60);
/// The timer's clock stands still while the machine sleeps, so a long wait is cut.
const LONGEST_WAIT: Duration = Duration::from_secs(12 * 3600);

/// Keeps the client certificate alive, for ever.
pub(super) async fn client(current: &Current, files: &Files, wanted: Wanted) {
    loop {
        sleep_until_due(&current.identity()).await;
        let identity = obtain(current, &wanted).await;
        // In use first: should the disk be full, the node at least lives on until it is restarted.
        told(current.replace(identity.clone()).and(files.write_client(&identity)));
        tracing::info!(user = wanted.user, until = %identity.until(), "renewed the client certificate");
    }
}

/// Gets the serving certificate, and keeps it alive and true to the node's addresses, for ever.
pub(super) async fn serving(
    current: &Current,
    files: &Files,
    (serving, node): (&Serving, &str),
    mut addresses: watch::Receiver<Vec<IpAddr>>,
) {
    loop {
        let wanted = Wanted::serving(node, addresses.borrow_and_update().clone());
        if let Some(identity) = serving.identity().filter(|identity| wanted.is_met_by(identity)) {
            // Both only wait: nothing is lost when the other is first.
            tokio::select! {
                () = sleep_until_due(&identity) => {}
                () = changed(&mut addresses) => continue,
            }
        }
        tokio::select! {
            // A request for addresses that are not the node's any more is left to the cluster, which removes it.
            () = changed(&mut addresses) => {}
            identity = obtain(current, &wanted) => {
                told(serving.replace(identity.clone()).and(files.write_serving(&identity)));
                tracing::info!(user = wanted.user, until = %identity.until(), "the serving certificate is there");
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
    let due = identity.renewal(rand::random_range(0.7..0.9));
    while let Some(left) =
        Duration::try_from(due.duration_since(Timestamp::now())).ok().filter(|left| !left.is_zero())
    {
        tokio::time::sleep(left.min(LONGEST_WAIT)).await;
    }
}

/// Asks until a certificate is there.
async fn obtain(current: &Current, wanted: &Wanted) -> Identity {
    let mut retry = FIRST_RETRY;
    loop {
        match request::certificate(&current.now(), wanted).await {
            Ok(identity) => return identity,
            Err(error) => {
                tracing::warn!(%error, user = wanted.user, "no certificate yet, asking again");
            }
        }
        tokio::time::sleep(retry).await;
        retry = (retry * 2).min(LAST_RETRY);
    }
}
