//! The job controller: runs pods until enough of them have succeeded.
//!
//! Pods are counted exactly once, even if the process ends at any step. Each pod has a finalizer. First, the uid of a
//! finished pod is written to `status.uncountedTerminatedPods`. Then the finalizer is removed. Then one write moves the
//! uid into the counter. The succeeded pods of an indexed job are counted by their index, which needs no list of uids.

mod indexes;
pub(crate) mod orphan;
pub(crate) mod plan;
mod pods;
mod policy;
pub(crate) mod run;
mod status;
mod verdict;

/// The finalizer of pods that are not counted yet.
pub(crate) const FINALIZER: &str = "batch.kubernetes.io/job-tracking";
