//! ContainerStatus and ListContainers.

use std::collections::HashMap;
use std::sync::Arc;

use coracle_proto::cri;
use serde_json::{Value, json};

use crate::container::Container;
use crate::error::Error;
use crate::runtime::Runtime;
use crate::sandbox::filter;
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
        json!({
            "sandboxID": container.record.sandbox_id,
            "pid": container.pid(),
            "cgroup": container.record.cgroup,
            "bundle": bundle,
            "runtimeSpec": serde_json::from_slice::<Value>(&spec).unwrap_or_default(),
        })
    }

    /// The containers that a filter lets through, newest first.
    pub(crate) fn container_list(
        &self,
        request: cri::ListContainersRequest,
    ) -> Result<cri::ListContainersResponse, Error> {
        let mut containers: Vec<cri::Container> = self
            .inner
            .containers
            .all()
            .iter()
            .filter(|container| container.visible())
            .map(|container| container.item())
            .filter(|item| filter::container(item, request.filter.as_ref()))
            .collect();
        containers.sort_by_key(|item| std::cmp::Reverse(item.created_at));
        Ok(cri::ListContainersResponse { containers })
    }

    /// A container that clients may see.
    pub(crate) fn container(&self, id: &str) -> Result<Arc<Container>, Error> {
        let container = self.inner.containers.get(id).filter(|container| container.visible());
        container.ok_or_else(|| Error::no_container(id))
    }

    /// All containers of a sandbox, those being created included.
    pub(crate) fn containers_of(&self, sandbox_id: &str) -> Vec<Arc<Container>> {
        let mut all = self.inner.containers.all();
        all.retain(|container| container.record.sandbox_id == sandbox_id);
        all
    }

    /// The shim that a container lives in.
    pub(crate) fn shim_of(&self, container: &Container) -> Result<Shim, Error> {
        let id = &container.record.sandbox_id;
        self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?.shim()
    }
}
