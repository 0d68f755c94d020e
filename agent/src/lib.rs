//! The node agent: pod sync, volumes, cgroups, status and the kubelet API.
//!
//! Start reading at [`run()`]: it wires the parts and waits. [`source`] says what is wanted here (the API
//! server's pods of this node, or the stored ones while there is no API server), [`pod`] makes it so
//! with one task per pod, [`runtime`] is all that pod sync asks of a container runtime.
//!
//! Invariants: the API is known only as a `kube::Client`; containers are touched only through
//! [`runtime::Runtime`] and networks only through `coracle_cni`; stopping the agent stops no pod.

mod api_health;
mod bounded;
pub mod cgroup;
mod checkpoint;
mod client;
mod config_cache;
mod configuration;
mod duration;
mod image_gc;
pub mod join;
pub mod node;
mod overlay;
pub mod pod;
pub mod runtime;
pub mod server;
mod service_cache;
pub mod source;
pub mod volume;

mod run;

pub use bounded::read_text;
pub use client::client;
pub use duration::parse as duration;
pub use image_gc::ImageGcPolicy;
pub use node::{EvictionThresholds, Threshold};
pub use run::{AgentConfig, Error, Identity, run};
