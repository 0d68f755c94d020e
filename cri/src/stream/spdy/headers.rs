//! SPDY/3 header blocks: name and value pairs, in one compressed stream per direction.

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::dictionary::dictionary;

/// Maximum uncompressed size of a header block.
const LIMIT: usize = 64 << 10;
/// Maximum headers of a block. In memory each takes the space of two strings besides its text; a block of empty headers
/// would take six times its size. Clients send three.
const MAX_HEADERS: u32 = 64;

/// Names (in lower case) and values, in order.
pub(super) type Headers = Vec<(String, String)>;

/// Reasons why a header block cannot be decoded.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum HeaderError {
    #[error("cannot decompress a header block: {0}")]
    Compression(String),
    #[error("header block exceeds {LIMIT} uncompressed bytes")]
    TooLong,
    #[error("header block has {0} headers; the maximum is {MAX_HEADERS}")]
    TooMany(u32),
    #[error("header block is truncated")]
    Short,
}

/// Decompresses the blocks of one connection.
#[derive(Debug)]
pub(super) struct Inflater {
    inflate: Decompress,
}

/// Compresses the blocks of one connection.
#[derive(Debug)]
pub(super) struct Deflater {
    deflate: Compress,
}

// === impl Inflater ===

impl Inflater {
    pub(super) fn new() -> Self {
        Self { inflate: Decompress::new(true) }
    }

    /// Decompresses and parses the next block.
    pub(super) fn headers(&mut self, block: &[u8]) -> Result<Headers, HeaderError> {
        parse(&self.unpack(block)?)
    }

    fn unpack(&mut self, mut block: &[u8]) -> Result<Vec<u8>, HeaderError> {
        let mut plain = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            let (before_in, before_out) = (self.inflate.total_in(), self.inflate.total_out());
            let status = match self.inflate.decompress(block, &mut chunk, FlushDecompress::Sync) {
                Err(error) if error.needs_dictionary().is_some() => {
                    let set = self.inflate.set_dictionary(&dictionary());
                    set.map_err(|error| HeaderError::Compression(error.to_string()))?;
                    Status::Ok
                }
                other => other.map_err(|error| HeaderError::Compression(error.to_string()))?,
            };
            let used = usize::try_from(self.inflate.total_in() - before_in).unwrap_or(block.len());
            let made = usize::try_from(self.inflate.total_out() - before_out).unwrap_or_default();
            block = &block[used.min(block.len())..];
            plain.extend_from_slice(&chunk[..made.min(chunk.len())]);
            if plain.len() > LIMIT {
                return Err(HeaderError::TooLong);
            }
            let stuck = used == 0 && made == 0;
            if status == Status::StreamEnd || (block.is_empty() && made < chunk.len()) || stuck {
                return Ok(plain);
            }
        }
    }
}

fn parse(mut plain: &[u8]) -> Result<Headers, HeaderError> {
    let count = take_u32(&mut plain).ok_or(HeaderError::Short)?;
    if count > MAX_HEADERS {
        return Err(HeaderError::TooMany(count));
    }
    let headers =
        (0..count).map(|_| Some((take_text(&mut plain)?.to_ascii_lowercase(), take_text(&mut plain)?)));
    headers.collect::<Option<Headers>>().ok_or(HeaderError::Short)
}

fn take_u32(plain: &mut &[u8]) -> Option<u32> {
    let (bytes, rest) = plain.split_first_chunk::<4>()?;
    *plain = rest;
    Some(u32::from_be_bytes(*bytes))
}

fn take_text(plain: &mut &[u8]) -> Option<String> {
    let length = usize::try_from(take_u32(plain)?).ok()?;
    let (text, rest) = plain.split_at_checked(length)?;
    *plain = rest;
    Some(String::from_utf8_lossy(text).into_owned())
}

// === impl Deflater ===

impl Deflater {
    pub(super) fn new() -> Result<Self, HeaderError> {
        let mut deflate = Compress::new(Compression::default(), true);
        let set = deflate.set_dictionary(&dictionary());
        set.map_err(|error| HeaderError::Compression(error.to_string()))?;
        Ok(Self { deflate })
    }

    /// Compresses the next block.
    pub(super) fn block(&mut self, headers: &Headers) -> Result<Vec<u8>, HeaderError> {
        let mut plain = length(headers.len());
        for (name, value) in headers {
            for text in [name, value] {
                plain.extend(length(text.len()));
                plain.extend_from_slice(text.as_bytes());
            }
        }
        let mut packed = Vec::with_capacity(plain.len() + 128);
        let packing = self.deflate.compress_vec(&plain, &mut packed, FlushCompress::Sync);
        packing.map_err(|error| HeaderError::Compression(error.to_string()))?;
        Ok(packed)
    }
}

fn length(length: usize) -> Vec<u8> {
    u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_connection_share_one_compressed_stream() {
        let mut deflate = Deflater::new().expect("dictionary");
        let mut inflate = Inflater::new();
        for port in ["80", "8080"] {
            let headers: Headers = vec![("streamtype".into(), "data".into()), ("port".into(), port.into())];
            let block = deflate.block(&headers).expect("packs");
            assert_eq!(inflate.headers(&block), Ok(headers));
        }
    }

    #[test]
    fn nonsense_and_bombs_are_refused() {
        assert!(Inflater::new().headers(b"nonsense").is_err());
        let mut deflate = Deflater::new().expect("dictionary");
        let mut block = Vec::with_capacity(1 << 20);
        deflate.deflate.compress_vec(&vec![0; 1 << 20], &mut block, FlushCompress::Sync).expect("packs");
        assert_eq!(Inflater::new().headers(&block), Err(HeaderError::TooLong));
        for (count, is_accepted) in [(MAX_HEADERS, true), (MAX_HEADERS + 1, false)] {
            let headers: Headers = (0..count).map(|_| (String::new(), String::new())).collect();
            let block = Deflater::new().expect("dictionary").block(&headers).expect("packs");
            assert_eq!(Inflater::new().headers(&block).is_ok(), is_accepted, "{count}");
        }
    }
}
