//! Entries as bytes on disk. Values under some prefixes are encrypted on disk only.

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
pub(super) struct Revisions {
    pub(super) created: u64,
    pub(super) modified: u64,
}

/// Encodes and decodes entries.
pub(super) struct Vault(pub(super) Option<Sealing>);

impl Vault {
    /// Encodes an entry: its revisions, `created` and `modified`, in big-endian, then the bytes, which may be sealed.
    pub(super) fn encode(
        &self,
        key: &str,
        revisions: Revisions,
        value: &[u8],
    ) -> Result<Vec<u8>, coracle_sealing::Error> {
        let sealed = self.sealing(key).map(|sealing| sealing.keys.seal(value, key.as_bytes())).transpose()?;
        let value = sealed.as_deref().unwrap_or(value);
        let mut bytes = Vec::with_capacity(16 + value.len());
        bytes.extend_from_slice(&revisions.created.to_be_bytes());
        bytes.extend_from_slice(&revisions.modified.to_be_bytes());
        bytes.extend_from_slice(value);
        Ok(bytes)
    }

    pub(super) fn decode(&self, key: &str, bytes: &[u8]) -> Result<Option<Entry>, Error> {
        let Some((Revisions { created, modified }, value)) = split(bytes) else { return Ok(None) };
        // A value that is not sealed is from an earlier version.
        let value = match self.sealing(key) {
            Some(sealing) if is_sealed(value) => sealing
                .keys
                .open(value, key.as_bytes())
                .map(bytes::Bytes::from)
                .map_err(|source| Error::Sealed { key: key.to_owned(), source })?,
            _ => bytes::Bytes::copy_from_slice(value),
        };
        Ok(Some(Entry { key: key.into(), value, created, modified }))
    }

    /// The revisions of an encoded entry.
    pub(super) fn revisions(bytes: &[u8]) -> Option<Revisions> {
        split(bytes).map(|(revisions, _)| revisions)
    }

    /// The prefixes whose values are encrypted.
    pub(super) fn prefixes(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|sealing| sealing.prefixes.iter().map(String::as_str))
    }

    /// The entry sealed with the first key; `None` if it is sealed with that key already.
    pub(super) fn resealed(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<u8>>, Error> {
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
