//! The fields that an update and mutating admission must not change.

use std::{
    hash::{BuildHasher as _, DefaultHasher, Hash as _, Hasher, RandomState},
    sync::LazyLock,
};

use coracle_kinds::Resource;
use serde_json::Value;

use super::text;
use crate::error::{ApiError, Result};

/// The fields that identify an object for admission. A mutating webhook must not change these fields, because earlier
/// plugins have used them for their decisions.
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

/// A keyed hash of an object, to detect a change without a copy of the object. The key is random for each process, so
/// that a client cannot construct two objects with the same hash.
pub(super) fn fingerprint(object: &Value) -> u64 {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    let mut hasher = BufferedHasher { hasher: KEY.build_hasher(), buffer: [0; BUFFER_BYTES], length: 0 };
    object.hash(&mut hasher);
    hasher.finish()
}

/// Size of the buffer of a [`BufferedHasher`].
const BUFFER_BYTES: usize = 512;

/// A hasher that hashes many writes at once. To hash a tree makes hundreds of writes of a few bytes. Each write to the
/// inner hasher costs more than the hash of its bytes. The hash depends only on the bytes, and not on how the bytes are
/// split into writes.
struct BufferedHasher {
    hasher: DefaultHasher,
    buffer: [u8; BUFFER_BYTES],
    /// Bytes in the buffer.
    length: usize,
}

impl Hasher for BufferedHasher {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(room) = self.buffer.get_mut(self.length..self.length + bytes.len()) {
            room.copy_from_slice(bytes);
            self.length += bytes.len();
            return;
        }
        self.hasher.write(&self.buffer[..self.length]);
        self.hasher.write(bytes);
        self.length = 0;
    }

    fn finish(&self) -> u64 {
        let mut hasher = self.hasher.clone();
        hasher.write(&self.buffer[..self.length]);
        hasher.finish()
    }
}

/// Checks the uid of a request against the uid of the stored object. An empty uid matches every object.
pub(crate) fn check_uid(kind: &Resource, name: &str, stored: &str, given: &str) -> Result<()> {
    if given.is_empty() || given == stored {
        return Ok(());
    }
    let why = format!("Precondition failed: UID in precondition: {given}, UID in object meta: {stored}");
    Err(ApiError::conflict(kind, name, why))
}

/// Restores the fields that an update cannot change. A different uid is a conflict: the client means another object.
pub(super) fn keep_identity(kind: &Resource, name: &str, old: &Value, new: &mut Value) -> Result<()> {
    check_uid(kind, name, text(old, "uid"), text(new, "uid"))?;
    let Some(metadata) = new.get_mut("metadata").and_then(Value::as_object_mut) else {
        return Err(ApiError::bad_request("metadata must be given"));
    };
    metadata.remove("selfLink");
    for field in ["uid", "creationTimestamp", "resourceVersion", "generation", "managedFields"] {
        keep(metadata, field, &old["metadata"][field]);
    }
    // An update without these fields does not remove them: a deletion cannot be undone.
    for field in ["deletionTimestamp", "deletionGracePeriodSeconds"] {
        if metadata.get(field).is_none_or(Value::is_null) {
            keep(metadata, field, &old["metadata"][field]);
        }
    }
    Ok(())
}

/// Sets a field of the metadata to its old value; null removes it.
pub(super) fn keep(metadata: &mut serde_json::Map<String, Value>, field: &str, old: &Value) {
    if old.is_null() {
        metadata.remove(field);
    } else {
        metadata.insert(field.to_owned(), old.clone());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_changed_object_has_another_fingerprint() {
        let object = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"list": [1, {"c": null}]}});
        assert_eq!(fingerprint(&object), fingerprint(&object.clone()));
        for (place, value) in [
            ("/metadata/labels/a", json!("c")),
            ("/metadata/labels", json!({"ab": ""})),
            ("/spec/list/0", json!("1")),
            ("/spec/list/1/c", json!(false)),
            ("/spec/list", json!([1])),
        ] {
            let mut changed = object.clone();
            *changed.pointer_mut(place).unwrap() = value;
            assert_ne!(fingerprint(&object), fingerprint(&changed), "{place}");
        }
    }

    #[test]
    fn each_part_of_a_long_object_is_in_its_fingerprint() {
        let object = json!({"a": "x".repeat(2 * BUFFER_BYTES), "b": vec!["y".repeat(100); 20]});
        assert_eq!(fingerprint(&object), fingerprint(&object.clone()));
        let texts = (0..20).map(|index| format!("/b/{index}")).chain(["/a".to_owned()]);
        for place in texts {
            let mut changed = object.clone();
            *changed.pointer_mut(&place).unwrap() = json!("z");
            assert_ne!(fingerprint(&object), fingerprint(&changed), "{place}");
        }
    }
}
