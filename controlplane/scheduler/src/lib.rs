//! The scheduler: binds pods to nodes, as an API client.
//!
//! One task owns the whole state (`run`). The state is a queue of pods without a node (`queue`), and a snapshot of the
//! nodes with the requests of their pods (`snapshot`). For the next pod the task filters the nodes (`filter/`) and
//! scores the remaining nodes (`score/`). It places the pod on the best node in the snapshot, and binds the pod through
//! the subresource `binding` (`bind`).
//!
//! Invariants: the only access to the API is a [`kube::Client`]. Filters and scores do no I/O. A pod is placed in the
//! snapshot before it is bound, and removed again if the binding fails. So no resource of a node is assigned twice. If
//! no node can run a pod, pods of lower priority may be evicted (`preempt`). The pods of a gang are placed together or
//! not at all (`groups`).

mod affinity_term;
mod bind;
mod budget;
mod config;
mod consult;
mod decide;
mod devices;
mod extender;
mod filter;
#[cfg(test)]
mod fixture;
mod groups;
mod hint;
mod memo;
mod metrics;
mod node_properties;
mod node_score;
mod object;
mod placed;
mod preempt;
mod queue;
mod refusal;
mod request;
mod reserve;
mod run;
mod score;
mod selectors;
mod simulate;
mod snapshot;
mod topology;
mod turn_queue;
mod volumes;
mod watch;

pub use config::{ConfigError, SchedulerConfig};
pub use metrics::SchedulerMetrics;
pub use run::run;
pub use simulate::decide_case;
