//! What mutating admission may not change.

use coracle_kinds::Resource;
use serde_json::Value;

use crate::error::{ApiError, Result};

/// The fields that identify an object for admission. A mutating webhook must not change them, because other plugins
/// have already decided by them.
pub(super) struct Identity([Value; 4]);

impl Identity {
    const FIELDS: [&str; 4] = ["namespace", "name", "uid", "creationTimestamp"];

    pub(super) fn of(object: &Value) -> Self {
        Self(Self::FIELDS.map(|field| object["metadata"][field].clone()))
    }

    pub(super) fn check(&self, kind: &Resource, object: &Value) -> Result<()> {
        for (field, before) in Self::FIELDS.iter().zip(&self.0) {
            let after = &object["metadata"][field];
            if after.as_str().unwrap_or_default() != before.as_str().unwrap_or_default() {
                return Err(ApiError::bad_request(format!(
                    "metadata.{field} of {} was changed from {before} to {after} by mutating admission",
                    kind.plural
                )));
            }
        }
        Ok(())
    }
}
