//! Queries and commits through the socket of a table's owner.

use std::io;

use coracle_nft::{Attributes, Channel, INET, Transaction, Verb, number_of};

use super::family::{V4, V6};
use crate::error::Error;

/// Whether the kernel has a table with this name.
pub(crate) fn exists(channel: &mut Channel, table: &str) -> io::Result<bool> {
    channel.has(Verb::GetTable, INET, &Attributes::default().text(1, table))
}

/// Whether the chain `hostports` has rules. Each of our tables has such rules until it is flushed.
pub(crate) fn has_rules(channel: &mut Channel, table: &str) -> io::Result<bool> {
    let rules = Attributes::default().text(1, table).text(2, "hostports");
    channel.has_any(Verb::GetRule, INET, &rules)
}

/// Whether the chain `FORWARD` of iptables' filter table has the policy DROP, for IPv4 or IPv6.
pub(crate) fn forward_drops(channel: &mut Channel) -> io::Result<bool> {
    const POLICY: u16 = 5;
    const DROP: u32 = 0;
    for family in [V4.number, V6.number] {
        let named = Attributes::default().text(1, "filter").text(3, "FORWARD");
        match channel.get(Verb::GetChain, family, &named) {
            Ok(answer) if number_of(&answer, POLICY) == Some(DROP) => return Ok(true),
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
            _ => {}
        }
    }
    Ok(false)
}

/// The socket of a table's owner, opened at the first change of the table.
pub(crate) fn open_once(channel: &mut Option<Channel>) -> Result<&mut Channel, Error> {
    match channel {
        Some(channel) => Ok(channel),
        none => {
            let failed = |source| Error::Socket { action: "open an nftables socket", source };
            Ok(none.insert(Channel::open().map_err(failed)?))
        }
    }
}

/// Commits a transaction on a table through the socket of the table's owner. `action` is the operation in the error.
pub(crate) fn commit(
    channel: &mut Option<Channel>,
    table: &str,
    transaction: Transaction<'_>,
    action: &'static str,
) -> Result<(), Error> {
    let refused = |source| Error::Firewall { action, table: table.to_owned(), source };
    open_once(channel)?.commit(transaction.finish()).map_err(refused)
}
