//! Error of a call, as it is sent to the agent.

pub(crate) use coracle_error_chain::chain;
use coracle_proto::shim::error::Kind;

/// Kind and text of the error.
#[derive(Clone, Debug)]
pub(crate) struct CallError {
    pub(crate) kind: Kind,
    pub(crate) message: String,
}

// === impl CallError ===

impl CallError {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// An internal error with the whole error chain as its text, outermost first.
    pub(crate) fn internal(error: &dyn std::error::Error) -> Self {
        Self::new(Kind::Internal, chain(error))
    }

    /// An internal error: `cannot`, the operation `doing` as a verb with its object, then the error chain.
    pub(crate) fn cannot(doing: &str, error: &dyn std::error::Error) -> Self {
        Self::new(Kind::Internal, format!("cannot {doing}: {}", chain(error)))
    }

    pub(crate) fn no_container(id: &str) -> Self {
        Self::new(Kind::NotFound, format!("there is no container {id} in this pod"))
    }

    pub(crate) fn wrong_state(id: &str, state: &str) -> Self {
        Self::new(Kind::WrongState, format!("the container {id} is {state}"))
    }
}

impl From<CallError> for coracle_proto::shim::Error {
    fn from(error: CallError) -> Self {
        Self { kind: error.kind.into(), message: error.message }
    }
}
