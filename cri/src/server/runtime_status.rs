//! Version, Status, RuntimeConfig and UpdateRuntimeConfig.

use std::collections::HashMap;

use coracle_proto::cri;
use serde_json::json;

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
    pub(crate) fn runtime_status(&self, request: cri::StatusRequest) -> Result<cri::StatusResponse, Error> {
        let runtime =
            cri::RuntimeCondition { r#type: "RuntimeReady".into(), status: true, ..Default::default() };
        let network = match self.inner.network.ready() {
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
        let mut info = HashMap::new();
        if request.verbose {
            let config = &self.inner.config;
            let text =
                json!({ "root": config.root, "state": config.state, "cgroupRoot": config.cgroup_root });
            info.insert("config".to_owned(), text.to_string());
        }
        let features =
            cri::RuntimeHandlerFeatures { recursive_read_only_mounts: true, user_namespaces: false };
        Ok(cri::StatusResponse {
            status: Some(cri::RuntimeStatus { conditions: vec![runtime, network] }),
            info,
            runtime_handlers: vec![cri::RuntimeHandler { name: String::new(), features: Some(features) }],
            features: Some(cri::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() }),
        })
    }

    /// Cgroups are made by writing files.
    pub(crate) fn runtime_config(
        &self,
        _request: cri::RuntimeConfigRequest,
    ) -> Result<cri::RuntimeConfigResponse, Error> {
        let linux = cri::LinuxRuntimeConfiguration { cgroup_driver: cri::CgroupDriver::Cgroupfs.into() };
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
