//! The parts of an object that can be updated separately.

/// The part of an object that an update may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All fields except the status.
    Main,
    /// The status.
    Status,
    /// A pod's ephemeral containers.
    EphemeralContainers,
    /// The resources of a pod's containers.
    Resize,
    /// The approval of a certificate signing request.
    Approval,
    /// Changes without strategy, admission and validation: by the server itself, or by the subresource `finalize`.
    Internal,
}
