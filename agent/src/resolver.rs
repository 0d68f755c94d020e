//! Look-ups of host names that users choose: the hosts of probes and hooks, and NFS servers.
//!
//! The resolver of the system blocks a thread for seconds if a name server does not respond. The look-up continues
//! after the timeout of a probe. So look-ups have threads of their own, and their number is limited. A namespace has at
//! most two look-ups, and all namespaces together have few second look-ups. So on a node with the default number of
//! pods, each namespace gets its look-up at once, even if all other namespaces use slow names.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};

#[cfg(test)]
use coracle_cri::fair_permits::FairPermit;
use coracle_cri::fair_permits::FairPermits;
use coracle_threads::Threads;
use tokio::net::TcpStream;

/// Maximum number of concurrent look-ups: one for each pod of a node (`--max-pods`, 110 by default), and the further
/// look-ups ([`MAX_FURTHER`]).
const MAX_LOOKUPS: usize = 128;
/// Maximum number of concurrent look-ups of one owner.
const MAX_OF_OWNER: usize = 2;
/// Maximum number of concurrent look-ups of owners that already have a look-up, of all owners together. So fewer than
/// 120 owners cannot occupy all look-ups.
const MAX_FURTHER: usize = 8;

static THREADS: Threads = Threads::new("look-ups");

static PERMITS: FairPermits = FairPermits::with_further(MAX_LOOKUPS, MAX_OF_OWNER, MAX_FURTHER);

/// Connects to a host that the owner, usually a namespace, has chosen.
pub(crate) async fn connect(owner: &str, host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses = resolve(owner, host, port).await?;
    TcpStream::connect(addresses.as_slice()).await
}

/// The addresses of a host. An IP address needs no look-up.
pub(crate) async fn resolve(owner: &str, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let host = host.to_owned();
    look_up(&PERMITS, owner, move || Ok((host.as_str(), port).to_socket_addrs()?.collect())).await
}

/// Occupies the look-ups of one owner.
#[cfg(test)]
pub(crate) async fn occupy(owner: &str) -> [FairPermit<'static>; MAX_OF_OWNER] {
    [PERMITS.take(owner).await, PERMITS.take(owner).await]
}

/// Runs a look-up on its own thread. The look-up keeps its permit until it ends, even if the caller no longer waits.
async fn look_up<T: Send + 'static>(
    permits: &'static FairPermits,
    owner: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let permit = permits.take(owner).await;
    let found = THREADS.result(move || {
        let found = work();
        drop(permit);
        found
    });
    found.await?
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use futures::FutureExt as _;

    use super::*;

    /// Time after which a test fails.
    const DEADLINE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn an_address_is_its_own_result() {
        for (host, address) in [("192.0.2.1", "192.0.2.1:80"), ("2001:db8::1", "[2001:db8::1]:80")] {
            assert_eq!(resolve("ns", host, 80).await.unwrap(), [address.parse().unwrap()]);
        }
    }

    #[tokio::test]
    async fn slow_names_of_one_namespace_leave_lookups_for_others() {
        static PERMITS: FairPermits = FairPermits::with_further(MAX_LOOKUPS, MAX_OF_OWNER, MAX_FURTHER);
        let mut releases = Vec::new();
        for _probe in 0..MAX_OF_OWNER {
            let (started, has_started) = tokio::sync::oneshot::channel::<()>();
            let (release, released) = mpsc::channel::<()>();
            releases.push(release);
            let probe = tokio::spawn(async move {
                let work = move || {
                    started.send(()).unwrap();
                    released.recv_timeout(DEADLINE).map_err(io::Error::other)
                };
                look_up(&PERMITS, "eve", work).await
            });
            tokio::time::timeout(DEADLINE, has_started).await.unwrap().unwrap();
            // The probe has reached its timeout. Its look-up continues.
            probe.abort();
        }
        let mut third = Box::pin(look_up(&PERMITS, "eve", || Ok(3)));
        // Later look-ups of another namespace overtake it.
        for _ in 0..10 {
            tokio::select! {
                biased;
                _found = &mut third => panic!("three look-ups of one namespace"),
                found = look_up(&PERMITS, "bob", || Ok(4)) => assert_eq!(found.unwrap(), 4),
            }
        }
        releases.into_iter().for_each(|release| release.send(()).unwrap());
        assert_eq!(third.await.unwrap(), 3);
        assert_eq!(look_up(&PERMITS, "eve", || Ok(5)).await.unwrap(), 5);
    }

    #[test]
    fn slow_names_in_all_other_pods_of_a_node_leave_a_lookup_for_a_namespace() {
        static PERMITS: FairPermits = FairPermits::with_further(MAX_LOOKUPS, MAX_OF_OWNER, MAX_FURTHER);
        let slow: Vec<String> = (1..110).map(|pod| format!("slow-{pod}")).collect();
        let take = |owner: &String| PERMITS.take(owner).now_or_never();
        let first: Vec<_> = slow.iter().filter_map(take).collect();
        let further: Vec<_> = slow.iter().filter_map(take).collect();
        assert_eq!((first.len(), further.len()), (slow.len(), MAX_FURTHER));
        assert!(PERMITS.take("bob").now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_lookup_that_panics_is_an_error_and_returns_its_permit() {
        static PERMITS: FairPermits = FairPermits::with_further(1, 1, 1);
        let panics = || -> io::Result<()> { panic!("a panic of a test") };
        assert!(look_up(&PERMITS, "bob", panics).await.is_err());
        assert_eq!(look_up(&PERMITS, "bob", || Ok(7)).await.unwrap(), 7);
    }
}
