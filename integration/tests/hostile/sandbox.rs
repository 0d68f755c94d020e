//! Pods that attack process 1 of their sandbox, their shim and the pids that the node knows.
