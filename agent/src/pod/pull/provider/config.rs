//! The kubelet's `CredentialProviderConfig`, and errors of reading it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use super::super::secret::Entry;

/// Errors of the credential provider configuration.
#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The file is not valid.
    #[error("cannot parse {}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: serde_yaml_ng::Error,
    },
    /// A provider's configuration is invalid.
    #[error("credential provider {name:?}: {what}")]
    Provider {
        /// Name of the provider.
        name: String,
        /// The error.
        what: String,
    },
    /// The file has another kind or version.
    #[error("{} is not a CredentialProviderConfig of kubelet.config.k8s.io/v1, v1beta1 or v1alpha1", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Config {
    #[serde(default)]
    pub(super) api_version: String,
    #[serde(default)]
    pub(super) kind: String,
    #[serde(default)]
    pub(super) providers: Vec<Settings>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Settings {
    pub(super) name: String,
    #[serde(default)]
    pub(super) match_images: Vec<String>,
    pub(super) default_cache_duration: Option<String>,
    #[serde(default)]
    pub(super) api_version: String,
    #[serde(default)]
    pub(super) args: Vec<String>,
    #[serde(default)]
    pub(super) env: Vec<Variable>,
    pub(super) token_attributes: Option<serde_yaml_ng::Value>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Variable {
    pub(super) name: String,
    #[serde(default)]
    pub(super) value: String,
}

pub(super) type Entries = BTreeMap<String, Entry>;
