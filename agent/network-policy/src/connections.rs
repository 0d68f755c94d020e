//! Checks open connections again after a change of policies.
//!
//! The table accepts packets of established connections. A connection that the policies no longer allow gets a mark in
//! conntrack, and the table drops its packets. The conntrack entry is not deleted: the next packet of the server would
//! create an entry in the other direction. The mark is removed when the policies allow the connection again.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use coracle_nft::{Channel, Flow, FlowSelector, mark_flows};

use crate::model::Model;
use crate::packet::Packet;

/// Bit of a connection's mark: the policies do not allow it.
pub(crate) const FORBIDDEN: u32 = 0x2000_0000;

/// Up to this number of addresses, the connections of each address are listed separately, with two requests to the
/// kernel. For more addresses one list of all connections is faster.
const ADDRESSES_MAX: usize = 16;

/// Counts of the checked connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionCounts {
    /// Connections that the kernel listed.
    pub listed: usize,
    /// Connections with the mark.
    pub forbidden: usize,
}

/// Marks the connections that the policies do not allow, and removes the mark from the others. `of`: the addresses
/// whose connections are checked; `None` checks all.
///
/// # Errors
/// When the kernel refuses to list or to mark connections. The other connections are still checked; the first error is
/// returned.
pub fn mark_connections(model: &Model, of: Option<&BTreeSet<IpAddr>>) -> io::Result<ConnectionCounts> {
    let mut channel = Channel::open()?;
    let wanted = |flow: &Flow| Some(!model.program.allows(&Packet::of(flow)));
    let selectors = match of.filter(|addresses| addresses.len() <= ADDRESSES_MAX) {
        Some(addresses) => addresses.iter().map(|address| FlowSelector::Of(*address)).collect(),
        None => vec![FlowSelector::Any { is_ipv4: true }, FlowSelector::Any { is_ipv4: false }],
    };
    let (mut counts, mut first) = (ConnectionCounts::default(), Ok(()));
    for selector in selectors {
        match mark_flows(&mut channel, selector, FORBIDDEN, wanted) {
            Ok(marked) => {
                counts.listed += marked.listed;
                counts.forbidden += marked.with_bit;
            }
            Err(error) => first = first.and(Err(error)),
        }
        coracle_fault::point("policies.marked");
    }
    first.map(|()| counts)
}
