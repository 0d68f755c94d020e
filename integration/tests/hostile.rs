//! Attacks on the built binary: from inside a container, by API clients, registries and local users. Each test names
//! the finding or the CVE that it reproduces, and fails on a vulnerable version.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test panics, waits, and prints what it left"
)]

#[path = "hostile/access.rs"]
mod access;
#[path = "hostile/api_load.rs"]
mod api_load;
#[path = "hostile/apparmor.rs"]
mod apparmor;
#[path = "hostile/container.rs"]
mod container;
#[path = "hostile/cve.rs"]
mod cve;
#[path = "hostile/disk.rs"]
mod disk;
#[path = "hostile/files.rs"]
mod files;
#[path = "hostile/node.rs"]
mod node;
#[path = "hostile/sandbox.rs"]
mod sandbox;
#[path = "hostile/store.rs"]
mod store;
