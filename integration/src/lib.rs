//! Fixtures for tests of the built binary: a machine (network namespace, directories, cgroup), a registry, clusters,
//! a runtime, and the published kubectl and crictl.
//!
//! This crate links no code of the product. Dropping a fixture ends its processes, even after a failed test.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "test fixtures panic, poll and print like tests"
)]

mod cgroup;
mod cluster;
mod cri;
mod crictl;
mod crio;
mod flannel;
mod host;
mod http;
mod kubectl;
mod kubelet_node;
mod lines;
mod machine;
mod nodes;
mod process;
mod registry_storage;
mod resource_snapshot;

pub use cgroup::end_cgroup;
pub use cluster::{Cluster, on_a_cluster};
pub use coracle_testing::{eventually, eventually_async, skip, skip_part, within, within_async};
pub use cri::Cri;
pub use crictl::Crictl;
pub use crio::CrioSettings;
pub use flannel::Flannel;
pub use host::{Host, inside};
pub use http::http_get;
pub use kubectl::{Kubectl, has_condition};
pub use kubelet_node::KubeletNode;
pub use lines::Lines;
pub use machine::{Machine, on_a_machine, repository};
pub use nodes::{Agent, Nodes};
pub use process::{checked_stdout, process_status, stderr, wait_for_exit};
pub use resource_snapshot::ResourceSnapshot;
