//! Publishes the cluster's CA as a config map in every namespace, so that pods can verify the API server.

pub(crate) mod plan;
pub(crate) mod run;
