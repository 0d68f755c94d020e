//! Manifests, indexes and configurations: parsed and checked before anything else is fetched.

use std::collections::HashMap;
use std::sync::Arc;

use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::config::Platform;
use crate::digest::Digest;
use crate::error::{ErrorKind, Malformed};

mod fields;
mod platform;
mod search;

use fields::ConfigFields;
pub(crate) use fields::{CONTAINERD_NAME, REF_NAME};
pub(crate) use platform::{Chosen, Fitting, choose, fits};
pub(crate) use search::{Found, Search, Step};

/// Maximum bytes of a manifest or index. Registries must accept 4 MiB; few accept more.
pub(crate) const MANIFEST_MAX: u64 = 4 << 20;
/// Maximum bytes of a configuration, which stays in memory as long as the image. Large configurations have some hundred
/// KiB.
pub(crate) const CONFIG_MAX: u64 = 2 << 20;
/// Maximum number of elements and fields in those parts of a configuration that are read.
const CONFIG_VALUES_MAX: usize = 20_000;
/// Maximum number of layers of an image; overlayfs supports 500.
const LAYERS_MAX: usize = 500;

/// Media types accepted from a registry, best first.
pub(crate) const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, */*";

/// A parsed document.
#[derive(Debug)]
pub(crate) enum Document {
    Manifest(Box<Manifest>),
    /// Manifests by platform.
    Index(Vec<Descriptor>),
}

/// An image: its configuration and its layers, lowest first.
#[derive(Debug, Clone)]
pub(crate) struct Manifest {
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

/// A reference to content.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    #[serde(default)]
    pub(crate) platform: Option<PlatformField>,
    /// Annotations with names of the image.
    #[serde(default, deserialize_with = "fields::names")]
    pub(crate) annotations: HashMap<String, String>,
    /// The first additional URLs of the content.
    #[serde(default, deserialize_with = "fields::first_urls")]
    pub(crate) urls: Vec<String>,
}

/// The platform in an index.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct PlatformField {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) os: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) architecture: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) variant: String,
}

/// A configuration and the diff ids of its layers, lowest first.
#[derive(Debug, Clone)]
pub(crate) struct ParsedConfig {
    pub(crate) config: Arc<ImageConfiguration>,
    pub(crate) diff_ids: Vec<Digest>,
}

/// Errors of documents.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManifestError {
    #[error("the manifest is damaged")]
    Damaged(#[source] Malformed),
    #[error("the manifest is both an image and an index")]
    Ambiguous,
    #[error(
        "the manifest has the obsolete schema 1, which is not supported; push the image with a current tool"
    )]
    Schema1,
    #[error("not a container image: {what} of type {media_type:?}")]
    Unsupported { what: &'static str, media_type: String },
    #[error("no image for {wanted} (available: {available}); use one that is built for this machine")]
    Platform { wanted: String, available: String },
    #[error("the image configuration is damaged")]
    Config(#[source] Malformed),
    #[error("the image configuration has {0} values, which exceeds the limit")]
    ConfigValues(usize),
    #[error("the manifest has {layers} layers, but its configuration lists {diff_ids}")]
    Count { layers: usize, diff_ids: usize },
    #[error("the image has {0} layers; overlayfs supports 500")]
    Layers(usize),
    #[error("{what} has a size of {size} bytes, which exceeds the limit")]
    Size { what: &'static str, size: u64 },
    #[error("indexes are nested too deeply")]
    Nesting,
}

// === impl ManifestError ===

impl ManifestError {
    /// The kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            ManifestError::Damaged(_) | ManifestError::Config(_) | ManifestError::Count { .. } => {
                ErrorKind::Corrupt
            }
            ManifestError::Ambiguous
            | ManifestError::ConfigValues(_)
            | ManifestError::Layers(_)
            | ManifestError::Size { .. }
            | ManifestError::Nesting => ErrorKind::Rejected,
            ManifestError::Schema1 | ManifestError::Unsupported { .. } => ErrorKind::Unsupported,
            // The error is reported as an absent image, as in containerd.
            ManifestError::Platform { .. } => ErrorKind::NotFound,
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    #[serde(default)]
    schema_version: u32,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
}

/// The part of a document that identifies schema 1, whose other fields have different types.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    #[serde(default)]
    schema_version: u32,
}

/// Parses a manifest or an index. Its fields decide, not its media type. A document that is valid as both is refused:
/// otherwise two readers could get different images for one digest.
pub(crate) fn parse(bytes: &[u8]) -> Result<Document, ManifestError> {
    let version: Version = serde_json::from_slice(bytes).map_err(|e| ManifestError::Damaged(e.into()))?;
    if version.schema_version == 1 {
        return Err(ManifestError::Schema1);
    }
    let raw: Raw = serde_json::from_slice(bytes).map_err(|e| ManifestError::Damaged(e.into()))?;
    match (raw.config, raw.manifests) {
        (Some(_), Some(_)) => Err(ManifestError::Ambiguous),
        (None, Some(_)) if raw.layers.is_some() => Err(ManifestError::Ambiguous),
        (None, Some(manifests)) => Ok(Document::Index(manifests)),
        (Some(config), None) => {
            let layers = raw.layers.unwrap_or_default();
            check(&config, &layers)?;
            Ok(Document::Manifest(Manifest { config, layers }.into()))
        }
        (None, None) => Err(ManifestError::Unsupported {
            what: "a document",
            media_type: format!("schema version {}", raw.schema_version),
        }),
    }
}

/// Parses a configuration and checks that it has this number of layers and may run on the platform.
pub(crate) fn parse_config(
    bytes: &[u8],
    layers: usize,
    wanted: &Platform,
    chosen: Chosen,
) -> Result<ParsedConfig, ManifestError> {
    let mut value = config_value(bytes)?;
    let values = fields::count(&value);
    if values > CONFIG_VALUES_MAX {
        return Err(ManifestError::ConfigValues(values));
    }
    let field = platform_of(&value);
    if !platform::is_usable(wanted, &field, chosen) {
        return Err(ManifestError::Platform {
            wanted: platform::name(wanted),
            available: platform::field_name(&field),
        });
    }
    let diff_ids = diff_ids_of(&value)?;
    if diff_ids.len() != layers {
        return Err(ManifestError::Count { layers, diff_ids: diff_ids.len() });
    }
    complete(&mut value, wanted);
    let config = serde_json::from_value(value).map_err(|e| ManifestError::Config(e.into()))?;
    Ok(ParsedConfig { config: Arc::new(config), diff_ids })
}

/// The used fields of a configuration, without nulls.
fn config_value(bytes: &[u8]) -> Result<Value, ManifestError> {
    let parsed = serde_json::from_slice(bytes).map_err(|e| ManifestError::Config(e.into()));
    let mut value = parsed.map(|ConfigFields(fields)| Value::Object(fields))?;
    strip_nulls(&mut value);
    Ok(value)
}

/// The platform of a configuration.
fn config_platform(bytes: &[u8]) -> Result<PlatformField, ManifestError> {
    config_value(bytes).map(|value| platform_of(&value))
}

fn platform_of(config: &Value) -> PlatformField {
    let text = |key: &str| config.get(key).and_then(|v| v.as_str()).unwrap_or_default().to_owned();
    PlatformField { os: text("os"), architecture: text("architecture"), variant: text("variant") }
}

/// The diff ids of a configuration, lowest first.
pub(crate) fn diff_ids(bytes: &[u8]) -> Result<Vec<Digest>, ManifestError> {
    diff_ids_of(&config_value(bytes)?)
}

fn diff_ids_of(config: &Value) -> Result<Vec<Digest>, ManifestError> {
    match config.pointer("/rootfs/diff_ids") {
        Some(Value::Null) | None => Ok(Vec::new()),
        Some(list) => serde_json::from_value(list.clone()).map_err(|e| ManifestError::Config(e.into())),
    }
}

/// Parses a configuration that was accepted before.
pub(crate) fn read_config(bytes: &[u8]) -> Result<Arc<ImageConfiguration>, ManifestError> {
    let mut value = config_value(bytes)?;
    complete(&mut value, &Platform::host());
    serde_json::from_value(value).map(Arc::new).map_err(|e| ManifestError::Config(e.into()))
}

fn check(config: &Descriptor, layers: &[Descriptor]) -> Result<(), ManifestError> {
    let unsupported =
        |what, media_type: &str| Err(ManifestError::Unsupported { what, media_type: media_type.to_owned() });
    match config.media_type.as_str() {
        ""
        | "application/vnd.oci.image.config.v1+json"
        | "application/vnd.docker.container.image.v1+json" => {}
        // Registries, and Docker before 1.13, lost the type of some valid configurations.
        "application/octet-stream" | "application/json" | "text/html" => {}
        other => return unsupported("a configuration", other),
    }
    if config.size > CONFIG_MAX {
        return Err(ManifestError::Size { what: "the configuration", size: config.size });
    }
    if layers.len() > LAYERS_MAX {
        return Err(ManifestError::Layers(layers.len()));
    }
    // Registries use a Go int64 for sizes; no disk has more.
    let total = layers.iter().try_fold(config.size, |sum, layer| sum.checked_add(layer.size));
    if total.is_none_or(|total| i64::try_from(total).is_err()) {
        let size = layers.iter().map(|layer| layer.size).max().unwrap_or_default();
        return Err(ManifestError::Size { what: "a layer", size });
    }
    for layer in layers {
        let kind = layer.media_type.as_str();
        let known = kind.is_empty()
            || kind.starts_with("application/vnd.oci.image.layer.v1.tar")
            || kind.starts_with("application/vnd.oci.image.layer.nondistributable.v1.tar")
            || kind.starts_with("application/vnd.docker.image.rootfs.diff.tar")
            || kind.starts_with("application/vnd.docker.image.rootfs.foreign.diff.tar");
        if !known || kind.contains("+encrypted") {
            return unsupported("a layer", kind);
        }
    }
    Ok(())
}

/// Deserializes null as the default value: Go does not distinguish null and absent.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Removes nulls: Go writes null for empty values, which the strict types do not accept.
fn strip_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(strip_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(strip_nulls),
        _ => {}
    }
}

/// Adds fields that some builders omit and the strict types require.
fn complete(value: &mut Value, wanted: &Platform) {
    let Some(map) = value.as_object_mut() else { return };
    for (key, default) in [("architecture", &wanted.architecture), ("os", &wanted.os)] {
        let entry = map.entry(key).or_insert_with(|| default.as_str().into());
        if entry.as_str() == Some("") {
            *entry = default.as_str().into();
        }
    }
    let rootfs = map.entry("rootfs").or_insert_with(|| serde_json::json!({}));
    if let Some(rootfs) = rootfs.as_object_mut() {
        rootfs.entry("type").or_insert_with(|| "layers".into());
        rootfs.entry("diff_ids").or_insert_with(|| serde_json::json!([]));
    }
}

#[cfg(test)]
mod tests;
