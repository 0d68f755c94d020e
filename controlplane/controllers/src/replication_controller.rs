//! The controller of ReplicationControllers: ReplicaSets whose selector has only labels.

pub(crate) mod run;
