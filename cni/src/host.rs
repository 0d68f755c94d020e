//! State shared by the plugins of one process: links and firewall table.

use std::sync::Arc;

use crate::attachment_cache::Cache;
use crate::connection_limit::ConnectionLimit;
use crate::error::Error;
use crate::firewall::Firewall;
use crate::link::Links;
use crate::source_guard::SourceGuard;

/// The network namespace of this process, the host of all attachments.
pub(crate) struct Host {
    pub(crate) links: Links,
    pub(crate) firewall: Firewall,
    /// Permitted sources of the default network's ports. `None` if pods may send from any address.
    pub(crate) guard: Option<SourceGuard>,
    /// The limit on the connections of each pod of the default network.
    pub(crate) connections: Option<ConnectionLimit>,
    /// Attachments of this runtime. `None` in an executable, which handles only the attachment of its request.
    pub(crate) attachments: Option<Arc<Cache>>,
}

// === impl Host ===

impl Host {
    pub(crate) fn in_own_namespace(
        firewall: Firewall,
        guard: Option<SourceGuard>,
        attachments: Option<Arc<Cache>>,
    ) -> Result<Self, Error> {
        Ok(Self { links: Links::in_own_namespace()?, firewall, guard, connections: None, attachments })
    }

    /// The host of the node's network, which limits the connections of its pods.
    pub(crate) fn limiting(mut self, connections: ConnectionLimit) -> Self {
        self.connections = Some(connections);
        self
    }

    /// Whether our own plugins run in this process instead of as executables. Then the caller also ensures that no
    /// attachment is added twice.
    pub(crate) fn in_process(&self) -> bool {
        self.attachments.is_some()
    }
}
