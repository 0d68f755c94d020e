//! Warnings of one request for the client.

use std::sync::{Mutex, PoisonError};

use coracle_kinds::{Resource, warnings};
use serde_json::Value;

/// Maximum number of warnings of one request. `reply::warned` limits their bytes.
const MAX_WARNINGS: usize = 100;

/// Warnings for the client without duplicates. Warnings above the maximum are dropped.
#[derive(Default)]
pub(crate) struct Warnings(Mutex<Vec<String>>);

// === impl Warnings ===

impl Warnings {
    /// Starts with the deprecation warning of the kind's version, if there is one.
    pub(crate) fn about(kind: &Resource) -> Self {
        Self(Mutex::new(kind.deprecation.iter().map(|text| text.clone().into_owned()).collect()))
    }

    pub(crate) fn add(&self, text: String) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if list.len() < MAX_WARNINGS && !list.contains(&text) {
            list.push(text);
        }
    }

    /// Adds the warnings about the fields of a valid object. `old` is the stored object of an update.
    pub(crate) fn add_about(&self, kind: &Resource, new: &Value, old: Option<&Value>) {
        warnings::about(kind, new, old).into_iter().for_each(|text| self.add(text));
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_distinct_and_limited() {
        let warnings = Warnings::default();
        for number in 0..10_000 {
            warnings.add(format!("{}", number / 2));
        }
        let all = warnings.take();
        assert_eq!((all.len(), all[1].as_str()), (MAX_WARNINGS, "1"));
    }
}
