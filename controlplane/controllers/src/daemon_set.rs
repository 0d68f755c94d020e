//! The daemon set controller: one pod on each node that the pod template selects.

mod fit;
mod observed;
pub(crate) mod plan;
mod rolling;
pub(crate) mod run;
