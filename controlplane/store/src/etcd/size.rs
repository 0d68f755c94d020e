//! The sizes of the databases of etcd's members. The sizes are requested when the metrics are read, and kept for the
//! maximum age.

use std::time::Duration;

use futures::future::join_all;
use tokio::{sync::Mutex, time::Instant};
use tonic::transport::Channel;

use super::{
    api::{StatusRequest, maintenance_client::MaintenanceClient},
    channels::Channels,
    unsigned,
};
use crate::MemberSize;

/// Maximum time for the response of a member, as upstream.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The last sizes.
pub(super) struct Sizes {
    /// Maximum age of the sizes. `None` if no member is asked.
    max_age: Option<Duration>,
    last: Mutex<Option<Measured>>,
}

/// The sizes of all members at one time.
struct Measured {
    at: Instant,
    sizes: Vec<MemberSize>,
}

// === impl Sizes ===

impl Sizes {
    pub(super) fn new(max_age: Option<Duration>) -> Self {
        Self { max_age, last: Mutex::new(None) }
    }

    /// The sizes, at most as old as the maximum age.
    pub(super) async fn get(&self, channels: &Channels) -> Vec<MemberSize> {
        let Some(max_age) = self.max_age else { return Vec::new() };
        let mut last = self.last.lock().await;
        if let Some(measured) = last.as_ref().filter(|measured| measured.at.elapsed() < max_age) {
            return measured.sizes.clone();
        }
        let sizes = of_members(channels.servers(), &channels.all()).await;
        *last = Some(Measured { at: Instant::now(), sizes: sizes.clone() });
        sizes
    }
}

/// The sizes of the members at these channels, in the order of the channels.
async fn of_members(servers: &[String], channels: &[Channel]) -> Vec<MemberSize> {
    let sizes = servers.iter().zip(channels).map(|(server, channel)| {
        let (endpoint, channel) = (server.clone(), channel.clone());
        async move { MemberSize { endpoint, bytes: size(channel).await } }
    });
    join_all(sizes).await
}

async fn size(channel: Channel) -> Option<u64> {
    let mut client = MaintenanceClient::new(channel);
    let response = tokio::time::timeout(TIMEOUT, client.status(StatusRequest {})).await;
    match response {
        Ok(Ok(status)) => Some(unsigned(status.into_inner().db_size)),
        Ok(Err(error)) => {
            tracing::debug!(error = error.message(), "cannot read the size of etcd's database");
            None
        }
        Err(_elapsed) => None,
    }
}
