//! An event.

use std::path::PathBuf;

use coracle_proto::cri::ContainerEventResponse;

/// An event and its follow-up work.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    pub(crate) number: u64,
    pub(crate) event: ContainerEventResponse,
    /// The record of a removed object, kept until a listener received the deletion.
    pub(crate) removed: Option<PathBuf>,
}
