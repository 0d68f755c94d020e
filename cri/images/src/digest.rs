//! SHA-256 digests: the identity of all content.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use ring::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};

/// A SHA-256 digest, written `sha256:…`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Digest([u8; 32]);

/// Computes a digest piece by piece.
#[derive(Clone)]
pub(crate) struct Hasher(Context);

/// A reader that computes the digest of what passes.
pub(crate) struct HashingReader<R> {
    input: R,
    hasher: Hasher,
}

/// Why a string is not a digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a sha256 digest")]
pub(crate) struct InvalidDigest(String);

// === impl Digest ===

impl Digest {
    /// The digest of some bytes.
    pub(crate) fn of(bytes: &[u8]) -> Digest {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.finish()
    }

    /// All 64 hexadecimal digits.
    pub(crate) fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// The first 16 digits: enough for a directory's name, with the whole digest checked inside. Short, for the
    /// names of all layers of an image must fit on the one page of mount options that the kernel takes.
    pub(crate) fn short(&self) -> String {
        hex::encode(&self.0[..8])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Digest, InvalidDigest> {
        let invalid = || InvalidDigest(text.to_owned());
        let digits = text.strip_prefix("sha256:").ok_or_else(invalid)?;
        let mut bytes = [0; 32];
        hex::decode_to_slice(digits, &mut bytes).map_err(|_not_hex| invalid())?;
        // Upper case would give one content two names.
        if digits.bytes().any(|b| b.is_ascii_uppercase()) { Err(invalid()) } else { Ok(Digest(bytes)) }
    }
}

impl TryFrom<String> for Digest {
    type Error = InvalidDigest;

    fn try_from(text: String) -> Result<Digest, InvalidDigest> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

// === impl Hasher ===

impl Default for Hasher {
    fn default() -> Hasher {
        Hasher(Context::new(&SHA256))
    }
}

impl Hasher {
    /// Adds bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes added.
    pub(crate) fn finish(self) -> Digest {
        let mut bytes = [0; 32];
        // SHA-256 has as many bytes.
        bytes.copy_from_slice(self.0.finish().as_ref());
        Digest(bytes)
    }
}

// === impl HashingReader ===

impl<R: Read> HashingReader<R> {
    /// Wraps a reader.
    pub(crate) fn new(input: R) -> HashingReader<R> {
        HashingReader { input, hasher: Hasher::default() }
    }

    /// The digest of what passed.
    pub(crate) fn finish(self) -> Digest {
        self.hasher.finish()
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(buffer)?;
        self.hasher.update(&buffer[..n]);
        Ok(n)
    }
}
