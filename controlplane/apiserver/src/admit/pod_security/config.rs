//! Defaults and exemptions of Pod Security.

use coracle_kinds::pod_security::{Level, LevelVersion, Policy, Version};
use serde::Deserialize;

use crate::admit::config::{PluginConfigs, expect};

/// Cluster-wide configuration of Pod Security.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PodSecurityConfig {
    /// The policy of a namespace without labels.
    pub(super) defaults: Policy,
    /// Users, namespaces and runtime classes whose pods are not checked.
    pub(super) usernames: Vec<String>,
    pub(super) namespaces: Vec<String>,
    pub(super) runtime_classes: Vec<String>,
}

/// Versions with the same fields as v1, which upstream accepts.
const OLDER_VERSIONS: [&str; 2] =
    ["pod-security.admission.config.k8s.io/v1beta1", "pod-security.admission.config.k8s.io/v1alpha1"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PluginConfig {
    api_version: String,
    kind: String,
    #[serde(default)]
    defaults: Defaults,
    #[serde(default)]
    exemptions: Exemptions,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Defaults {
    enforce: String,
    enforce_version: String,
    audit: String,
    audit_version: String,
    warn: String,
    warn_version: String,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Exemptions {
    usernames: Vec<String>,
    namespaces: Vec<String>,
    runtime_classes: Vec<String>,
}

// === impl PodSecurityConfig ===

impl PodSecurityConfig {
    /// The configuration in the file. By default the level is privileged, and there are no exemptions.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub(in crate::admit) fn read(configs: &mut PluginConfigs) -> Result<Self, String> {
        configs.take("PodSecurity")?.map_or_else(|| Ok(Self::default()), Self::of)
    }

    fn of(config: PluginConfig) -> Result<Self, String> {
        if !OLDER_VERSIONS.contains(&config.api_version.as_str()) {
            expect("apiVersion", &config.api_version, "pod-security.admission.config.k8s.io/v1")?;
        }
        expect("kind", &config.kind, "PodSecurityConfiguration")?;
        let set = config.defaults;
        let Exemptions { usernames, namespaces, runtime_classes } = config.exemptions;
        for (field, list) in
            [("usernames", &usernames), ("namespaces", &namespaces), ("runtimeClasses", &runtime_classes)]
        {
            for (index, name) in list.iter().enumerate() {
                if name.is_empty() || list.iter().take(index).any(|other| other == name) {
                    return Err(format!("exemptions.{field}[{index}]: {name:?} is empty or a duplicate"));
                }
            }
        }
        Ok(Self {
            defaults: Policy {
                enforce: mode("enforce", &set.enforce, &set.enforce_version)?,
                audit: mode("audit", &set.audit, &set.audit_version)?,
                warn: mode("warn", &set.warn, &set.warn_version)?,
            },
            usernames,
            namespaces,
            runtime_classes,
        })
    }
}

fn mode(name: &str, level: &str, version: &str) -> Result<LevelVersion, String> {
    let failed = |rule: &str| format!("defaults.{name}: {rule}");
    Ok(LevelVersion {
        level: if level.is_empty() { Level::Privileged } else { Level::parse(level).map_err(failed)? },
        version: if version.is_empty() {
            Version::Latest
        } else {
            Version::parse(version).map_err(failed)?
        },
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(text: &str) -> Result<PodSecurityConfig, String> {
        PodSecurityConfig::read(&mut PluginConfigs::parse(text, Path::new("")).unwrap())
    }

    const HEAD: &str = "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n\
        - name: PodSecurity\n  configuration:\n    apiVersion: pod-security.admission.config.k8s.io/v1\n    \
        kind: PodSecurityConfiguration\n";

    #[test]
    fn defaults_and_exemptions_are_read() {
        let rest = "    defaults: {enforce: baseline, enforce-version: v1.30}\n    exemptions: {usernames: [ann], \
            namespaces: [kube-system], runtimeClasses: [kata]}\n";
        let config = parse(&format!("{HEAD}{rest}")).unwrap();
        assert_eq!(config.defaults.enforce.to_string(), "baseline:v1.30");
        assert_eq!(config.defaults.audit, LevelVersion::PRIVILEGED);
        assert_eq!((config.usernames, config.namespaces), (vec!["ann".into()], vec!["kube-system".into()]));
        assert_eq!(config.runtime_classes, ["kata"]);
        let of =
            |version: &str| parse(&format!("{}{rest}", HEAD.replace("config.k8s.io/v1\n    kind", version)));
        assert!(
            of("config.k8s.io/v1beta1\n    kind").is_ok() && of("config.k8s.io/v1alpha1\n    kind").is_ok()
        );
        assert!(of("config.k8s.io/v2\n    kind").is_err());
    }

    #[test]
    fn invalid_configurations_are_refused() {
        for (rest, says) in [
            ("    defaults: {enforce: strict}\n", "must be one of"),
            ("    defaults: {enforced: baseline}\n", "unknown field"),
            ("    exemptions: {users: [ann]}\n", "unknown field"),
            ("    exemptions: {usernames: [a, a]}\n", "duplicate"),
        ] {
            let refused = parse(&format!("{HEAD}{rest}")).unwrap_err();
            assert!(refused.contains(says), "{rest}: {refused}");
        }
    }
}
