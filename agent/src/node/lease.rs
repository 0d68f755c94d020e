//! The node's Lease in `kube-node-lease`: its heartbeat, renewed every quarter of the lease duration (default: every
//! ten seconds).

use std::sync::Arc;
use std::time::Duration;

use coracle_error_chain::chain;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

const NAMESPACE: &str = "kube-node-lease";
/// Delay after a failure: shorter than the renewal interval, because four missed renewals make the node NotReady.
const RETRY: Duration = Duration::from_secs(2);

/// Notifications of the task that renews the lease, so that other tasks need no timer.
#[derive(Clone, Debug)]
pub(super) struct Heartbeats {
    /// Once in each renewal interval, which is a quarter of the lease duration, also while the lease cannot be renewed.
    /// While renewals fail, a notification may be late by the timeout of a request.
    pub(super) intervals: watch::Sender<()>,
    /// Renewals of the lease, for tasks that send requests to the API server.
    pub(super) renewals: watch::Sender<()>,
}

/// Renews the lease until dropped, after the Node object is known, and sends the notifications.
pub(super) async fn keep(
    client: kube::Client,
    name: String,
    seconds: u16,
    mut node: watch::Receiver<Option<Arc<Node>>>,
    beats: Heartbeats,
) {
    let api: Api<Lease> = Api::namespaced(client, NAMESPACE);
    let mut failing = false;
    let interval = Duration::from_secs(seconds.into()) / 4;
    let mut last_interval = Instant::now();
    loop {
        // An error means that the agent is stopping.
        let Ok(owner) = node.wait_for(Option::is_some).await.map(|node| node.clone()) else { return };
        let wait = match renew(&api, &name, seconds, owner.as_deref()).await {
            Ok(()) => {
                failing = false;
                interval
            }
            Err(error) => {
                // The failure is logged once per outage.
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(error = chain(&error), "cannot renew the node's lease, retrying");
                }
                RETRY.min(interval)
            }
        };
        tokio::time::sleep(wait).await;
        if !failing {
            beats.renewals.send_replace(());
        }
        // Retries are more frequent than the renewal interval, so not every retry begins an interval.
        if !failing || last_interval.elapsed() >= interval {
            last_interval = Instant::now();
            beats.intervals.send_replace(());
        }
    }
}

async fn renew(api: &Api<Lease>, name: &str, seconds: u16, node: Option<&Node>) -> Result<(), kube::Error> {
    let now = MicroTime(Timestamp::now());
    let patch = json!({"spec": {"holderIdentity": name, "leaseDurationSeconds": seconds, "renewTime": now}});
    match api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        other => return other.map(drop),
    }
    let lease = Lease {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            owner_references: node.and_then(owner).map(|o| vec![o]),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(name.to_owned()),
            lease_duration_seconds: Some(seconds.into()),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }),
    };
    api.create(&PostParams::default(), &lease).await.map(drop)
}

/// The owner reference to the Node: the lease is deleted with the Node.
fn owner(node: &Node) -> Option<OwnerReference> {
    let (name, uid) = (node.metadata.name.clone()?, node.metadata.uid.clone()?);
    Some(OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name,
        uid,
        ..OwnerReference::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn other_tasks_are_notified_while_the_lease_cannot_be_renewed() {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
            Err::<http::Response<kube::client::Body>, _>(refused)
        });
        let client = kube::Client::new(service, "default");
        let (_node, known) = watch::channel(Some(Arc::new(Node::default())));
        let beats = Heartbeats { intervals: watch::channel(()).0, renewals: watch::channel(()).0 };
        let (mut intervals, renewals) = (beats.intervals.subscribe(), beats.renewals.subscribe());
        let begin = Instant::now();
        let three_intervals = async {
            for _ in 0..3 {
                intervals.changed().await.unwrap();
            }
            begin.elapsed()
        };
        tokio::select! {
            () = keep(client, "n".to_owned(), 40, known, beats.clone()) => panic!("it runs until it is dropped"),
            elapsed = three_intervals => assert!(elapsed >= Duration::from_secs(30), "{elapsed:?}"),
        }
        assert!(!renewals.has_changed().unwrap());
    }
}
