//! Decodes JSON.

use serde::de::{DeserializeOwned, Error as _};

/// Decodes a value from text, as `kube` does, so that the binary contains the code of each type only once.
/// `serde_json::from_slice` would add a second copy.
pub(crate) fn decode<T: DeserializeOwned>(json: &[u8]) -> serde_json::Result<T> {
    let text = std::str::from_utf8(json).map_err(serde_json::Error::custom)?;
    serde_json::from_str(text)
}
