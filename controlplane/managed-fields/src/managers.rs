//! `metadata.managedFields`: the managers of an object and the fields that each owns.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::field_set::{FieldSet, InvalidFields};

/// Maximum number of managers of an object with the operation Update. The oldest managers above this number are merged
/// into one manager for each API version.
const MAX_UPDATERS: usize = 10;
/// Name of the managers into which the oldest managers with the operation Update are merged.
const OLD_UPDATERS: &str = "ancient-changes";

/// The operation of a manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// Server-side apply.
    Apply,
    /// Any other write.
    Update,
}

/// The identity of a manager. One name can belong to several managers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ManagerId {
    /// The name from the request, or the default name that the server chose.
    pub name: String,
    /// Operation of the manager: apply or update.
    pub operation: Operation,
    /// The API version (`apps/v1`) of an update. Empty for apply: an applier is one manager for all versions.
    pub api_version: String,
    /// The subresource that the manager writes. Empty for the object itself.
    pub subresource: String,
}

/// The fields of a manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owned {
    /// The fields, in the form of `api_version`.
    pub fields: FieldSet,
    /// The API version of the fields.
    pub api_version: String,
    /// Time of the last change, in the API's format.
    pub time: Option<String>,
}

/// All managers of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Managers(pub(crate) BTreeMap<ManagerId, Owned>);

/// `managedFields` is not valid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidManagedFields {
    /// The value is not a list of objects.
    #[error("managedFields is not a list of objects")]
    NotAList,
    /// An entry's operation is neither Apply nor Update.
    #[error("operation must be `Apply` or `Update`")]
    Operation,
    /// An entry has no API version.
    #[error("apiVersion must not be empty")]
    ApiVersion,
    /// An entry's fields have another type than `FieldsV1`.
    #[error("invalid fieldsType {0:?} in managed fields entry {1}")]
    FieldsType(String, usize),
    /// An entry's fields are invalid.
    #[error(transparent)]
    Fields(#[from] InvalidFields),
}

// === impl Operation ===

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Operation::Apply => "Apply",
            Operation::Update => "Update",
        }
    }
}

// === impl ManagerId ===

impl ManagerId {
    /// The manager of an apply request.
    pub(crate) fn applier(name: &str, subresource: &str) -> ManagerId {
        ManagerId {
            name: name.to_owned(),
            operation: Operation::Apply,
            api_version: String::new(),
            subresource: subresource.to_owned(),
        }
    }

    /// The manager of any other write. A client without a name is `unknown`.
    pub(crate) fn updater(name: &str, api_version: &str, subresource: &str) -> ManagerId {
        ManagerId {
            name: if name.is_empty() { "unknown".to_owned() } else { name.to_owned() },
            operation: Operation::Update,
            api_version: api_version.to_owned(),
            subresource: subresource.to_owned(),
        }
    }
}

// === impl Managers ===

impl Managers {
    /// Whether no manager owns a field.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Each manager and the fields that it owns.
    pub fn iter(&self) -> impl Iterator<Item = (&ManagerId, &Owned)> {
        self.0.iter()
    }

    /// Reads `managedFields`; null means none.
    ///
    /// # Errors
    /// The first entry that is not valid.
    pub fn from_json(entries: &Value) -> Result<Managers, InvalidManagedFields> {
        let entries = match entries {
            Value::Null => return Ok(Managers::default()),
            Value::Array(entries) => entries,
            _ => return Err(InvalidManagedFields::NotAList),
        };
        let mut managers = Managers::default();
        for (index, entry) in entries.iter().enumerate() {
            let (id, owned) = read_entry(index, entry)?;
            managers.0.insert(id, owned);
        }
        Ok(managers)
    }

    /// Encodes `managedFields`. Appliers are first; both groups are sorted by time, name, version and subresource. Null
    /// if there are no managers.
    pub fn to_json(&self) -> Value {
        if self.0.is_empty() {
            return Value::Null;
        }
        let mut entries: Vec<(&ManagerId, &Owned)> = self.0.iter().collect();
        entries.sort_by_key(|(id, owned)| {
            (
                id.operation,
                owned.time.clone().unwrap_or_default(),
                &id.name,
                &owned.api_version,
                &id.subresource,
            )
        });
        entries.into_iter().map(|(id, owned)| write_entry(id, owned)).collect()
    }

    /// Sets the time of each manager to the time that it had in an earlier state, or to none. The caller does this for
    /// writes that upstream records without a time.
    #[must_use]
    pub fn with_times_of(mut self, earlier: &Managers) -> Managers {
        for (id, owned) in &mut self.0 {
            owned.time = earlier.0.get(id).and_then(|earlier| earlier.time.clone());
        }
        self
    }

    /// Merges the oldest managers with the operation Update until at most [`MAX_UPDATERS`] are left. Only managers of
    /// the same API version are merged, so more can stay. Managers of subresources do not count.
    pub(crate) fn cap(&mut self) {
        let mut updaters: Vec<(String, ManagerId)> = self
            .0
            .iter()
            .filter(|(id, _)| id.operation == Operation::Update && id.subresource.is_empty())
            .map(|(id, owned)| (owned.time.clone().unwrap_or_default(), id.clone()))
            .collect();
        updaters.sort_unstable();
        let mut count = updaters.len();
        let mut first_of: BTreeMap<String, ManagerId> = BTreeMap::new();
        for (_, id) in updaters {
            if count <= MAX_UPDATERS {
                return;
            }
            let Some(version) = self.0.get(&id).map(|owned| owned.api_version.clone()) else { continue };
            let Some(first) = first_of.get(&version) else {
                first_of.insert(version, id);
                continue;
            };
            let bucket = ManagerId::updater(OLD_UPDATERS, &version, "");
            if !self.0.contains_key(&bucket)
                && let Some(owned) = self.0.remove(first)
            {
                self.0.insert(bucket.clone(), owned);
            }
            if let (Some(owned), Some(target)) = (self.0.remove(&id), self.0.get_mut(&bucket)) {
                target.fields.add(&owned.fields);
                target.time = owned.time;
                count -= 1;
            }
        }
    }
}

