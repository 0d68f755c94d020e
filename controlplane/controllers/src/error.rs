//! What can go wrong in a look at one object: a request to the server.

use std::fmt::Display;
use std::time::Duration;

/// A failed look; the key is tried again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A request that the server refused or that did not reach it.
    #[error("cannot {verb} {object}")]
    Request {
        /// What was tried.
        verb: &'static str,
        /// Kind and key of what it was tried on.
        object: String,
        #[source]
        source: kube::Error,
    },
    /// A selector that cannot be read.
    #[error("invalid selector of {object}")]
    Selector {
        /// Kind and key of the object.
        object: String,
        #[source]
        source: kube::core::ParseExpressionError,
    },
    /// What the API consists of could not be found out.
    #[error("cannot discover the API's kinds")]
    Discovery(#[source] kube::Error),
    /// Contents that are still there and must be waited for.
    #[error("{object} still has contents")]
    NotEmpty {
        /// What is to be emptied.
        object: String,
    },
}

impl Error {
    /// Whether another writer was faster: expected, and cured by another look.
    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self, Self::Request { source: kube::Error::Api(status), .. } if status.is_conflict())
    }

    /// Logs the whole chain, once, at the edge of a worker.
    pub(crate) fn log(&self, controller: &'static str, key: &impl Display, retry: Duration) {
        let cause = std::error::Error::source(self).map(ToString::to_string).unwrap_or_default();
        if self.is_conflict() || matches!(self, Self::NotEmpty { .. }) {
            tracing::debug!(controller, %key, ?retry, cause, "{self}");
        } else {
            tracing::warn!(controller, %key, ?retry, cause, "{self}");
        }
    }
}

/// Whether the server says that the object is not there.
pub(crate) fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found())
}

/// Whether the server says that the object is there already.
pub(crate) fn is_already_exists(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_already_exists())
}

/// Whether the server refuses because the namespace is being deleted.
pub(crate) fn is_namespace_terminating(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    let named = status
        .details
        .iter()
        .flat_map(|details| &details.causes)
        .any(|cause| cause.reason == "NamespaceTerminating");
    named || (status.is_forbidden() && status.message.contains("because it is being terminated"))
}
