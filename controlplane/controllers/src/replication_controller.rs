//! The replication controller: replica sets with the selector of the first Kubernetes versions.

pub(crate) mod run;
