//! The CDI file format. Pure.
//!
//! A file with an unknown field is refused: in a newer version of the specification, the field may change the device.

use serde::Deserialize;

/// The content of a CDI file.
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

/// A CDI device.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Device {
    pub(super) name: String,
    #[serde(default, rename = "annotations")]
    _annotations: serde::de::IgnoredAny,
    pub(super) container_edits: ContainerEdits,
}

/// Changes to a container's spec.
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

/// A device node in the container. Missing fields are taken from the node on the host.
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
    /// Combination of `r`, `w` and `m`; all by default.
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

/// A program that runs at a stage of the container's life.
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

/// Parses a file and checks its version and device names.
pub(super) fn parse(text: &[u8], json: bool) -> Result<File, String> {
    let file: File = if json {
        serde_json::from_slice(text).map_err(|error| error.to_string())?
    } else {
        serde_yaml_ng::from_slice(text).map_err(|error| error.to_string())?
    };
    let version = file.cdi_version.trim_start_matches('v');
    if !matches!(version.split('.').next(), Some("0" | "1")) {
        return Err(format!("cdiVersion {:?} is not supported", file.cdi_version));
    }
    for device in &file.devices {
        let name = format!("{}={}", file.kind, device.name);
        if parse_name(&name).is_none() {
            return Err(format!("{name:?} is not a device name"));
        }
    }
    Ok(file)
}

/// Splits `vendor/class=device` into kind and device.
pub(super) fn parse_name(name: &str) -> Option<(&str, &str)> {
    let (kind, device) = name.split_once('=')?;
    let (vendor, class) = kind.split_once('/')?;
    let ends_well = |text: &str, more: &str| {
        text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
            && text.ends_with(|c: char| c.is_ascii_alphanumeric())
    };
    let is_kind_part =
        |text: &str| text.starts_with(|c: char| c.is_ascii_alphabetic()) && ends_well(text, "_-.");
    let is_valid = is_kind_part(vendor)
        && is_kind_part(class)
        && device.starts_with(|c: char| c.is_ascii_alphanumeric())
        && ends_well(device, "_-.:");
    is_valid.then_some((kind, device))
}
