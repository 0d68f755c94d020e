//! The configuration of the webhook plugins: `WebhookAdmissionConfiguration`.

use std::path::PathBuf;

use serde::Deserialize;

use crate::{
    admit::config::{PluginConfigs, expect},
    remote::identities::Identities,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Config {
    api_version: String,
    kind: String,
    #[serde(default)]
    kube_config_file: PathBuf,
}

/// Reads the identities of the server at the webhooks of a plugin. Without a configuration the server is anonymous.
///
/// # Errors
/// The configuration or its kubeconfig file is invalid.
pub(in crate::admit) fn identities(configs: &mut PluginConfigs, plugin: &str) -> Result<Identities, String> {
    let Some(config) = configs.take::<Config>(plugin)? else { return Ok(Identities::default()) };
    expect("apiVersion", &config.api_version, "apiserver.config.k8s.io/v1")?;
    expect("kind", &config.kind, "WebhookAdmissionConfiguration")?;
    let path = &config.kube_config_file;
    if path.as_os_str().is_empty() {
        return Ok(Identities::default());
    }
    if !path.is_absolute() {
        return Err(format!("kubeConfigFile: {:?}: must be an absolute file path", path.display()));
    }
    Identities::read(path).map_err(|why| format!("kubeConfigFile: {}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const PLUGIN: &str = "ValidatingAdmissionWebhook";

    fn read(config: &str) -> Result<Identities, String> {
        let head = "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\n";
        let file = format!("{head}plugins: [{{name: {PLUGIN}, configuration: {{{config}}}}}]\n");
        identities(&mut PluginConfigs::parse(&file, Path::new("")).unwrap(), PLUGIN)
    }

    #[test]
    fn without_a_kubeconfig_the_server_is_anonymous() {
        let empty = read("apiVersion: apiserver.config.k8s.io/v1, kind: WebhookAdmissionConfiguration");
        assert!(empty.unwrap().find("a:443").is_none());
        assert!(identities(&mut PluginConfigs::default(), PLUGIN).unwrap().find("a:443").is_none());
    }

    #[test]
    fn invalid_configurations_are_refused() {
        let head = "apiVersion: apiserver.config.k8s.io/v1, kind: WebhookAdmissionConfiguration";
        for (config, why) in [
            ("apiVersion: v1, kind: WebhookAdmissionConfiguration".to_owned(), "apiVersion: "),
            ("apiVersion: apiserver.config.k8s.io/v1, kind: WebhookAdmission".to_owned(), "kind: "),
            (format!("{head}, kubeConfigFile: relative"), "must be an absolute file path"),
            (format!("{head}, kubeConfigFile: /missing/file"), "cannot read /missing/file"),
            (format!("{head}, staticManifestsDir: /d"), "staticManifestsDir"),
        ] {
            let found = read(&config).map(|_| ()).unwrap_err();
            assert!(found.contains(why), "{config}: {found}");
        }
    }
}
