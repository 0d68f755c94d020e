//! ContainerStatus and ListContainers.

use std::collections::HashMap;
use std::sync::Arc;

use coracle_proto::cri;
use serde_json::{Value, json};

use super::list_stream::batches;
use super::status::Streamed;
use super::verbose::{message, order_capabilities};
use crate::container::Container;
use crate::container::resources::limits;
use crate::error::Error;
use crate::records::ContainerPhase;
use crate::runtime::Runtime;
use crate::sandbox::{POD_UID, filter};
use crate::shim_client::Shim;

impl Runtime {
    /// The state of a container.
    pub(crate) fn container_status(
        &self,
        request: cri::ContainerStatusRequest,
    ) -> Result<cri::ContainerStatusResponse, Error> {
        let container = self.container(&request.container_id)?;
        let mut info = HashMap::new();
        if request.verbose {
            info.insert("info".to_owned(), self.container_info(&container).to_string());
        }
        Ok(cri::ContainerStatusResponse { status: Some(container.status()), info })
    }

    fn container_info(&self, container: &Container) -> Value {
        let bundle = self.inner.records.container_dir(&container.id);
        let spec = std::fs::read(bundle.join("config.json")).unwrap_or_default();
        let mut spec: Value = serde_json::from_slice(&spec).unwrap_or_default();
        // The file says how it was created; its limits may have changed since.
        let limits = limits(container.resources().as_ref(), self.inner.host.hugetlb);
        if let Some(Value::Object(shown)) = spec.pointer_mut("/linux/resources")
            && let Ok(Value::Object(now)) = serde_json::to_value(limits)
        {
            shown.extend(now.into_iter().filter(|(_, value)| !value.is_null()));
        }
        order_capabilities(&mut spec);
        // Of one that ended it may be another process' by now.
        let pid = if matches!(container.phase(), ContainerPhase::Exited(_)) { 0 } else { container.pid() };
        json!({
            "sandboxID": container.record.sandbox_id,
            "pid": pid,
            "cgroup": container.record.cgroup,
            "bundle": bundle,
            "config": message(&container.record.config),
            "runtimeSpec": spec,
        })
    }

    /// The containers that a filter lets through, newest first.
    pub(crate) fn container_list(&self, request: cri::ListContainersRequest) -> cri::ListContainersResponse {
        let containers = self.containers_that(request.filter);
        cri::ListContainersResponse { containers: containers.iter().map(|row| row.item()).collect() }
    }

    /// The same, in pieces.
    pub(crate) fn container_stream(
        &self,
        request: cri::StreamContainersRequest,
    ) -> Streamed<cri::StreamContainersResponse> {
        let items = self.containers_that(request.filter).into_iter().map(|row| row.item());
        batches(items, |containers| cri::StreamContainersResponse { containers })
    }

    fn containers_that(&self, filter: Option<cri::ContainerFilter>) -> Vec<Arc<Container>> {
        let filter = filter.map(|filter| cri::ContainerFilter {
            id: self.inner.containers.whole_id(&filter.id),
            pod_sandbox_id: self.inner.sandboxes.whole_id(&filter.pod_sandbox_id),
            ..filter
        });
        let table = &self.inner.containers;
        // A kubelet asks for one pod's, after each event of the pod.
        let mut containers = match filter.as_ref() {
            Some(filter) if !filter.id.is_empty() => table.get(&filter.id).into_iter().collect(),
            Some(filter) if !filter.pod_sandbox_id.is_empty() => table.of_sandbox(&filter.pod_sandbox_id),
            Some(filter) => match filter.label_selector.get(POD_UID) {
                Some(uid) => table.of_pod(uid),
                None => table.all(),
            },
            None => table.all(),
        };
        containers.retain(|row| row.visible() && filter::container(&row.subject(), filter.as_ref()));
        containers.sort_by_key(|row| std::cmp::Reverse(row.record.created_at));
        containers
    }

    /// A container that clients may see.
    pub(crate) fn container(&self, id: &str) -> Result<Arc<Container>, Error> {
        let container = self.inner.containers.get(id).filter(|container| container.visible());
        container.ok_or_else(|| Error::no_container(id))
    }

    /// All containers of a sandbox, those being created included.
    pub(crate) fn containers_of(&self, sandbox_id: &str) -> Vec<Arc<Container>> {
        self.inner.containers.of_sandbox(sandbox_id)
    }

    /// The shim that a container lives in.
    pub(crate) fn shim_of(&self, container: &Container) -> Result<Shim, Error> {
        let id = &container.record.sandbox_id;
        self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?.shim()
    }
}
