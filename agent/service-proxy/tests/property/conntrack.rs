//! The kernel's conntrack entries.

use std::net::SocketAddr;

/// The kernel's list of conntrack entries.
const ENTRIES: &str = "/proc/thread-self/net/nf_conntrack";

/// Whether the kernel lists its conntrack entries (`CONFIG_NF_CONNTRACK_PROCFS`). Valid only after the first table
/// exists.
pub(crate) fn are_entries_visible() -> bool {
    std::path::Path::new(ENTRIES).exists()
}

/// The address that answers a connection from the local port `from`, according to conntrack.
pub(crate) fn tracked(from: u16, to: SocketAddr) -> Option<SocketAddr> {
    let table = std::fs::read_to_string(ENTRIES).unwrap();
    table.lines().find_map(|line| {
        let values = |name: &'static str| {
            line.split_whitespace().filter_map(move |word| word.strip_prefix(name)?.strip_prefix('='))
        };
        // A line has two directions: first that of the client's packets, then that of the answers.
        let ends: Vec<SocketAddr> = values("dst")
            .zip(values("dport"))
            .chain(values("src").zip(values("sport")))
            .filter_map(|(address, port)| Some(SocketAddr::new(address.parse().ok()?, port.parse().ok()?)))
            .collect();
        let [wanted, _, client, answering] = ends[..] else { return None };
        (wanted == to && client.port() == from).then_some(answering)
    })
}
