//! Keeps a group of pods until its last pod has finished or is deleted. The API server adds the finalizer.

pub(crate) mod plan;
pub(crate) mod run;
