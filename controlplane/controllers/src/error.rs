//! Errors of a reconcile.

use std::fmt::Display;
use std::time::Duration;

/// A failed reconcile. The queue retries the key.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The API server refused a request or did not receive it.
    #[error("cannot {verb} {object}")]
    Request {
        /// The operation.
        verb: &'static str,
        /// Kind and key of the object.
        object: String,
        #[source]
        source: kube::Error,
    },
    /// An invalid label selector.
    #[error("cannot parse the label selector of {object}")]
    Selector {
        /// Kind and key of the object.
        object: String,
        #[source]
        source: coracle_values::SelectorError,
    },
    /// Discovery of the API's kinds failed.
    #[error("cannot discover the API's kinds")]
    Discovery(#[source] kube::Error),
    /// A reconcile that exceeded its time limit.
    #[error("the reconcile did not end within {} s", limit.as_secs())]
    TooLong {
        /// The maximum time of a reconcile.
        limit: Duration,
    },
    /// A pod's controller whose scale cannot be read.
    #[error("cannot read the scales of {object}: {why}")]
    Scale {
        /// Kind and key of the object.
        object: String,
        /// The error of the read.
        why: String,
    },
    /// A namespace that still has contents. The controller waits for their deletion.
    #[error("{object} still has contents")]
    NotEmpty {
        /// Kind and key of the object.
        object: String,
    },
}

impl Error {
    /// Whether the object changed since it was read. Such an error is expected: the retry reads the new version.
    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self, Self::Request { source: kube::Error::Api(status), .. } if status.is_conflict())
    }

    /// Whether the object does not exist any more, or the controllers have no right to change it. Another attempt
    /// cannot succeed before the object or the rights change.
    pub(crate) fn is_refused(&self) -> bool {
        let Self::Request { source: kube::Error::Api(status), .. } = self else { return false };
        status.is_not_found() || status.is_forbidden()
    }

    /// The text of the source. Empty without a source.
    pub(crate) fn cause(&self) -> String {
        std::error::Error::source(self).map(ToString::to_string).unwrap_or_default()
    }

    /// Logs the error and its source. Only workers call this.
    pub(crate) fn log(&self, controller: &'static str, key: &impl Display, retry: Duration) {
        let cause = self.cause();
        if self.is_conflict() || matches!(self, Self::NotEmpty { .. } | Self::Scale { .. }) {
            tracing::debug!(controller, %key, ?retry, error = %self, cause, "cannot reconcile an object");
        } else {
            tracing::warn!(controller, %key, ?retry, error = %self, cause, "cannot reconcile an object");
        }
    }
}

/// Whether the object does not exist.
pub(crate) fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found())
}

/// Whether the API server has answered that the object with this name does not exist. A 404 response for a path that is
/// not served does not name an object.
pub(crate) fn is_missing(error: &kube::Error, name: &str) -> bool {
    let kube::Error::Api(status) = error else { return false };
    status.is_not_found() && status.details.as_ref().is_some_and(|details| details.name == name)
}

/// Whether an object with this name exists.
pub(crate) fn is_already_exists(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_already_exists())
}

/// Whether the API server refused because the namespace is being deleted.
pub(crate) fn is_namespace_terminating(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    let named = status
        .details
        .iter()
        .flat_map(|details| &details.causes)
        .any(|cause| cause.reason == "NamespaceTerminating");
    named || (status.is_forbidden() && status.message.contains("because it is being terminated"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_path_that_is_not_served_says_nothing_about_an_object() {
        let failed = |details: serde_json::Value| {
            let status = json!({"status": "Failure", "code": 404, "reason": "NotFound", "message": "m", "details": details});
            kube::Error::Api(serde_json::from_value(status).unwrap())
        };
        assert!(is_missing(&failed(json!({"name": "a", "kind": "things"})), "a"));
        assert!(!is_missing(&failed(json!({})), "a"));
        assert!(!is_missing(&failed(json!(null)), "a"));
    }
}
