//! Settings of the node's reports to the API server.

use crate::request_rate::RequestRate;

/// Settings of the node's reports to the API server. Each field names the kubelet's setting.
#[derive(Clone, Copy, Debug)]
pub struct NodeReports {
    /// Maximum images in the status of the Node object: `nodeStatusMaxImages`. None means no limit.
    pub max_images: Option<usize>,
    /// Maximum rate of requests for events: `eventRecordQPS` and `eventBurst`. None means no limit.
    pub event_rate: Option<RequestRate>,
    /// Whether a cloud controller manager completes the Node object: `--cloud-provider=external`.
    pub has_external_cloud: bool,
}
