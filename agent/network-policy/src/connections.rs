//! Checks open connections again after a change of policies.
//!
//! The table accepts packets of established connections. A connection that the policies no longer allow gets a mark in
//! conntrack, and the table drops its packets. The conntrack entry is not deleted: the next packet of the server would
//! create an entry in the other direction. The mark is removed when the policies allow the connection again.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use coracle_nft::{Channel, Flow, FlowSelector, count_flows, mark_flows};

use crate::model::Model;
use crate::packet::Packet;

/// Bit of the conntrack mark of connections that the policies do not allow.
pub(crate) const FORBIDDEN: u32 = 0x2000_0000;

/// If the kernel has at most this number of connections, one list of all of them is requested. For each list, even a
/// short one, the kernel walks through its whole table. With the usual 262,144 buckets the walk takes 8 to 10 ms.
/// Listing this number of connections takes as long.
const ALL_MAX: u32 = 8192;
/// Above [`ALL_MAX`] the connections of each address are listed separately, up to this number of addresses. For more
/// addresses one list of all connections is faster.
const ADDRESSES_MAX: usize = 16;

/// Counts of the checked connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionCounts {
    /// Connections that the kernel listed.
    pub listed: usize,
    /// Connections with the mark.
    pub forbidden: usize,
}

/// Marks the connections that the policies do not allow, see [`Model::allows`], and removes the mark from the other
/// connections. `addresses` limits the check to connections of these addresses. `None` checks all connections. After an
/// error the channel must be closed.
///
/// Without an error, callers keep the channel open. To close an nftables socket, the kernel waits for an RCU grace
/// period, and no transaction begins during the wait.
///
/// # Errors
/// When the kernel refuses to count connections: then no connection is checked. When it refuses to list or to mark
/// connections: then the other connections are still checked, and the first error is returned.
pub fn mark_connections(
    channel: &mut Channel,
    addresses: Option<&BTreeSet<IpAddr>>,
    allows: impl Fn(&Flow) -> bool,
) -> io::Result<ConnectionCounts> {
    let wanted = |flow: &Flow| {
        let is_of = |addresses: &BTreeSet<IpAddr>| {
            [flow.from, flow.answered_by].iter().any(|ip| addresses.contains(ip))
        };
        addresses.is_none_or(is_of).then(|| !allows(flow))
    };
    let (mut counts, mut first) = (ConnectionCounts::default(), Ok(()));
    let tracked = count_flows(channel)?;
    for selector in selectors(addresses, tracked) {
        match mark_flows(channel, selector, FORBIDDEN, wanted) {
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

impl Model {
    /// Whether the policies allow a connection.
    #[must_use]
    pub fn allows(&self, flow: &Flow) -> bool {
        self.program.allows(&Packet::of(flow))
    }
}

/// The lists to request from the kernel. Together they contain all connections of the addresses.
fn selectors(addresses: Option<&BTreeSet<IpAddr>>, tracked: u32) -> Vec<FlowSelector> {
    match addresses {
        _ if tracked == 0 => Vec::new(),
        Some(addresses) if tracked > ALL_MAX && addresses.len() <= ADDRESSES_MAX => {
            addresses.iter().map(|address| FlowSelector::Of(*address)).collect()
        }
        _ => vec![FlowSelector::All],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_few_addresses_are_listed_separately_only_among_many() {
        let address = |number: u8| IpAddr::from([10, 42, 0, number]);
        let few: BTreeSet<IpAddr> = [1, 2].map(address).into();
        let many: BTreeSet<IpAddr> = (1..=20).map(address).collect();
        let each: Vec<_> = few.iter().map(|address| FlowSelector::Of(*address)).collect();
        assert_eq!(selectors(Some(&few), 0), [], "no connection has to be checked");
        assert_eq!(selectors(Some(&few), ALL_MAX), [FlowSelector::All]);
        assert_eq!(selectors(Some(&few), ALL_MAX + 1), each);
        assert_eq!(selectors(Some(&many), ALL_MAX + 1), [FlowSelector::All]);
        assert_eq!(selectors(None, ALL_MAX + 1), [FlowSelector::All]);
    }
}
