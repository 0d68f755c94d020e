//! Checks open connections again after a change of policies.
//!
//! The table accepts packets of established connections. A connection that the policies no longer allow gets a mark in
//! conntrack, and the table drops its packets. The conntrack entry is not deleted: the next packet of the server would
//! create an entry in the other direction. The mark is removed when the policies allow the connection again.

use std::io;

use coracle_nft::{Channel, Flow, mark_flows};

use crate::model::Model;
use crate::packet::Packet;

/// Bit of a connection's mark: the policies do not allow it.
pub(crate) const FORBIDDEN: u32 = 0x2000_0000;

/// Marks the connections that the policies do not allow, and removes the mark from the others. Returns the number of
/// marked connections.
///
/// # Errors
/// When the kernel refuses it. All connections are tried.
pub fn judge_connections(model: &Model) -> io::Result<usize> {
    let mut channel = Channel::open()?;
    let wanted = |flow: &Flow| Some(!model.program.allows(&Packet::of(flow)));
    let v4 = mark_flows(&mut channel, true, FORBIDDEN, wanted);
    let v6 = mark_flows(&mut channel, false, FORBIDDEN, wanted);
    Ok(v4? + v6?)
}
