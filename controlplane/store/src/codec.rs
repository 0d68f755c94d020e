//! The format of entries in the store. In this format, the values of keys with certain prefixes are encrypted. In
//! memory they are not encrypted.

use std::sync::Arc;

use bytes::Bytes;
use coracle_encryption::{Encryption, is_encrypted};
use coracle_sealing::{Keys, is_sealed};

use crate::{Entry, Error};

/// The encryption of the values of some keys.
#[derive(Debug)]
pub struct Sealing {
    /// The keys of the key file.
    pub keys: Keys,
    /// Prefixes of the keys whose values are encrypted.
    pub prefixes: Vec<String>,
    /// Providers of the encryption configuration. They take precedence over the key file.
    pub encryption: Option<Arc<Encryption>>,
}

/// The revisions at which an entry was created and last changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Revisions {
    pub(crate) created: u64,
    pub(crate) modified: u64,
}

/// Encodes and decodes entries.
pub(crate) struct EntryCodec(pub(crate) Option<Sealing>);

impl EntryCodec {
    /// Encodes an entry: the revisions `created` and `modified` in big-endian, then the value, which may be encrypted.
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

    /// Whether the decoding of an entry may wait for a key management service.
    pub(crate) fn may_wait(&self, bytes: &[u8]) -> bool {
        let has_providers = self.0.as_ref().is_some_and(|sealing| sealing.encryption.is_some());
        has_providers && split(bytes).is_some_and(|(_, value)| is_encrypted(value))
    }

    /// The encrypted value. `None` if the values of this key are not encrypted.
    pub(crate) fn seal(&self, key: &str, value: &[u8]) -> Result<Option<Vec<u8>>, coracle_sealing::Error> {
        match self.encryption(key) {
            Some(encryption) => encryption.seal(key, value),
            None => self.sealing(key).map(|sealing| sealing.keys.seal(value, key.as_bytes())).transpose(),
        }
    }

