//! State that controllers keep between reconciles. Most of it is derived from watched objects. Exceptions are the
//! back-off of daemon sets, of stateful sets and of jobs, and the limits of the creation of pods. The
//! [`Context`](crate::context::Context) holds it.

pub(crate) mod daemon_backoff;
pub(crate) mod deletions;
pub(crate) mod failed_pods;
pub(crate) mod group_members;
pub(crate) mod job_creations;
pub(crate) mod job_failures;
pub(crate) mod pod_counts;
pub(crate) mod pod_creations;
pub(crate) mod selector_index;
pub(crate) mod service_addresses;
mod service_index;
pub(crate) mod service_ports;
pub(crate) mod volume_index;
pub(crate) mod zones;
