//! The memory of an incomplete request header.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_connections::ConnectionPermit;

use super::header_block::HeaderBlock;
use crate::{
    error::Result,
    in_flight::{BodyMemory, InFlight},
};

/// Maximum bytes of a header that do not count. Each connection has a buffer of this size.
const SMALL_HEADER: usize = 8 << 10;
/// Memory for each received byte: a full buffer is replaced by a buffer of twice the size.
const PER_RECEIVED_BYTE: usize = 2;
/// Bytes that are reserved at once.
const STEP: usize = 16 << 10;

/// The memory of the request header that a connection receives. The memory is counted for the source of the connection,
/// like the memory of requests that are not authenticated yet.
///
/// An HTTP/1.1 connection keeps its buffer, which is as large as its longest header. So the memory counts until the
/// connection has received a byte after its client has authenticated.
pub(super) struct HeaderMemory {
    in_flight: Arc<InFlight>,
    permit: Arc<ConnectionPermit>,
    incomplete: Mutex<Incomplete>,
}

#[derive(Default)]
struct Incomplete {
    /// Finds the headers in the frames of HTTP/2. `None` with HTTP/1.1.
    block: Option<HeaderBlock>,
    received: usize,
    /// Reservations of [`STEP`] bytes each.
    reserved: Vec<BodyMemory>,
}

// === impl HeaderMemory ===

impl HeaderMemory {
    /// A new connection, which has received nothing.
    pub(super) fn new(in_flight: Arc<InFlight>, permit: Arc<ConnectionPermit>, is_http2: bool) -> Self {
        let incomplete = Incomplete { block: is_http2.then(HeaderBlock::default), ..Incomplete::default() };
        Self { in_flight, permit, incomplete: Mutex::new(incomplete) }
    }

    /// Reserves memory for received bytes of a header. `is_between` means that the connection has no running request.
    /// With HTTP/1.1, the bytes then belong to a header; otherwise the bytes are ignored.
    ///
    /// # Errors
    /// 429 if other headers and requests use all the memory. The caller must close the connection.
    pub(super) fn received(&self, bytes: &[u8], is_between: bool) -> Result<()> {
        let mut incomplete = self.lock();
        match &mut incomplete.block {
            Some(block) => incomplete.received = block.read(bytes),
            None if is_between => incomplete.received += bytes.len(),
            None => return Ok(()),
        }
        let needed = incomplete.received.saturating_sub(SMALL_HEADER) * PER_RECEIVED_BYTE;
        if needed == 0 {
            self.release(&mut incomplete);
        }
        while incomplete.reserved.len() * STEP < needed {
            let memory = self.in_flight.unauthenticated(self.permit.source(), STEP)?;
            incomplete.reserved.push(memory);
        }
        Ok(())
    }

    /// Records that the header is complete. Returns the bytes that stay reserved for the buffer, which contains the
    /// header. The request has memory of its own for the other bytes.
    pub(super) fn complete(&self) -> usize {
        let mut incomplete = self.lock();
        incomplete.received = 0;
        self.release(&mut incomplete);
        incomplete.reserved.len() * STEP
    }

