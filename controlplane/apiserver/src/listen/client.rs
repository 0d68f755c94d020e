//! The client of a connection, and the memory of its requests until they are authenticated.

use std::sync::Arc;

use coracle_connections::ConnectionPermit;
use http::{HeaderValue, Request};
use http_body::Body;

use super::UNCERTIFIED_WINDOW;
use crate::{
    authn::PeerCertificate,
    error::{ApiError, Result},
    in_flight::InFlight,
    reply::{self, Reply},
    server::PeerAddress,
    short_lived::ShortLived,
};

/// Bytes that a request takes besides its header until it is authenticated: for its stream, its task and its handler.
pub(super) const TASK_BYTES: usize = 8 << 10;
/// Bytes that a header field takes besides its text.
const FIELD_BYTES: usize = 128;

/// The properties that all requests of a connection share.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) certificate: Option<PeerCertificate>,
    pub(super) address: Option<PeerAddress>,
    pub(super) permit: Arc<ConnectionPermit>,
}

/// Maximum bytes of memory that a request takes before its handler reads the body. `buffered` bytes of its header are
/// already counted. The target and the values of an HTTP/1.1 header are parts of the connection's buffer. Names are
/// copies.
fn unread_size<B: Body>(request: &Request<B>, buffered: usize) -> usize {
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let headers = request.headers();
    let values: usize = headers.values().map(HeaderValue::len).sum();
    let names: usize = headers.iter().map(|(name, _value)| name.as_str().len() + FIELD_BYTES).sum();
    let header = (target + values).saturating_sub(buffered) + names;
    let length = request.body().size_hint().upper().and_then(|length| usize::try_from(length).ok());
    let body = length.unwrap_or(usize::MAX).min(UNCERTIFIED_WINDOW as usize);
    TASK_BYTES + header + body
}

/// The response if there is no memory for a request.
pub(super) fn refusal(error: &ApiError) -> Reply {
    let mut reply = reply::failure(error);
    reply.extensions_mut().insert(ShortLived::default());
    reply
}

// === impl Client ===

impl Client {
    /// Attaches the client to a request, and reserves memory until the request is authenticated. A client with a
    /// certificate needs no such memory: its authentication does not wait. `buffered` bytes of the header are already
    /// counted.
    ///
    /// # Errors
    /// 429 if other requests that are not authenticated yet have reserved the memory.
    pub(super) fn attach<B: Body>(
        &self,
        request: &mut Request<B>,
        in_flight: &InFlight,
        buffered: usize,
    ) -> Result<()> {
        match &self.certificate {
            Some(certificate) => {
                request.extensions_mut().insert(certificate.clone());
            }
            None => {
                let memory =
                    in_flight.unauthenticated(self.permit.source(), unread_size(request, buffered))?;
                request.extensions_mut().insert(Arc::new(memory));
            }
        }
        if let Some(address) = self.address {
            request.extensions_mut().insert(address);
        }
        request.extensions_mut().insert(self.permit.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use bytes::Bytes;
    use coracle_connections::{Connections, Limits};
    use http_body::Frame;
    use http_body_util::{Empty, Full, StreamBody};

    use super::*;
    use crate::in_flight::{BodyMemory, GRANTED_WITHOUT_CREDENTIALS, MAX_IN_FLIGHT};

    fn client(port: &Connections, last: u8) -> Client {
        let permit = Arc::new(port.admit(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))).unwrap());
        Client { certificate: None, address: None, permit }
    }

    #[test]
    fn requests_that_are_not_authenticated_yet_have_a_limited_memory() {
        let in_flight = InFlight::new(MAX_IN_FLIGHT);
        let limits = Limits { total: 8, per_source: 4, unauthenticated: 8, unauthenticated_per_source: 4 };
        let port = Connections::new(limits);
        let (eve, bob) = (client(&port, 1), client(&port, 2));
        let attached = |client: &Client| {
            let field = "x".repeat(56 << 10);
            let mut request = Request::get("/").header("a", field).body(Empty::<Bytes>::new()).unwrap();
            client.attach(&mut request, &in_flight, 0).map(|()| request)
        };
        let mut of_eve: Vec<_> = std::iter::from_fn(|| attached(&eve).ok()).collect();
        assert!((700..800).contains(&of_eve.len()), "{}", of_eve.len());
        assert_eq!(attached(&eve).err().map(|error| error.code), Some(429));
        assert!(attached(&bob).is_ok(), "another source");
        // Authentication removes the memory from the request.
        of_eve[0].extensions_mut().remove::<Arc<BodyMemory>>();
        assert!(attached(&eve).is_ok());
    }

    #[test]
    fn a_header_in_the_buffer_of_its_connection_counts_once() {
        let field = "x".repeat(56 << 10);
        let request = Request::get("/").header("a", field).body(Empty::<Bytes>::new()).unwrap();
        assert_eq!(unread_size(&request, 96 << 10), TASK_BYTES + FIELD_BYTES + 1);
        assert_eq!(unread_size(&request, 0) - unread_size(&request, 16 << 10), 16 << 10);
    }

    #[test]
    fn an_unread_body_counts_up_to_the_window_that_the_client_may_send() {
        let window = UNCERTIFIED_WINDOW as usize;
        assert!(unread_size(&Request::new(Empty::<Bytes>::new()), 0) < window / 4);
        assert!(
            (20_000..40_000)
                .contains(&unread_size(&Request::new(Full::new(Bytes::from(vec![0_u8; 20_000]))), 0))
        );
        let large = unread_size(&Request::new(Full::new(Bytes::from(vec![0_u8; 3 << 20]))), 0);
        assert!(large < window * 2);
        assert!(large < GRANTED_WITHOUT_CREDENTIALS, "each source may send a body of any size");
        let unknown = futures::stream::pending::<std::io::Result<Frame<Bytes>>>();
        assert!(unread_size(&Request::new(StreamBody::new(unknown)), 0) > window);
    }
}
