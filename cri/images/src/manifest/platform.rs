//! Selects the manifest of an index for this machine.

use super::{Descriptor, ManifestError, PlatformField};
use crate::config::Platform;

/// The way in which a manifest was selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chosen {
    /// The name refers to the manifest directly.
    Direct,
    /// The index marks the manifest for this platform.
    ByPlatform,
    /// The index does not state the platform of the manifest.
    Unmarked,
}

/// Candidates of an index for a machine.
#[derive(Debug)]
pub(crate) enum Fitting<'a> {
    /// The best match by the platforms in the index. Of equal matches, the first.
    Marked(&'a Descriptor),
    /// The manifests without a platform. No other manifest has a platform that matches.
    Unmarked(Vec<&'a Descriptor>),
}

/// Selects from the manifests of an index.
pub(crate) fn choose<'a>(
    manifests: &'a [Descriptor],
    wanted: &Platform,
) -> Result<Fitting<'a>, ManifestError> {
    let fitting = manifests.iter().filter_map(|manifest| {
        let rank = platform_rank(wanted, manifest.platform.as_ref()?)?;
        Some((rank, manifest))
    });
    if let Some((_, best)) = fitting.min_by_key(|(rank, _)| *rank) {
        return Ok(Fitting::Marked(best));
    }
    let unmarked: Vec<&Descriptor> = manifests.iter().filter(|m| m.platform.is_none()).collect();
    if unmarked.is_empty() {
        let available: Vec<String> =
            manifests.iter().filter_map(|m| m.platform.as_ref()).map(field_name).collect();
        return Err(ManifestError::Platform { wanted: name(wanted), available: available.join(", ") });
    }
    Ok(Fitting::Unmarked(unmarked))
}

/// Whether the index marks a manifest for this platform.
pub(crate) fn fits(manifest: &Descriptor, wanted: &Platform) -> bool {
    manifest.platform.as_ref().is_some_and(|given| platform_rank(wanted, given).is_some())
}

/// Rank of an image with this platform in its configuration; smaller is better. An image without a platform ranks last.
pub(super) fn config_rank(wanted: &Platform, given: &PlatformField) -> Option<usize> {
    let other_system = !given.os.is_empty() && given.os != wanted.os;
    let unstated = given.architecture.is_empty() && !other_system;
    platform_rank(wanted, given).or(unstated.then_some(usize::MAX))
}

/// Whether an image can be used. `given` is the platform in its configuration.
///
/// The platforms in an index are trusted, because its publisher chose them. A single image was requested explicitly.
/// Its architecture is often stated wrongly or is emulated (binfmt_misc), so it is used with a warning; containerd,
/// CRI-O and Docker do the same. An image for another operating system is refused.
pub(super) fn is_usable(wanted: &Platform, given: &PlatformField, chosen: Chosen) -> bool {
    let fits = config_rank(wanted, given).is_some();
    match chosen {
        Chosen::Unmarked => fits,
        Chosen::Direct => {
            let same_system = given.os.is_empty() || given.os == wanted.os;
            if same_system && !fits {
                let (given, wanted) = (field_name(given), name(wanted));
                tracing::warn!(given, wanted, "the image is for another platform");
            }
            same_system
        }
        Chosen::ByPlatform => true,
    }
}

/// Formats a platform as `os/architecture[/variant]`.
pub(super) fn name(platform: &Platform) -> String {
    joined(&platform.os, &platform.architecture, &platform.variant)
}

/// Formats the platform of a document.
pub(super) fn field_name(field: &PlatformField) -> String {
    joined(&field.os, &field.architecture, &field.variant)
}

fn joined(os: &str, architecture: &str, variant: &str) -> String {
    match variant {
        "" => format!("{os}/{architecture}"),
        variant => format!("{os}/{architecture}/{variant}"),
    }
}

fn platform_rank(wanted: &Platform, given: &PlatformField) -> Option<usize> {
    if !given.os.is_empty() && given.os != wanted.os {
        return None;
    }
    let architecture = match given.architecture.as_str() {
        "x86_64" | "x86-64" => "amd64",
        "aarch64" => "arm64",
        "i386" => "386",
        "armhf" => "arm",
        "armel" => "arm",
        other => other,
    };
    let variant = match (given.architecture.as_str(), given.variant.as_str()) {
        ("armel", "") => "v6",
        ("arm" | "armhf", "") => "v7",
        ("arm64" | "aarch64", "v8" | "8") | ("amd64", "v1") => "",
        (_, variant) => variant,
    };
    runs(wanted).iter().position(|(a, v)| *a == architecture && *v == variant)
}

/// The architectures and variants that a machine runs, best first. Variants of amd64 above v1 need
/// instructions that a machine may lack, so they are used only if configured.
fn runs(wanted: &Platform) -> Vec<(&str, &str)> {
    let arm = ["v8", "v7", "v6", "v5"].into_iter().map(|v| ("arm", v));
    match (wanted.architecture.as_str(), wanted.variant.as_str()) {
        ("amd64", variant) => {
            let own = ["v4", "v3", "v2"].into_iter().skip_while(|v| *v != variant).map(|v| ("amd64", v));
            own.chain([("amd64", ""), ("386", "")]).collect()
        }
        ("arm64", variant) => {
            let own = (!matches!(variant, "" | "v8")).then_some(("arm64", variant));
            own.into_iter().chain([("arm64", "")]).chain(arm).collect()
        }
        ("arm", variant) => arm.skip_while(|(_, v)| *v != variant).collect(),
        (other, variant) => {
            let plain = (!variant.is_empty()).then_some((other, ""));
            [(other, variant)].into_iter().chain(plain).collect()
        }
    }
}
