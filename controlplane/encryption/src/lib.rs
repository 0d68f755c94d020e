//! Encryption of any resource, as configured in upstream's configuration file (`EncryptionConfiguration`).
//!
//! The first provider of a resource encrypts; all providers decrypt. A value without encryption is readable, so that
//! encryption can be enabled for existing objects.
//!
//! Start reading at [`Encryption`]. [`coracle_sealing::Keys`] encrypts Secrets without further configuration. This is a
//! separate crate, because a node without a control plane needs only those keys, for its checkpoint.

mod config;
mod gcm;
mod kms;
mod provider;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use arc_swap::ArcSwap;

use coracle_sealing::Error;
use kms::Kms;
use provider::Provider;

/// Prefix of every encrypted value. A plain object starts with a brace.
const ENCRYPTED: &[u8] = b"k8s:enc:";

/// The providers of the configuration file.
pub struct Encryption {
    path: PathBuf,
    rules: ArcSwap<Vec<Rule>>,
}

/// The providers of some resources.
struct Rule {
    resources: Vec<Pattern>,
    providers: Vec<Arc<Provider>>,
}

/// A pattern that matches resources.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    /// `*.*`.
    All,
    /// `*.group`. An empty group is the core group.
    Group(String),
    /// `plural.group`, or `plural` of the core group.
    One { plural: String, group: String },
}

impl fmt::Debug for Encryption {
    /// Prints only the path of the file: the providers contain keys.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Encryption").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Encryption {
    /// Reads the file, and requests the encryption of a seed from each key management service. A service that does not
    /// respond is not an error. [`Encryption::health`] reports such a service.
    ///
    /// # Errors
    /// The file cannot be read, it is invalid, or the thread of a service cannot be started.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let rules = config::load(path, &[])?;
        Ok(Self { path: path.to_owned(), rules: ArcSwap::from_pointee(rules) })
    }

    /// The path of the configuration file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file again. Later writes use the first provider of each resource in the new configuration.
    ///
    /// # Errors
    /// The errors of [`Encryption::load`], or a service has failed. After an error the current providers are kept.
    pub fn reload(&self) -> Result<(), Error> {
        let rules = config::load(&self.path, &self.rules.load())?;
        check_services(&rules)?;
        self.rules.store(Arc::new(rules));
        Ok(())
    }

    /// Whether a key management service encrypts or decrypts.
    #[must_use]
    pub fn uses_services(&self) -> bool {
        self.rules.load().iter().flat_map(|rule| &rule.providers).any(|provider| provider.service().is_some())
    }

    /// The results of the last checks of the key management services. Starts the next checks if they are due, and waits
    /// only for the checks of services that have failed.
    ///
    /// # Errors
    /// The first failure of a service.
    pub fn health(&self) -> Result<(), Error> {
        check_services(&self.rules.load())
    }

    /// Checks that values of this key can be encrypted. Waits for the check of a service without a usable key, if that
    /// check is due.
    ///
    /// # Errors
    /// The key management service has no usable key.
    pub fn ready(&self, key: &str) -> Result<(), Error> {
        let rules = self.rules.load();
        let first = rules.iter().find(|rule| rule.covers(key)).and_then(|rule| rule.providers.first());
        first.and_then(|provider| provider.service()).map_or(Ok(()), Kms::ready)
    }

    /// Whether the configuration names the resource of this key.
    #[must_use]
    pub fn covers(&self, key: &str) -> bool {
        self.rules.load().iter().any(|rule| rule.covers(key))
    }

    /// Encrypts a value. `None` if the resource is stored without encryption.
    ///
    /// # Errors
    /// The cipher failed.
    pub fn seal(&self, key: &str, plain: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let rules = self.rules.load();
        let first = rules.iter().find(|rule| rule.covers(key)).and_then(|rule| rule.providers.first());
        first.map_or(Ok(None), |provider| provider.seal(plain, key.as_bytes()))
    }

    /// Decrypts a value. `None` if the value does not have the prefix of a provider. Providers of other resources are
    /// tried last, because a former configuration may have used them for this resource.
    ///
    /// # Errors
    /// A provider has the prefix of the value, but cannot decrypt it.
    pub fn open(&self, key: &str, stored: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let rules = self.rules.load();
        let (own, others): (Vec<&Rule>, Vec<&Rule>) = rules.iter().partition(|rule| rule.covers(key));
        let mut failure = None;
        for provider in own.into_iter().chain(others).flat_map(|rule| &rule.providers) {
            match provider.open(stored, key.as_bytes()) {
                Some(Ok(plain)) => return Ok(Some(plain)),
                Some(Err(error)) => failure = Some(error),
                None => {}
            }
        }
        failure.map_or(Ok(None), Err)
    }

    /// Whether the value can be decrypted without a call of its key management service: an earlier call has decrypted
    /// its key. False for a value of another provider.
    #[must_use]
    pub fn has_key_of(&self, stored: &[u8]) -> bool {
        let rules = self.rules.load();
        let mut services =
            rules.iter().flat_map(|rule| &rule.providers).filter_map(|provider| provider.service());
        services.any(|kms| kms.has_key_of(stored))
    }

    /// Whether a new write of the value would use the same provider and key. Returns true for a resource without
    /// providers.
    #[must_use]
    pub fn is_current(&self, key: &str, stored: &[u8]) -> bool {
        let rules = self.rules.load();
        let first = rules.iter().find(|rule| rule.covers(key)).and_then(|rule| rule.providers.first());
        first.is_none_or(|provider| provider.is_current(stored))
    }
}

/// The first failure of a key management service in the rules.
fn check_services(rules: &[Rule]) -> Result<(), Error> {
    let mut services = rules.iter().flat_map(|rule| &rule.providers).filter_map(|one| one.service());
    services.try_for_each(Kms::health)
}

/// Whether the key management service with this name encrypted the value.
#[must_use]
pub fn is_of_service(stored: &[u8], name: &str) -> bool {
    stored.starts_with(&kms::prefix_of(name))
}

/// Whether the bytes have the prefix of an encrypted value of any provider.
#[must_use]
pub fn is_encrypted(bytes: &[u8]) -> bool {
    bytes.starts_with(ENCRYPTED)
}

// === impl Rule ===

impl Rule {
    fn covers(&self, key: &str) -> bool {
        let mut parts = key.split('/');
        let (Some(group), Some(plural), Some(_)) = (parts.next(), parts.next(), parts.next()) else {
            return false;
        };
        self.resources.iter().any(|pattern| match pattern {
            Pattern::All => true,
            Pattern::Group(name) => name == group,
            Pattern::One { plural: name, group: of } => name == plural && of == group,
        })
    }
}

#[cfg(test)]
mod tests;
