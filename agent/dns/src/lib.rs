//! The cluster's DNS server: names of Services, endpoints and pods, and a caching forwarder for all other names.
//!
//! Start at [`Server::run`]. `zone` answers from the shared tables of Services, without I/O. It follows version 1.1.0
//! of the specification of Kubernetes DNS-Based Service Discovery. `forward` queries the servers of the host's
//! `resolv.conf` and of stub domains. The crate `hickory-proto` parses and writes messages.
//!
//! Invariants:
//! - names of the cluster are never forwarded;
//! - the server answers only pods of this node and the node itself, so other hosts cannot use it for amplification
//!   attacks;
//! - clients are served in round-robin order, so that a flood of one client delays no other client;
//! - connections and forwarded queries are limited, in total and for each client; cached answers are limited in total;
//! - the cost of a query has a limit that neither other servers nor the authors of Services can exceed: a reply by UDP
//!   is built up to its maximum size. Large messages are decoded, built and encoded one at a time, and the clients take
//!   turns.

mod answer;
mod cache;
mod exchange;
mod fair_queue;
mod forward;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod large;
mod limit;
mod metrics;
mod reply;
mod server;
mod servers;
mod summary;
mod tcp;
mod zone;

pub use forward::Upstream;
pub use metrics::{Metrics, ServiceKind};
pub use server::{IsPod, Server, ServerError};
pub use servers::StubDomain;
pub use zone::Zone;
