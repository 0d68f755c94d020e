//! Look-ups of host names that users choose: the hosts of probes and hooks, and NFS servers.
//!
//! The resolver of the system blocks a thread for seconds if a name server does not respond. It continues after the timeout of
//! a probe. The node has few blocking threads, which all pods share. So the number of look-ups is limited. The pods of one
//! namespace get half of them, and only one namespace at a time has more than one.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};

#[cfg(test)]
use coracle_cri::fair_permits::FairPermit;
use coracle_cri::fair_permits::FairPermits;
use tokio::net::TcpStream;

/// Maximum number of concurrent look-ups: a quarter of the blocking threads.
const MAX_LOOKUPS: usize = 4;
/// Maximum number of concurrent look-ups of one owner.
const MAX_OF_OWNER: usize = 2;
/// Maximum number of concurrent look-ups of owners that have one already, of all owners together. So two owners with slow
/// names leave a look-up for a third.
const MAX_FURTHER: usize = 1;

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

/// Runs a look-up on a blocking thread. It keeps its permit until it ends, even if the caller no longer waits.
async fn look_up<T: Send + 'static>(
    permits: &'static FairPermits,
    owner: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let permit = permits.take(owner).await;
    let found = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work()
    });
    found.await.unwrap_or_else(|failed| Err(io::Error::other(failed)))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

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
        let third = tokio::time::timeout(Duration::from_millis(50), look_up(&PERMITS, "eve", || Ok(3)));
        assert!(third.await.is_err(), "three look-ups of one namespace");
        assert_eq!(look_up(&PERMITS, "bob", || Ok(4)).await.unwrap(), 4);
        releases.into_iter().for_each(|release| release.send(()).unwrap());
        assert_eq!(look_up(&PERMITS, "eve", || Ok(5)).await.unwrap(), 5);
    }

    #[tokio::test]
    async fn slow_names_of_two_namespaces_leave_a_lookup_for_a_third() {
        static PERMITS: FairPermits = FairPermits::with_further(MAX_LOOKUPS, MAX_OF_OWNER, MAX_FURTHER);
        let _of_eve = [PERMITS.take("eve").await, PERMITS.take("eve").await];
        let _of_mallory = PERMITS.take("mallory").await;
        let mut second = Box::pin(PERMITS.take("mallory"));
        assert!(futures::poll!(&mut second).is_pending(), "two look-ups of two namespaces");
        assert_eq!(look_up(&PERMITS, "bob", || Ok(6)).await.unwrap(), 6);
    }
}
