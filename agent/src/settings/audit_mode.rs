//! Modes of the audit backends, with the names of kube-apiserver.

use clap::ValueEnum;

use super::value::choices;

/// The time at which a backend gets an audit event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AuditMode {
    /// The event is queued.
    Batch,
    /// The request waits until the backend has the event.
    Blocking,
    /// As blocking. If the backend does not accept the first event of a request, the request fails.
    BlockingStrict,
}

choices!(AuditMode);
