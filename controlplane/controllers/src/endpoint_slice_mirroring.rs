//! EndpointSlices of services without a selector, from Endpoints that users write.

pub(crate) mod plan;
pub(crate) mod run;
