//! Binds pods to nodes, as an API client.
//!
//! One task owns the whole state (`run`): a queue of pods that wait (`queue`) and a snapshot of the nodes with
//! what is asked of them (`snapshot`). For the next pod it filters the nodes (`filter/`, one reason a file),
//! scores those that are left (`score/`), assumes the pod on the best one and binds it through the `binding`
//! subresource (`bind`).
//!
//! Invariants: the API is known only as a [`kube::Client`]; filters and scores are pure; a pod is assumed before
//! it is bound and forgotten again when binding fails, so that no node is ever promised twice. Nothing is evicted
//! to make room: preemption is not done here.

mod bind;
mod config;
mod decide;
mod filter;
#[cfg(test)]
mod fixture;
mod object;
mod queue;
mod request;
mod run;
mod score;
mod snapshot;

pub use config::SchedulerConfig;
pub use run::run;
