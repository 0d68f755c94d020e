//! PodSandboxStatus and ListPodSandbox.

use std::collections::HashMap;
use std::sync::Arc;

use coracle_proto::cri;
use serde_json::{Value, json};

use super::SandboxService;
use crate::clock::now;
use crate::error::Error;
use crate::list_stream::Streamed;
use crate::list_stream::batches;
use crate::namespaces::own_network;
use crate::nri::about::namespaces_of;
use crate::sandbox::attachment::INTERFACE;
use crate::sandbox::{POD_UID, Sandbox, filter};
use crate::services::verbose::{cni_result, message};

impl SandboxService {
    /// The state of a sandbox and of its containers.
    pub(crate) fn sandbox_status(
        &self,
        request: cri::PodSandboxStatusRequest,
    ) -> Result<cri::PodSandboxStatusResponse, Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.objects.tables.sandbox(id)?;
        let mut info = HashMap::new();
        if request.verbose {
            info.insert("info".to_owned(), self.sandbox_info(&sandbox).to_string());
        }
        Ok(cri::PodSandboxStatusResponse {
            status: Some(sandbox.status()),
            info,
            containers_statuses: self
                .objects
                .tables
                .containers_of(&sandbox.id)
                .iter()
                .filter(|container| container.visible())
                .map(|container| container.status())
                .collect(),
            timestamp: now(),
        })
    }

    fn sandbox_info(&self, sandbox: &Sandbox) -> Value {
        let (live, size, config) = (sandbox.live(), sandbox.size(), sandbox.config());
        let namespaces = live.as_ref().map(|live| namespaces_of(&sandbox.record, live)).unwrap_or_default();
        let namespaces: Vec<Value> =
            namespaces.iter().map(|one| json!({"type": one.r#type, "path": one.path})).collect();
        // After the end of the pod, another pod can have the addresses.
        let answer = live.as_ref().and_then(|_| self.network.answer(&sandbox.id));
        let limits = |limits: &cri::LinuxContainerResources| json!({"linux": message(limits)});
        json!({
            "resources": size.resources.as_ref().map(limits),
            "overhead": size.overhead.as_deref().map(limits),
            "pid": live.as_ref().map(|live| live.shim.pid()),
            "initPid": live.as_ref().map(|live| live.init_pid),
            "netNamespaceClosed": live.is_none() && own_network(config),
            "config": message(config),
            // Other runtimes have the namespaces at this path, and debugging scripts read them there.
            "runtimeSpec": {"linux": {"namespaces": namespaces}},
            "cniResult": answer.map(|answer| cni_result(&answer, INTERFACE)),
            "directory": self.objects.records.sandbox_dir(&sandbox.id),
            "cgroupParent": config.linux.as_ref().map(|linux| &linux.cgroup_parent),
        })
    }

    /// Sandboxes that match a filter, newest first.
    pub(crate) fn sandbox_list(&self, request: cri::ListPodSandboxRequest) -> cri::ListPodSandboxResponse {
        let state = wanted_state(request.filter.as_ref());
        cri::ListPodSandboxResponse { items: items(self.matching(request.filter), state).collect() }
    }

    /// [`sandbox_list`](Self::sandbox_list) as a stream of batches.
    pub(crate) fn sandbox_stream(
        &self,
        request: cri::StreamPodSandboxesRequest,
    ) -> Streamed<cri::StreamPodSandboxesResponse> {
        let state = wanted_state(request.filter.as_ref());
        let items = items(self.matching(request.filter), state);
        batches(items, |pod_sandboxes| cri::StreamPodSandboxesResponse { pod_sandboxes })
    }

    fn matching(&self, filter: Option<cri::PodSandboxFilter>) -> Vec<Arc<Sandbox>> {
        let filter = filter.map(|filter| cri::PodSandboxFilter {
            id: self.objects.tables.sandboxes.whole_id(&filter.id),
            ..filter
        });
        let table = &self.objects.tables.sandboxes;
        // The kubelet lists the sandboxes of one pod after each event of the pod.
        let mut sandboxes = match filter.as_ref() {
            Some(filter) if !filter.id.is_empty() => table.get(&filter.id).into_iter().collect(),
            Some(filter) => match filter.label_selector.get(POD_UID) {
                Some(uid) => table.of_pod(uid),
                None => table.all(),
            },
            None => table.all(),
        };
        sandboxes.retain(|row| filter::sandbox(&row.subject(), filter.as_ref()));
        sandboxes.sort_by_key(|row| std::cmp::Reverse(row.record.created_at));
        sandboxes
    }
}

/// The state that a filter requests.
fn wanted_state(filter: Option<&cri::PodSandboxFilter>) -> Option<i32> {
    filter.and_then(|filter| filter.state.as_ref()).map(|wanted| wanted.state)
}

/// The items of sandboxes that matched a filter. A sandbox may have changed its state since then, and a stream builds its
/// items late, so the requested state is compared with the state in each item.
fn items(rows: Vec<Arc<Sandbox>>, state: Option<i32>) -> impl Iterator<Item = cri::PodSandbox> {
    let items = rows.into_iter().map(|row| row.item());
    items.filter(move |item| state.is_none_or(|state| item.state == state))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::SandboxRecord;
    use crate::sandbox::SandboxState;

    #[test]
    fn a_sandbox_that_ends_during_a_list_of_ready_sandboxes_is_left_out() {
        let text = include_str!("../../../recorded/sandbox-not-ready.json");
        let record: SandboxRecord = serde_json::from_str(text).expect("a record");
        let sandbox = Arc::new(Sandbox::new(record, SandboxState::NotReady));
        let listed = |state: cri::PodSandboxState| {
            let state = Some(cri::PodSandboxStateValue { state: state.into() });
            let filter = cri::PodSandboxFilter { state, ..Default::default() };
            items(vec![Arc::clone(&sandbox)], wanted_state(Some(&filter))).count()
        };
        assert_eq!(listed(cri::PodSandboxState::SandboxReady), 0);
        assert_eq!(listed(cri::PodSandboxState::SandboxNotready), 1);
        assert_eq!(items(vec![Arc::clone(&sandbox)], wanted_state(None)).count(), 1);
    }
}
