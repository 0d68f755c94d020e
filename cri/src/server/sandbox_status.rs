//! PodSandboxStatus and ListPodSandbox.

use std::collections::HashMap;

use coracle_proto::cri;
use serde_json::json;

use super::sandbox_run::now;
use crate::error::Error;
use crate::runtime::Runtime;
use crate::sandbox::filter;

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
            let live = sandbox.live();
            let text = json!({
                "pid": live.as_ref().map(|live| live.shim.pid()),
                "initPid": live.as_ref().map(|live| live.init_pid),
                "directory": self.inner.records.sandbox_dir(&sandbox.id),
                "cgroupParent": sandbox.config().linux.as_ref().map(|linux| &linux.cgroup_parent),
            });
            info.insert("info".to_owned(), text.to_string());
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

    /// The sandboxes that a filter lets through, newest first.
    pub(crate) fn sandbox_list(
        &self,
        request: cri::ListPodSandboxRequest,
    ) -> Result<cri::ListPodSandboxResponse, Error> {
        let mut items: Vec<cri::PodSandbox> = self
            .inner
            .sandboxes
            .all()
            .iter()
            .map(|sandbox| sandbox.item())
            .filter(|item| filter::sandbox(item, request.filter.as_ref()))
            .collect();
        items.sort_by_key(|item| std::cmp::Reverse(item.created_at));
        Ok(cri::ListPodSandboxResponse { items })
    }
}
