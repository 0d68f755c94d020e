//! Connections to kubelets and to other servers of the cluster.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::capacity::SharedCapacity;
use super::{InFlight, owner};
use crate::authn::User;
use crate::error::{ApiError, Result};

/// Maximum connections to one kubelet for logs, streams and proxied requests. A kubelet accepts a limited number of
/// connections from the API server, and one user must not use up the connections of other users.
pub(super) const MAX_STREAMS_OF_NODE: usize = 512;
/// Key of the connections to pods, Services and aggregated servers in the map of kubelet connections. No node has an
/// empty name.
const PROXIED: &str = "";
/// Key of the connections to all kubelets in this map. No node has this name.
const ALL_KUBELETS: &str = " ";

/// The permission for a connection to a server of the cluster. Dropping it releases the slot. Empty for users without
/// a limit.
#[derive(Default)]
pub(crate) struct StreamPermit {
    _streams: Vec<OwnedStream>,
}

struct OwnedStream {
    streams: Arc<Mutex<HashMap<String, SharedCapacity>>>,
    node: String,
    owner: String,
}

// === impl InFlight ===

impl InFlight {
    /// Reserves a connection to the kubelet of a node.
    pub(crate) fn stream(&self, user: &User, node: &str) -> Result<StreamPermit> {
        let limits = [(ALL_KUBELETS, self.max_kubelet_clients), (node, MAX_STREAMS_OF_NODE)];
        self.connection(user, &limits)
    }

    /// Reserves a connection to a pod, a Service or an aggregated server.
    pub(crate) fn proxied(&self, user: &User) -> Result<StreamPermit> {
        self.connection(user, &[(PROXIED, self.max_proxied)])
    }

    /// Reserves a connection in each of the limits: a key of the map, and the maximum number of connections.
    fn connection(&self, user: &User, limits: &[(&str, usize)]) -> Result<StreamPermit> {
        if user.is_in("system:masters") {
            return Ok(StreamPermit::default());
        }
        let streams = limits.iter().map(|(key, most)| self.owned_stream(owner(&user.name), key, *most));
        // If one limit is reached, the reservations in the other limits are dropped.
        Ok(StreamPermit { _streams: streams.collect::<Result<_>>()? })
    }

    fn owned_stream(&self, owner: &str, key: &str, most: usize) -> Result<OwnedStream> {
        let mut nodes = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if !nodes.entry(key.to_owned()).or_insert_with(|| SharedCapacity::new(most)).reserve(owner, 1) {
            return Err(ApiError::too_many_requests());
        }
        drop(nodes);
        Ok(OwnedStream { streams: self.streams.clone(), node: key.to_owned(), owner: owner.to_owned() })
    }
}

// === impl OwnedStream ===

impl Drop for OwnedStream {
    fn drop(&mut self) {
        let mut nodes = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(of_node) = nodes.get(&self.node) else { return };
        of_node.release(&self.owner, 1);
        if of_node.lock().total == 0 {
            nodes.remove(&self.node);
        }
    }
}
