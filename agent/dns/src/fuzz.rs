//! Functions of the fuzz targets in `integration/fuzz`, and a test that replays their corpora with a stable compiler.
//! Each function accepts any bytes and fails by a panic, or by exceeding the fuzzer's limits on time and memory.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock, RwLock};

use crate::reply::{Reply, Sources, Transport, reply};
use crate::zone::Zone;
use crate::{exchange, forward::Upstream, metrics::Metrics, servers};

/// Fuzz target: messages of clients and of other servers, and the resolver's configuration.
pub fn dns(data: &[u8]) {
    static SERVER: LazyLock<Option<(Zone, Arc<Upstream>)>> = LazyLock::new(|| {
        let zone = Zone::new("cluster.local", Arc::new(RwLock::default()), Vec::new())?;
        let metrics = Arc::new(Metrics::default());
        Some((zone, Arc::new(Upstream::new(PathBuf::new(), Vec::new(), &[], metrics))))
    });
    let Some((zone, upstream)) = &*SERVER else { return };
    for transport in [Transport::Udp, Transport::Tcp, Transport::TcpLarge] {
        let response = match reply(data, transport, Sources { zone, upstream }) {
            Reply::Nothing => None,
            Reply::Now(response) => Some(response),
            Reply::Forward(pending) => Some(pending.without_permit(upstream)),
        };
        let Some(response) = response else { continue };
        if let Some(bytes) = response.encode() {
            let most = response.limit;
            assert!(bytes.len() <= usize::from(most), "a reply of {} bytes for {most}", bytes.len());
        }
    }
    exchange::fuzz(data);
    servers::fuzz(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_is_replayed() {
        coracle_testing::replay_corpus("dns", super::dns);
    }
}
