//! The format of entries in the store. In this format, the values of keys with certain prefixes are encrypted. In
//! memory they are not encrypted.

use std::sync::Arc;

use bytes::Bytes;
use coracle_encryption::{Encryption, is_encrypted, is_of_service};
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

/// Key management services that have failed during a pass over many entries. The pass does not call them again, because
/// each call may take up to the timeout of the service.
#[derive(Default)]
pub(crate) struct FailedServices(Vec<FailedService>);

struct FailedService {
    name: String,
    reason: String,
}

// === impl FailedServices ===

impl FailedServices {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The error of an entry whose service has failed.
    fn error(&self, key: &str, value: &[u8]) -> Option<Error> {
        let FailedService { name, reason } = self.0.iter().find(|one| is_of_service(value, &one.name))?;
        let source = coracle_sealing::Error::Kms { name: name.clone(), reason: reason.clone() };
        Some(Error::Sealed { key: key.to_owned(), source })
    }

    /// Records the service that caused an error.
    fn record(&mut self, error: &Error) {
        if let Error::Sealed { source: coracle_sealing::Error::Kms { name, reason }, .. } = error {
            self.0.push(FailedService { name: name.clone(), reason: reason.clone() });
        }
    }
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
        self.decode_in_pass(&mut FailedServices::default(), key, bytes)
    }

    /// Does the same as [`EntryCodec::decode`], in a pass over many entries.
    pub(crate) fn decode_in_pass(
        &self,
        failed: &mut FailedServices,
        key: &str,
        bytes: &[u8],
    ) -> Result<Option<Entry>, Error> {
        let Some((Revisions { created, modified }, value)) = split(bytes) else { return Ok(None) };
        let opened = self.open_in_pass(failed, key, value)?;
        let value = opened.unwrap_or_else(|| Bytes::copy_from_slice(value));
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

    /// Does the same as [`EntryCodec::open`], in a pass over many entries. A value whose key is in the cache needs no
    /// service.
    pub(crate) fn open_in_pass(
        &self,
        failed: &mut FailedServices,
        key: &str,
        value: &[u8],
    ) -> Result<Option<Bytes>, Error> {
        if let Some(error) = failed.error(key, value)
            && !self.has_key_of(value)
        {
            return Err(error);
        }
        self.open(key, value).inspect_err(|error| failed.record(error))
    }

    /// Whether the value can be decrypted without a call of its key management service.
    fn has_key_of(&self, value: &[u8]) -> bool {
        let encryption = self.0.as_ref().and_then(|sealing| sealing.encryption.as_ref());
        encryption.is_some_and(|encryption| encryption.has_key_of(value))
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

    /// The entry with the current encryption. `None` if the stored entry already has it, or if the entry cannot be
    /// decrypted or encrypted now.
    ///
    /// # Errors
    /// An entry under a prefix of the key file is encrypted with an unknown key, or is damaged. Or the encryption
    /// failed for another reason than the key management service.
    pub(crate) fn resealed(
        &self,
        failed: &mut FailedServices,
        key: &str,
        bytes: &[u8],
    ) -> Result<Option<Vec<u8>>, Error> {
        let Some((revisions, value)) = split(bytes) else { return Ok(None) };
        if self.is_current(key, value) {
            return Ok(None);
        }
        let entry = match self.decode_in_pass(failed, key, bytes) {
            // The service of the former key may start later, so the value stays as it is until its next write. A value
            // with an unknown key also stays: the consumer of the store decides whether it needs the entry. Entries
            // under a prefix of the key file are always needed.
            Err(error) if error.is_of_service() || self.sealing(key).is_none() => None,
            decoded => decoded?,
        };
        let Some(entry) = entry else { return Ok(None) };
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

    /// Whether a value is stored with the current encryption, or without encryption if none is configured.
    pub(crate) fn is_current(&self, key: &str, value: &[u8]) -> bool {
        match (self.encryption(key), self.sealing(key)) {
            _ if self.0.is_none() => true,
            (Some(encryption), _) => encryption.is_current(key, value),
            (None, Some(sealing)) => is_sealed(value) && sealing.keys.is_current(value),
            (None, None) => !is_encrypted(value),
        }
    }

    /// Does the same as [`EntryCodec::is_current`], for an encoded entry.
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
pub(crate) mod tests {
    use super::*;

    /// A value with the prefix of the service in [`with_absent_service`]. The rest is an empty message.
    pub(crate) const SEALED_BY_SERVICE: &[u8] = b"k8s:enc:kms:v2:p:";

    /// Encryption of Secrets by a key management service that does not respond.
    pub(crate) fn with_absent_service(directory: &std::path::Path) -> Sealing {
        let file = directory.join("encryption.yaml");
        let text = "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n\
            - resources: [secrets]\n  providers: [{kms: {apiVersion: v2, name: p, endpoint: 'unix:///absent/s'}}]\n";
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let keys = Keys::load_or_create(&directory.join("keys")).unwrap();
        let encryption = Some(Arc::new(Encryption::load(&file).unwrap()));
        Sealing { keys, prefixes: vec!["/secrets/".to_owned()], encryption }
    }

    #[test]
    fn a_value_stays_as_it_is_while_the_key_management_service_does_not_respond() {
        let directory = tempfile::tempdir().unwrap();
        let codec = EntryCodec(Some(with_absent_service(directory.path())));
        let mut plain = [0_u8; 16].to_vec();
        plain.extend(b"{}");
        assert!(!codec.is_current_entry("/secrets/n/a", &plain));
        assert_eq!(codec.resealed(&mut FailedServices::default(), "/secrets/n/a", &plain).unwrap(), None);
        assert!(matches!(codec.ready("/secrets/n/a"), Err(Error::Sealed { .. })));
        codec.ready("/pods/n/a").unwrap();
    }

    #[test]
    fn a_pass_does_not_call_a_failed_service_again() {
        let directory = tempfile::tempdir().unwrap();
        let sealing = with_absent_service(directory.path());
        let codec = EntryCodec(Some(sealing));
        let mut failed = FailedServices::default();
        let error = codec.open_in_pass(&mut failed, "/secrets/n/a", SEALED_BY_SERVICE).unwrap_err();
        assert!(error.is_of_service(), "{error}");
        // This codec has no service, so the error is from the first call.
        let keys = Keys::load_or_create(&directory.path().join("keys")).unwrap();
        let without = EntryCodec(Some(Sealing { keys, prefixes: Vec::new(), encryption: None }));
        let error = without.open_in_pass(&mut failed, "/secrets/n/b", SEALED_BY_SERVICE).unwrap_err();
        assert!(error.is_of_service(), "{error}");
        let error = without.open("/secrets/n/b", SEALED_BY_SERVICE).unwrap_err();
        assert!(!error.is_of_service(), "{error}");
        let mut stored = [0_u8; 16].to_vec();
        stored.extend(SEALED_BY_SERVICE);
        assert_eq!(codec.resealed(&mut failed, "/secrets/n/a", &stored).unwrap(), None);
        // A damaged value is not the fault of the service.
        let damaged = [stored.as_slice(), b"\xff"].concat();
        assert!(codec.resealed(&mut FailedServices::default(), "/secrets/n/a", &damaged).is_err());
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
        // A value that the providers encrypt is not current for the key file. Pods are not encrypted.
        assert!(providers.is_current_entry("/secrets/n/a", &sealed));
        assert!(!codec(None).is_current_entry("/secrets/n/a", &sealed));
        assert!(providers.may_be_outdated("/pods/n/a") && !codec(None).may_be_outdated("/pods/n/a"));
    }
}
