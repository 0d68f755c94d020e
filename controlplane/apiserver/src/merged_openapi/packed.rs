//! Documents that the server keeps in compressed form.

use std::{
    io::{self, BufWriter, Read as _, Write},
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Buf as _, Bytes, buf::Reader};
use flate2::{Compression, bufread::GzDecoder, write::GzEncoder};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;

use crate::{
    compression::MIN_COMPRESSED_BYTES,
    reply::{self, Body},
};

/// Bytes that are compressed or decompressed at once.
const PART_BYTES: usize = 16 << 10;

/// A document, compressed with gzip. Clones share the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    gzip: Bytes,
    /// Bytes of the document itself.
    size: usize,
}

/// Compresses the bytes that are written, and counts them.
struct Packer {
    encoder: GzEncoder<Vec<u8>>,
    size: usize,
}

/// A body that is decompressed part by part. So each client without gzip needs only the memory of one part.
struct Unpacked {
    decoder: GzDecoder<Reader<Bytes>>,
    /// Bytes that are not decompressed yet.
    left: usize,
    /// Decompressed bytes of an incomplete character at the end of the last part.
    rest: Vec<u8>,
}

// === impl Packed ===

impl Packed {
    /// Compresses the document that `write` writes.
    ///
    /// # Errors
    /// The error of `write`.
    pub(super) fn new(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<Self> {
        let packer = Packer { encoder: GzEncoder::new(Vec::new(), Compression::fast()), size: 0 };
        let mut out = BufWriter::with_capacity(PART_BYTES, packer);
        write(&mut out)?;
        let Packer { encoder, size } = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(Self { gzip: encoder.finish()?.into_boxed_slice().into(), size })
    }

    /// The compressed bytes. `None` if the document is too small to be sent compressed.
    pub(crate) fn gzip(&self) -> Option<Bytes> {
        (self.size >= MIN_COMPRESSED_BYTES).then(|| self.gzip.clone())
    }

    /// The decompressed document. Parts of a text begin and end at the borders of characters.
    pub(crate) fn text(&self) -> Body {
        if self.size == 0 {
            return reply::full("");
        }
        let decoder = GzDecoder::new(self.gzip.clone().reader());
        Unpacked { decoder, left: self.size, rest: Vec::new() }.boxed_unsync()
    }

    /// The whole document.
    ///
    /// # Errors
    /// No error is expected: the bytes were compressed by this process.
    pub(super) fn unpacked(&self) -> io::Result<Vec<u8>> {
        let mut text = Vec::with_capacity(self.size);
        GzDecoder::new(&*self.gzip).read_to_end(&mut text)?;
        Ok(text)
    }

    /// Number of compressed bytes.
    pub(super) fn len(&self) -> usize {
        self.gzip.len()
    }
}

impl Write for Packer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.encoder.write(bytes)?;
        self.size += written;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// === impl Unpacked ===

impl Unpacked {
    /// The next part.
    fn next_part(&mut self) -> io::Result<Vec<u8>> {
        let mut part = std::mem::take(&mut self.rest);
        let start = part.len();
        let size = self.left.min(PART_BYTES);
        part.resize(start + size, 0);
        self.decoder.read_exact(&mut part[start..])?;
        self.left -= size;
        if self.left > 0 {
            self.rest = part.split_off(whole_characters(&part));
        }
        Ok(part)
    }
}

/// Number of bytes without an incomplete character at the end. If the bytes are not UTF-8, the number of all bytes.
fn whole_characters(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => bytes.len(),
    }
}

impl http_body::Body for Unpacked {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.is_end_stream() {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(self.next_part().map(|part| Frame::data(part.into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0 && self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact((self.left + self.rest.len()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use http_body::Body as _;

    use super::*;

    fn packed(text: &[u8]) -> Packed {
        Packed::new(|out| out.write_all(text)).unwrap()
    }

    async fn parts(packed: &Packed) -> Vec<Bytes> {
        let (mut body, mut found) = (packed.text(), Vec::new());
        while let Some(frame) = body.frame().await {
            found.push(frame.unwrap().into_data().unwrap());
        }
        found
    }

    #[tokio::test]
    async fn a_document_is_sent_as_it_was_written() {
        // The characters have three bytes, so a part of the buffer's size ends within a character.
        for text in [String::new(), "a".to_owned(), "€".repeat(PART_BYTES), "x".repeat(3 * PART_BYTES)] {
            let packed = packed(text.as_bytes());
            assert_eq!(packed.text().size_hint().exact(), Some(text.len() as u64));
            let parts = parts(&packed).await;
            assert!(parts.iter().all(|part| std::str::from_utf8(part).is_ok()));
            assert!(parts.iter().all(|part| part.len() < PART_BYTES + 4), "the memory of a body is bounded");
            assert!(parts.concat() == text.as_bytes(), "{} bytes", text.len());
            assert!(packed.unpacked().unwrap() == text.as_bytes(), "{} bytes", text.len());
        }
        let binary = [0xff, 0, 0xe2].repeat(PART_BYTES);
        assert!(parts(&packed(&binary)).await.concat() == binary);
    }

    #[test]
    fn large_documents_are_sent_compressed() {
        assert_eq!(packed(&vec![b'a'; MIN_COMPRESSED_BYTES - 1]).gzip(), None);
        let large = packed(&vec![b'a'; MIN_COMPRESSED_BYTES]);
        let gzip = large.gzip().unwrap();
        assert!(gzip.len() == large.len() && gzip.len() < MIN_COMPRESSED_BYTES / 10);
        let mut text = Vec::new();
        flate2::read::GzDecoder::new(&*gzip).read_to_end(&mut text).unwrap();
        assert_eq!(text.len(), MIN_COMPRESSED_BYTES);
    }
}
