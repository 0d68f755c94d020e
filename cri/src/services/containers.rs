//! The container service: create, start, stop, update, remove, list.

mod bundle;
pub(crate) mod check;
mod create;
mod log;
mod pid_namespace;
mod remove;
mod restore;
mod service;
mod spec;
mod start;
mod status;
mod stop;
mod update;
mod volumes;

pub(crate) use self::create::{ContainerRequest, Origin};
pub(crate) use self::service::ContainerService;
