//! Slices and scopes: cgroups that systemd makes for us, so that it knows their limits and leaves them alone.
//!
//! Owns the talk with systemd, which goes over its private socket, in blocking calls: the socket is there
//! wherever systemd is, without a message bus, and no thread or executor is needed, so that a fork of the shim may
//! call. Start reading at [`Systemd`]; names and paths are [`mod@unit`]'s, limits [`property`]'s, the wire [`message`]'s.
//!
//! It is our own, since the libraries at hand do not fit: `zbus` runs threads, and the container library's client
//! asks the message bus first, starts a scope with no other properties than its own, and polls for its end.
//!
//! Invariants:
//! - systemd is told what the kernel holds ([`property::held`]), never something worked out a second time;
//! - a call returns when its job is done, never before;
//! - knows neither pods nor containers.

mod connection;
mod message;
pub mod property;
pub mod unit;

pub use connection::{Error, Systemd};
pub use message::Value;
pub use property::Property;
pub use unit::Scope;
