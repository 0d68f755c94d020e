//! Resets the condition DisruptionTarget of pods that were not deleted within a time limit, for example because the
//! client that set the condition crashed.

pub(crate) mod plan;
pub(crate) mod run;
