//! Which manifest of an index is for this machine.

use super::{Descriptor, ManifestError, PlatformField};
use crate::config::Platform;

/// How a manifest was come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chosen {
    /// The name means it, and no other.
    Alone,
    /// An index says that it is for this machine.
    ByPlatform,
    /// An index has it, and does not say for whom.
    Unmarked,
}

/// What of an index may be for a machine.
#[derive(Debug)]
pub(crate) enum Fitting<'a> {
    /// The one that fits best by what the index says; the first among equals.
    Marked(&'a Descriptor),
    /// The index says of none that it fits, and of these nothing.
    Unmarked(Vec<&'a Descriptor>),
}

/// Chooses among the manifests of an index.
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

/// Whether an index says of a manifest that it is for such a machine.
pub(crate) fn fits(manifest: &Descriptor, wanted: &Platform) -> bool {
    manifest.platform.as_ref().is_some_and(|given| platform_rank(wanted, given).is_some())
}

/// How well an image fits whose configuration says this. Smaller is better; one that does not say it is the last choice.
pub(super) fn config_rank(wanted: &Platform, given: &PlatformField) -> Option<usize> {
    let other_system = !given.os.is_empty() && given.os != wanted.os;
    let unsaid = given.architecture.is_empty() && !other_system;
    platform_rank(wanted, given).or(unsaid.then_some(usize::MAX))
}

/// Whether an image whose configuration says this platform may be taken for that. An index that says what is for whom is
/// believed, as its publisher's choice. An image that there is alone was asked for as it is: its architecture is often
/// written down wrongly, or is emulated (binfmt_misc), so it is the machine that knows; containerd, CRI-O and Docker
/// take it too. Another operating system is nothing that a machine could run.
pub(super) fn may_be(wanted: &Platform, given: &PlatformField, chosen: Chosen) -> bool {
    let fits = config_rank(wanted, given).is_some();
    match chosen {
        Chosen::Unmarked => fits,
        Chosen::Alone => {
            let same_system = given.os.is_empty() || given.os == wanted.os;
            if same_system && !fits {
                let (given, wanted) = (field_name(given), name(wanted));
                tracing::warn!(given, wanted, "an image that there is for one platform only is for another");
            }
            same_system
        }
        Chosen::ByPlatform => true,
    }
}

/// A platform in one word.
pub(super) fn name(platform: &Platform) -> String {
    joined(&platform.os, &platform.architecture, &platform.variant)
}

/// The same for one from a document.
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

/// What runs on a machine, best first. Variants of amd64 beyond the first need instructions that a machine may not
/// have, so they are taken only when they were asked for.
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
