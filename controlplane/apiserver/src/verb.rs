//! The verbs, generic over the table of kinds. Each verb has its own file.

pub(crate) mod apply;
pub(crate) mod component_status;
pub(crate) mod create;
pub(crate) mod delete;
pub(crate) mod delete_collection;
pub(crate) mod get;
pub(crate) mod list;
pub(crate) mod list_options;
pub(crate) mod patch;
pub(crate) mod review;
mod unsafe_delete;
pub(crate) mod update;
mod version_fields;
pub(crate) mod watch;
pub(crate) mod watch_socket;
