//! GetContainerEvents, and the making of events.

use coracle_proto::cri;
use cri::{ContainerEventResponse, ContainerEventType};
use futures::StreamExt;
use tonic::Status;

use super::sandbox_run::now;
use super::status::Streamed;
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;

impl Runtime {
    /// All events from now on; to the first caller also those since the runtime's start.
    pub(crate) fn events_get(&self, _request: cri::GetEventsRequest) -> Streamed<ContainerEventResponse> {
        let events = self.inner.events.listen();
        Box::pin(events.map(|event| event.map_err(|lost| Status::resource_exhausted(lost.to_string()))))
    }

    /// Tells all listeners what became of a container, or of a sandbox.
    pub(crate) fn event(&self, sandbox_id: &str, subject: &str, what: ContainerEventType) {
        if let Some(sandbox) = self.inner.sandboxes.get(sandbox_id) {
            self.event_of(&sandbox, subject, what);
        }
    }

    /// The same for a sandbox that is no longer in the table.
    pub(super) fn event_of(&self, sandbox: &Sandbox, subject: &str, what: ContainerEventType) {
        self.inner.changes.send_replace(());
        if !self.inner.events.wanted() {
            return;
        }
        let containers = self.containers_of(&sandbox.id);
        self.inner.events.send(&ContainerEventResponse {
            container_id: subject.to_owned(),
            container_event_type: what.into(),
            created_at: now(),
            pod_sandbox_status: Some(sandbox.status()),
            containers_statuses: containers
                .iter()
                .filter(|container| container.visible())
                .map(|container| container.status())
                .collect(),
        });
    }
}
