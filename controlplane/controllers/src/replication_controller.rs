//! The controller of ReplicationControllers, which are ReplicaSets with a selector of labels only.

pub(crate) mod run;
