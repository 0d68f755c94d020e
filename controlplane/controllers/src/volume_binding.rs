//! Binds claims to volumes, and reclaims released volumes.
//!
//! ```text
//! claim:   Pending ──► Bound ──► Lost (its volume is gone or belongs to another claim)
//! volume:  Available ──► Bound ──► Released ──► deleted (Delete) or kept (Retain)
//!                                     └──► Failed (the volume cannot be deleted or recycled)
//! ```
//! A binding consists of four writes: the volume's claimRef, the volume's phase, the claim's volumeName, the claim's
//! status. The first write has the version of the volume as a precondition, so that two claims never get the same
//! volume. Each write can be repeated: after a crash the next reconcile continues.

pub(crate) mod matching;
pub(crate) mod plan;
pub(crate) mod run;

/// Annotation that is set on a claim and a volume once they are bound.
pub(crate) const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
/// Annotation of a claim or a volume. It means that the controller, not the user, selected the volume of the claim, or
/// the claim of the volume.
pub(crate) const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
/// Annotation of a claim: the provisioner that must create the volume.
pub(crate) const PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
/// Annotation of the default storage class.
pub(crate) const IS_DEFAULT: &str = "storageclass.kubernetes.io/is-default-class";
