//! Checks for a namespace's default service account.

use crate::object::{Namespace, ObjectExt, ServiceAccount};

/// Name of the account.
pub(crate) const NAME: &str = "default";

/// Whether the account must be created.
pub(crate) fn is_missing(namespace: Option<&Namespace>, account: Option<&ServiceAccount>) -> bool {
    namespace.is_some_and(|namespace| !namespace.is_being_deleted()) && account.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_namespace_that_is_not_being_deleted_gets_an_account() {
        let stays: Namespace = serde_json::from_value(json!({"metadata": {"name": "n"}})).unwrap();
        let goes = json!({"metadata": {"name": "n", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
        let goes: Namespace = serde_json::from_value(goes).unwrap();
        assert!(is_missing(Some(&stays), None));
        assert!(!is_missing(Some(&stays), Some(&ServiceAccount::default())));
        assert!(!is_missing(Some(&goes), None));
        assert!(!is_missing(None, None));
    }
}
