//! Entries as bytes in the store. Values under some prefixes are encrypted there, and only there.

use bytes::Bytes;
use coracle_sealing::{Keys, is_sealed};

use crate::{Entry, Error};

/// Encryption of the values of some keys.
#[derive(Debug)]
pub struct Sealing {
    /// The keys of the key file.
    pub keys: Keys,
    /// Keys with one of these prefixes have encrypted values.
    pub prefixes: Vec<String>,
}

/// Revisions of an entry: of its creation and of its last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Revisions {
    pub(crate) created: u64,
    pub(crate) modified: u64,
}

/// Encodes and decodes entries.
pub(crate) struct Vault(pub(crate) Option<Sealing>);

impl Vault {
    /// Encodes an entry: its revisions, `created` and `modified`, in big-endian, then the bytes, which may be sealed.
    pub(crate) fn encode(
        &self,
        key: &str,
        revisions: Revisions,
        value: &[u8],
    ) -> Result<Vec<u8>, coracle_sealing::Error> {
        let sealed = self.seal(key, value)?;
        let value = sealed.as_deref().unwrap_or(value);
        let mut bytes = Vec::with_capacity(16 + value.len());
        bytes.extend_from_slice(&revisions.created.to_be_bytes());
        bytes.extend_from_slice(&revisions.modified.to_be_bytes());
        bytes.extend_from_slice(value);
        Ok(bytes)
    }

    pub(crate) fn decode(&self, key: &str, bytes: &[u8]) -> Result<Option<Entry>, Error> {
        let Some((Revisions { created, modified }, value)) = split(bytes) else { return Ok(None) };
        let value = self.open(key, value)?.unwrap_or_else(|| Bytes::copy_from_slice(value));
        Ok(Some(Entry { key: key.into(), value, created, modified }))
    }

    /// The encrypted value; `None` if the values of this key are stored as they are.
    pub(crate) fn seal(&self, key: &str, value: &[u8]) -> Result<Option<Vec<u8>>, coracle_sealing::Error> {
        self.sealing(key).map(|sealing| sealing.keys.seal(value, key.as_bytes())).transpose()
    }

    /// The decrypted value; `None` if the value is not encrypted: an earlier version has written it.
    pub(crate) fn open(&self, key: &str, value: &[u8]) -> Result<Option<Bytes>, Error> {
        let Some(sealing) = self.sealing(key).filter(|_| is_sealed(value)) else { return Ok(None) };
        let opened = sealing.keys.open(value, key.as_bytes()).map(Bytes::from);
        opened.map(Some).map_err(|source| Error::Sealed { key: key.to_owned(), source })
    }

    /// The revisions of an encoded entry.
    pub(crate) fn revisions(bytes: &[u8]) -> Option<Revisions> {
        split(bytes).map(|(revisions, _)| revisions)
    }

    /// The prefixes whose values are encrypted.
    pub(crate) fn prefixes(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|sealing| sealing.prefixes.iter().map(String::as_str))
    }

    /// The entry sealed with the first key; `None` if it is sealed with that key already.
    pub(crate) fn resealed(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let Some(sealing) = self.sealing(key) else { return Ok(None) };
        let Some((revisions, value)) = split(bytes) else { return Ok(None) };
        if is_sealed(value) && sealing.keys.is_current(value) {
            return Ok(None);
        }
        let Some(entry) = self.decode(key, bytes)? else { return Ok(None) };
        let failed = |source| Error::Sealed { key: key.to_owned(), source };
        self.encode(key, revisions, &entry.value).map(Some).map_err(failed)
    }

    fn sealing(&self, key: &str) -> Option<&Sealing> {
        self.0
            .as_ref()
            .filter(|sealing| sealing.prefixes.iter().any(|prefix| key.starts_with(prefix.as_str())))
    }
}

fn split(bytes: &[u8]) -> Option<(Revisions, &[u8])> {
    let (created, rest) = bytes.split_first_chunk::<8>()?;
    let (modified, value) = rest.split_first_chunk::<8>()?;
    let revisions =
        Revisions { created: u64::from_be_bytes(*created), modified: u64::from_be_bytes(*modified) };
    Some((revisions, value))
}
