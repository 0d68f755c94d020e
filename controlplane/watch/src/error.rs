//! The error of a failed request of a watch.

use std::time::Duration;

use kube::core::Status;

/// The cause of a failed request. The watch repeats the request after a back-off.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A list request failed.
    #[error("cannot list the objects")]
    List(#[source] kube::Error),
    /// A watch request failed before its first event.
    #[error("cannot start a watch")]
    Start(#[source] kube::Error),
    /// The response of a watch request could not be read.
    #[error("cannot read the events of a watch")]
    Read(#[source] kube::Error),
    /// The server ended the watch. The status code is 410 if it no longer has the resource version.
    #[error("the API server ended a watch")]
    Ended(#[source] Box<Status>),
    /// The server ended the watch within a second, without an event.
    #[error("the API server ended a watch within a second")]
    Short,
    /// An object does not have the expected type.
    #[error("cannot decode an object")]
    Object(#[source] serde_json::Error),
    /// A list, or a line of a watch, does not have the form that the API defines.
    #[error("a response of the API server is invalid")]
    Invalid(#[source] serde_json::Error),
    /// A list or a changed object has no resource version, so no watch can continue from it.
    #[error("a response of the API server has no resource version")]
    NoVersion,
    /// A page with one object, or an event, is larger than the given number of bytes.
    #[error("a response of the API server has more than {limit} bytes")]
    TooLarge {
        /// Maximum in bytes.
        limit: usize,
    },
    /// The server did not respond.
    #[error("the API server did not respond within {} s", .limit.as_secs())]
    Timeout {
        /// Timeout of the request.
        limit: Duration,
    },
}

impl Error {
    /// The HTTP status code of a refused request. `None` for an error without a Status of the server.
    #[must_use]
    pub fn code(&self) -> Option<u16> {
        self.status().map(|status| status.code)
    }

    /// The Status of a refused request. `None` for an error without a Status of the server.
    #[must_use]
    pub fn status(&self) -> Option<&Status> {
        match self {
            Self::List(kube::Error::Api(status))
            | Self::Start(kube::Error::Api(status))
            | Self::Read(kube::Error::Api(status))
            | Self::Ended(status) => Some(&**status),
            _ => None,
        }
    }

    /// Whether the server does not serve the kind.
    #[must_use]
    pub fn is_unserved(&self) -> bool {
        matches!(self, Self::List(kube::Error::Api(status)) if status.code == 404)
    }

    /// Whether the server refused the request, because the client has no right to list the kind.
    #[must_use]
    pub fn is_forbidden(&self) -> bool {
        matches!(self, Self::List(kube::Error::Api(status)) if status.code == 403)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: u16) -> kube::Error {
        kube::Error::Api(Box::new(Status { code, ..Status::default() }))
    }

    #[test]
    fn only_a_list_that_is_not_found_shows_that_a_kind_is_not_served() {
        assert!(Error::List(refused(404)).is_unserved());
        assert!(!Error::List(refused(403)).is_unserved() && !Error::List(refused(503)).is_unserved());
        assert!(!Error::Start(refused(404)).is_unserved());
        assert!(Error::List(refused(403)).is_forbidden() && !Error::List(refused(404)).is_forbidden());
        assert_eq!((Error::Start(refused(403)).code(), Error::Short.code()), (Some(403), None));
    }
}
