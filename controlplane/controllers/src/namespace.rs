//! The namespace controller: deletes the contents of namespaces that are being deleted.

pub(crate) mod plan;
pub(crate) mod run;
