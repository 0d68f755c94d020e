//! Configurations of admission plugins, from upstream's `AdmissionConfiguration` file.
//!
//! Source: `k8s.io/apiserver/pkg/admission/config.go`.

use std::{collections::BTreeMap, path::Path};

use coracle_values::CollectMap;
use serde::{Deserialize, de::DeserializeOwned};
use serde_yaml_ng::{Mapping, Value};

use crate::bounded_file;

/// Maximum bytes of a configuration file.
const LIMIT: u64 = 1 << 20;
/// API versions of the file.
const VERSIONS: [&str; 2] = ["apiserver.config.k8s.io/v1", "apiserver.k8s.io/v1alpha1"];
/// The plugins that can have a configuration.
const CONFIGURABLE: [&str; 8] = [
    "EventRateLimit",
    "ImagePolicyWebhook",
    "MutatingAdmissionWebhook",
    "PodNodeSelector",
    "PodSecurity",
    "PodTolerationRestriction",
    "ResourceQuota",
    "ValidatingAdmissionWebhook",
];
/// Fields of files without a kind, and their plugins. This form of the file is older than AdmissionConfiguration.
const LEGACY: [(&str, &str); 2] =
    [("imagePolicy", "ImagePolicyWebhook"), ("podNodeSelectorPluginConfig", "PodNodeSelector")];

/// The configurations of the plugins, by the plugin's name.
#[derive(Debug, Default)]
pub(crate) struct PluginConfigs {
    by_plugin: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct File {
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
    configuration: Option<Value>,
}

// === impl PluginConfigs ===

impl PluginConfigs {
    /// Reads the configuration file and the files that it refers to. Relative paths start at the directory of the
    /// configuration file.
    ///
    /// # Errors
    /// A file cannot be read, or is invalid.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        Self::parse(&bounded_file::read_text(path, LIMIT)?, path.parent().unwrap_or(Path::new("")))
    }

    pub(super) fn parse(text: &str, directory: &Path) -> Result<Self, String> {
        let file: Value = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
        if let Some(legacy) = Self::of_legacy(&file) {
            return Ok(legacy);
        }
        let file: File = serde_yaml_ng::from_value(file).map_err(|error| error.to_string())?;
        if !VERSIONS.contains(&file.api_version.as_str()) {
            return expect("apiVersion", &file.api_version, VERSIONS[0]).map(|()| Self::default());
        }
        expect("kind", &file.kind, "AdmissionConfiguration")?;
        let mut by_plugin = BTreeMap::new();
        for (index, plugin) in file.plugins.into_iter().enumerate() {
            let failed = |why: String| format!("plugins[{index}] {:?}: {why}", plugin.name);
            if !CONFIGURABLE.contains(&plugin.name.as_str()) {
                return Err(failed(format!(
                    "it has no configuration; only {} have",
                    CONFIGURABLE.join(", ")
                )));
            }
            let config = match (plugin.configuration, plugin.path.as_str()) {
                (Some(config), "") => config,
                (None, "") => continue,
                (None, path) => bounded_file::read_text(&directory.join(path), LIMIT)
                    .and_then(|text| serde_yaml_ng::from_str(&text).map_err(|error| error.to_string()))
                    .map_err(|why| failed(format!("{path}: {why}")))?,
                (Some(_), _) => return Err(failed("both path and configuration are set".to_owned())),
            };
            if by_plugin.insert(plugin.name.clone(), config).is_some() {
                return Err(failed("it is configured twice".to_owned()));
            }
        }
        Ok(Self { by_plugin })
    }

    /// The configurations in a file without a kind.
    fn of_legacy(file: &Value) -> Option<Self> {
        let fields = file.as_mapping().filter(|fields| !fields.contains_key("kind"))?;
        let found = LEGACY.into_iter().filter_map(|(field, plugin)| {
            let config = Mapping::from_iter([(field.into(), fields.get(field)?.clone())]);
            Some((plugin.to_owned(), Value::Mapping(config)))
        });
        let by_plugin: BTreeMap<String, Value> = found.collect_map();
        // A field of another plugin makes the whole file invalid.
        (!by_plugin.is_empty() && by_plugin.len() == fields.len()).then_some(Self { by_plugin })
    }

