//! Probes of paths to peers. The peer's kernel answers, so any node can be probed, including flannel's.
//!
//! - *small*: an echo request (ICMP, ICMPv6) of 84 bytes;
//! - *full*: an echo request of the MTU's size that must not be fragmented. If it is lost, a binary search finds the
//!   longest request that passes;
//! - *offloaded*: two datagrams passed to the kernel as one (UDP_SEGMENT), so that the device splits them and
//!   computes their checksums. Their port is closed: "port unreachable" shows that they arrived intact. Wrong
//!   checksums are a known fault of VXLAN with some network cards.

mod socket;

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use socket::{ProbeSockets, Request, disable_fragmentation};

/// Timeout of an answer. The round trip between nodes of one cluster is assumed to be shorter.
const TIMEOUT: Duration = Duration::from_millis(250);
/// Number of attempts: the first packets may be lost while the underlay resolves neighbours.
const ATTEMPTS: usize = 3;
/// Maximum number of open sockets.
const MAX_SOCKETS: usize = 64;
/// The discard port: no program is expected to listen on it.
const DISCARD_PORT: u16 = 9;
const SMALL: u32 = 84;

/// A path to a peer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ProbePath {
    /// The peer's name.
    pub peer: String,
    /// An address of the peer behind the overlay, on which its kernel answers.
    pub to: IpAddr,
    /// Size of a full packet in bytes, including the IP header.
    pub mtu: u32,
}

/// Result of the probe of a [`ProbePath`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeResult {
    /// Size of the longest packet that passes, in bytes. 0 if no packet passes.
    pub bytes: u32,
    /// Whether datagrams arrive intact if the device splits them and computes their checksums. True if the kernel does
    /// not offload.
    pub offloaded: bool,
}

/// Probes all paths at the same time. Blocks for some milliseconds if all packets arrive, and for seconds if packets
/// are lost.
///
/// # Errors
/// When the sockets cannot be opened or used.
pub fn examine(paths: &[ProbePath]) -> io::Result<Vec<ProbeResult>> {
    let mut probe_sockets = ProbeSockets::open()?;
    let mut searches: Vec<Search> = paths.iter().map(|way| Search::new(way.mtu)).collect();
    while searches.iter().any(|search| search.next().is_some()) {
        let requests: Vec<Request> = searches
            .iter()
            .zip(paths)
            .enumerate()
            .filter_map(|(index, (search, way))| Some(Request { index, to: way.to, bytes: search.next()? }))
            .collect();
        let mut answered: HashSet<usize> = HashSet::new();
        for _ in 0..ATTEMPTS {
            let open: Vec<_> =
                requests.iter().filter(|request| !answered.contains(&request.index)).copied().collect();
            if open.is_empty() {
                break;
            }
            answered.extend(probe_sockets.round(&open, TIMEOUT)?);
        }
        for Request { index, .. } in requests {
            if let Some(search) = searches.get_mut(index) {
                search.record(answered.contains(&index));
            }
        }
    }
    let bytes: Vec<u32> = searches.iter().map(|search| search.low).collect();
    let offloaded = offloaded(paths, &bytes);
    Ok(bytes.into_iter().zip(offloaded).map(|(bytes, offloaded)| ProbeResult { bytes, offloaded }).collect())
}

/// Binary search for the longest packet that passes: small, then full, then halves.
#[derive(Debug, Clone, Copy)]
struct Search {
    /// The longest size known to pass.
    low: u32,
    /// The longest size that may pass.
    high: u32,
    full: u32,
}

impl Search {
    fn new(full: u32) -> Self {
        Self { low: 0, high: full, full }
    }

    /// The next size to try. `None` when the result is exact to eight bytes, the unit to which MTUs are rounded.
    fn next(&self) -> Option<u32> {
        match (self.low, self.high) {
            (_, 0) => None,
            (0, _) => Some(SMALL.min(self.full)),
            (low, high) if low >= high => None,
            (_, high) if high == self.full => Some(high),
            (low, high) if high - low < 8 => None,
            (low, high) => Some(low + (high - low).div_ceil(2)),
        }
    }

    fn record(&mut self, passed: bool) {
        let Some(tried) = self.next() else { return };
        match (passed, self.low) {
            (true, _) => self.low = tried,
            // Even the small packet is lost.
            (false, 0) => self.high = 0,
            (false, _) => self.high = tried - 1,
        }
    }
}

/// For each path: whether two datagrams arrive that were passed to the kernel as one. True if the kernel does not
/// offload. False if `bytes`, the longest packet that passes, is 0.
fn offloaded(paths: &[ProbePath], bytes: &[u32]) -> Vec<bool> {
    let mut passed = vec![false; paths.len()];
    for _ in 0..ATTEMPTS {
        let open: Vec<usize> = (0..paths.len()).filter(|at| !passed[*at] && bytes[*at] > 0).collect();
        for together in open.chunks(MAX_SOCKETS) {
            let sent: Vec<_> =
                together.iter().map(|at| (*at, send_segments(paths[*at].to, bytes[*at]))).collect();
            let end = Instant::now() + TIMEOUT;
            for (at, sent) in sent {
                passed[at] =
                    sent.map_or_else(|error| cannot_offload(&error), |socket| is_refused(&socket, end));
            }
        }
    }
    passed
}

/// Whether the kernel refused to segment because it does not support `UDP_SEGMENT` or the device has no checksum
/// offload. Then no packets can be lost because of offload.
fn cannot_offload(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::ENOPROTOOPT | libc::EOPNOTSUPP))
}

fn send_segments(to: IpAddr, bytes: u32) -> io::Result<UdpSocket> {
    let (any, headers): (&str, u32) = if to.is_ipv4() { ("0.0.0.0", 28) } else { ("::", 48) };
    let segment = bytes.saturating_sub(headers).min(30_000);
    let socket = UdpSocket::bind((any, 0))?;
    // Otherwise the kernel refuses segments longer than the path MTU that a route has recorded.
    disable_fragmentation(&socket, to.is_ipv6())?;
    socket.connect(SocketAddr::new(to, DISCARD_PORT))?;
    let size = i32::try_from(segment).unwrap_or_default();
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::UdpGsoSegment, &size)?;
    socket.send(&vec![0; segment as usize * 2])?;
    Ok(socket)
}

fn is_refused(socket: &UdpSocket, end: Instant) -> bool {
    let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let waited = socket.set_read_timeout(Some(left));
    waited.is_ok() && socket.recv(&mut [0]).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(full: u32, passes: u32) -> (u32, usize) {
        let (mut search, mut steps) = (Search::new(full), 0);
        while let Some(tried) = search.next() {
            search.record(tried <= passes);
            steps += 1;
        }
        (search.low, steps)
    }

    #[test]
    fn the_path_mtu_is_found_in_few_steps() {
        assert_eq!(found(1450, 1450), (1450, 2));
        assert_eq!(found(1450, 9000), (1450, 2));
        assert_eq!(found(1450, 83), (0, 1));
        for passes in 84..1450 {
            let (low, steps) = found(1450, passes);
            assert!(low <= passes && passes - low < 8 && steps < 12, "{passes}: {low} in {steps}");
        }
        assert_eq!(found(0, 100), (0, 0));
        assert_eq!(found(60, 100), (60, 1));
    }
}
