//! The configuration of the plugin ResourceQuota: resources whose use needs a quota.

use coracle_kinds::quota::LimitedResource;
use serde::Deserialize;

use super::config::PluginConfigs;

/// API versions of the configuration, and their kinds.
const KINDS: [(&str, &str); 3] = [
    ("apiserver.config.k8s.io/v1", "ResourceQuotaConfiguration"),
    ("resourcequota.admission.k8s.io/v1beta1", "Configuration"),
    ("resourcequota.admission.k8s.io/v1alpha1", "Configuration"),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Config {
    api_version: String,
    kind: String,
    #[serde(default)]
    limited_resources: Vec<LimitedResource>,
}

/// Reads the configuration. Without a configuration, no resource needs a quota.
///
/// # Errors
/// The configuration has another kind, an unknown field, or an entry without a resource.
pub(super) fn read(configs: &mut PluginConfigs, plugin: &str) -> Result<Vec<LimitedResource>, String> {
    let Some(config) = configs.take::<Config>(plugin)? else { return Ok(Vec::new()) };
    let found = (config.api_version.as_str(), config.kind.as_str());
    if !KINDS.contains(&found) {
        let (version, kind) = KINDS[0];
        return Err(format!("{} {} is not {version} {kind}", found.0, found.1));
    }
    match config.limited_resources.iter().position(|one| !one.is_named()) {
        Some(index) => Err(format!("limitedResources[{index}].resource: Required value")),
        None => Ok(config.limited_resources),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read_of(config: &str) -> Result<usize, String> {
        let file = format!(
            "{{apiVersion: apiserver.config.k8s.io/v1, kind: AdmissionConfiguration, plugins: [\
             {{name: ResourceQuota, configuration: {config}}}]}}"
        );
        read(&mut PluginConfigs::parse(&file, Path::new(""))?, "ResourceQuota").map(|limited| limited.len())
    }

    #[test]
    fn the_configuration_is_checked() {
        let head = "apiVersion: apiserver.config.k8s.io/v1, kind: ResourceQuotaConfiguration";
        assert_eq!(read_of(&format!("{{{head}}}")), Ok(0));
        let scope = "{scopeName: PriorityClass, operator: In, values: [high]}";
        let limited = format!("limitedResources: [{{resource: pods, matchScopes: [{scope}]}}]");
        assert_eq!(read_of(&format!("{{{head}, {limited}}}")), Ok(1));
        let old = "apiVersion: resourcequota.admission.k8s.io/v1beta1, kind: Configuration";
        assert_eq!(read_of(&format!("{{{old}, {limited}}}")), Ok(1));
        for (config, says) in [
            (format!("{{{head}, limitedResources: [{{}}]}}"), "limitedResources[0].resource: Required value"),
            (format!("{{{head}, limits: []}}"), "unknown field"),
            (
                "{apiVersion: v1, kind: ResourceQuotaConfiguration}".to_owned(),
                "is not apiserver.config.k8s.io/v1",
            ),
        ] {
            let refused = read_of(&config).unwrap_err();
            assert!(refused.contains(says), "{config}: {refused}");
        }
    }
}
