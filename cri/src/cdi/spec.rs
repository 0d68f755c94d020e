//! What a CDI file says, by the names of the specification. Pure.
//!
//! A field that the specification does not have makes the file unusable: it may be one of a newer version
//! that changes what the device is.

use serde::Deserialize;

/// One file.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct File {
    cdi_version: String,
    /// `vendor/class`.
    pub(super) kind: String,
    #[serde(default, rename = "annotations")]
    _annotations: serde::de::IgnoredAny,
    pub(super) devices: Vec<Device>,
    #[serde(default)]
    pub(super) container_edits: ContainerEdits,
}

/// One device.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Device {
    pub(super) name: String,
    #[serde(default, rename = "annotations")]
    _annotations: serde::de::IgnoredAny,
    pub(super) container_edits: ContainerEdits,
}

/// What is changed in a container's spec.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct ContainerEdits {
    /// `KEY=value`.
    pub(super) env: Vec<String>,
    pub(super) device_nodes: Vec<DeviceNode>,
    pub(super) net_devices: Vec<serde_json::Value>,
    pub(super) hooks: Vec<Hook>,
    pub(super) mounts: Vec<Mount>,
    pub(super) intel_rdt: Option<serde_json::Value>,
    pub(super) additional_gids: Vec<u32>,
}

/// A node in the container; what is not said of it is as the node of the host is.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct DeviceNode {
    pub(super) path: String,
    #[serde(default)]
    pub(super) host_path: String,
    /// `b`, `c`, `u` or `p`.
    #[serde(default, rename = "type")]
    pub(super) kind: String,
    #[serde(default)]
    pub(super) major: i64,
    #[serde(default)]
    pub(super) minor: i64,
    #[serde(default)]
    pub(super) file_mode: Option<u32>,
    /// Of `r`, `w`, `m`; all by default.
    #[serde(default)]
    pub(super) permissions: String,
    #[serde(default)]
    pub(super) uid: Option<u32>,
    #[serde(default)]
    pub(super) gid: Option<u32>,
}

/// A mount in the container.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Mount {
    pub(super) host_path: String,
    pub(super) container_path: String,
    #[serde(default)]
    pub(super) options: Vec<String>,
    #[serde(default, rename = "type")]
    pub(super) kind: String,
}

/// A program that is run at a step of the container's life.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Hook {
    pub(super) hook_name: String,
    pub(super) path: String,
    #[serde(default)]
    pub(super) args: Vec<String>,
    #[serde(default)]
    pub(super) env: Vec<String>,
    #[serde(default)]
    pub(super) timeout: Option<i64>,
}

/// Reads a file's text and checks its names.
pub(super) fn parse(text: &[u8], json: bool) -> Result<File, String> {
    let file: File = if json {
        serde_json::from_slice(text).map_err(|error| error.to_string())?
    } else {
        serde_yaml_ng::from_slice(text).map_err(|error| error.to_string())?
    };
    let version = file.cdi_version.trim_start_matches('v');
    if !matches!(version.split('.').next(), Some("0" | "1")) {
        return Err(format!("its cdiVersion {:?} is not known", file.cdi_version));
    }
    for device in &file.devices {
        let name = format!("{}={}", file.kind, device.name);
        if parse_name(&name).is_none() {
            return Err(format!("{name:?} is no name of a device"));
        }
    }
    Ok(file)
}

/// Kind and device of `vendor/class=device`.
pub(super) fn parse_name(name: &str) -> Option<(&str, &str)> {
    let (kind, device) = name.split_once('=')?;
    let (vendor, class) = kind.split_once('/')?;
    let rest = |text: &str, more: &str| {
        text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
            && text.ends_with(|c: char| c.is_ascii_alphanumeric())
    };
    let lettered = |text: &str| text.starts_with(|c: char| c.is_ascii_alphabetic()) && rest(text, "_-.");
    let right = lettered(vendor)
        && lettered(class)
        && device.starts_with(|c: char| c.is_ascii_alphanumeric())
        && rest(device, "_-.:");
    right.then_some((kind, device))
}
