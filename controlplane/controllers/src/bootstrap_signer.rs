//! The cluster's address and authority are published in `kube-public/cluster-info`, signed with each bootstrap token.

mod plan;
pub(crate) mod run;
