//! Merged adjustments, put onto a container's OCI spec. Pure. What this runtime cannot do is refused
//! by name, never left out: a plugin that is told nothing believes that it was done.

mod fields;
mod resources;

use coracle_proto::nri::ContainerAdjustment;
use oci_spec::runtime::Spec;

/// What the machine and the runtime can do beyond what every one can.
#[derive(Debug, Clone, Copy)]
pub struct Abilities {
    /// Whether cgroups are v2: `unified` files exist, and v1's own limits do not.
    pub unified: bool,
    /// Whether anything can limit huge pages.
    pub hugetlb: bool,
}

/// An adjustment that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("NRI adjustment of {field}: {why}")]
pub struct ApplyError {
    /// The field, as the contract names it.
    pub field: &'static str,
    /// Why not.
    pub why: String,
}

type Applied = Result<(), ApplyError>;

/// Puts the adjustment onto the spec. References to CDI devices are the caller's: they are resolved
/// against the machine's registry.
///
/// # Errors
/// The first adjustment that cannot be made; the spec is then of no use.
pub fn apply(spec: &mut Spec, asked: &ContainerAdjustment, abilities: Abilities) -> Applied {
    fields::annotations(spec, &asked.annotations);
    fields::process(spec, asked)?;
    if let Some(hooks) = &asked.hooks {
        fields::hooks(spec, hooks);
    }
    fields::mounts(spec, &asked.mounts)?;
    if let Some(asked) = &asked.linux {
        fields::linux(spec, asked)?;
        if let Some(asked) = &asked.resources {
            let linux = spec.linux_mut().get_or_insert_default();
            let mut limits = linux.resources().clone().unwrap_or_default();
            resources::apply(&mut limits, asked, abilities)?;
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
