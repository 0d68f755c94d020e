//! The node agent: pod sync, volumes, cgroups, status and the kubelet API.
//!
//! Start reading at [`run()`], which starts all tasks. [`source`] supplies the desired pods from the API server, or
//! from the checkpoint while the API server does not answer. [`pod`] runs them with one worker per pod. [`runtime`] is
//! the interface to the container runtime.
//!
//! Invariants: the API is reached only by a `kube::Client`, containers only by [`runtime::Runtime`], and networks only
//! by `coracle_cni` or the container runtime. When the agent stops, the pods keep running, unless the machine shuts
//! down and the settings give the pods a period to end.

mod address_announcer;
mod api_handlers;
mod api_health;
mod bounded;
mod certificate_files;
pub mod cgroup;
mod checkpoint;
mod client;
mod cluster_dns;
pub mod component_server;
mod config;
mod config_cache;
mod configuration;
mod cpu_manager;
mod deadline;
mod device_plugins;
mod dra;
mod duration;
mod event_recorder;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod health_server;
mod image_gc;
mod image_gc_policy;
mod image_gc_trigger;
mod image_verification;
pub mod join;
mod json_file;
pub mod kubelet_metrics;
mod memory_manager;
mod metric;
mod namespace_watch;
mod network_policy;
pub mod node;
mod node_balancer;
mod node_health;
mod node_object;
mod node_reports;
mod overlay;
mod overlay_guard;
mod own_address;
pub mod pod;
mod pod_logs;
mod pod_policy;
mod pod_resources;
mod policy_gate;
mod private_file;
mod project_quota;
mod proxy_health;
mod proxy_metrics;
mod pull_activity;
mod repair;
mod request_rate;
mod resolver;
mod resource_managers;
pub mod runtime;
pub mod server;
mod service_cache;
mod service_health;
mod service_proxy;
mod shutdown_policy;
pub mod source;
mod system_oom;
mod tls_options;
mod topology;
mod version;
pub mod volume;

mod run;

pub use api_handlers::ApiHandlers;
pub use bounded::read_text;
pub use certificate_files::CertificateFiles;
pub use client::{component_client, node_client};
pub use cluster_dns::dns_record;
pub use config::{AgentConfig, CredentialProviderPaths, DnsConfig, Identity, ServiceProxyConfig, TableNames};
pub use coracle_dns::StubDomain;
pub use cpu_manager::CpuOptions;
pub use device_plugins::sockets::remove as remove_plugin_sockets;
pub use duration::parse as duration;
pub use image_gc_policy::ImageGcPolicy;
pub use image_verification::{AllowedImages, ImageVerification};
pub use node::{EvictionThresholds, MinimumReclaim, SoftThreshold, SoftThresholds, Threshold};
pub use node_reports::NodeReports;
pub use pod_logs::remove as remove_pod_logs;
pub use pod_policy::{AllowedSysctl, PodPolicy, PullSlots};
pub use private_file::replace as replace_private;
pub use pull_activity::{ActivePull, PullActivity};
pub use request_rate::{RateLimit, RequestRate};
pub use resource_managers::{ReservedMemory, ResourceManagerConfig};
pub use run::{Error, run};
pub use shutdown_policy::{ShutdownPeriod, ShutdownPeriods};
pub use source::{ManifestUrl, StaticPodSources};
pub use tls_options::TlsOptions;
pub use topology::{CpuSet, CpuSetError, TopologyPolicy, TopologySettings};
