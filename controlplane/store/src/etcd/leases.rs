//! Leases of etcd for entries with a time to live. As in kube-apiserver, entries that are written within a short
//! interval share one lease. A lease for each event would cost etcd more than the event.

use std::{collections::HashMap, time::Duration};

use tokio::{sync::Mutex, time::Instant};

use super::{api::LeaseGrantRequest, connection::Connection};
use crate::Error;

/// Maximum time during which a lease is attached to new entries. An entry can exceed its time to live by at most this
/// time.
const MAX_SHARED: Duration = Duration::from_secs(60);
/// Maximum number of entries of a lease.
const MAX_ENTRIES: usize = 1000;

/// The current lease of each time to live.
#[derive(Default)]
pub(super) struct Leases(Mutex<HashMap<Duration, Lease>>);

struct Lease {
    id: i64,
    until: Instant,
    entries: usize,
}

// === impl Leases ===

impl Leases {
    /// A lease that ends after `ttl` or a little later, in whole seconds.
    pub(super) async fn of(&self, connection: &Connection, ttl: Duration) -> Result<i64, Error> {
        let mut leases = self.0.lock().await;
        if let Some(lease) = leases.get_mut(&ttl)
            && lease.until > Instant::now()
            && lease.entries < MAX_ENTRIES
        {
            lease.entries += 1;
            return Ok(lease.id);
        }
        let shared = MAX_SHARED.min(ttl / 20);
        let seconds = (ttl + shared).as_secs().max(1);
        let request = LeaseGrantRequest { ttl: i64::try_from(seconds).unwrap_or(i64::MAX) };
        let until = Instant::now() + shared;
        let id = connection.grant(request).await?.id;
        leases.insert(ttl, Lease { id, until, entries: 1 });
        Ok(id)
    }

    /// Removes a lease that etcd does not know. The next entry gets a new lease.
    pub(super) async fn remove(&self, ttl: Duration) {
        self.0.lock().await.remove(&ttl);
    }
}
