//! The per-pod shim: holds the namespaces, runs the containers, keeps stdio and exit codes.
