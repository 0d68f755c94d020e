//! The garbage collector: deletes objects whose owners do not exist any more.

mod absent_owners;
mod actions;
mod discovery;
mod first_lists;
mod graph;
pub(crate) mod plan;
mod removed;
pub(crate) mod run;
