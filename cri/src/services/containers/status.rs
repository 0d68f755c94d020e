//! ContainerStatus and ListContainers.

use std::collections::HashMap;
use std::sync::Arc;

use coracle_proto::cri;
use serde_json::{Value, json};

use super::service::ContainerService;
use crate::container::Container;
use crate::container::resources::limits;
use crate::error::Error;
use crate::list_stream::Streamed;
use crate::list_stream::batches;
use crate::records::ContainerPhase;
use crate::sandbox::{POD_UID, filter};
use crate::services::verbose::{message, order_capabilities};

impl ContainerService {
    /// The state of a container.
    pub(crate) fn container_status(
        &self,
        request: cri::ContainerStatusRequest,
    ) -> Result<cri::ContainerStatusResponse, Error> {
        let container = self.objects.tables.container(&request.container_id)?;
        let mut info = HashMap::new();
        if request.verbose {
            info.insert("info".to_owned(), self.container_info(&container).to_string());
        }
        Ok(cri::ContainerStatusResponse { status: Some(container.status()), info })
    }

    fn container_info(&self, container: &Container) -> Value {
        let bundle = self.objects.records.container_dir(&container.id);
        let spec = std::fs::read(bundle.join("config.json")).unwrap_or_default();
        let mut spec: Value = serde_json::from_slice(&spec).unwrap_or_default();
        // The file has the limits at creation; they may have changed since.
        let limits = limits(container.resources().as_ref(), self.machine.host.hugetlb);
        if let Some(Value::Object(shown)) = spec.pointer_mut("/linux/resources")
            && let Ok(Value::Object(now)) = serde_json::to_value(limits)
        {
            shown.extend(now.into_iter().filter(|(_, value)| !value.is_null()));
        }
        order_capabilities(&mut spec);
        // After the end, another process can have this pid.
        let pid = if matches!(container.phase(), ContainerPhase::Exited(_)) { 0 } else { container.pid() };
        json!({
            "sandboxID": container.record.sandbox_id,
            "pid": pid,
            "cgroup": container.record.cgroup,
            "bundle": bundle,
            "config": message(&container.config()),
            "runtimeSpec": spec,
        })
    }

    /// Containers that match a filter, newest first.
    pub(crate) fn container_list(&self, request: cri::ListContainersRequest) -> cri::ListContainersResponse {
        let containers = self.matching(request.filter);
        cri::ListContainersResponse { containers: containers.iter().map(|row| row.item()).collect() }
    }

    /// [`container_list`](Self::container_list) as a stream of batches.
    pub(crate) fn container_stream(
        &self,
        request: cri::StreamContainersRequest,
    ) -> Streamed<cri::StreamContainersResponse> {
        let items = self.matching(request.filter).into_iter().map(|row| row.item());
        batches(items, |containers| cri::StreamContainersResponse { containers })
    }

    fn matching(&self, filter: Option<cri::ContainerFilter>) -> Vec<Arc<Container>> {
        let filter = filter.map(|filter| cri::ContainerFilter {
            id: self.objects.tables.containers.whole_id(&filter.id),
            pod_sandbox_id: self.objects.tables.sandboxes.whole_id(&filter.pod_sandbox_id),
            ..filter
        });
        let table = &self.objects.tables.containers;
        // The kubelet lists the containers of one pod after each event of the pod.
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
}
