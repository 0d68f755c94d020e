//! Whether the pods' network can take pods, by the word of its plugins (CNI STATUS): a node whose network cannot is not
//! Ready.
//!
//! Programs of others can only be asked: at each turn of the lease's timer, as the kubelet asks a runtime. Plugins of
//! our own are asked when there is a doubt: after an attachment failed, after the network changed, and from a refusal
//! on until they take pods again.

use std::time::Duration;

use coracle_cni::Network;
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

/// Between two questions: many attachments may fail together.
const PAUSE: Duration = Duration::from_secs(1);
/// How long the first answer is waited for.
const SOON: Duration = Duration::from_secs(3);

/// What the plugins said last; none before they have answered.
pub(super) type Said = Option<Result<(), String>>;

/// What is said first: the answer, if it comes soon.
pub(super) async fn first_word(network: &Network) -> Said {
    if network.ready().is_err() || !network.has_others().await {
        return Some(Ok(()));
    }
    tokio::time::timeout(SOON, network.status()).await.ok()
}

/// Whether the network takes pods. A node whose agent starts again is what it was until its plugins have answered.
pub(super) fn word(said: &Said, node: Option<&Node>) -> Result<(), String> {
    said.clone().unwrap_or_else(|| {
        let conditions = node.and_then(|node| node.status.as_ref()?.conditions.as_ref());
        let ready = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
        let was_ready = ready.is_some_and(|ready| ready.status == "True");
        if was_ready { Ok(()) } else { Err("its plugins have not answered yet".to_owned()) }
    })
}

/// Keeps true what the plugins said last, for ever. Of a network that is not there, or cannot be, they are not asked.
pub(super) async fn ask(network: Network, mut pulse: watch::Receiver<()>, said: watch::Sender<Said>) {
    let mut doubts = network.doubts();
    let mut is_doubted = true;
    loop {
        let takes_pods = matches!(*said.borrow(), Some(Ok(())));
        if is_doubted || !takes_pods || network.has_others().await {
            let answer = Some(if network.ready().is_ok() { network.status().await } else { Ok(()) });
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

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{NodeCondition, NodeStatus};

    use super::*;

    #[test]
    fn a_node_is_what_it_was_until_its_plugins_have_answered() {
        let node = |ready: &str| {
            let (type_, status) = ("Ready".to_owned(), ready.to_owned());
            let conditions = Some(vec![NodeCondition { type_, status, ..NodeCondition::default() }]);
            Node { status: Some(NodeStatus { conditions, ..NodeStatus::default() }), ..Node::default() }
        };
        assert_eq!(word(&None, Some(&node("True"))), Ok(()));
        for other in [None, Some(&node("False")), Some(&node("Unknown"))] {
            assert!(word(&None, other).is_err_and(|why| why.contains("not answered")));
        }
        let refused = Err("no uplink".to_owned());
        assert_eq!(word(&Some(refused.clone()), Some(&node("True"))), refused);
        assert_eq!(word(&Some(Ok(())), None), Ok(()));
    }
}
