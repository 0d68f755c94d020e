//! PodSandboxStatus and ListPodSandbox.

use std::collections::HashMap;
use std::sync::Arc;

use coracle_proto::cri;
use serde_json::{Value, json};

use super::list_stream::batches;
use super::sandbox_run::now;
use super::status::Streamed;
use super::verbose::{cni_result, message};
use crate::error::Error;
use crate::nri::about::namespaces_of;
use crate::runtime::Runtime;
use crate::sandbox::attachment::INTERFACE;
use crate::sandbox::namespaces::own_network;
use crate::sandbox::{POD_UID, Sandbox, filter};

impl Runtime {
    /// The state of a sandbox and of its containers.
    pub(crate) fn sandbox_status(
        &self,
        request: cri::PodSandboxStatusRequest,
    ) -> Result<cri::PodSandboxStatusResponse, Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?;
        let mut info = HashMap::new();
        if request.verbose {
            info.insert("info".to_owned(), self.sandbox_info(&sandbox).to_string());
        }
        Ok(cri::PodSandboxStatusResponse {
            status: Some(sandbox.status()),
            info,
            containers_statuses: self
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
        // Of one that ended, somebody else may have the addresses by now.
        let answer = live.as_ref().and_then(|_| self.inner.network.answer(&sandbox.id));
        let limits = |limits: &cri::LinuxContainerResources| json!({"linux": message(limits)});
        json!({
            "resources": size.resources.as_ref().map(limits),
            "overhead": size.overhead.as_ref().map(limits),
            "pid": live.as_ref().map(|live| live.shim.pid()),
            "initPid": live.as_ref().map(|live| live.init_pid),
            "netNamespaceClosed": live.is_none() && own_network(config),
            "config": message(config),
            // Where other runtimes show them, and debuggers' scripts look for them.
            "runtimeSpec": {"linux": {"namespaces": namespaces}},
            "cniResult": answer.map(|answer| cni_result(&answer, INTERFACE)),
            "directory": self.inner.records.sandbox_dir(&sandbox.id),
            "cgroupParent": config.linux.as_ref().map(|linux| &linux.cgroup_parent),
        })
    }

    /// The sandboxes that a filter lets through, newest first.
    pub(crate) fn sandbox_list(&self, request: cri::ListPodSandboxRequest) -> cri::ListPodSandboxResponse {
        let sandboxes = self.sandboxes_that(request.filter);
        cri::ListPodSandboxResponse { items: sandboxes.iter().map(|row| row.item()).collect() }
    }

    /// The same, in pieces.
    pub(crate) fn sandbox_stream(
        &self,
        request: cri::StreamPodSandboxesRequest,
    ) -> Streamed<cri::StreamPodSandboxesResponse> {
        let items = self.sandboxes_that(request.filter).into_iter().map(|row| row.item());
        batches(items, |pod_sandboxes| cri::StreamPodSandboxesResponse { pod_sandboxes })
    }

    fn sandboxes_that(&self, filter: Option<cri::PodSandboxFilter>) -> Vec<Arc<Sandbox>> {
        let filter = filter
            .map(|filter| cri::PodSandboxFilter { id: self.inner.sandboxes.whole_id(&filter.id), ..filter });
        let table = &self.inner.sandboxes;
        // A kubelet asks for one pod's, after each event of the pod.
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
