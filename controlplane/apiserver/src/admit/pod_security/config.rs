//! Defaults and exemptions of Pod Security, from upstream's `AdmissionConfiguration` file.

use std::path::Path;

use coracle_kinds::pod_security::{Level, LevelVersion, Policy, Version};
use serde::Deserialize;

/// Maximum bytes of a configuration file.
const LIMIT: u64 = 1 << 20;

/// Configuration of Pod Security by the cluster's administrator.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PodSecurityConfig {
    /// The policy of a namespace without labels.
    pub(super) defaults: Policy,
    /// Users, namespaces and runtime classes whose pods are not checked.
    pub(super) usernames: Vec<String>,
    pub(super) namespaces: Vec<String>,
    pub(super) runtime_classes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct AdmissionFile {
    api_version: String,
    kind: String,
    #[serde(default)]
    plugins: Vec<Plugin>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Plugin {
    name: String,
    #[serde(default)]
    path: String,
    configuration: Option<PluginConfig>,
}

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
    /// Reads the configuration from a file.
    ///
    /// # Errors
    /// The file cannot be read, or is invalid.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        Self::parse(&text(path)?, path.parent())
    }

    fn parse(text: &str, directory: Option<&Path>) -> Result<Self, String> {
        let file: AdmissionFile = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
        expect("apiVersion", &file.api_version, "apiserver.config.k8s.io/v1")?;
        expect("kind", &file.kind, "AdmissionConfiguration")?;
        let mut plugins = file.plugins.into_iter();
        let Some(plugin) = plugins.next() else { return Ok(Self::default()) };
        expect("plugins[0].name", &plugin.name, "PodSecurity")?;
        if let Some(second) = plugins.next() {
            return Err(format!("plugins[1]: {:?}: only PodSecurity, once, is supported", second.name));
        }
        let config = match (plugin.configuration, plugin.path.as_str()) {
            (Some(config), "") => config,
            (None, "") => return Ok(Self::default()),
            (None, path) => {
                let text = self::text(&directory.unwrap_or(Path::new("")).join(path))?;
                serde_yaml_ng::from_str(&text).map_err(|error| format!("{path}: {error}"))?
            }
            (Some(_), _) => return Err("plugins[0]: both path and configuration are set".to_owned()),
        };
        Self::of(config)
    }

    fn of(config: PluginConfig) -> Result<Self, String> {
        expect("apiVersion", &config.api_version, "pod-security.admission.config.k8s.io/v1")?;
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

fn text(path: &Path) -> Result<String, String> {
    use std::io::Read as _;
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    file.take(LIMIT).read_to_string(&mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

fn expect(field: &str, found: &str, expected: &str) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{field}: {found:?} is not {expected:?}")) }
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
    use super::*;

    const HEAD: &str = "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n\
        - name: PodSecurity\n  configuration:\n    apiVersion: pod-security.admission.config.k8s.io/v1\n    \
        kind: PodSecurityConfiguration\n";

    #[test]
    fn defaults_and_exemptions_are_read() {
        let rest = "    defaults: {enforce: baseline, enforce-version: v1.30}\n    exemptions: {usernames: [ann], \
            namespaces: [kube-system], runtimeClasses: [kata]}\n";
        let config = PodSecurityConfig::parse(&format!("{HEAD}{rest}"), None).unwrap();
        assert_eq!(config.defaults.enforce.to_string(), "baseline:v1.30");
        assert_eq!(config.defaults.audit, LevelVersion::PRIVILEGED);
        assert_eq!((config.usernames, config.namespaces), (vec!["ann".into()], vec!["kube-system".into()]));
        assert_eq!(config.runtime_classes, ["kata"]);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for (rest, says) in [
            ("    defaults: {enforce: strict}\n", "must be one of"),
            ("    defaults: {enforced: baseline}\n", "unknown field"),
            ("    exemptions: {users: [ann]}\n", "unknown field"),
            ("    exemptions: {usernames: [a, a]}\n", "duplicate"),
            ("- name: ImagePolicyWebhook\n", "only PodSecurity"),
        ] {
            let refused = PodSecurityConfig::parse(&format!("{HEAD}{rest}"), None).unwrap_err();
            assert!(refused.contains(says), "{rest}: {refused}");
        }
        assert!(PodSecurityConfig::parse("kind: PodSecurityConfiguration", None).is_err());
    }
}
