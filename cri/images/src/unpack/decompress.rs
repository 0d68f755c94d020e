//! Detects a layer's compression and decompresses it within limits.

use std::io::{self, BufRead, Chain, Cursor, Read};

use flate2::bufread::MultiGzDecoder;

use super::error::TooLarge;
use crate::config::Limits;

/// The uncompressed content of a layer. Reading fails when a limit is exceeded.
pub(super) struct Decompressed<R: BufRead> {
    decoder: Decoder<R>,
    limits: Limits,
    count: u64,
}

enum Decoder<R: BufRead> {
    Plain(Counted<Whole<R>>),
    Gzip(Box<MultiGzDecoder<Counted<Whole<R>>>>),
    Zstd(zstd::Decoder<'static, Counted<Whole<R>>>),
}

/// The complete input, after its first bytes were examined.
type Whole<R> = Chain<Cursor<Vec<u8>>, R>;

/// Counts the compressed bytes.
struct Counted<R> {
    input: R,
    count: u64,
}

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// Part of zstd's message for `ZSTD_error_frameParameter_windowTooLarge`. The crate returns only the message, not the
/// error code.
const WINDOW_TOO_LARGE: &str = "requires too much memory";

// === impl Decompressed ===

impl<R: BufRead> Decompressed<R> {
    /// Detects the compression by the first bytes, because media types are often wrong.
    pub(super) fn new(mut input: R, limits: Limits) -> io::Result<Decompressed<R>> {
        // A slow connection may return a single byte first.
        let mut head = Vec::new();
        input.by_ref().take(ZSTD.len() as u64).read_to_end(&mut head)?;
        let (gzip, zstd) = (head.starts_with(GZIP), head.starts_with(ZSTD) || is_skippable(&head));
        let counted = Counted { input: Cursor::new(head).chain(input), count: 0 };
        let decoder = if gzip {
            Decoder::Gzip(Box::new(MultiGzDecoder::new(counted)))
        } else if zstd {
            let mut decoder = zstd::Decoder::with_buffer(counted)?;
            decoder.window_log_max(limits.zstd_window_log)?;
            Decoder::Zstd(decoder)
        } else {
            Decoder::Plain(counted)
        };
        Ok(Decompressed { decoder, limits, count: 0 })
    }

    fn check(&self) -> Result<(), TooLarge> {
        let taken = match &self.decoder {
            Decoder::Plain(_) => self.count,
            Decoder::Gzip(decoder) => decoder.get_ref().count,
            Decoder::Zstd(decoder) => decoder.get_ref().count,
        };
        let limits = &self.limits;
        if self.count > limits.layer_bytes {
            return Err(TooLarge::Bytes(limits.layer_bytes));
        }
        if self.count > limits.ratio_from && self.count / limits.ratio > taken {
            return Err(TooLarge::Ratio(limits.ratio));
        }
        Ok(())
    }
}

impl<R: BufRead> Read for Decompressed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = match &mut self.decoder {
            Decoder::Plain(input) => input.read(buffer),
            Decoder::Gzip(decoder) => decoder.read(buffer),
            Decoder::Zstd(decoder) => {
                let window = 1 << self.limits.zstd_window_log;
                decoder.read(buffer).map_err(|error| match error.to_string().contains(WINDOW_TOO_LARGE) {
                    true => io::Error::other(TooLarge::Window(window)),
                    false => error,
                })
            }
        }?;
        self.count += n as u64;
        self.check().map_err(io::Error::other)?;
        Ok(n)
    }
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(buffer)?;
        self.count += n as u64;
        Ok(n)
    }
}

impl<R: BufRead> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.input.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.input.consume(count);
        self.count += count as u64;
    }
}

/// Whether the data starts with a skippable frame, as in seekable variants of zstd.
fn is_skippable(head: &[u8]) -> bool {
    matches!(head, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..])
}
