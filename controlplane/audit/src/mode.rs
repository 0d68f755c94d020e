//! The modes of audit backends: `--audit-log-mode` and `--audit-webhook-mode` of kube-apiserver.

/// The mode of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Events are queued. Requests do not wait for the backend.
    Batch,
    /// A request waits at each stage until the backend has the event, or has failed.
    Blocking,
    /// The mode [`Mode::Blocking`] with a further rule. If the backend does not accept the event of the stage
    /// `RequestReceived`, the request fails.
    BlockingStrict,
}
