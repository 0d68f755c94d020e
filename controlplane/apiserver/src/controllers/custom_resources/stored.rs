//! Access to stored definitions: their kind, and changes of them by this server.

use std::sync::Arc;

use coracle_custom_resources::definition::Metadata;
use coracle_kinds::Resource;
use coracle_kinds::kind::by_resource;
use serde_json::Value;

use crate::call::Call;
use crate::error::{ApiError, Result};
use crate::field_manager::Writer;
use crate::state::State;
use crate::write::{self, Part};

/// The kind of definitions.
pub(super) fn kind() -> Result<Arc<Resource>> {
    by_resource("apiextensions.k8s.io", "v1", "customresourcedefinitions")
        .cloned()
        .ok_or_else(ApiError::no_resource)
}

/// Checks that the definition still exists. The error is `NotFound`, even if a new definition has the same name.
pub(super) fn check_exists(state: &State, definition: &Metadata) -> Result<()> {
    let kind = kind()?;
    match state.cache.get(&kind, "", &definition.name) {
        Some(stored) => check_uid(&kind, definition, &stored.value()),
        None => Err(ApiError::not_found(&kind, &definition.name)),
    }
}

fn check_uid(kind: &Resource, definition: &Metadata, stored: &Value) -> Result<()> {
    if write::text(stored, "uid") == definition.uid {
        return Ok(());
    }
    Err(ApiError::not_found(kind, &definition.name))
}

/// Changes a definition as this server. The error is `NotFound` if the definition was deleted, even if a new definition
/// has the same name.
pub(super) async fn edit(
    state: &Arc<State>,
    definition: &Metadata,
    change: impl Fn(&mut Value) + Send + Sync,
) -> Result<()> {
    let kind = kind()?;
    let call = Call::internal(state, kind.clone(), &Value::Null);
    write::update(&call, &definition.name, Part::Internal, Writer::Update, |old| {
        check_uid(&kind, definition, old)?;
        let mut new = old.clone();
        change(&mut new);
        Ok(new)
    })
    .await
    .map(|_| ())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_new_definition_with_the_name_of_a_deleted_one_is_not_changed() {
        let kind = kind().unwrap();
        let definition = Metadata { name: "a.b".to_owned(), uid: "old".to_owned(), ..Metadata::default() };
        let check =
            |uid: &str| check_uid(&kind, &definition, &json!({"metadata": {"name": "a.b", "uid": uid}}));
        assert!(check("old").is_ok());
        assert!(check("new").is_err_and(|error| error.reason == "NotFound"));
    }
}
