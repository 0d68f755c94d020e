//! Look-ups of host names that users choose: the hosts of probes and hooks, and NFS servers.
//!
//! The resolver of the system blocks a thread for seconds if a name server does not respond. It continues after the timeout of
//! a probe. The node has few blocking threads, which all pods share. So the number of look-ups is limited, and the pods of one
//! namespace get half of them.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of concurrent look-ups: a quarter of the blocking threads.
const MAX_LOOKUPS: usize = 4;
/// Maximum number of concurrent look-ups of one owner.
const MAX_OF_OWNER: usize = 2;

static PLACES: LazyLock<Places> = LazyLock::new(Places::new);

/// The owners with look-ups, by name.
type Owners = Arc<Mutex<HashMap<String, Arc<Semaphore>>>>;

/// The places of concurrent look-ups.
struct Places {
    all: Arc<Semaphore>,
    owners: Owners,
}

/// The place of one look-up, or its place in the queue.
struct Place {
    owner: String,
    owners: Owners,
    permits: Vec<OwnedSemaphorePermit>,
}

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
    PLACES.look_up(owner, move || Ok((host.as_str(), port).to_socket_addrs()?.collect())).await
}

fn lock(owners: &Owners) -> MutexGuard<'_, HashMap<String, Arc<Semaphore>>> {
    owners.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Places ===

impl Places {
    fn new() -> Self {
        Self { all: Arc::new(Semaphore::new(MAX_LOOKUPS)), owners: Owners::default() }
    }

    /// Runs a look-up on a blocking thread. It occupies its place until it ends, even if the caller no longer waits.
    async fn look_up<T: Send + 'static>(
        &self,
        owner: &str,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let place = self.enter(owner).await;
        let found = tokio::task::spawn_blocking(move || {
            let _place = place;
            work()
        });
        found.await.unwrap_or_else(|failed| Err(io::Error::other(failed)))
    }

    /// Waits for a place.
    async fn enter(&self, owner: &str) -> Place {
        let own = Arc::new(Semaphore::new(MAX_OF_OWNER));
        let own = lock(&self.owners).entry(owner.to_owned()).or_insert(own).clone();
        // Made before the waits: a cancelled wait must remove the entry of the owner, too.
        let mut place = Place { owner: owner.to_owned(), owners: self.owners.clone(), permits: Vec::new() };
        // The semaphores are never closed.
        place.permits.extend(own.acquire_owned().await.ok());
        place.permits.extend(self.all.clone().acquire_owned().await.ok());
        place
    }
}

// === impl Place ===

impl Drop for Place {
    fn drop(&mut self) {
        self.permits.clear();
        let mut owners = lock(&self.owners);
        // Each other look-up of the owner holds one more reference.
        if owners.get(&self.owner).is_some_and(|own| Arc::strong_count(own) == 1) {
            owners.remove(&self.owner);
        }
    }
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
        let places = Arc::new(Places::new());
        let mut releases = Vec::new();
        for _probe in 0..MAX_OF_OWNER {
            let (started, has_started) = tokio::sync::oneshot::channel::<()>();
            let (release, released) = mpsc::channel::<()>();
            releases.push(release);
            let places = places.clone();
            let probe = tokio::spawn(async move {
                let work = move || {
                    started.send(()).unwrap();
                    released.recv_timeout(DEADLINE).map_err(io::Error::other)
                };
                places.look_up("eve", work).await
            });
            tokio::time::timeout(DEADLINE, has_started).await.unwrap().unwrap();
            // The probe has reached its timeout. Its look-up continues.
            probe.abort();
        }
        let third = tokio::time::timeout(Duration::from_millis(50), places.look_up("eve", || Ok(3)));
        assert!(third.await.is_err(), "three look-ups of one namespace");
        assert_eq!(places.look_up("bob", || Ok(4)).await.unwrap(), 4);
        releases.into_iter().for_each(|release| release.send(()).unwrap());
        assert_eq!(places.look_up("eve", || Ok(5)).await.unwrap(), 5);
    }
}
