//! What plugins of one process share: the host's links, and the firewall table.

use crate::error::Error;
use crate::firewall::Firewall;
use crate::link::Links;

/// The host that attachments are made on: the network namespace of this process.
pub(crate) struct Host {
    pub(crate) links: Links,
    pub(crate) firewall: Firewall,
    /// Whether plugins of our own types are called here instead of being run. Then the caller also sees to it
    /// that no attachment is added twice.
    pub(crate) in_process: bool,
}

// === impl Host ===

impl Host {
    pub(crate) fn here(firewall: Firewall, in_process: bool) -> Result<Self, Error> {
        Ok(Self { links: Links::here()?, firewall, in_process })
    }
}
