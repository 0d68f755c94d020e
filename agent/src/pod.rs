//! Pods of this node: one worker each, level-triggered, for the newest desired state.
//!
//! [`sync`] turns the source's changes into desired pods and gives each pod its [`worker`]. A worker observes
//! ([`observe`]), plans ([`plan`], pure), applies ([`apply`]) and reports ([`status`], pure).

pub(crate) mod admit;
mod apply;
mod backoff;
mod config;
mod context;
mod env;
mod eviction;
mod hook;
mod observe;
mod plan;
mod pods;
mod preemption;
mod probe;
mod pull;
mod removed;
mod resize;
mod resize_state;
mod restart;
mod security;
mod shutdown;
mod state;
mod status;
pub(crate) mod sync;
mod user_ids;
mod worker;

pub(crate) use context::NodeContext;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use env::fuzz as fuzz_env_file;
pub use eviction::DiskUsages;
pub(crate) use eviction::{Eviction, Evictions, LimitEviction};
pub(crate) use pods::Pods;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use probe::http::fuzz as fuzz_redirect;
pub use pull::ProviderError;
pub(crate) use pull::Providers;
pub(crate) use pull::records::PullRecords;
pub(crate) use resize::Resizes;
pub(crate) use shutdown::MachineShutdown;
pub(crate) use state::has_ended;
pub(crate) use status::write::StatusWriter;
pub(crate) use user_ids::UserIds;
