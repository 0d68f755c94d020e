//! Parts that the tests of all crates share: polling with a deadline ([`eventually`]), network namespaces
//! ([`in_new_namespace`]), skipped tests ([`skip!`]) and inputs of fuzz targets ([`replay_corpus`]). Test programs with
//! their own `main` use the harness [`Suite`].
//!
//! Only dev-dependencies name this crate. It depends on no crate of the product.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "polls with sleeps and prints like a test harness"
)]

mod closed_port;
mod corpus;
mod criu;
mod killed;
mod namespace;
mod pids;
mod poll;
mod program;
mod skipped;
mod suite;
mod udp;

pub use closed_port::ClosedPort;
pub use corpus::{corpus, replay_corpus};
pub use criu::CRIU_STAND_IN;
pub use killed::{is_to_be_killed, killed_dir, run_until_killed, run_until_killed_in};
pub use namespace::{NamespaceThread, in_new_namespace, in_new_namespace_async};
pub use pids::{SleepingProcess, has_own_pids, reuse_pid, run_with_own_pids};
pub use poll::{Outcome, eventually, eventually_async, until, until_yielding, within, within_async};
pub use program::{ip, run};
pub use skipped::{NO_IDMAPPED_TMPFS, has_idmapped_tmpfs, record_skip, record_skipped_part, test_name};
pub use suite::{Suite, Test};
pub use udp::bind_udp;
