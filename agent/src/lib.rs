//! The node agent: pod sync, volumes, cgroups, status and the kubelet API.
