//! The sources of the keys of values.

use std::sync::{Arc, atomic::AtomicBool};

use ring::{aead::LessSafeKey, hkdf};

use super::SEED_BYTES;
use crate::gcm;

/// A seed or key that the plugin has decrypted.
pub(super) struct Decrypted {
    pub(super) source: Source,
    /// Whether the key has already decrypted a value. Otherwise the response of the plugin may have been wrong.
    pub(super) is_proven: AtomicBool,
}

/// Source of the key of a value.
pub(super) enum Source {
    Seed(hkdf::Prk),
    Key(Box<LessSafeKey>),
}

// === impl Decrypted ===

impl Decrypted {
    pub(super) fn new(source: Source) -> Arc<Self> {
        Arc::new(Self { source, is_proven: AtomicBool::new(false) })
    }
}

// === impl Source ===

impl Source {
    /// The seed or the key with these bytes. `None` if their number is wrong.
    pub(super) fn of(plain: &[u8], is_seed: bool) -> Option<Self> {
        match (is_seed, plain.len()) {
            (true, SEED_BYTES) => Some(Self::Seed(hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, plain))),
            (false, 16 | 32) => gcm::key(plain).map(|key| Self::Key(Box::new(key))),
            _ => None,
        }
    }

    /// Derives the key of the value with these random bytes. `None` if the source is a key itself.
    pub(super) fn key(&self, info: &[u8]) -> Option<LessSafeKey> {
        let Self::Seed(seed) = self else { return None };
        let mut key = [0; 32];
        seed.expand(&[info], hkdf::HKDF_SHA256).ok()?.fill(&mut key).ok()?;
        gcm::key(&key)
    }
}
