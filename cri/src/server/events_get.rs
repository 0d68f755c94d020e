//! GetContainerEvents.

use coracle_proto::cri;
use cri::ContainerEventResponse;
use futures::StreamExt;
use tonic::Status;

use super::status::Streamed;
use crate::runtime::Runtime;

impl Runtime {
    /// All events from now on; to the first caller also what no listener was told before.
    pub(crate) fn events_get(&self, _request: cri::GetEventsRequest) -> Streamed<ContainerEventResponse> {
        let events = self.inner.events.listen();
        Box::pin(events.map(|event| event.map_err(|lost| Status::resource_exhausted(lost.to_string()))))
    }
}