    /// Releases the memory. With HTTP/1.1, the memory stays reserved until the client has authenticated, because the
    /// connection keeps its buffer.
    fn release(&self, incomplete: &mut Incomplete) {
        if !incomplete.reserved.is_empty() && (incomplete.block.is_some() || self.permit.is_authenticated()) {
            incomplete.reserved.clear();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Incomplete> {
        self.incomplete.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use coracle_connections::{Connections, Limits, UNCERTIFIED_HEADER};

    use super::*;
    use crate::in_flight::MAX_IN_FLIGHT;

    const PIECE: [u8; 1024] = [b'x'; 1024];

    /// A port whose limits are above the number of connections in these tests.
    fn port() -> Connections {
        let [total, per_source, unauthenticated, unauthenticated_per_source] = [4096; 4];
        Connections::new(Limits { total, per_source, unauthenticated, unauthenticated_per_source })
    }

    fn permit(port: &Connections, last: u8) -> Arc<ConnectionPermit> {
        Arc::new(port.admit(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))).unwrap())
    }

    fn header(in_flight: &Arc<InFlight>, permit: Arc<ConnectionPermit>) -> HeaderMemory {
        HeaderMemory::new(in_flight.clone(), permit, false)
    }

    /// Whether the connection gets memory for an incomplete header of the maximum length.
    fn is_received(header: &HeaderMemory) -> bool {
        (0..UNCERTIFIED_HEADER / PIECE.len()).all(|_| header.received(&PIECE, true).is_ok())
    }

    /// Opens connections of a source, each with an incomplete header, until a connection gets no memory.
    fn incomplete(in_flight: &Arc<InFlight>, port: &Connections, last: u8) -> Vec<HeaderMemory> {
        let headers = std::iter::repeat_with(|| header(in_flight, permit(port, last)));
        headers.take_while(is_received).collect()
    }

    #[test]
    fn incomplete_headers_of_a_source_leave_memory_for_others() {
        let (in_flight, port) = (Arc::new(InFlight::new(MAX_IN_FLIGHT)), port());
        let of_eve = incomplete(&in_flight, &port, 1);
        assert!((400..500).contains(&of_eve.len()), "{}", of_eve.len());
        assert!(!incomplete(&in_flight, &port, 2).is_empty(), "another source");
        let [short, long] = [1, 1].map(|last| header(&in_flight, permit(&port, last)));
        assert!((0..8).all(|_| short.received(&PIECE, true).is_ok()), "a short header needs no memory");
        assert!(!is_received(&long));
        drop(of_eve);
        long.complete();
        assert!(is_received(&long));
    }

    #[test]
    fn a_complete_header_releases_its_memory() {
        let (in_flight, port) = (Arc::new(InFlight::new(MAX_IN_FLIGHT)), port());
        let header = header(&in_flight, permit(&port, 1));
        for _ in 0..1000 {
            assert!(is_received(&header));
            header.complete();
        }
        assert!((0..1 << 17).all(|_| header.received(&PIECE, false).is_ok()), "a body is no header");
    }

    #[test]
    fn the_buffer_of_a_connection_counts_until_its_client_is_authenticated() {
        let (in_flight, port) = (Arc::new(InFlight::new(MAX_IN_FLIGHT)), port());
        let eve = permit(&port, 1);
        let buffer = header(&in_flight, eve.clone());
        assert!(is_received(&buffer));
        let reserved = || buffer.lock().reserved.len();
        let all = reserved();
        assert!(all > 0);
        assert_eq!(buffer.complete(), all * STEP);
        assert!(buffer.received(&PIECE, true).is_ok());
        assert_eq!(reserved(), all, "the next header uses the same buffer");
        eve.set_authenticated();
        assert!(buffer.received(&PIECE, true).is_ok());
        assert_eq!(reserved(), 0);
        assert!(is_received(&buffer));
        assert_eq!(buffer.complete(), 0);
        assert_eq!(reserved(), 0, "the client is known");
    }

    #[test]
    fn an_incomplete_header_of_http2_has_memory() {
        let (in_flight, port) = (Arc::new(InFlight::new(MAX_IN_FLIGHT)), port());
        let incomplete = || {
            let header = HeaderMemory::new(in_flight.clone(), permit(&port, 1), true);
            let begin = [&[b'p'; 24][..], &[0, 0xff, 0xff, 1, 0, 0, 0, 0, 1]].concat();
            (header.received(&begin, false).is_ok() && is_received(&header)).then_some(header)
        };
        let held: Vec<_> = std::iter::from_fn(incomplete).collect();
        assert!((400..500).contains(&held.len()), "{}", held.len());
    }
}
