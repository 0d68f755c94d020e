//! The container runtime: sandboxes, containers, streaming and the CRI service.
//!
//! Owns what runs on the node: every pod sandbox (a shim process, see `shim_client`), the containers
//! in it, their records, logs, streams and statistics. Start reading at [`Runtime`], which implements
//! both CRI services; each call has a file of its own under `server/`.
//!
//! Invariants:
//! - knows CRI and the OCI, never a Kubernetes kind;
//! - never calls the container library: that happens only in the shim's forked creators;
//! - record first, side effect second: whatever instruction the process dies at, [`Runtime::open`]
//!   finds every sandbox and container again or undoes the half-made;
//! - errors become gRPC codes in `server/status.rs` and nowhere else;
//! - idle does nothing: no timers, no polling, no writes.

mod cdi;
mod cgroup;
mod checkpoint;
mod container;
mod error;
mod events;
mod exits;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod host;
mod known;
mod lock;
mod metrics;
mod names;
mod nri;
mod pidfd;
mod records;
mod recover;
mod resize;
mod runtime;
mod sandbox;
mod selinux;
mod server;
pub mod shim_client;
mod shim_program;
mod stats;
mod steps;
mod stream;
mod table;
mod telling;
mod undo;

pub use cgroup::driver::CgroupDriver;
pub use checkpoint::{CheckpointError, CriuError};
pub use coracle_nri::Settings as NriSettings;
pub use error::Error;
pub use runtime::{Runtime, RuntimeConfig};
pub use selinux::labels_containers;
pub use shim_client::Times as ShimTimes;
pub use stream::{BoxBody, notice_lost_client, serve as serve_streams};
