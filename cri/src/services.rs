//! The services of the runtime, one for each kind of object of the CRI. Each call has a file of its own.
//!
//! A service holds the state that its calls use. It uses other services only in this order: checkpoints, sandboxes,
//! containers, execs.

pub(crate) mod checkpoints;
pub(crate) mod containers;
pub(crate) mod execs;
pub(crate) mod images;
mod process_file;
pub(crate) mod sandboxes;
pub(crate) mod shared;
pub(crate) mod status;
mod verbose;

/// A new random id.
fn new_id() -> String {
    hex::encode(rand::random::<[u8; 32]>())
}
