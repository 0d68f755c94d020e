//! Binds pods to nodes, as an API client.
