//! Version, Status, RuntimeConfig and UpdateRuntimeConfig.

use std::collections::HashMap;
use std::sync::Arc;

use coracle_cni::Network;
use coracle_proto::cri;
use serde_json::json;

use crate::cgroup::driver::CgroupDriver;
use crate::cgroup::driver::Layout;
use crate::config::RuntimeConfig;
use crate::container::apparmor;
use crate::error::Error;
use crate::host::Host;
use crate::selinux::Selinux;

/// Reports the version and the state of the runtime, and its configuration.
#[derive(Clone)]
pub(crate) struct StatusService {
    pub(crate) config: Arc<RuntimeConfig>,
    pub(crate) host: Arc<Host>,
    pub(crate) network: Network,
    pub(crate) layout: Arc<Layout>,
    pub(crate) selinux: Arc<Selinux>,
}

// === impl StatusService ===

impl StatusService {
    /// Name and version of the runtime.
    pub(crate) fn version(&self, _request: cri::VersionRequest) -> Result<cri::VersionResponse, Error> {
        Ok(cri::VersionResponse {
            // Version of the response format; the kubelet checks it.
            version: "0.1.0".to_owned(),
            runtime_name: "coracle".to_owned(),
            runtime_version: env!("CARGO_PKG_VERSION").to_owned(),
            runtime_api_version: "v1".to_owned(),
        })
    }

    /// Conditions RuntimeReady and NetworkReady.
    pub(crate) async fn runtime_status(
        &self,
        request: cri::StatusRequest,
    ) -> Result<cri::StatusResponse, Error> {
        let runtime =
            cri::RuntimeCondition { r#type: "RuntimeReady".into(), status: true, ..Default::default() };
        let network = match self.network.status().await {
            Ok(()) => {
                cri::RuntimeCondition { r#type: "NetworkReady".into(), status: true, ..Default::default() }
            }
            Err(message) => cri::RuntimeCondition {
                r#type: "NetworkReady".into(),
                status: false,
                reason: "NetworkPluginNotReady".into(),
                message,
            },
        };
        let info = if request.verbose { self.runtime_info() } else { HashMap::new() };
        let kernel = self.host.kernel;
        let features = cri::RuntimeHandlerFeatures {
            recursive_read_only_mounts: kernel.recursive_read_only,
            user_namespaces: kernel.user_namespaces,
        };
        Ok(cri::StatusResponse {
            status: Some(cri::RuntimeStatus { conditions: vec![runtime, network] }),
            info,
            runtime_handlers: vec![cri::RuntimeHandler { name: String::new(), features: Some(features) }],
            features: Some(cri::RuntimeFeatures {
                supplemental_groups_policy: true,
                user_namespaces_host_network: kernel.user_namespaces,
                mount_options: true,
            }),
        })
    }

    /// Configuration and host facts for `crictl info`.
    fn runtime_info(&self) -> HashMap<String, String> {
        let (config, host) = (&self.config, &self.host);
        let config = json!({
            "root": config.root,
            "state": config.state,
            "cgroupRoot": config.cgroup_root,
            "cgroupDriver": config.cgroup_driver.to_string(),
            "logMaxSize": config.log_max_size,
            "logMaxFiles": config.log_max_files,
            "shimBinary": config.shim_binary,
            "streamUrl": config.stream_url,
        });
        let kernel = nix::sys::utsname::uname();
        let host = json!({
            "kernel": kernel.map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default(),
            "hostname": host.hostname,
            "cgroups": if host.unified { "v2" } else { "v1" },
            "hugetlb": host.hugetlb,
            "apparmor": apparmor::describe(),
            "selinux": self.selinux.describe(),
            "capabilities": host.capabilities,
            "oomScoreFloor": host.oom_floor,
        });
        let runtime = json!({ "name": "coracle", "version": env!("CARGO_PKG_VERSION") });
        let texts = [("config", config), ("host", host), ("runtime", runtime)];
        texts.into_iter().map(|(name, value)| (name.to_owned(), value.to_string())).collect()
    }

    /// The cgroup driver. The kubelet reads it and uses the same driver.
    pub(crate) fn runtime_config(
        &self,
        _request: cri::RuntimeConfigRequest,
    ) -> Result<cri::RuntimeConfigResponse, Error> {
        let driver = match self.layout.driver() {
            CgroupDriver::Cgroupfs => cri::CgroupDriver::Cgroupfs,
            CgroupDriver::Systemd => cri::CgroupDriver::Systemd,
        };
        let linux = cri::LinuxRuntimeConfiguration { cgroup_driver: driver.into() };
        Ok(cri::RuntimeConfigResponse { linux: Some(linux) })
    }

    /// Sets the node's pod CIDRs, which the kubelet sends.
    pub(crate) async fn runtime_config_update(
        &self,
        request: cri::UpdateRuntimeConfigRequest,
    ) -> Result<cri::UpdateRuntimeConfigResponse, Error> {
        let cidr =
            request.runtime_config.and_then(|config| config.network_config).map(|config| config.pod_cidr);
        let cidr = cidr.unwrap_or_default();
        let cidrs = cidr
            .split(',')
            .filter(|text| !text.is_empty())
            .map(|text| {
                text.trim()
                    .parse()
                    .map_err(|_not| Error::invalid("pod_cidr", format!("{text:?} is not a CIDR")))
            })
            .collect::<Result<Vec<_>, _>>()?;
        if !cidrs.is_empty() {
            let set = self.network.set_pod_cidrs(cidrs).await;
            set.map_err(|source| Error::Network { id: String::new(), source })?;
        }
        Ok(cri::UpdateRuntimeConfigResponse {})
    }
}
