//! Parameters of attachments.

use std::path::PathBuf;

use crate::spec::list::Capabilities;

/// Parameters of one attachment. ADD, DEL and CHECK get the same parameters.
#[derive(Debug, Clone)]
pub(crate) struct Parameters {
    pub(crate) container_id: String,
    pub(crate) netns: Option<PathBuf>,
    pub(crate) ifname: String,
    /// `CNI_ARGS`.
    pub(crate) args: String,
    pub(crate) capabilities: Capabilities,
}
