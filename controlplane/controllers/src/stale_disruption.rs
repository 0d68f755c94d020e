//! Pods that were marked to be deleted and then were not, as when the one that marked them died: the mark is taken back.

pub(crate) mod plan;
pub(crate) mod run;