    /// Removes and returns the configuration of a plugin. `None` if the file does not contain it.
    ///
    /// # Errors
    /// The configuration has an unknown field or a wrong type.
    pub(super) fn take<C: DeserializeOwned>(&mut self, plugin: &str) -> Result<Option<C>, String> {
        let config = self.by_plugin.remove(plugin);
        config.map(serde_yaml_ng::from_value).transpose().map_err(|error| error.to_string())
    }

    /// The plugins whose configuration was not taken, because they do not run.
    pub(super) fn unused(&self) -> impl Iterator<Item = &str> {
        self.by_plugin.keys().map(String::as_str)
    }
}

/// Checks a type field of a configuration.
pub(super) fn expect(field: &str, found: &str, expected: &str) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{field}: {found:?} is not {expected:?}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n";

    fn parse(plugins: &str) -> Result<PluginConfigs, String> {
        PluginConfigs::parse(&format!("{HEAD}{plugins}"), Path::new(""))
    }

    #[test]
    fn each_plugin_gets_its_own_configuration() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("rate.yaml"), "a: 1\n").unwrap();
        let plugins = "- {name: EventRateLimit, path: rate.yaml}\n- {name: PodNodeSelector, configuration: {b: 2}}\n\
            - {name: PodSecurity}\n";
        let mut configs = PluginConfigs::parse(&format!("{HEAD}{plugins}"), directory.path()).unwrap();
        let one = |name: &str, value: u32| Some(BTreeMap::from([(name.to_owned(), value)]));
        assert_eq!(configs.take("EventRateLimit").unwrap(), one("a", 1));
        assert_eq!(configs.take::<Value>("PodSecurity").unwrap(), None);
        assert_eq!(configs.unused().collect::<Vec<_>>(), ["PodNodeSelector"]);
        assert!(configs.take::<u32>("PodNodeSelector").is_err());
    }

    #[test]
    fn a_file_without_a_kind_is_of_the_plugins_that_it_names() {
        let mut configs = PluginConfigs::parse("imagePolicy: {allowTTL: 5}\n", Path::new("")).unwrap();
        assert_eq!(configs.unused().collect::<Vec<_>>(), ["ImagePolicyWebhook"]);
        let config = configs.take::<Value>("ImagePolicyWebhook").unwrap().unwrap();
        assert_eq!(config["imagePolicy"]["allowTTL"], 5);
        for other in
            ["imagePolicy: {}\nother: {}\n", "other: {}\n", "[]\n", "kind: PodSecurityConfiguration\n"]
        {
            assert!(PluginConfigs::parse(other, Path::new("")).is_err(), "{other}");
        }
    }

    #[test]
    fn wrong_plugin_configurations_are_refused() {
        for (plugins, says) in [
            (
                "- name: Priority\n  path: x\n",
                "plugins[0] \"Priority\": it has no configuration; only EventRateLimit",
            ),
            ("- name: PodSecurity\n  path: missing\n", "missing: No such file"),
            ("- name: PodSecurity\n  path: x\n  configuration: {}\n", "both path and configuration"),
            (
                "- &a {name: PodSecurity, configuration: {}}\n- *a\n",
                "plugins[1] \"PodSecurity\": it is configured twice",
            ),
            ("- name: PodSecurity\n  config: {}\n", "unknown field"),
        ] {
            let refused = parse(plugins).unwrap_err();
            assert!(refused.contains(says), "{plugins}: {refused}");
        }
        let old = PluginConfigs::parse("apiVersion: v1\nkind: AdmissionConfiguration\n", Path::new(""));
        assert!(old.unwrap_err().contains("is not \"apiserver.config.k8s.io/v1\""));
    }
}
