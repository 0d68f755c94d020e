//! systemd slices and scopes: cgroups that systemd creates. systemd knows their limits, and so does not overwrite
//! them.
//!
//! This crate communicates with systemd over its private socket, in blocking calls. The socket exists wherever systemd
//! runs and needs no message bus, thread or executor, so a fork of the shim may use it. Start reading at
//! [`Systemd`]. Names and paths are in [`mod@unit`], limits in [`property`], the wire format in [`message`].
//!
//! The client is written here, because existing libraries do not fit. `zbus` runs threads. The container library's
//! client uses the message bus, supports no additional properties of a scope, and polls for the end of a job.
//!
//! Invariants:
//! - systemd gets the limits that the kernel has ([`property::current_limits`]), never separately calculated ones.
//! - A call returns when its job has ended, not earlier.
//! - The crate is independent of pods and containers.

mod connection;
mod message;
pub mod property;
pub mod unit;

pub use connection::{Error, Systemd};
pub use message::Value;
pub use property::Property;
pub use unit::Scope;
