//! ReopenContainerLog.

use coracle_proto::cri;

use super::service::ContainerService;
use crate::error::Error;

impl ContainerService {
    /// Reopens a container's log file after the client renamed it.
    pub(crate) async fn log_reopen(
        &self,
        request: cri::ReopenContainerLogRequest,
    ) -> Result<cri::ReopenContainerLogResponse, Error> {
        let container = self.objects.tables.running(&request.container_id)?;
        let shim = self.objects.tables.shim_of(&container)?;
        shim.reopen_log(&container.id).await.map_err(Error::shim("reopen the container's log"))?;
        coracle_fault::point("reopen.done");
        Ok(cri::ReopenContainerLogResponse {})
    }
}
