//! The container runtime: sandboxes, containers, streaming and the CRI service.
