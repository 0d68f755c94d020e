//! The pod resources API (`v1.PodResourcesLister`): reports the devices, the exclusive CPUs and the NUMA memory of
//! containers to monitoring agents.
//!
//! As in the kubelet, the socket is `pod-resources/kubelet.sock` below the directory of plugins.

mod rate_limit;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use coracle_error_chain::chain;
use coracle_proto::pod_resources as api;
use coracle_proto::pod_resources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use k8s_openapi::api::core::v1::{Container, Pod};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

use crate::device_plugins::{DevicePlugins, sockets};
use crate::dra::Dra;
use crate::kubelet_metrics::{KubeletMetrics, PodResourcesCall};
use crate::memory_manager::policy::Block;
use crate::pod::{Pods, has_ended};
use crate::resource_managers::ResourceManagers;
use crate::topology::CpuSet;
use rate_limit::RateLimit;

/// Maximum bytes of a request.
const REQUEST_MAX: usize = 16 << 10;
/// Maximum calls at a time of one client. An answer can contain the devices of all pods.
const CALLS_MAX: usize = 4;

/// The service at the socket.
pub(crate) struct PodResources {
    pub(crate) pods: Pods,
    pub(crate) devices: DevicePlugins,
    pub(crate) dra: Dra,
    pub(crate) managers: ResourceManagers,
    pub(crate) metrics: Arc<KubeletMetrics>,
}

// === impl PodResources ===

impl PodResources {
    /// Serves the socket in this directory until dropped.
    pub(crate) async fn serve(self, dir: PathBuf) {
        let listener = match sockets::listen(&dir) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::warn!(%error, dir = %dir.display(), "cannot listen for clients of the pod resources API");
                return std::future::pending().await;
            }
        };
        let service = PodResourcesListerServer::new(self).max_decoding_message_size(REQUEST_MAX);
        let served = Server::builder()
            .concurrency_limit_per_connection(CALLS_MAX)
            .add_service(InterceptedService::new(service, RateLimit::new()))
            .serve_with_incoming(sockets::clients(listener))
            .await;
        if let Err(error) = served {
            tracing::warn!(error = chain(&error), "cannot serve the pod resources API");
        }
        std::future::pending().await
    }

    /// The pods that have not ended.
    fn active(&self) -> impl Iterator<Item = Arc<Pod>> {
        self.pods.all().into_iter().filter(|pod| !has_ended(pod))
    }

    fn of_pod(&self, pod: &Pod) -> api::PodResources {
        let spec = pod.spec.as_ref();
        // Init containers other than sidecars are left out, as upstream: they end before the pod runs.
        let sidecars = spec.into_iter().flat_map(|spec| spec.init_containers.iter().flatten());
        let sidecars = sidecars.filter(|init| init.restart_policy.as_deref() == Some("Always"));
        let containers = sidecars.chain(spec.into_iter().flat_map(|spec| &spec.containers));
        api::PodResources {
            name: pod.metadata.name.clone().unwrap_or_default(),
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            containers: containers.map(|container| self.of_container(pod, container)).collect(),
        }
    }

    fn of_container(&self, pod: &Pod, container: &Container) -> api::ContainerResources {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        api::ContainerResources {
            name: container.name.clone(),
            devices: device_messages(self.devices.of_container(uid, &container.name)),
            cpu_ids: numbers(&self.managers.exclusive_cpus(uid, &container.name)),
            memory: memory_messages(&self.managers.memory_of(uid, &container.name)),
            dynamic_resources: self.dra.resources(pod, container),
        }
    }
}

/// The pod with this name. As upstream, an ended pod is returned only if no other pod has the name.
fn find_pod(pods: impl IntoIterator<Item = Arc<Pod>>, namespace: &str, name: &str) -> Option<Arc<Pod>> {
    let is_named = |pod: &Arc<Pod>| {
        let meta = &pod.metadata;
        meta.name.as_deref() == Some(name) && meta.namespace.as_deref() == Some(namespace)
    };
    pods.into_iter().filter(is_named).min_by_key(|pod| has_ended(pod))
}

/// Devices in the messages of the API. As upstream, each device and NUMA node has an entry of its own.
fn device_messages(
    devices: impl IntoIterator<Item = (String, BTreeMap<String, Vec<i64>>)>,
) -> Vec<api::ContainerDevices> {
    let entry = |resource: &str, id: &str, node: Option<i64>| api::ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id.to_owned()],
        topology: node.map(|id| api::TopologyInfo { nodes: vec![api::NumaNode { id }] }),
    };
    let mut list = Vec::new();
    for (resource, devices) in devices {
        for (id, nodes) in devices {
            if nodes.is_empty() {
                list.push(entry(&resource, &id, None));
            }
            list.extend(nodes.into_iter().map(|node| entry(&resource, &id, Some(node))));
        }
    }
    list
}

