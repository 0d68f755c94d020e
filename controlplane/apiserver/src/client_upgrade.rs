//! The upgrade of a client's connection to another protocol.

use std::sync::Arc;

use coracle_connections::ConnectionPermit;
use http::Request;
use hyper::upgrade::OnUpgrade;

/// The client's connection after a response that switches protocols.
pub(crate) struct ClientUpgrade {
    pub(crate) on: OnUpgrade,
    /// The permit of the connection. `None` for requests from this process.
    pub(crate) permit: Option<Arc<ConnectionPermit>>,
}

// === impl ClientUpgrade ===

impl ClientUpgrade {
    /// Removes the upgrade from a request.
    pub(crate) fn of<B>(request: &mut Request<B>) -> Self {
        let permit = request.extensions().get::<Arc<ConnectionPermit>>().cloned();
        Self { on: hyper::upgrade::on(request), permit }
    }
}
