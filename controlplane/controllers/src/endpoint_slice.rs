//! EndpointSlices of services, from the selected pods.

pub(crate) mod pack;
pub(crate) mod plan;
pub(crate) mod run;
mod topology;
mod zone_changes;
