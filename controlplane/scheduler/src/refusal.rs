//! The refusal of a pod by a filter.

use crate::hint::Changes;

/// The reason why a node cannot run a pod, in upstream's words.
pub(crate) type Refusal = String;

/// A refusal of a pod by a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    /// Upstream's name of the plugin.
    pub(crate) plugin: &'static str,
    pub(crate) reasons: Vec<Refusal>,
    /// Whether the removal of other pods can change the refusal. Upstream calls other refusals unresolvable.
    pub(crate) resolvable: bool,
    /// The changes that may help.
    pub(crate) helped_by: Changes,
}
