//! The controllers that run in the API server. They write through the write pipeline, as clients do.

pub(crate) mod aggregation;
mod api_services;
pub(crate) mod custom_resources;
pub(crate) mod flow_control;
pub(crate) mod initialization;
pub(crate) mod policy_status;
pub(crate) mod quota_status;
pub(crate) mod unreadable;
pub(crate) mod usage_history;
