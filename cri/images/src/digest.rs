//! Digests, which identify content. The store computes SHA-256 for its own content, as is usual. SHA-512 is the other
//! algorithm that the OCI specification registers. It is accepted in documents and names.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use ring::digest::{Context, SHA256, SHA512};
use serde::{Deserialize, Serialize};

/// Hash algorithm.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Algorithm {
    Sha256,
    Sha512,
}

/// A digest, written `sha256:…` or `sha512:…`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Digest {
    algorithm: Algorithm,
    /// The bytes that the algorithm produces, then zeros.
    bytes: [u8; 64],
}

/// Computes a digest incrementally.
#[derive(Clone)]
pub(crate) struct Hasher {
    algorithm: Algorithm,
    context: Context,
}

/// A reader that computes the digest of the bytes read.
pub(crate) struct HashingReader<R> {
    input: R,
    hasher: Hasher,
}

/// Error of a string that is not a digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a sha256 or sha512 digest")]
pub(crate) struct InvalidDigest(String);

// === impl Algorithm ===

impl Algorithm {
    const ALL: [Algorithm; 2] = [Algorithm::Sha256, Algorithm::Sha512];

    /// The name before the colon.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        }
    }

    fn length(self) -> usize {
        match self {
            Algorithm::Sha256 => 32,
            Algorithm::Sha512 => 64,
        }
    }
}

// === impl Digest ===

impl Digest {
    /// The SHA-256 digest of the bytes.
    pub(crate) fn of(bytes: &[u8]) -> Digest {
        Digest::by(Algorithm::Sha256, bytes)
    }

    /// The digest of the bytes by an algorithm.
    pub(crate) fn by(algorithm: Algorithm, bytes: &[u8]) -> Digest {
        let mut hasher = Hasher::new(algorithm);
        hasher.update(bytes);
        hasher.finish()
    }

    /// The digest's algorithm.
    pub(crate) fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// All hexadecimal digits: 64 for SHA-256, 128 for SHA-512.
    pub(crate) fn hex(&self) -> String {
        hex::encode(&self.bytes[..self.algorithm.length()])
    }

    /// The digest with these hexadecimal digits. The number of digits determines the algorithm.
    pub(crate) fn from_hex(digits: &str) -> Option<Digest> {
        let algorithm = Algorithm::ALL.into_iter().find(|all| all.length() * 2 == digits.len())?;
        let mut bytes = [0; 64];
        hex::decode_to_slice(digits, &mut bytes[..algorithm.length()]).ok()?;
        // Upper case is refused: it would give one content two names.
        let upper = digits.bytes().any(|b| b.is_ascii_uppercase());
        (!upper).then_some(Digest { algorithm, bytes })
    }

    /// Path of the content in an OCI layout.
    pub(crate) fn blob_path(&self) -> String {
        format!("blobs/{}/{}", self.algorithm.name(), self.hex())
    }

    /// The first 16 digits, as a directory name; the complete digest is checked inside the directory. The name is
    /// short because the paths of all layers of an image must fit into one page of mount options.
    pub(crate) fn short(&self) -> String {
        hex::encode(&self.bytes[..8])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex())
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
        let parsed = text.split_once(':').and_then(|(name, digits)| {
            Digest::from_hex(digits).filter(|digest| digest.algorithm.name() == name)
        });
        parsed.ok_or_else(|| InvalidDigest(text.to_owned()))
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

impl Hasher {
    /// A hasher without any bytes.
    pub(crate) fn new(algorithm: Algorithm) -> Hasher {
        let context = Context::new(match algorithm {
            Algorithm::Sha256 => &SHA256,
            Algorithm::Sha512 => &SHA512,
        });
        Hasher { algorithm, context }
    }

    /// Adds bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
    }

    /// The digest of all added bytes.
    pub(crate) fn finish(self) -> Digest {
        let mut bytes = [0; 64];
        // The algorithm produces exactly this many bytes.
        bytes[..self.algorithm.length()].copy_from_slice(self.context.finish().as_ref());
        Digest { algorithm: self.algorithm, bytes }
    }
}

// === impl HashingReader ===

impl<R: Read> HashingReader<R> {
    /// Wraps a reader.
    pub(crate) fn new(input: R, algorithm: Algorithm) -> HashingReader<R> {
        HashingReader { input, hasher: Hasher::new(algorithm) }
    }

    /// The digest of all bytes read.
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

#[cfg(test)]
mod tests {
    use super::{Algorithm, Digest};

    #[test]
    fn digests_of_both_algorithms_are_parsed_and_formatted() {
        // From FIPS 180: the digests of "abc".
        for (algorithm, text) in [
            (Algorithm::Sha256, "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                Algorithm::Sha512,
                "sha512:ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a\
                 2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f",
            ),
        ] {
            let digest = Digest::by(algorithm, b"abc");
            assert_eq!((digest.to_string().as_str(), text.parse()), (text, Ok(digest)));
            assert_eq!(digest.blob_path(), format!("blobs/{}", text.replace(':', "/")));
            assert_eq!(Digest::from_hex(&digest.hex()), Some(digest));
            for wrong in [
                text.to_uppercase().replace("SHA", "sha"),
                text[..text.len() - 2].to_owned(),
                format!("{text}00"),
            ] {
                assert!(wrong.parse::<Digest>().is_err(), "{wrong}");
            }
        }
        let hex = Digest::of(b"").hex();
        for wrong in [
            format!("sha512:{hex}"),
            format!("sha384:{hex}"),
            hex.clone(),
            format!("sha256:{hex}:"),
            String::new(),
        ] {
            assert!(wrong.parse::<Digest>().is_err(), "{wrong}");
        }
    }
}
