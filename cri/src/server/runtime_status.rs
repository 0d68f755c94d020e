//! Version, Status, RuntimeConfig and UpdateRuntimeConfig.

use std::collections::HashMap;

use coracle_proto::cri;
use serde_json::json;

use crate::cgroup::driver::CgroupDriver;
use crate::container::apparmor;
use crate::error::Error;
use crate::runtime::Runtime;

impl Runtime {
    /// Who we are.
    pub(crate) fn version(&self, _request: cri::VersionRequest) -> Result<cri::VersionResponse, Error> {
        Ok(cri::VersionResponse {
            // The version of this answer, which the kubelet checks.
            version: "0.1.0".to_owned(),
            runtime_name: "coracle".to_owned(),
            runtime_version: env!("CARGO_PKG_VERSION").to_owned(),
            runtime_api_version: "v1".to_owned(),
        })
    }

    /// Whether pods can be run, and with a network.
    pub(crate) async fn runtime_status(
        &self,
        request: cri::StatusRequest,
    ) -> Result<cri::StatusResponse, Error> {
        let runtime =
            cri::RuntimeCondition { r#type: "RuntimeReady".into(), status: true, ..Default::default() };
        let network = match self.inner.network.status().await {
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
        let kernel = self.inner.host.kernel;
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

    /// What `crictl info` shows beside the conditions: how the runtime is set, and what it found here.
    fn runtime_info(&self) -> HashMap<String, String> {
        let (config, host) = (&self.inner.config, &self.inner.host);
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
            "selinux": self.inner.selinux.describe(),
            "capabilities": host.capabilities,
            "oomScoreFloor": host.oom_floor,
        });
        let runtime = json!({ "name": "coracle", "version": env!("CARGO_PKG_VERSION") });
        let texts = [("config", config), ("host", host), ("runtime", runtime)];
        texts.into_iter().map(|(name, value)| (name.to_owned(), value.to_string())).collect()
    }

    /// Who makes cgroups: a kubelet does as we do.
    pub(crate) fn runtime_config(
        &self,
        _request: cri::RuntimeConfigRequest,
    ) -> Result<cri::RuntimeConfigResponse, Error> {
        let driver = match self.inner.layout.driver() {
            CgroupDriver::Cgroupfs => cri::CgroupDriver::Cgroupfs,
            CgroupDriver::Systemd => cri::CgroupDriver::Systemd,
        };
        let linux = cri::LinuxRuntimeConfiguration { cgroup_driver: driver.into() };
        Ok(cri::RuntimeConfigResponse { linux: Some(linux) })
    }

    /// The node's pod addresses, from a kubelet that is told them.
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
                text.trim().parse().map_err(|_not| Error::invalid("pod_cidr", format!("{text:?} is none")))
            })
            .collect::<Result<Vec<_>, _>>()?;
        if !cidrs.is_empty() {
            let set = self.inner.network.set_pod_cidrs(cidrs).await;
            set.map_err(|source| Error::Network { id: String::new(), source })?;
        }
        Ok(cri::UpdateRuntimeConfigResponse {})
    }
}
