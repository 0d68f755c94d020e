//! The heartbeat: a Lease in `kube-node-lease`, renewed four times as often as it must be: every ten seconds, if
//! nobody sets another time.

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
/// After a failure: sooner, because four missed renewals make the node be given up.
const RETRY: Duration = Duration::from_secs(2);

/// Renews the lease for ever, from when the Node is known. Each turn also gives the node's status and
/// its network a look through `pulse`, so that they share one timer.
pub(super) async fn keep(
    client: kube::Client,
    (name, seconds): (String, u16),
    mut node: watch::Receiver<Option<Arc<Node>>>,
    pulse: watch::Sender<()>,
) {
    let api: Api<Lease> = Api::namespaced(client, NAMESPACE);
    let mut failing = false;
    let often = Duration::from_secs(seconds.into()) / 4;
    loop {
        // An error is the end of the agent, which drops this future.
        let Ok(owner) = node.wait_for(Option::is_some).await.map(|node| node.clone()) else { return };
        let wait = match renew(&api, (&name, seconds), owner.as_deref()).await {
            Ok(()) => {
                failing = false;
                often
            }
            Err(error) => {
                // Said once a failure, not every two seconds of it.
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(error = chain(&error), "cannot renew the node's lease, going on trying");
                }
                RETRY.min(often)
            }
        };
        tokio::time::sleep(wait).await;
        // What nobody can be told need not be asked more often than that.
        if !failing {
            pulse.send_replace(());
        }
    }
}

async fn renew(
    api: &Api<Lease>,
    (name, seconds): (&str, u16),
    node: Option<&Node>,
) -> Result<(), kube::Error> {
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

/// The lease goes with its node.
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
