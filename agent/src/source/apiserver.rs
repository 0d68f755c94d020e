//! The watch of this node's pods in the API. While the API server does not answer, the desired pods stay unchanged.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use tokio::sync::mpsc;

use super::PodChange;
use crate::api_health::ApiHealth;

/// Sends changes until the receiver is dropped.
pub(crate) async fn watch(client: Client, health: ApiHealth, node: &str, changes: mpsc::Sender<PodChange>) {
    let api: Api<Pod> = Api::all(client);
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let mut events = watcher::watcher(api, config).boxed();
    let mut pause = FIRST_PAUSE;
    let mut listed = HashSet::new();
    while let Some(event) = events.next().await {
        if event.is_ok() {
            health.answered();
        }
        let change = match event {
            Ok(Event::Init) => {
                listed.clear();
                continue;
            }
            Ok(Event::InitApply(pod)) => {
                listed.extend(pod.metadata.uid.clone());
                PodChange::Applied(Arc::new(lighten(pod)))
            }
            Ok(Event::InitDone) => {
                pause = FIRST_PAUSE;
                PodChange::Complete(std::mem::take(&mut listed))
            }
            Ok(Event::Apply(pod)) => {
                pause = FIRST_PAUSE;
                PodChange::Applied(Arc::new(lighten(pod)))
            }
            Ok(Event::Delete(pod)) => PodChange::Deleted(Arc::new(lighten(pod))),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "the watch of pods failed");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
                continue;
            }
        };
        if changes.send(change).await.is_err() {
            return;
        }
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Removes fields that the agent does not read and that are often large.
fn lighten(mut pod: Pod) -> Pod {
    pod.metadata.managed_fields = None;
    pod
}
