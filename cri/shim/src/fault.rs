//! A refused call, as the agent is told of it.

use coracle_proto::shim::error::Kind;

/// Kind and words of a refusal.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) message: String,
}

// === impl Fault ===

impl Fault {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// The whole chain of an error, outermost first.
    pub(crate) fn internal(error: &dyn std::error::Error) -> Self {
        Self::new(Kind::Internal, chain(error))
    }

    /// The chain below a sentence of ours.
    pub(crate) fn doing(doing: &str, error: &dyn std::error::Error) -> Self {
        Self::new(Kind::Internal, format!("{doing}: {}", chain(error)))
    }

    pub(crate) fn no_container(id: &str) -> Self {
        Self::new(Kind::NotFound, format!("there is no container {id} in this pod"))
    }

    pub(crate) fn wrong_state(id: &str, state: &str) -> Self {
        Self::new(Kind::WrongState, format!("the container {id} is {state}"))
    }
}

impl From<Fault> for coracle_proto::shim::Error {
    fn from(fault: Fault) -> Self {
        Self { kind: fault.kind.into(), message: fault.message }
    }
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
