//! The kernel's conntrack entries.

use std::collections::HashMap;
use std::net::SocketAddr;

/// The kernel's list of conntrack entries.
const ENTRIES: &str = "/proc/thread-self/net/nf_conntrack";

/// A connection from a local port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Connection {
    pub(crate) from: u16,
    pub(crate) to: SocketAddr,
}

/// Whether the kernel lists its conntrack entries (`CONFIG_NF_CONNTRACK_PROCFS`). Valid only after the first table
/// exists.
pub(crate) fn are_entries_visible() -> bool {
    std::path::Path::new(ENTRIES).exists()
}

/// The address that answers each of these connections, according to conntrack. Connections without an entry are left
/// out. The kernel visits its whole table for the list, so one call for several connections saves time.
pub(crate) fn tracked(connections: &[Connection]) -> HashMap<Connection, SocketAddr> {
    let table = std::fs::read_to_string(ENTRIES).unwrap();
    table.lines().filter_map(|line| answering(line, connections)).collect()
}

/// The connection of a line and the address that answers it, if it is one of these connections.
fn answering(line: &str, connections: &[Connection]) -> Option<(Connection, SocketAddr)> {
    let values = |name: &'static str| {
        line.split_whitespace().filter_map(move |word| word.strip_prefix(name)?.strip_prefix('='))
    };
    // Most lines belong to other connections.
    let from: u16 = values("sport").next()?.parse().ok()?;
    if !connections.iter().any(|connection| connection.from == from) {
        return None;
    }
    // A line has two directions: first that of the client's packets, then that of the answers.
    let ends: Vec<SocketAddr> = values("dst")
        .zip(values("dport"))
        .chain(values("src").zip(values("sport")))
        .filter_map(|(address, port)| Some(SocketAddr::new(address.parse().ok()?, port.parse().ok()?)))
        .collect();
    let [to, _, client, answering] = ends[..] else { return None };
    let connection = Connection { from: client.port(), to };
    connections.contains(&connection).then_some((connection, answering))
}