    /// The decrypted value. `None` if the value is not encrypted.
    pub(crate) fn open(&self, key: &str, value: &[u8]) -> Result<Option<Bytes>, Error> {
        let Some(sealing) = self.0.as_ref().filter(|_| is_encrypted(value)) else { return Ok(None) };
        let failed = |source| Error::Sealed { key: key.to_owned(), source };
        let by_provider = match &sealing.encryption {
            Some(encryption) => encryption.open(key, value),
            None => Ok(None),
        };
        // A value of an AES-GCM provider has the same prefix as a value that is encrypted with the key file.
        let failure = match by_provider {
            Ok(Some(opened)) => return Ok(Some(opened.into())),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        if !is_sealed(value) {
            return Err(failed(failure.unwrap_or(coracle_sealing::Error::UnknownProvider)));
        }
        let opened = sealing.keys.open(value, key.as_bytes()).map(Bytes::from);
        opened.map(Some).map_err(|error| failed(failure.unwrap_or(error)))
    }

    /// The revisions of an encoded entry.
    pub(crate) fn revisions(bytes: &[u8]) -> Option<Revisions> {
        split(bytes).map(|(revisions, _)| revisions)
    }

    /// Prefixes of the keys whose values may be encrypted. With an encryption configuration these are all keys, because
    /// an earlier configuration may have named more resources.
    pub(crate) fn prefixes(&self) -> Vec<&str> {
        match &self.0 {
            Some(Sealing { encryption: Some(_), .. }) => vec![""],
            Some(sealing) => sealing.prefixes.iter().map(String::as_str).collect(),
            None => Vec::new(),
        }
    }

    /// The entry with the current encryption. `None` if the stored entry already has it, or if a key management service
    /// does not respond.
    pub(crate) fn resealed(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let Some((revisions, value)) = split(bytes) else { return Ok(None) };
        if self.is_current(key, value) {
            return Ok(None);
        }
        let Some(entry) = self.decode(key, bytes)? else { return Ok(None) };
        match self.encode(key, revisions, &entry.value) {
            Ok(bytes) => Ok(Some(bytes)),
            // A key management service may start later. The value keeps its encryption until its next write.
            Err(coracle_sealing::Error::Kms { .. }) => Ok(None),
            Err(source) => Err(Error::Sealed { key: key.to_owned(), source }),
        }
    }

    /// Checks that a value of this key can be encrypted. May wait for a key management service.
    pub(crate) fn ready(&self, key: &str) -> Result<(), Error> {
        let Some(encryption) = self.encryption(key) else { return Ok(()) };
        encryption.ready(key).map_err(|source| Error::Sealed { key: key.to_owned(), source })
    }

    /// Whether values of this key may be stored with an earlier encryption.
    pub(crate) fn may_be_outdated(&self, key: &str) -> bool {
        let has_providers = self.0.as_ref().is_some_and(|sealing| sealing.encryption.is_some());
        has_providers || self.sealing(key).is_some()
    }

    /// Whether a value is stored with the current encryption, which may be none.
    pub(crate) fn is_current(&self, key: &str, value: &[u8]) -> bool {
        match (self.encryption(key), self.sealing(key)) {
            _ if self.0.is_none() => true,
            (Some(encryption), _) => encryption.is_current(key, value),
            (None, Some(sealing)) => is_sealed(value) && sealing.keys.is_current(value),
            (None, None) => !is_encrypted(value),
        }
    }

    /// [`EntryCodec::is_current`] for an encoded entry.
    pub(crate) fn is_current_entry(&self, key: &str, bytes: &[u8]) -> bool {
        split(bytes).is_none_or(|(_, value)| self.is_current(key, value))
    }

    /// The configured providers, if the configuration names the resource of this key.
    fn encryption(&self, key: &str) -> Option<&Encryption> {
        let encryption = self.0.as_ref()?.encryption.as_deref()?;
        encryption.covers(key).then_some(encryption)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_stays_as_it_is_while_the_key_management_service_does_not_respond() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("encryption.yaml");
        let text = "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n\
            - resources: [secrets]\n  providers: [{kms: {apiVersion: v2, name: p, endpoint: 'unix:///absent/s'}}]\n";
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let keys = Keys::load_or_create(&directory.path().join("keys")).unwrap();
        let encryption = Some(Arc::new(Encryption::load(&file).unwrap()));
        let codec = EntryCodec(Some(Sealing { keys, prefixes: vec!["/secrets/".to_owned()], encryption }));
        let mut plain = [0_u8; 16].to_vec();
        plain.extend(b"{}");
        assert!(!codec.is_current_entry("/secrets/n/a", &plain));
        assert_eq!(codec.resealed("/secrets/n/a", &plain).unwrap(), None);
        assert!(matches!(codec.ready("/secrets/n/a"), Err(Error::Sealed { .. })));
        codec.ready("/pods/n/a").unwrap();
    }

    #[test]
    fn only_encrypted_values_may_wait_and_only_with_providers() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("encryption.yaml");
        let text = "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n\
            - resources: [secrets]\n  providers: [{secretbox: {keys: [{name: k, secret: \
            AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=}]}}]\n";
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let codec = |encryption: Option<Arc<Encryption>>| {
            let keys = Keys::load_or_create(&directory.path().join("keys")).unwrap();
            EntryCodec(Some(Sealing { keys, prefixes: vec!["/secrets/".to_owned()], encryption }))
        };
        let providers = codec(Some(Arc::new(Encryption::load(&file).unwrap())));
        let revisions = Revisions { created: 1, modified: 1 };
        let sealed = providers.encode("/secrets/n/a", revisions, b"{}").unwrap();
        let plain = providers.encode("/pods/n/a", revisions, b"{}").unwrap();
        assert!(providers.may_wait(&sealed) && !providers.may_wait(&plain));
        assert!(!codec(None).may_wait(&sealed));
        // The key file encrypts in another way than the providers. Neither of them encrypts pods.
        assert!(providers.is_current_entry("/secrets/n/a", &sealed));
        assert!(!codec(None).is_current_entry("/secrets/n/a", &sealed));
        assert!(providers.may_be_outdated("/pods/n/a") && !codec(None).may_be_outdated("/pods/n/a"));
    }
}
