//! The watch of this node's pods in the API. While the API server does not answer, the desired pods stay unchanged.

use std::collections::HashSet;
use std::sync::Arc;

use coracle_values::object::without_managed_fields;
use coracle_values::resource;
use coracle_watch::{Config, Event};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Pod, PodSpec, PodStatus, VolumeProjection};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};
use serde::Deserialize;
use tokio::sync::mpsc;

use super::PodChange;
use super::mirror::{MirrorPods, is_mirror};
use crate::api_health::ApiHealth;

/// A pod as the watch decodes it: without managed fields, which the agent does not read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct WatchedPod {
    #[serde(deserialize_with = "without_managed_fields")]
    metadata: ObjectMeta,
    spec: Option<PodSpec>,
    status: Option<PodStatus>,
}

resource!(WatchedPod, "Pod", ("", "v1", "pods"), NamespaceResourceScope);

/// Sends changes until the receiver is dropped. Mirror pods only show the state of static pods, so the agent never runs
/// them, and passes them to `mirrors`.
pub(super) async fn watch(
    client: Client,
    health: ApiHealth,
    node: &str,
    mirrors: &MirrorPods,
    changes: mpsc::Sender<PodChange>,
) {
    let api: Api<WatchedPod> = Api::all(client);
    let config = Config::default().fields(&format!("spec.nodeName={node}"));
    let mut events = coracle_watch::watch(api, config);
    let (mut listed, mut listed_mirrors) = (HashSet::new(), Vec::new());
    while let Some(event) = events.next().await {
        // `Init` precedes the request, so it is not a response.
        if event.as_ref().is_ok_and(|event| !matches!(event, Event::Init)) {
            health.record_response();
        }
        let change = match event {
            Ok(Event::Init) => {
                listed.clear();
                listed_mirrors.clear();
                continue;
            }
            Ok(Event::InitApply(pod)) => {
                let pod = pod.without_free_capacity();
                if is_mirror(&pod) {
                    listed_mirrors.push(pod);
                    continue;
                }
                listed.extend(pod.metadata.uid.clone());
                PodChange::Applied(Arc::new(pod))
            }
            Ok(Event::InitDone) => {
                mirrors.replace(&std::mem::take(&mut listed_mirrors));
                PodChange::Complete(std::mem::take(&mut listed))
            }
            Ok(Event::Apply(pod)) => {
                let pod = pod.without_free_capacity();
                if is_mirror(&pod) {
                    mirrors.observe(&pod);
                    continue;
                }
                PodChange::Applied(Arc::new(pod))
            }
            Ok(Event::Delete(pod)) => {
                let pod = pod.without_free_capacity();
                mirrors.remove(pod.metadata.uid.as_deref().unwrap_or_default());
                PodChange::Deleted(Arc::new(pod))
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "the watch of pods failed");
                continue;
            }
        };
        if changes.send(change).await.is_err() {
            return;
        }
    }
}

// === impl WatchedPod ===

impl WatchedPod {
    fn without_free_capacity(self) -> Pod {
        let mut pod = Pod { metadata: self.metadata, spec: self.spec, status: self.status };
        shrink(&mut pod);
        pod
    }
}

/// Removes the unused capacity of lists. A decoded list of one item has room for four. A container's status or a
/// projected volume takes 500 to 800 bytes, so the unused room is a quarter of a typical pod.
fn shrink(pod: &mut Pod) {
    shrink_list(&mut pod.metadata.owner_references);
    if let Some(spec) = &mut pod.spec {
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
            shrink_list(&mut container.env);
            shrink_list(&mut container.ports);
            shrink_list(&mut container.volume_mounts);
        }
        spec.containers.shrink_to_fit();
        shrink_list(&mut spec.init_containers);
        for volume in spec.volumes.iter_mut().flatten() {
            if let Some(projected) = &mut volume.projected {
                projected.sources.iter_mut().flatten().for_each(shrink_projection);
                shrink_list(&mut projected.sources);
            }
        }
        shrink_list(&mut spec.volumes);
        shrink_list(&mut spec.tolerations);
    }
    if let Some(status) = &mut pod.status {
        shrink_list(&mut status.conditions);
        let inits = status.init_container_statuses.iter_mut().flatten();
        for container in status.container_statuses.iter_mut().flatten().chain(inits) {
            shrink_list(&mut container.volume_mounts);
        }
        shrink_list(&mut status.container_statuses);
        shrink_list(&mut status.init_container_statuses);
        shrink_list(&mut status.host_ips);
        shrink_list(&mut status.pod_ips);
    }
}

fn shrink_projection(source: &mut VolumeProjection) {
    if let Some(map) = &mut source.config_map {
        shrink_list(&mut map.items);
    }
    if let Some(fields) = &mut source.downward_api {
        shrink_list(&mut fields.items);
    }
}

fn shrink_list<T>(list: &mut Option<Vec<T>>) {
    if let Some(list) = list {
        list.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_of_a_decoded_pod_have_no_free_capacity() {
        let text = json!({
            "metadata": {"name": "p", "managedFields": [{"manager": "m"}],
                "ownerReferences": [{"apiVersion": "v1", "kind": "K", "name": "n", "uid": "u"}]},
            "spec": {"containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
                "volumes": [{"name": "v", "projected": {"sources": [{
                    "configMap": {"name": "m", "items": [{"key": "k", "path": "p"}]},
                    "downwardAPI": {"items": [{"path": "p", "fieldRef": {"fieldPath": "metadata.name"}}]}}]}}]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": "c", "image": "i", "imageID": "i", "ready": true, "restartCount": 0,
                    "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]},
        })
        .to_string();
        // A JSON decoder does not know the length of a list in advance.
        let decoded: Pod = serde_json::from_str(&text).unwrap();
        let pod: WatchedPod = serde_json::from_str(&text).unwrap();
        let pod = pod.without_free_capacity();
        let (spec, status) = (pod.spec.as_ref().unwrap(), pod.status.as_ref().unwrap());
        let projected = spec.volumes.as_ref().unwrap()[0].projected.as_ref().unwrap();
        let source = &projected.sources.as_ref().unwrap()[0];
        let capacities = [
            source.config_map.as_ref().unwrap().items.as_ref().unwrap().capacity(),
            source.downward_api.as_ref().unwrap().items.as_ref().unwrap().capacity(),
            status.container_statuses.as_ref().unwrap()[0].volume_mounts.as_ref().unwrap().capacity(),
            spec.volumes.as_ref().unwrap().capacity(),
            projected.sources.as_ref().unwrap().capacity(),
            spec.containers[0].volume_mounts.as_ref().unwrap().capacity(),
            status.conditions.as_ref().unwrap().capacity(),
            status.container_statuses.as_ref().unwrap().capacity(),
            pod.metadata.owner_references.as_ref().unwrap().capacity(),
        ];
        assert_eq!(capacities, [1; 9]);
        assert!(pod.metadata.managed_fields.is_none());
        assert_eq!((&pod.spec, &pod.status), (&decoded.spec, &decoded.status));
    }
}
