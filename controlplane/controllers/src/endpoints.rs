//! The endpoints of services: the addresses of the selected pods.

pub(crate) mod batch;
pub(crate) mod omitted_pods;
pub(crate) mod plan;
pub(crate) mod port_lists;
pub(crate) mod run;
pub(crate) mod trigger_time;
