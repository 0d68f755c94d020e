//! Resets the condition DisruptionTarget of pods that were not deleted after all, for example because the client that
//! set it crashed.

pub(crate) mod plan;
pub(crate) mod run;
