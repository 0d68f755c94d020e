//! What plugins of one process share: the host's links, and the firewall table.

use std::sync::Arc;

use crate::error::Error;
use crate::firewall::Firewall;
use crate::invoke::cache::Cache;
use crate::link::Links;

/// The host that attachments are made on: the network namespace of this process.
pub(crate) struct Host {
    pub(crate) links: Links,
    pub(crate) firewall: Firewall,
    /// The attachments of the runtime that this process is; none in an executable, which knows no other than its own.
    pub(crate) attachments: Option<Arc<Cache>>,
}

// === impl Host ===

impl Host {
    pub(crate) fn here(firewall: Firewall, attachments: Option<Arc<Cache>>) -> Result<Self, Error> {
        Ok(Self { links: Links::here()?, firewall, attachments })
    }

    /// Whether plugins of our own types are called here instead of being run. Then the caller also sees to it
    /// that no attachment is added twice.
    pub(crate) fn in_process(&self) -> bool {
        self.attachments.is_some()
    }
}
