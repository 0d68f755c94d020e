//! The caller of a request from the network, and the start of its audit record.

use std::sync::Arc;

use coracle_connections::ConnectionPermit;
use http::{HeaderValue, header};

use super::{Apiserver, PeerAddress, request_seats};
use crate::{
    audit::{Received, Record},
    authn::{PeerCertificate, ReceivedRequest, User, presented},
    error::{ApiError, Result},
    freshness, in_flight,
    reply::{self, Reply},
    request::RequestInfo,
    request_owner,
};

impl Apiserver {
    /// The caller of a request from the network. Counts the attempt, and removes the token from the headers. Releases
    /// the memory that the request has until its authentication.
    pub(super) async fn network_caller(&self, parts: &mut http::request::Parts) -> Result<User> {
        let identity = request_owner::scope(request_seats::source(&parts.extensions), self.identify(parts));
        let identified = self.state.metrics.access.authentication(identity).await;
        let is_known = identified.as_ref().is_ok_and(|user| !user.is_anonymous());
        request_seats::identified(&self.state.in_flight, &mut parts.extensions, is_known);
        presented::remove_token(&mut parts.headers);
        identified
    }

    /// Authenticates a request from the network.
    async fn identify(&self, parts: &http::request::Parts) -> Result<User> {
        let state = &self.state;
        let certificate = parts.extensions.get::<PeerCertificate>();
        let received = ReceivedRequest {
            headers: &parts.headers,
            path: parts.uri.path(),
            address: parts.extensions.get::<PeerAddress>().map(|peer| peer.0),
        };
        if let Some(remaining) = certificate.and_then(PeerCertificate::remaining) {
            state.metrics.presented_certificate(remaining);
        }
        let caller = state.authenticators.identify(&state.cache, certificate, &received).await?;
        freshness::check_credential(&*state.store, &caller)?;
        if let Some(permit) =
            parts.extensions.get::<Arc<ConnectionPermit>>().filter(|_| !caller.is_anonymous())
        {
            permit.set_authenticated();
        }
        Ok(caller)
    }

    /// The response to a request that authentication refuses.
    pub(super) fn unauthenticated(&self, error: &ApiError) -> Reply {
        let mut reply = reply::failure(error);
        if error.code == 401 && self.state.authenticators.has_passwords() {
            let challenge = HeaderValue::from_static("Basic realm=\"kubernetes-master\"");
            reply.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
        }
        reply
    }

    /// Begins the audit record of a request. If its first event is required but cannot be recorded, the result has an
    /// error instead of the caller.
    pub(super) async fn record(
        &self,
        parts: &http::request::Parts,
        info: &RequestInfo,
        caller: Result<User>,
    ) -> (Result<User>, Option<Arc<Record>>) {
        let Some(auditor) = &self.state.auditor else { return (caller, None) };
        let begun = {
            let user = caller.as_ref().ok();
            // If all anonymous clients were one owner, one client could delay the probes of the others.
            let owner = user.filter(|user| !user.is_anonymous()).map_or_else(
                || request_seats::source(&parts.extensions),
                |user| in_flight::queued_owner(user).into(),
            );
            let peer = parts.extensions.get::<PeerAddress>().map(|peer| peer.0);
            let received = Received { user, info, uri: &parts.uri, headers: &parts.headers, peer, owner };
            auditor.begin(&received).await
        };
        match begun {
            Ok(record) => (caller, record),
            Err(error) => (Err(error), None),
        }
    }
}
