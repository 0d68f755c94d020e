//! Look-ups of host names.
//!
//! The resolver of the system blocks a thread for seconds if a name server does not respond. So look-ups have threads
//! of their own, and their number and their duration are limited. One owner of requests can have only few look-ups at a
//! time.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    sync::LazyLock,
    time::Duration,
};

use coracle_threads::Threads;

use crate::{large_requests::LargeRequests, request_owner};

/// Maximum number of concurrent look-ups of all owners, and of one owner. So fewer than 32 owners cannot occupy all
/// look-ups.
const CONCURRENCY: [u32; 2] = [64, 2];
/// Maximum time for which a request waits for its look-up.
const TIMEOUT: Duration = Duration::from_secs(10);

static THREADS: Threads = Threads::new("look-ups");

static LOOKUPS: LazyLock<LargeRequests> = LazyLock::new(lookups);

/// The look-ups of an HTTP client. They have the limits of [`resolve`].
pub(crate) struct HttpLookups;

fn lookups() -> LargeRequests {
    let [all, own] = CONCURRENCY;
    LargeRequests::with_budget(all, own)
}

/// The addresses of a host. An IP address needs no look-up.
pub(crate) async fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let host = host.to_owned();
    let found = look_up(&LOOKUPS, move || Ok((host.as_str(), port).to_socket_addrs()?.collect()));
    let found = tokio::time::timeout(TIMEOUT, found).await;
    found
        .unwrap_or_else(|_elapsed| Err(io::Error::new(io::ErrorKind::TimedOut, "the look-up takes too long")))
}

/// Occupies the slots of all look-ups.
#[cfg(test)]
pub(crate) async fn occupy() -> Vec<crate::large_requests::LargeRequestPermit> {
    let [all, own] = CONCURRENCY;
    let mut permits = Vec::new();
    for owner in 0..all / own {
        permits.push(LOOKUPS.enter_units(&format!("resolver-{owner}"), own).await);
    }
    permits
}

/// Runs a look-up on its own thread. The look-up occupies its slot until it ends, even if the request no longer waits
/// for it.
async fn look_up<T: Send + 'static>(
    slots: &LargeRequests,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let slot = slots.enter_units(&request_owner::current(), 1).await;
    let found = THREADS.result(move || {
        let found = work();
        drop(slot);
        found
    });
    found.await?
}

// === impl HttpLookups ===

impl reqwest::dns::Resolve for HttpLookups {
    fn resolve(&self, name: reqwest::dns::Name) -> reqwest::dns::Resolving {
        Box::pin(async move {
            // The client replaces the port.
            let found = resolve(name.as_str(), 0).await?;
            let found: reqwest::dns::Addrs = Box::new(found.into_iter());
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(found)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use futures::FutureExt as _;

    use super::*;

    /// Time after which a test fails.
    const DEADLINE: Duration = Duration::from_secs(60);

    #[test]
    fn slow_names_of_many_owners_leave_a_lookup_for_another() {
        let places = lookups();
        let enter = |owner: String| places.enter_units(&owner, 2).now_or_never();
        let slow: Vec<_> = (1..32).filter_map(|owner| enter(format!("slow-{owner}"))).collect();
        assert_eq!(slow.len(), 31);
        assert!(enter("bob".to_owned()).is_some());
    }

    #[tokio::test]
    async fn an_address_is_its_own_result() {
        for (host, address) in [("192.0.2.1", "192.0.2.1:10250"), ("2001:db8::1", "[2001:db8::1]:10250")] {
            assert_eq!(resolve(host, 10250).await.unwrap(), [address.parse().unwrap()]);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_lookup_occupies_its_slot_after_its_request_has_ended() {
        let slots = Arc::new(lookups());
        let start = |owner: &str| {
            let (started, has_started) = mpsc::channel::<()>();
            let (release, released) = mpsc::channel::<()>();
            let slots = slots.clone();
            let lookup = async move {
                let work = move || {
                    started.send(()).unwrap();
                    released.recv_timeout(DEADLINE).map_err(io::Error::other)
                };
                look_up(&slots, work).await
            };
            (tokio::spawn(request_owner::scope(owner.into(), lookup)), has_started, release)
        };
        let (first, second) = (start("eve"), start("eve"));
        for (request, has_started, _release) in [&first, &second] {
            has_started.recv_timeout(DEADLINE).unwrap();
            request.abort();
        }
        let (third, of_bob) = (start("eve"), start("bob"));
        of_bob.1.recv_timeout(DEADLINE).unwrap();
        assert!(third.1.try_recv().is_err(), "three look-ups of one owner");
        for (_request, _has_started, release) in [&first, &second, &third, &of_bob] {
            release.send(()).unwrap();
        }
        third.0.await.unwrap().unwrap();
        of_bob.0.await.unwrap().unwrap();
    }
}
