//! The control plane in one process: store, apiserver, controllers and scheduler.
