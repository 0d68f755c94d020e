//! Identity of calls of the agent.

/// Identifies a call: connection and request id. Calls of a closed connection get no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallId {
    pub(crate) connection: u64,
    pub(crate) id: u64,
}
