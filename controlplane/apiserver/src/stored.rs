//! The result of a write.

use std::sync::Arc;

use serde_json::Value;

use crate::{cache::Object, offload};

/// The result of a write.
#[derive(Debug)]
pub(crate) enum Stored {
    Committed(Arc<Object>),
    /// The new state, which is not stored: the request is a dry run, or the write has removed the object.
    DryRun(Value),
}

// === impl Stored ===

impl Stored {
    pub(crate) fn value(&self) -> Value {
        match self {
            Self::Committed(object) => object.value(),
            Self::DryRun(value) => value.clone(),
        }
    }

    /// Returns the same as [`Stored::value`]. Large objects are processed off the async workers.
    pub(crate) fn offloaded_value(&self) -> Value {
        let is_large = matches!(self, Self::Committed(object) if object.is_large());
        offload::run(is_large, || self.value())
    }
}
