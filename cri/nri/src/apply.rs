//! Applies merged adjustments to a container's OCI spec. No I/O. An unsupported adjustment is an error with its name.
//! If it was ignored, the plugin would assume that it is in effect.

mod fields;
mod resources;

use coracle_proto::nri::ContainerAdjustment;
use oci_spec::runtime::Spec;

/// Features of this machine and runtime on which adjustments depend.
#[derive(Debug, Clone, Copy)]
pub struct Features {
    /// Whether cgroups are v2: `unified` files exist, and v1-only limits do not.
    pub unified: bool,
    /// Whether huge pages can be limited.
    pub hugetlb: bool,
}

/// An adjustment that cannot be applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("NRI adjustment of {field}: {why}")]
pub struct ApplyError {
    /// The field, with its name in the NRI protocol.
    pub field: &'static str,
    /// The reason.
    pub why: String,
}

type Applied = Result<(), ApplyError>;

/// Applies the adjustment to the spec, except CDI devices, which the caller resolves in the machine's
/// registry.
///
/// # Errors
/// The first adjustment that cannot be applied. After an error the spec must not be used.
pub fn apply(spec: &mut Spec, requested: &ContainerAdjustment, features: Features) -> Applied {
    fields::annotations(spec, &requested.annotations);
    fields::process(spec, requested)?;
    if let Some(hooks) = &requested.hooks {
        fields::hooks(spec, hooks);
    }
    fields::mounts(spec, &requested.mounts)?;
    if let Some(requested) = &requested.linux {
        fields::linux(spec, requested)?;
        if let Some(requested) = &requested.resources {
            let linux = spec.linux_mut().get_or_insert_default();
            let mut limits = linux.resources().clone().unwrap_or_default();
            resources::apply(&mut limits, requested, features)?;
            linux.set_resources(Some(limits));
        }
    }
    Ok(())
}

fn refuse(field: &'static str, why: impl Into<String>) -> ApplyError {
    ApplyError { field, why: why.into() }
}

#[cfg(test)]
mod tests;
