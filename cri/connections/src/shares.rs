//! Shares of the process's descriptor limit: one for each kind of descriptors that clients can cause the process to
//! open.
//!
//! All shares together are at most three quarters of the limit. The rest is a reserve for the node's own work: shims,
//! probes, images, the store, servers of kubeconfig files, and its connections to the API server.

use nix::sys::resource::{Resource, getrlimit};

use crate::Limits;

/// The assumed descriptor limit if the kernel does not report one.
const USUAL_DESCRIPTORS: u128 = 1024;
/// The descriptor limit is divided into this number of equal parts. A share consists of some of them.
const PARTS: u128 = 256;
/// Minimum number of uses of a share, if the descriptor limit is very low.
const LEAST: usize = 8;

/// A kind of descriptors that clients can cause the process to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Connections of the API port.
    ApiConnections,
    /// Connections of the API server to all kubelets.
    KubeletClients,
    /// Connections of the API server to pods, Services and aggregated servers.
    ProxiedRequests,
    /// Connections of the API server to webhooks of admission and conversion.
    Webhooks,
    /// Connections of the kubelet API's port. Each connection can have a second descriptor: an open log, or a
    /// connection to another runtime.
    KubeletConnections,
    /// Connections of the port for streams.
    StreamConnections,
    /// Commands and attached containers of clients. Each has up to three pipes.
    Commands,
    /// Connections to ports of pods, for port-forward clients.
    Forwards,
    /// Listening sockets for health checks of load balancers.
    ServiceHealthServers,
    /// Connections of all health checks of load balancers.
    ServiceHealthConnections,
    /// Connections of the node's health check.
    NodeHealth,
    /// Connections of the service proxy's health checks.
    ProxyHealth,
    /// Connections of the service proxy's metrics.
    ProxyStatus,
    /// Connections of the metrics and health checks of controllers and scheduler.
    ComponentHealth,
    /// Queries of the DNS server to other servers.
    DnsQuestions,
    /// TCP connections of the DNS server.
    DnsConnections,
}

/// The size of a share.
struct Size {
    /// Number of 256ths of the descriptor limit.
    parts: u128,
    /// Maximum descriptors of one use.
    each: u128,
    /// Maximum number of uses, even if the descriptor limit permits more.
    most: usize,
}

// === impl Share ===

impl Share {
    /// Maximum number of uses (connections, commands, queries) with the current descriptor limit of the process.
    #[must_use]
    pub fn count(self) -> usize {
        // The C library's type for limits has 32 or 64 bits, depending on the architecture.
        let descriptors =
            getrlimit(Resource::RLIMIT_NOFILE).map_or(USUAL_DESCRIPTORS, |(soft, _)| u128::from(soft));
        self.count_of(descriptors)
    }

    /// The limits of a port whose connections use this share.
    #[must_use]
    pub fn limits(self) -> Limits {
        Limits::of_total(self.count())
    }

    fn count_of(self, descriptors: u128) -> usize {
        let Size { parts, each, most } = self.size();
        usize::try_from(descriptors * parts / (PARTS * each)).unwrap_or(most).clamp(LEAST, most)
    }

    /// The sum of the parts is at most three quarters of [`PARTS`].
    fn size(self) -> Size {
        let (parts, each, most) = match self {
            Self::ApiConnections => (48, 1, 16 << 10),
            Self::KubeletClients => (8, 1, 8 << 10),
            Self::ProxiedRequests => (12, 1, 2 << 10),
            Self::Webhooks => (8, 1, 2 << 10),
            Self::KubeletConnections => (32, 2, 4 << 10),
            Self::StreamConnections => (12, 1, 4 << 10),
            Self::Commands => (16, 3, 4 << 10),
            Self::Forwards => (12, 1, 4 << 10),
            Self::ServiceHealthServers => (8, 1, 4 << 10),
            Self::ServiceHealthConnections => (6, 1, 256),
            Self::NodeHealth | Self::ProxyHealth | Self::ProxyStatus => (4, 1, 64),
            Self::ComponentHealth => (2, 1, 64),
            Self::DnsQuestions => (10, 1, 2 << 10),
            Self::DnsConnections => (6, 1, 256),
        };
        Size { parts, each, most }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Share; 16] = [
        Share::ApiConnections,
        Share::KubeletClients,
        Share::ProxiedRequests,
        Share::Webhooks,
        Share::KubeletConnections,
        Share::StreamConnections,
        Share::Commands,
        Share::Forwards,
        Share::ServiceHealthServers,
        Share::ServiceHealthConnections,
        Share::NodeHealth,
        Share::ProxyHealth,
        Share::ProxyStatus,
        Share::ComponentHealth,
        Share::DnsQuestions,
        Share::DnsConnections,
    ];

    #[test]
    fn all_shares_leave_a_quarter_of_the_descriptors_for_the_node() {
        for descriptors in [1024, 4096, 20_000, 524_288] {
            let used =
                |share: Share| u128::try_from(share.count_of(descriptors)).unwrap() * share.size().each;
            let sum: u128 = ALL.into_iter().map(used).sum();
            let reserve = descriptors / 4;
            assert!(sum + reserve <= descriptors, "{sum} of {descriptors} descriptors");
        }
        let parts: u128 = ALL.into_iter().map(|share| share.size().parts).sum();
        assert!(parts <= PARTS / 4 * 3, "{parts} parts");
    }

    #[test]
    fn with_the_usual_hard_limit_all_shares_have_their_maximum() {
        for share in ALL {
            assert_eq!(share.count_of(524_288), share.size().most, "{share:?}");
        }
        assert_eq!(Share::ApiConnections.count_of(524_288), 16_384);
        assert_eq!(Share::DnsQuestions.count_of(u128::MAX / PARTS), 2048);
    }

    #[test]
    fn a_low_limit_leaves_a_few_uses() {
        assert_eq!((Share::ApiConnections.count_of(1024), Share::Commands.count_of(1024)), (192, 21));
        assert_eq!(Share::ComponentHealth.count_of(16), LEAST);
    }
}
