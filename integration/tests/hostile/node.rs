//! Pods that attack the node's own ports, sockets and probes.
