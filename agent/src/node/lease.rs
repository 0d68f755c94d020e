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

const NAMESPACE: &str = "kube-node-lease";
/// Pause after a failure: shorter than the period, because four missed renewals make the node NotReady.
const RETRY: Duration = Duration::from_secs(2);

/// Renews the lease until dropped, after the Node object is known. Each turn also wakes the updates of status and
/// network by `pulse`, so that they share one timer.
pub(super) async fn keep(
    client: kube::Client,
    name: String,
    seconds: u16,
    mut node: watch::Receiver<Option<Arc<Node>>>,
    pulse: watch::Sender<()>,
) {
    let api: Api<Lease> = Api::namespaced(client, NAMESPACE);
    let mut failing = false;
    let often = Duration::from_secs(seconds.into()) / 4;
    loop {
        // An error means that the agent is stopping.
        let Ok(owner) = node.wait_for(Option::is_some).await.map(|node| node.clone()) else { return };
        let wait = match renew(&api, &name, seconds, owner.as_deref()).await {
            Ok(()) => {
                failing = false;
                often
            }
            Err(error) => {
                // Logged once per outage.
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(error = chain(&error), "cannot renew the node's lease, retrying");
                }
                RETRY.min(often)
            }
        };
        tokio::time::sleep(wait).await;
        // While the API is not reachable, updates of the status could not be sent.
        if !failing {
            pulse.send_replace(());
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

/// The owner reference to the Node: the lease is deleted with it.
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
