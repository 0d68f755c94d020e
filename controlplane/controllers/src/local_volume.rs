//! The built-in provisioner of local volumes: a directory on the node of the claim's first pod.
//!
//! The controller creates only the PersistentVolume. The node's agent creates the directory when it mounts the volume,
//! and removes it when the volume is being deleted. A finalizer keeps the volume until then.

pub(crate) mod plan;
pub(crate) mod run;

/// Name of the provisioner in storage classes.
pub(crate) const PROVISIONER_NAME: &str = "coracle.dev/local-path";
/// The node annotation with the directory of local volumes. The agent sets it.
pub(crate) const DIRECTORY: &str = "coracle.dev/local-volumes";
/// The node annotation with the size of the file system that has the directory. Absent if the size is unknown.
pub(crate) const DISK: &str = "coracle.dev/local-volumes-disk";
/// The volume label with the name of the node that has the directory.
pub(crate) const NODE: &str = "coracle.dev/node";
/// The finalizer that waits until the directory is removed.
pub(crate) const FINALIZER: &str = "coracle.dev/local-volume";
