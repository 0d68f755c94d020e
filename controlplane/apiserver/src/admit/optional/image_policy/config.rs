//! The configuration of the plugin: `imagePolicy`.

use std::{path::PathBuf, time::Duration};

use serde::Deserialize;

use crate::admit::config::PluginConfigs;

/// Settings of the webhook.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Settings {
    /// Kubeconfig file of the webhook.
    pub(super) kubeconfig: PathBuf,
    /// Time to live of a cached acceptance. Zero disables its cache.
    pub(super) allow_ttl: Duration,
    /// Time to live of a cached refusal. Zero disables its cache.
    pub(super) deny_ttl: Duration,
    /// Pause before the first retry.
    pub(super) retry_backoff: Duration,
    /// Whether pods are accepted if the call fails.
    pub(super) default_allow: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Config {
    image_policy: ImagePolicy,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
#[derive(Default)]
struct ImagePolicy {
    kube_config_file: PathBuf,
    /// Seconds. 0 means the default, -1 disables.
    #[serde(rename = "allowTTL")]
    allow_ttl: i64,
    /// Seconds. 0 means the default, -1 disables.
    #[serde(rename = "denyTTL")]
    deny_ttl: i64,
    /// Milliseconds. 0 means the default, -1 disables.
    retry_backoff: i64,
    default_allow: bool,
}

/// Unit, default and range of a duration in the configuration.
struct Rule {
    unit: Duration,
    default: Duration,
    range: [Duration; 2],
}

const ALLOW_TTL: Rule = Rule {
    unit: Duration::from_secs(1),
    default: Duration::from_secs(300),
    range: [Duration::from_secs(1), Duration::from_secs(1800)],
};
const DENY_TTL: Rule = Rule { default: Duration::from_secs(30), ..ALLOW_TTL };
const RETRY_BACKOFF: Rule = Rule {
    unit: Duration::from_millis(1),
    default: Duration::from_millis(500),
    range: [Duration::from_nanos(1), Duration::from_secs(300)],
};

// === impl Settings ===

impl Settings {
    /// Reads the plugin's configuration.
    ///
    /// # Errors
    /// There is no configuration, or a field is invalid.
    pub(super) fn read(configs: &mut PluginConfigs) -> Result<Self, String> {
        let config = configs.take::<Config>("ImagePolicyWebhook")?;
        let config = config.ok_or("no config specified; set it in the file admission-control-config-file")?;
        let config = config.image_policy;
        if config.kube_config_file.as_os_str().is_empty() {
            return Err("imagePolicy.kubeConfigFile: it is not set".to_owned());
        }
        let failed = |field: &str, why: String| format!("imagePolicy.{field}: {why}");
        Ok(Self {
            kubeconfig: config.kube_config_file,
            allow_ttl: ALLOW_TTL.read(config.allow_ttl).map_err(|why| failed("allowTTL", why))?,
            deny_ttl: DENY_TTL.read(config.deny_ttl).map_err(|why| failed("denyTTL", why))?,
            retry_backoff: RETRY_BACKOFF
                .read(config.retry_backoff)
                .map_err(|why| failed("retryBackoff", why))?,
            default_allow: config.default_allow,
        })
    }
}

// === impl Rule ===

impl Rule {
    /// Converts a number of units.
    fn read(&self, count: i64) -> Result<Duration, String> {
        let [min, max] = self.range;
        let invalid =
            || format!("valid value is between {min:?} and {max:?}, got {count} times {:?}", self.unit);
        match count {
            -1 => Ok(Duration::ZERO),
            0 => Ok(self.default),
            count => {
                let count = u32::try_from(count).map_err(|_negative_or_large| invalid())?;
                let duration = self.unit.checked_mul(count).filter(|duration| *duration <= max);
                duration.filter(|duration| *duration >= min).ok_or_else(invalid)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(fields: &str) -> Result<Settings, String> {
        Settings::read(&mut PluginConfigs::parse(&format!("imagePolicy: {{{fields}}}"), Path::new(""))?)
    }

    #[test]
    fn durations_have_units_defaults_and_limits() {
        let settings = read("kubeConfigFile: /k, allowTTL: 60, denyTTL: -1, defaultAllow: true").unwrap();
        let expected = Settings {
            kubeconfig: "/k".into(),
            allow_ttl: Duration::from_secs(60),
            deny_ttl: Duration::ZERO,
            retry_backoff: Duration::from_millis(500),
            default_allow: true,
        };
        assert_eq!(settings, expected);
        for (fields, says) in [
            (
                "kubeConfigFile: k, allowTTL: 1801",
                "imagePolicy.allowTTL: valid value is between 1s and 1800s",
            ),
            ("kubeConfigFile: k, denyTTL: -2", "imagePolicy.denyTTL: "),
            (
                "kubeConfigFile: k, retryBackoff: 300001",
                "imagePolicy.retryBackoff: valid value is between 1ns and 300s",
            ),
            ("kubeConfigFile: k, retryBackoff: 99999999999", "imagePolicy.retryBackoff: "),
            ("kubeConfigFile: k, ttl: 1", "unknown field `ttl`"),
            ("defaultAllow: true", "imagePolicy.kubeConfigFile: it is not set"),
        ] {
            let refused = read(fields).unwrap_err();
            assert!(refused.contains(says), "{fields}: {refused}");
        }
        assert!(Settings::read(&mut PluginConfigs::default()).unwrap_err().contains("no config specified"));
    }
}
