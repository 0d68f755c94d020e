//! Accepts the `:authority` of gRPC clients that send the path of a Unix socket.
//!
//! Clients that are built on the C core (Python, C++, Ruby) and Go clients in older device plugins send the path,
//! usually percent-encoded. RFC 9110 allows neither a percent sign nor a slash in a host, so the HTTP library resets
//! the stream with PROTOCOL_ERROR. Servers in other languages accept such a value, and no server of a Unix socket uses
//! the value. So these characters are replaced before the library reads them.
//!
//! The bytes are changed in place: no frame and no entry of the HPACK table changes its size, and nothing is buffered.
//! The C core sends the header as plain text. Go clients encode it with the Huffman code, in which each character and
//! its replacement have codes of the same length.

mod hpack;

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;
use tonic::transport::server::Connected;

use self::hpack::Block;

/// Length of the connection preface of a client (RFC 9113, section 3.4).
const PREFACE: usize = 24;
/// Length of a frame's header (RFC 9113, section 4.1).
const HEADER: usize = 9;
/// Types and flags of frames (RFC 9113, section 6).
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// A client's connection.
#[derive(Debug)]
pub struct Stream {
    inner: UnixStream,
    frames: Frames,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Parser state for the bytes that a client sends.
#[derive(Debug)]
struct Frames {
    /// Number of following bytes to skip: of the preface, of a frame's payload or of its padding.
    skip: usize,
    header: [u8; HEADER],
    /// Number of received bytes of the header.
    received: usize,
    part: Part,
    block: Block,
}

/// The next part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Header,
    /// The byte with the padding's length; `left` bytes of the frame follow it.
    Padding {
        left: usize,
        priority: bool,
    },
    Fragment {
        left: usize,
        padding: usize,
    },
}

// === impl Stream ===

impl Stream {
    /// Accepts the requests of a client.
    pub fn new(inner: UnixStream) -> Self {
        Self { inner, frames: Frames::new(), _permit: None }
    }

    /// Returns the permit when the connection ends. The semaphore limits the number of clients.
    #[must_use]
    pub fn with_permit(self, permit: OwnedSemaphorePermit) -> Self {
        Self { _permit: Some(permit), ..self }
    }
}

impl Connected for Stream {
    type ConnectInfo = <UnixStream as Connected>::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.inner).poll_read(context, buffer))?;
        if let Some(new) = buffer.filled_mut().get_mut(before..) {
            this.frames.process(new);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(context)
    }
}

// === impl Frames ===

impl Frames {
    fn new() -> Self {
        Self { skip: PREFACE, header: [0; HEADER], received: 0, part: Part::Header, block: Block::default() }
    }

    /// Processes the next bytes of the client. They can be divided at any position.
    fn process(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let taken = self.process_part(bytes);
            bytes = bytes.get_mut(taken..).unwrap_or_default();
        }
    }

    /// Processes one part. Returns the number of processed bytes, at least one.
    fn process_part(&mut self, bytes: &mut [u8]) -> usize {
        if self.skip > 0 {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            return skipped;
        }
        match self.part {
            Part::Header => {
                let taken = (HEADER - self.received).min(bytes.len());
                self.header[self.received..self.received + taken].copy_from_slice(&bytes[..taken]);
                self.received += taken;
                if self.received == HEADER {
                    self.received = 0;
                    self.begin_payload();
                }
                taken
            }
            Part::Padding { left, priority } => {
                let padding = usize::from(bytes[0]);
                self.begin_fragment(left, padding, priority);
                1
            }
            Part::Fragment { left, padding } => {
                let taken = left.min(bytes.len());
                self.block.process(&mut bytes[..taken]);
                self.set_fragment(left - taken, padding);
                taken
            }
        }
    }

    fn begin_payload(&mut self) {
        let [high, middle, low, kind, flags, ..] = self.header;
        let len = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        match kind {
            HEADERS => {
                self.block = Block::default();
                let priority = flags & PRIORITY != 0;
                if flags & PADDED != 0 && len > 0 {
                    self.part = Part::Padding { left: len - 1, priority };
                } else {
                    self.begin_fragment(len, 0, priority);
                }
            }
            CONTINUATION => self.set_fragment(len, 0),
            _ => self.skip = len,
        }
    }

    fn begin_fragment(&mut self, left: usize, padding: usize, priority: bool) {
        // The library reports frames that are too short.
        let padding = padding.min(left);
        self.skip = if priority { 5.min(left - padding) } else { 0 };
        self.set_fragment(left - padding - self.skip, padding);
    }

    /// Sets the state for a header block fragment, which padding and the next frame follow.
    fn set_fragment(&mut self, left: usize, padding: usize) {
        if left > 0 {
            self.part = Part::Fragment { left, padding };
        } else {
            self.part = Part::Header;
            self.skip += padding;
        }
    }
}

/// Fuzz target: the bytes of a client after the preface. The result must not depend on how they are divided.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn fuzz(data: &[u8]) {
    let processed = |size: usize| {
        let mut bytes = [&[0_u8; PREFACE][..], data].concat();
        let mut frames = Frames::new();
        bytes.chunks_mut(size).for_each(|piece| frames.process(piece));
        bytes
    };
    let whole = processed(usize::MAX);
    for size in [1, 7] {
        assert_eq!(processed(size), whole, "{size}");
    }
}

#[cfg(test)]
mod tests;