fn numbers(cpus: &CpuSet) -> Vec<i64> {
    cpus.iter().map(i64::from).collect()
}

/// Memory in the messages of the API.
fn memory_messages(memory: &[Block]) -> Vec<api::ContainerMemory> {
    let one = |block: &Block| {
        let nodes = block.nodes().nodes().map(|node| api::NumaNode { id: node.into() });
        api::ContainerMemory {
            memory_type: block.resource().to_owned(),
            size: block.size(),
            topology: Some(api::TopologyInfo { nodes: nodes.collect() }),
        }
    };
    memory.iter().map(one).collect()
}

#[tonic::async_trait]
impl PodResourcesLister for PodResources {
    async fn list(
        &self,
        _request: Request<api::ListPodResourcesRequest>,
    ) -> Result<Response<api::ListPodResourcesResponse>, Status> {
        self.metrics.pod_resources_called(PodResourcesCall::List);
        let pod_resources = self.active().map(|pod| self.of_pod(&pod)).collect();
        Ok(Response::new(api::ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _request: Request<api::AllocatableResourcesRequest>,
    ) -> Result<Response<api::AllocatableResourcesResponse>, Status> {
        self.metrics.pod_resources_called(PodResourcesCall::GetAllocatable);
        let devices = device_messages(self.devices.allocatable());
        let (cpus, memory) = self.managers.allocatable();
        let (cpu_ids, memory) = (numbers(&cpus), memory_messages(&memory));
        Ok(Response::new(api::AllocatableResourcesResponse { devices, cpu_ids, memory }))
    }

    async fn get(
        &self,
        request: Request<api::GetPodResourcesRequest>,
    ) -> Result<Response<api::GetPodResourcesResponse>, Status> {
        self.metrics.pod_resources_called(PodResourcesCall::Get);
        let api::GetPodResourcesRequest { pod_name: name, pod_namespace: namespace } = request.into_inner();
        let Some(pod) = find_pod(self.pods.all(), &namespace, &name) else {
            self.metrics.pod_resources_get_failed();
            // Code and message are upstream's.
            let message = format!("pod {name} in namespace {namespace} not found");
            return Err(Status::new(Code::Unknown, message));
        };
        let pod_resources = Some(self.of_pod(&pod));
        Ok(Response::new(api::GetPodResourcesResponse { pod_resources }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_ended_pod_is_found_if_no_other_has_its_name() {
        let pod = |uid: &str, phase: &str| {
            let metadata = json!({"namespace": "ns", "name": "p", "uid": uid});
            let pod = json!({"metadata": metadata, "status": {"phase": phase}});
            Arc::new(serde_json::from_value::<Pod>(pod).unwrap())
        };
        let (ended, running) = (pod("1", "Succeeded"), pod("2", "Running"));
        let uid = |pods: &[&Arc<Pod>], namespace: &str| {
            let pods: Vec<_> = pods.iter().map(|pod| Arc::clone(pod)).collect();
            find_pod(pods, namespace, "p").and_then(|pod| pod.metadata.uid.clone())
        };
        assert_eq!(uid(&[&ended], "ns").as_deref(), Some("1"));
        assert_eq!(uid(&[&ended, &running], "ns").as_deref(), Some("2"));
        assert_eq!(uid(&[&running], "other"), None);
    }

    #[test]
    fn each_device_and_numa_node_has_an_entry() {
        let devices = BTreeMap::from([("a".to_owned(), vec![0, 1]), ("b".to_owned(), Vec::new())]);
        let found = device_messages([("x.io/a".to_owned(), devices)]);
        let shown: Vec<_> = found
            .iter()
            .map(|entry| {
                let nodes = entry.topology.iter().flat_map(|topology| &topology.nodes).map(|node| node.id);
                (entry.device_ids.concat(), nodes.collect::<Vec<_>>())
            })
            .collect();
        let expected = [("a", vec![0]), ("a", vec![1]), ("b", vec![])];
        assert_eq!(shown, expected.map(|(id, nodes)| (id.to_owned(), nodes)));
        assert!(found.iter().all(|entry| entry.resource_name == "x.io/a"));
    }
}
