//! Whether the pods' network can take pods, by the word of its plugins (CNI STATUS): a node whose network cannot is not
//! Ready.
//!
//! Programs of others can only be asked: at each turn of the lease's timer, as the kubelet asks a runtime. Plugins of
//! our own are asked when there is a doubt: after an attachment failed, after the network changed, and from a refusal
//! on until they take pods again.

use std::time::Duration;

use coracle_cni::Network;
use tokio::sync::watch;

/// Between two questions: many attachments may fail together.
const PAUSE: Duration = Duration::from_secs(1);
/// How long the first answer is waited for.
const SOON: Duration = Duration::from_secs(3);

/// What is said first, so that a node whose agent starts again is what it was: the answer, if it comes soon.
pub(super) async fn first_word(network: &Network) -> Result<(), String> {
    if network.ready().is_err() || !network.has_others().await {
        return Ok(());
    }
    let answer = tokio::time::timeout(SOON, network.status()).await;
    answer.unwrap_or_else(|_late| Err("its plugins have not answered yet".to_owned()))
}

/// Keeps true what the plugins said last, for ever. Of a network that is not there, or cannot be, they are not asked.
pub(super) async fn ask(
    network: Network,
    mut pulse: watch::Receiver<()>,
    said: watch::Sender<Result<(), String>>,
) {
    let mut doubts = network.doubts();
    let mut is_doubted = true;
    loop {
        if is_doubted || said.borrow().is_err() || network.has_others().await {
            let answer = if network.ready().is_ok() { network.status().await } else { Ok(()) };
            said.send_if_modified(|before| {
                // A doubt may be that of a network which is another now.
                let is_news = is_doubted || *before != answer;
                *before = answer;
                is_news
            });
            tokio::time::sleep(PAUSE).await;
        }
        // Neither is lost when the other comes first: both are still to be seen then.
        is_doubted = tokio::select! {
            changed = doubts.changed() => if changed.is_ok() { true } else { return },
            changed = pulse.changed() => if changed.is_ok() { false } else { return },
        };
    }
}
