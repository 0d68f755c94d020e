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
use crate::sandbox::{POD_UID, filter};
use crate::services::verbose::{message, order_capabilities};

impl ContainerService {
    /// The state of a container.
    pub(crate) fn container_status(
        &self,
        request: cri::ContainerStatusRequest,
    ) -> Result<cri::ContainerStatusResponse, Error> {
        let container = self.objects.tables.container(&request.container_id)?;
        let (status, mut info) = (container.status(), HashMap::new());
        if request.verbose {
            info.insert("info".to_owned(), self.container_info(&container, status.state()).to_string());
        }
        Ok(cri::ContainerStatusResponse { status: Some(status), info })
    }

    /// Details of a container. `state` is the state in the same response: the container may end meanwhile.
    fn container_info(&self, container: &Container, state: cri::ContainerState) -> Value {
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
        let pid = if state == cri::ContainerState::ContainerExited { 0 } else { container.pid() };
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
        let state = wanted_state(request.filter.as_ref());
        let containers = items(self.matching(request.filter), state);
        cri::ListContainersResponse { containers: containers.collect() }
    }

    /// [`container_list`](Self::container_list) as a stream of batches.
    pub(crate) fn container_stream(
        &self,
        request: cri::StreamContainersRequest,
    ) -> Streamed<cri::StreamContainersResponse> {
        let state = wanted_state(request.filter.as_ref());
        let items = items(self.matching(request.filter), state);
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

/// The state that a filter requests.
fn wanted_state(filter: Option<&cri::ContainerFilter>) -> Option<i32> {
    filter.and_then(|filter| filter.state.as_ref()).map(|wanted| wanted.state)
}

/// The items of containers that matched a filter. A container may have changed its state since then, and a stream builds
/// its items late, so the requested state is compared with the state in each item.
fn items(rows: Vec<Arc<Container>>, state: Option<i32>) -> impl Iterator<Item = cri::Container> {
    let items = rows.into_iter().map(|row| row.item());
    items.filter(move |item| state.is_none_or(|state| item.state == state))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::config_memory::ConfigMemory;
    use crate::records::{ContainerRecord, ExitRecord};

    #[test]
    fn a_container_that_ends_during_a_list_of_running_containers_is_left_out() {
        let text = include_str!("../../../recorded/container-running.json");
        let record: ContainerRecord = serde_json::from_str(text).expect("a record");
        let memory = ConfigMemory::take(&record.config, 0).expect("memory");
        let container = Arc::new(Container::new(record, Vec::new(), memory));
        let state = |state: cri::ContainerState| {
            let state = Some(cri::ContainerStateValue { state: state.into() });
            wanted_state(Some(&cri::ContainerFilter { state, ..Default::default() }))
        };
        let running = state(cri::ContainerState::ContainerRunning);
        let listed = |state| items(vec![Arc::clone(&container)], state);
        assert_eq!(listed(running).count(), 1);
        // The filter has matched the container, and its item is not built yet.
        let late = listed(running);
        let exit = ExitRecord {
            started_at: 1,
            finished_at: 2,
            code: 0,
            reason: "Completed".to_owned(),
            message: String::new(),
        };
        assert!(container.exited(exit));
        assert_eq!(late.count(), 0);
        let exited = state(cri::ContainerState::ContainerExited);
        assert_eq!([listed(exited).count(), listed(wanted_state(None)).count()], [1, 1]);
    }
}
