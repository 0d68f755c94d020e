//! Clusters driven with kubectl, and the roles of the binary. The small modules share one program, because each
//! additional program must be linked, and cores are idle during the last test of a program.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test panics and waits"
)]

#[path = "cluster/backup.rs"]
mod backup;
#[path = "cluster/bad_input.rs"]
mod bad_input;
#[path = "cluster/checkpoint.rs"]
mod checkpoint;
#[path = "cluster/custom_resources.rs"]
mod custom_resources;
#[path = "cluster/deployment.rs"]
mod deployment;
#[path = "cluster/device_plugins.rs"]
mod device_plugins;
#[path = "cluster/devices.rs"]
mod devices;
#[path = "cluster/disruption.rs"]
mod disruption;
#[path = "cluster/documents.rs"]
mod documents;
#[path = "cluster/eviction.rs"]
mod eviction;
#[path = "cluster/examples.rs"]
mod examples;
#[path = "cluster/exclusive_cpus.rs"]
mod exclusive_cpus;
#[path = "cluster/grpcio.rs"]
mod grpcio;
#[path = "cluster/high_availability.rs"]
mod high_availability;
#[path = "cluster/image_gc.rs"]
mod image_gc;
#[path = "cluster/local_clusters.rs"]
mod local_clusters;
#[path = "cluster/network_policy.rs"]
mod network_policy;
#[path = "cluster/packages.rs"]
mod packages;
#[path = "cluster/pod_network.rs"]
mod pod_network;
#[path = "cluster/pod_spec.rs"]
mod pod_spec;
#[path = "cluster/private_images.rs"]
mod private_images;
#[path = "cluster/progress.rs"]
mod progress;
#[path = "cluster/rbac.rs"]
mod rbac;
#[path = "cluster/resize.rs"]
mod resize;
#[path = "cluster/restart_rules.rs"]
mod restart_rules;
#[path = "cluster/roles.rs"]
mod roles;
#[path = "cluster/scheduling.rs"]
mod scheduling;
#[path = "cluster/server_side_apply.rs"]
mod server_side_apply;
#[path = "cluster/services.rs"]
mod services;
#[path = "cluster/static_pods.rs"]
mod static_pods;
#[path = "cluster/storage.rs"]
mod storage;
#[path = "cluster/streams.rs"]
mod streams;
#[path = "cluster/usage.rs"]
mod usage;
#[path = "cluster/workloads.rs"]
mod workloads;
