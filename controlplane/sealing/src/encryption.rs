//! Encryption of any resource, by a file of upstream's `EncryptionConfiguration`.
//!
//! The first provider of a resource encrypts, all of them decrypt. A value that is not encrypted is read as it is, so
//! that encryption can be switched on.

mod config;
mod kms;
mod provider;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use arc_swap::ArcSwap;

use crate::Error;
use provider::Provider;

/// Start of every encrypted value. Objects begin with a brace.
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

/// The resources that a pattern names.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    /// `*.*`.
    All,
    /// `*.group`; an empty group is the core group.
    Group(String),
    /// `plural.group`, or `plural` of the core group.
    One { plural: String, group: String },
}

impl fmt::Debug for Encryption {
    /// The file alone.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Encryption").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Encryption {
    /// Reads the file, and asks the key management services for a key to encrypt with.
    ///
    /// # Errors
    /// The file cannot be read, is invalid, or a service does not answer.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let rules = config::load(path, &[])?;
        Ok(Self { path: path.to_owned(), rules: ArcSwap::from_pointee(rules) })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file again. Values are then encrypted by its first providers when they are written.
    ///
    /// # Errors
    /// As [`Encryption::load`]; the former providers stay.
    pub fn reload(&self) -> Result<(), Error> {
        let rules = config::load(&self.path, &self.rules.load())?;
        self.rules.store(Arc::new(rules));
        Ok(())
    }

    /// Whether the configuration names the resource of this key.
    #[must_use]
    pub fn covers(&self, key: &str) -> bool {
        self.rules.load().iter().any(|rule| rule.covers(key))
    }

    /// The value as it is to be stored; `None` if it is stored as it is.
    ///
    /// # Errors
    /// The cipher failed.
    pub fn seal(&self, key: &str, plain: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let rules = self.rules.load();
        let first = rules.iter().find(|rule| rule.covers(key)).and_then(|rule| rule.providers.first());
        first.map_or(Ok(None), |provider| provider.seal(plain, key.as_bytes()))
    }

    /// The decrypted value; `None` if no provider knows it. Providers of other resources are tried last: the resource
    /// may have moved between them.
    ///
    /// # Errors
    /// A provider knows the value but cannot decrypt it.
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

    /// Whether the first provider of the resource has encrypted the value, with its current key.
    #[must_use]
    pub fn is_current(&self, key: &str, stored: &[u8]) -> bool {
        let rules = self.rules.load();
        let first = rules.iter().find(|rule| rule.covers(key)).and_then(|rule| rule.providers.first());
        first.is_none_or(|provider| provider.is_current(stored))
    }
}

/// Whether the bytes have the prefix of an encrypted value, of any provider.
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
