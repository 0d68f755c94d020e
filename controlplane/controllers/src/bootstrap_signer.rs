//! Publishes the cluster's address and CA in `kube-public/cluster-info`, signed with each bootstrap token.

mod plan;
pub(crate) mod run;
