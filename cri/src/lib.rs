//! The container runtime: sandboxes, containers, streaming and the CRI service.
//!
//! Owns everything that runs on the node: the pod sandboxes (each has a shim process, see `shim_client`) and their
//! containers. Also owns the records, logs, streams and statistics of both. Start reading at [`Runtime`], which
//! composes the `services`; each call has a file of its own. `server/` passes the calls of the CRI to the services.
//!
//! Invariants:
//! - The crate uses the types of the CRI and the OCI, but no Kubernetes kind.
//! - It never calls the container library: only forks of the shim do.
//! - Record first, side effect second: if the process is killed at any time, [`Runtime::open`] finds every sandbox and
//!   container again, and undoes incomplete objects.
//! - Errors become gRPC codes in `server/grpc_status.rs` and nowhere else.
//! - An idle runtime has no timers, no polling and no writes.

mod announcement;
pub mod background_walks;
pub mod blocking;
mod cdi;
mod cgroup;
mod checkpoint;
mod clock;
mod config;
mod container;
mod descriptor;
mod error;
mod event_outbox;
mod events;
mod exec_killer;
mod exit_recorder;
pub mod fair_permits;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod host;
mod image_files;
mod json_file;
mod known;
mod list_stream;
mod lock;
mod metrics;
mod names;
pub mod namespace_limit;
mod namespaces;
mod nri;
mod pidfd;
mod plugin_host;
mod profiles;
mod records;
mod recover;
mod resize;
mod root_limits;
mod runtime;
mod sandbox;
mod security_profile;
mod selinux;
mod server;
mod services;
pub mod shim_client;
mod shim_monitor;
mod shim_program;
mod stats;
mod steps;
mod stream;
mod table;
mod tables;
mod undo;
mod usage;
mod user;

pub use cgroup::driver::CgroupDriver;
pub use config::RuntimeConfig;
pub use coracle_nri::Settings as NriSettings;
pub use error::Error;
pub use error::checkpoint::{CheckpointError, CriuError};
pub use runtime::{Runtime, serve_streams};
pub use selinux::labels_containers;
pub use server::UnixClient;
pub use shim_client::Timeouts as ShimTimeouts;
pub use stream::BoxBody;
