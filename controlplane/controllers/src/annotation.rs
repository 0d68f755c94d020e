//! Annotations of pods, claims and volumes that controllers read.

/// Cost of deleting the pod: a replica set deletes the pods with the lowest cost first.
pub(crate) const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// The completion index of a job's pod. A label has the same name.
pub(crate) const JOB_INDEX: &str = "batch.kubernetes.io/job-completion-index";
/// The number of earlier failures of the pod's index.
pub(crate) const JOB_INDEX_FAILURES: &str = "batch.kubernetes.io/job-index-failure-count";
/// The number of ignored failures of the pod's index.
pub(crate) const JOB_INDEX_IGNORED_FAILURES: &str = "batch.kubernetes.io/job-index-ignored-failure-count";
/// Name of the provisioner that made a volume.
pub(crate) const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// The node that the scheduler selected for a claim's first pod.
pub(crate) const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
