//! The action for one namespace, from its config map with the CA.

use crate::object::{ConfigMap, Namespace, ObjectExt};

/// The config map's key for the CA.
pub(crate) const DATA_KEY: &str = "ca.crt";

/// The action for a namespace.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Nothing,
    Create,
    Correct,
}

/// Plans the action.
pub(crate) fn plan(namespace: Option<&Namespace>, copy: Option<&ConfigMap>, pem: &str) -> Action {
    if namespace.is_none_or(ObjectExt::is_being_deleted) {
        return Action::Nothing;
    }
    let Some(copy) = copy else { return Action::Create };
    let data = copy.data.as_ref();
    let right = data.is_some_and(|data| data.len() == 1 && data.get(DATA_KEY).is_some_and(|own| own == pem));
    if right { Action::Nothing } else { Action::Correct }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_config_map_is_created_and_corrected() {
        let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": "n"}})).unwrap();
        let copy = |data| serde_json::from_value::<ConfigMap>(json!({"data": data})).unwrap();
        let decide = |copy: Option<&ConfigMap>| plan(Some(&namespace), copy, "pem");
        assert_eq!(decide(None), Action::Create);
        assert_eq!(decide(Some(&copy(json!({"ca.crt": "pem"})))), Action::Nothing);
        assert_eq!(decide(Some(&copy(json!({"ca.crt": "other"})))), Action::Correct);
        assert_eq!(decide(Some(&copy(json!({"ca.crt": "pem", "x": "y"})))), Action::Correct);
        assert_eq!(plan(None, None, "pem"), Action::Nothing);
    }
}
