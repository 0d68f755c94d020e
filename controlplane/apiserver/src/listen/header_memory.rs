//! The memory of an incomplete HTTP/1.1 request header.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_connections::Source;

use crate::{
    error::Result,
    in_flight::{BodyMemory, InFlight},
};

/// Maximum bytes of a header that do not count. Each connection has a buffer of this size.
const SMALL_HEADER: usize = 8 << 10;
/// Memory for each received byte: a full buffer is replaced by one of twice its size.
const PER_RECEIVED_BYTE: usize = 2;
/// Bytes that are reserved at once.
const STEP: usize = 16 << 10;

/// The memory of the request header that a connection receives. It belongs to the source of the connection, like that of
/// requests that are not authenticated yet.
pub(super) struct HeaderMemory {
    in_flight: Arc<InFlight>,
    source: Source,
    incomplete: Mutex<Incomplete>,
}

#[derive(Default)]
struct Incomplete {
    received: usize,
    /// Parts of [`STEP`] bytes.
    reserved: Vec<BodyMemory>,
}

// === impl HeaderMemory ===

impl HeaderMemory {
    /// A new connection, which has received nothing.
    pub(super) fn new(in_flight: Arc<InFlight>, source: Source) -> Self {
        Self { in_flight, source, incomplete: Mutex::default() }
    }

    /// Reserves memory for further received bytes of a header.
    ///
    /// # Errors
    /// 429 if other headers and requests have the memory. The connection must be closed.
    pub(super) fn received(&self, bytes: usize) -> Result<()> {
        let mut incomplete = self.lock();
        incomplete.received += bytes;
        let needed = incomplete.received.saturating_sub(SMALL_HEADER) * PER_RECEIVED_BYTE;
        while incomplete.reserved.len() * STEP < needed {
            let memory = self.in_flight.unauthenticated(self.source, STEP)?;
            incomplete.reserved.push(memory);
        }
        Ok(())
    }

    /// Releases the memory: the header is complete, and its request has memory of its own.
    pub(super) fn complete(&self) {
        *self.lock() = Incomplete::default();
    }

    fn lock(&self) -> MutexGuard<'_, Incomplete> {
        self.incomplete.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use coracle_connections::UNCERTIFIED_HEADER;

    use super::*;
    use crate::in_flight::MAX_IN_FLIGHT;

    /// Headers of a source without an end, as many as get memory.
    fn incomplete(in_flight: &Arc<InFlight>, source: Source) -> Vec<HeaderMemory> {
        let received = || {
            let header = HeaderMemory::new(in_flight.clone(), source);
            let pieces = UNCERTIFIED_HEADER / 1024;
            (0..pieces).all(|_| header.received(1024).is_ok()).then_some(header)
        };
        std::iter::from_fn(received).collect()
    }

    #[test]
    fn incomplete_headers_of_a_source_leave_memory_for_others() {
        let in_flight = Arc::new(InFlight::new(MAX_IN_FLIGHT));
        let of_eve = incomplete(&in_flight, 1);
        assert!((400..500).contains(&of_eve.len()), "{}", of_eve.len());
        assert!(!incomplete(&in_flight, 2).is_empty(), "another source");
        let short = HeaderMemory::new(in_flight.clone(), 1);
        assert!(short.received(SMALL_HEADER).is_ok(), "a short header needs no memory");
        let long = HeaderMemory::new(in_flight, 1);
        assert!(long.received(UNCERTIFIED_HEADER).is_err());
        of_eve[0].complete();
        drop(of_eve);
        long.complete();
        assert!(long.received(UNCERTIFIED_HEADER).is_ok());
    }

    #[test]
    fn a_complete_header_releases_its_memory() {
        let in_flight = Arc::new(InFlight::new(MAX_IN_FLIGHT));
        let header = HeaderMemory::new(in_flight, 1);
        for _ in 0..10_000 {
            assert!(header.received(UNCERTIFIED_HEADER).is_ok());
            header.complete();
        }
    }
}
