//! Memory of bodies, selectors and requests.

use super::capacity::SharedCapacity;
use crate::error::{ApiError, Result};

/// Bytes of a body that are always accepted.
const SMALL_BODY_BYTES: usize = 64 << 10;

/// Memory for the body of one request or response, for the selectors of a watch, or for a request that is not
/// authenticated yet. Dropping it releases the memory.
#[derive(Default)]
pub(crate) struct BodyMemory {
    /// The shared memory and the owner of this part.
    shared: Option<(SharedCapacity, String)>,
    bytes: usize,
}

// === impl BodyMemory ===

impl BodyMemory {
    /// Memory of an owner. No bytes are reserved until [`BodyMemory::grow`].
    pub(super) fn of(capacity: &SharedCapacity, owner: &str) -> Self {
        Self { shared: Some((capacity.clone(), owner.to_owned())), bytes: 0 }
    }

    /// The owner. `None` if the memory has no limit.
    pub(super) fn owner(&self) -> Option<&str> {
        self.shared.as_ref().map(|(_, owner)| owner.as_str())
    }

    /// Number of bytes that are reserved.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reserves memory for a body that has grown to `bytes` bytes.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<()> {
        let Some((memory, owner)) = &self.shared else { return Ok(()) };
        if bytes <= SMALL_BODY_BYTES.max(self.bytes) {
            return Ok(());
        }
        // The reservation grows in steps of a quarter of a megabyte, so that the lock is taken rarely.
        let wanted = bytes.next_multiple_of(256 << 10);
        if !memory.reserve(owner, wanted - self.bytes) {
            return Err(ApiError::too_many_requests());
        }
        self.bytes = wanted;
        Ok(())
    }
}

impl Drop for BodyMemory {
    fn drop(&mut self) {
        if let Some((memory, owner)) = &self.shared
            && self.bytes > 0
        {
            memory.release(owner, self.bytes);
        }
    }
}

/// Reserves memory for an owner.
///
/// # Errors
/// `TooManyRequests` if too little memory is free.
pub(super) fn reserved(memory: &SharedCapacity, owner: &str, bytes: usize) -> Result<BodyMemory> {
    if bytes == 0 {
        return Ok(BodyMemory::default());
    }
    if !memory.reserve(owner, bytes) {
        return Err(ApiError::too_many_requests());
    }
    Ok(BodyMemory { shared: Some((memory.clone(), owner.to_owned())), bytes })
}
