//! Deletes finished jobs after their `ttlSecondsAfterFinished`.

mod plan;
pub(crate) mod run;