fn read_entry(index: usize, entry: &Value) -> Result<(ManagerId, Owned), InvalidManagedFields> {
    let entry = entry.as_object().ok_or(InvalidManagedFields::NotAList)?;
    let text = |field: &str| entry.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let operation = match text("operation").as_str() {
        "Apply" => Operation::Apply,
        "Update" => Operation::Update,
        _ => return Err(InvalidManagedFields::Operation),
    };
    let api_version = text("apiVersion");
    if api_version.is_empty() {
        return Err(InvalidManagedFields::ApiVersion);
    }
    if text("fieldsType") != "FieldsV1" {
        return Err(InvalidManagedFields::FieldsType(text("fieldsType"), index));
    }
    let fields = match entry.get("fieldsV1") {
        None | Some(Value::Null) => FieldSet::default(),
        Some(fields) => FieldSet::from_json(fields)?,
    };
    let id = ManagerId {
        name: text("manager"),
        operation,
        api_version: if operation == Operation::Apply { String::new() } else { api_version.clone() },
        subresource: text("subresource"),
    };
    let time = entry.get("time").and_then(Value::as_str).map(str::to_owned);
    Ok((id, Owned { fields, api_version, time }))
}

fn write_entry(id: &ManagerId, owned: &Owned) -> Value {
    let mut entry = Map::new();
    if !id.name.is_empty() {
        entry.insert("manager".to_owned(), json!(id.name));
    }
    entry.insert("operation".to_owned(), json!(id.operation.name()));
    entry.insert("apiVersion".to_owned(), json!(owned.api_version));
    if let Some(time) = &owned.time {
        entry.insert("time".to_owned(), json!(time));
    }
    entry.insert("fieldsType".to_owned(), json!("FieldsV1"));
    entry.insert("fieldsV1".to_owned(), owned.fields.to_json());
    if !id.subresource.is_empty() {
        entry.insert("subresource".to_owned(), json!(id.subresource));
    }
    Value::Object(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, operation: &str, time: &str) -> Value {
        json!({"manager": name, "operation": operation, "apiVersion": "v1", "time": time, "fieldsType": "FieldsV1",
            "fieldsV1": {"f:data": {format!("f:{name}"): {}}}})
    }

    #[test]
    fn entries_are_sorted_by_operation_and_time() {
        let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
        let entries =
            json!([entry("a", "Update", late), entry("b", "Update", early), entry("c", "Apply", late)]);
        let written = Managers::from_json(&entries).unwrap().to_json();
        let names: Vec<&str> =
            written.as_array().unwrap().iter().map(|e| e["manager"].as_str().unwrap()).collect();
        assert_eq!(names, ["c", "b", "a"]);
        assert_eq!(Managers::from_json(&written).unwrap().to_json(), written);
    }

    #[test]
    fn managers_can_keep_the_times_of_an_earlier_state() {
        let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
        let read = |entries: Value| Managers::from_json(&entries).unwrap();
        let earlier = read(json!([entry("a", "Update", early)]));
        let later = read(json!([entry("a", "Update", late), entry("b", "Update", late)]));
        let times = later.with_times_of(&earlier).to_json();
        let shown = |index: usize| (&times[index]["manager"], &times[index]["time"]);
        assert_eq!(shown(0), (&json!("b"), &Value::Null));
        assert_eq!(shown(1), (&json!("a"), &json!(early)));
    }

    #[test]
    fn invalid_entries_are_refused() {
        for (entries, error) in [
            (json!({}), InvalidManagedFields::NotAList),
            (json!([1]), InvalidManagedFields::NotAList),
            (json!([{}]), InvalidManagedFields::Operation),
            (json!([{"operation": "Apply"}]), InvalidManagedFields::ApiVersion),
            (
                json!([{"operation": "Apply", "apiVersion": "v1", "fieldsType": "X"}]),
                InvalidManagedFields::FieldsType("X".into(), 0),
            ),
        ] {
            assert_eq!(Managers::from_json(&entries).unwrap_err(), error);
        }
    }

    #[test]
    fn more_than_ten_updaters_are_merged_from_the_oldest() {
        let entries: Vec<Value> = (0..13)
            .map(|n| entry(&format!("m{n:02}"), "Update", &format!("2026-01-{:02}T00:00:00Z", n + 1)))
            .collect();
        let mut managers = Managers::from_json(&Value::Array(entries)).unwrap();
        managers.cap();
        assert_eq!(managers.0.len(), 10);
        let old = &managers.0[&ManagerId::updater(OLD_UPDATERS, "v1", "")];
        assert_eq!(
            old.fields.to_json(),
            json!({"f:data": {"f:m00": {}, "f:m01": {}, "f:m02": {}, "f:m03": {}}})
        );
        assert_eq!(old.time.as_deref(), Some("2026-01-04T00:00:00Z"));
    }
}
