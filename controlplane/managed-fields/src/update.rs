//! Ownership after a write, and the result of an apply request.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::{
    annotation,
    conflict::Conflicts,
    field_set::FieldSet,
    managers::{ManagerId, Managers, Operation, Owned},
    path::{PathElement, equal},
    schema::{Schema, TypeId},
    walk::{
        compare::Comparison,
        merge::merge,
        owned::fields_of,
        reconcile::{fits, reconcile},
        remove::remove,
        validate::{InvalidElement, validate},
    },
};

/// The manager that gets the existing fields of an object without `managedFields` at its first apply.
const BEFORE_FIRST_APPLY: &str = "before-first-apply";
/// The manager of kubectl. Its apply requests also update the annotation of client-side apply.
const KUBECTL: &str = "kubectl";

/// The API versions of a kind.
pub trait Versions {
    /// The schema of a version. None if the version is not served any more.
    fn schema(&self, api_version: &str) -> Option<(&Schema, TypeId)>;

    /// The object in a version. None if it cannot be converted.
    fn convert<'a>(&self, object: &'a Value, api_version: &str) -> Option<Cow<'a, Value>>;

    /// Whether objects can be converted between all versions.
    fn all_convert(&self) -> bool {
        true
    }
}

/// A kind with one API version.
#[derive(Debug)]
pub struct SingleVersion<'a> {
    /// The version, `apps/v1`.
    pub api_version: &'a str,
    /// The schema.
    pub schema: &'a Schema,
    /// The kind's type in the schema.
    pub of: TypeId,
}

/// Computes ownership for the objects of one kind.
#[derive(Debug)]
pub struct Updater<'a, V> {
    /// The kind's versions.
    pub versions: &'a V,
    /// The version of the request, `apps/v1`.
    pub api_version: &'a str,
    /// The subresource of the request. Empty for the object itself.
    pub subresource: &'a str,
    /// Fields that the request cannot set and therefore does not own: `status` for a write of the object itself.
    pub ignored: &'a FieldSet,
    /// The time of the write, in the API's format.
    pub now: &'a str,
}

/// A write that is not an apply.
#[derive(Clone, Copy, Debug)]
pub struct UpdateRequest<'a> {
    /// The object before the write. For a create, it has only `apiVersion` and `kind`.
    pub live: &'a Value,
    /// The object as it is going to be stored.
    pub new: &'a Value,
    /// The name of the writer.
    pub manager: &'a str,
}

/// An apply request.
#[derive(Clone, Copy, Debug)]
pub struct ApplyRequest<'a> {
    /// The object before the write. If it does not exist, this has only `apiVersion` and `kind`.
    pub live: &'a Value,
    /// The configuration.
    pub config: &'a Value,
    /// The name of the writer.
    pub manager: &'a str,
    /// Whether the writer takes over fields in conflict.
    pub force: bool,
}

/// The result of an apply request.
#[derive(Debug)]
pub struct Applied {
    /// The merged object, without `managedFields`.
    pub object: Value,
    /// The owners of its fields.
    pub managers: Managers,
}

/// The reason why a configuration cannot be applied.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// Other managers own fields with other values.
    #[error("{}", crate::conflict_message(.0))]
    Conflicts(Conflicts),
    /// Elements of lists cannot be identified.
    #[error("{}", list(.0))]
    Invalid(Vec<InvalidElement>),
    /// The kind does not have the version of the request.
    #[error("version {0} is not served")]
    Version(String),
}

fn list(elements: &[InvalidElement]) -> String {
    if let [only] = elements {
        return only.to_string();
    }
    let lines: Vec<String> = elements.iter().map(|element| format!("\n  {element}")).collect();
    format!("errors:{}", lines.concat())
}

// === impl SingleVersion ===

impl Versions for SingleVersion<'_> {
    fn schema(&self, api_version: &str) -> Option<(&Schema, TypeId)> {
        (api_version == self.api_version).then_some((self.schema, self.of))
    }

    fn convert<'a>(&self, object: &'a Value, api_version: &str) -> Option<Cow<'a, Value>> {
        (api_version == self.api_version).then_some(Cow::Borrowed(object))
    }
}

// === impl Updater ===

impl<V: Versions> Updater<'_, V> {
    /// The owners after a write that is not an apply.
    ///
    /// The writer owns every field that it changed; all others lose these fields. An existing object without managers
    /// gets none, because the owners of its other fields are not known.
    pub fn update(&self, request: UpdateRequest<'_>, mut managers: Managers) -> Managers {
        let is_new = request.live["metadata"]["uid"].as_str().unwrap_or_default().is_empty();
        if managers.is_empty() && !is_new {
            return managers;
        }
        self.assign_changes(request, &mut managers);
        managers.cap();
        managers
    }

    /// Merges a configuration into an object.
    ///
    /// # Errors
    /// Conflicts, unless the request is forced; elements of lists that cannot be identified, or are duplicate; a
    /// version that is not served.
    pub fn apply(&self, request: ApplyRequest<'_>, managers: Managers) -> Result<Applied, ApplyError> {
        let (schema, of) = self.schema()?;
        validate(schema, of, request.config).map_err(ApplyError::Invalid)?;
        let mut applied = match self.merge(request, managers.clone()) {
            Err(ApplyError::Conflicts(conflicts)) if request.manager == KUBECTL => {
                let conflicts = self.without_last_applied(request.live, conflicts);
                if !conflicts.is_empty() {
                    return Err(ApplyError::Conflicts(conflicts));
                }
                self.merge(ApplyRequest { force: true, ..request }, managers)?
            }
            other => other?,
        };
        if request.manager == KUBECTL {
            annotation::refresh(&mut applied.object, request.config);
        }
        applied.managers.cap();
        Ok(applied)
    }

    fn schema(&self) -> Result<(&Schema, TypeId), ApplyError> {
        self.versions.schema(self.api_version).ok_or_else(|| ApplyError::Version(self.api_version.to_owned()))
    }

    fn merge(&self, request: ApplyRequest<'_>, mut managers: Managers) -> Result<Applied, ApplyError> {
        let (schema, of) = self.schema()?;
        if managers.is_empty() {
            let empty = json!({"apiVersion": request.live["apiVersion"], "kind": request.live["kind"]});
            let first = UpdateRequest { live: &empty, new: request.live, manager: BEFORE_FIRST_APPLY };
            self.assign_changes(first, &mut managers);
        }
        managers = self.reconciled(managers);
        let merged = merge(schema, of, request.live, request.config);
        let id = ManagerId::applier(request.manager, self.subresource);
        let fields = fields_of(schema, of, request.config).without_trees(self.ignored);
        let last = managers.0.remove(&id);
        let time = last.as_ref().and_then(|owned| owned.time.clone());
        managers.0.insert(id.clone(), Owned { fields, api_version: self.api_version.to_owned(), time });
        let object = self.prune(&merged, last.as_ref(), &managers);
        let conflicts = self.release(request.live, &object, &id, &mut managers);
        if !request.force && !conflicts.is_empty() {
            return Err(ApplyError::Conflicts(conflicts));
        }
        strip(&id, &mut managers);
        if !equal(&object, request.live)
            && let Some(owned) = managers.0.get_mut(&id)
        {
            owned.time = Some(self.now.to_owned());
        }
        Ok(Applied { object, managers })
    }

    /// Gives the changed fields of an update to its writer.
    fn assign_changes(&self, request: UpdateRequest<'_>, managers: &mut Managers) {
        let Some((schema, of)) = self.versions.schema(self.api_version) else { return };
        *managers = self.reconciled(std::mem::take(managers));
        let writer = ManagerId::updater(request.manager, self.api_version, self.subresource);
        let changes = Comparison::new(schema, of, request.live, request.new).without(self.ignored);
        // All managers lose the changed fields, including the writer. The writer gets them back below.
        let mut by_version = BTreeMap::from([(self.api_version.to_owned(), Some(changes))]);
        let _ = self.release_all(request.live, request.new, managers, &mut by_version);
        let changes = by_version.remove(self.api_version).flatten().unwrap_or_default();
        if !changes.added.is_empty() && !self.versions.all_convert() {
            self.release_absent(request.new, managers);
        }
        let mut fields = changes.added;
        fields.merge(changes.modified);
        fields.subtract(&UNOWNED);
        if fields.is_empty() {
            return;
        }
        let owned = managers.0.entry(writer).or_insert_with(|| Owned {
            fields: FieldSet::default(),
            api_version: self.api_version.to_owned(),
            time: None,
        });
        owned.fields.merge(fields);
        owned.time = Some(self.now.to_owned());
    }

    /// Takes changed and removed fields from all managers but the applier. Returns the conflicts.
    fn release(&self, live: &Value, new: &Value, applier: &ManagerId, managers: &mut Managers) -> Conflicts {
        let own = managers.0.remove(applier);
        let conflicts = self.release_all(live, new, managers, &mut BTreeMap::new());
        managers.0.extend(own.filter(|own| !own.fields.is_empty()).map(|own| (applier.clone(), own)));
        conflicts
    }

    /// Takes changed and removed fields from all managers. Returns the changed fields that had an owner. Drops managers
    /// without fields, and managers of a version that is no longer served. If the states cannot be converted to a
    /// manager's version, the manager keeps its fields. The states are compared once for each version, not for each
    /// manager: `by_version` has the known comparisons, without the ignored fields.
    fn release_all(
        &self,
        live: &Value,
        new: &Value,
        managers: &mut Managers,
        by_version: &mut BTreeMap<String, Option<Comparison>>,
    ) -> Conflicts {
        let mut conflicts = Conflicts::default();
        managers.0.retain(|id, owned| {
            if self.versions.schema(&owned.api_version).is_none() {
                return false;
            }
            let changes = by_version
                .entry(owned.api_version.clone())
                .or_insert_with(|| self.changes(live, new, &owned.api_version));
            let Some(changes) = changes else { return true };
            let taken = owned
                .fields
                .intersection(&changes.modified)
                .union(&owned.fields.intersection(&changes.added));
            owned.fields.subtract(&taken);
            owned.fields.subtract(&changes.removed);
            conflicts.add(id.clone(), taken);
            !owned.fields.is_empty()
        });
        conflicts
    }

    /// Removes the fields that the object does not have from the managers with the operation Update in this version. A
    /// write in another version, without conversion, cannot take such fields from these managers. Their sets would grow
    /// until the object is too large, for example if one version adds keys and another version removes them.
    fn release_absent(&self, new: &Value, managers: &mut Managers) {
        let Some((schema, of)) = self.versions.schema(self.api_version) else { return };
        let present = Comparison::new(schema, of, &json!({}), new).added;
        managers.0.retain(|id, owned| {
            if id.operation == Operation::Update && owned.api_version == self.api_version {
                owned.fields = owned.fields.intersection(&present);
            }
            !owned.fields.is_empty()
        });
    }

    fn changes(&self, live: &Value, new: &Value, api_version: &str) -> Option<Comparison> {
        let (schema, of) = self.versions.schema(api_version)?;
        let (live, new) =
            (self.versions.convert(live, api_version)?, self.versions.convert(new, api_version)?);
        Some(Comparison::new(schema, of, &live, &new).without(self.ignored))
    }

    /// Removes the fields that the applier owned before and omits now, unless another manager owns them.
    fn prune(&self, merged: &Value, last: Option<&Owned>, managers: &Managers) -> Value {
        let Some(last) = last.filter(|last| !last.fields.is_empty()) else { return merged.clone() };
        self.pruned(merged, last, managers).unwrap_or_else(|| merged.clone())
    }

    /// The pruned object. None if it cannot be converted to a version that is needed.
    fn pruned(&self, merged: &Value, last: &Owned, managers: &Managers) -> Option<Value> {
        let (schema, of) = self.versions.schema(&last.api_version)?;
        let before = self.versions.convert(merged, &last.api_version)?;
        let last_fields = last.fields.with_declared_fields(schema, of);
        let mut pruned = remove(schema, of, &before, &last_fields);
        // Restores the fields that any manager owns, for each API version. The version of the pruned object is first.
        let mut versions: Vec<&str> = managers.0.values().map(|owned| owned.api_version.as_str()).collect();
        versions.sort_by_key(|version| (*version != last.api_version, *version));
        versions.dedup();
        let mut not_converted = Vec::new();
        for version in versions {
            match self.with_owned(merged, &pruned, version, managers) {
                Some(restored) => pruned = restored,
                None => not_converted.push(version),
            }
        }
        // Restores the fields that the applier did not own.
        let pruned = self.versions.convert(&pruned, &last.api_version)?.into_owned();
        let lost = lost_fields(schema, of, &before, &pruned).intersection(&last_fields);
        let others = self.owned_in(&not_converted, managers).with_declared_fields(schema, of);
        let pruned = remove(schema, of, &before, &lost.difference(&others));
        self.versions.convert(&pruned, self.api_version).map(Cow::into_owned)
    }

    /// The fields that the managers of these API versions own. Objects cannot be converted to these versions. Most
    /// fields have the same path in all versions, so pruning does not remove them. Managers of versions that are no
    /// longer served were dropped before.
    fn owned_in(&self, versions: &[&str], managers: &Managers) -> FieldSet {
        let mut owned = FieldSet::default();
        for manager in managers.0.values() {
            let version = manager.api_version.as_str();
            if versions.contains(&version) && self.versions.schema(version).is_some() {
                owned.add(&manager.fields);
            }
        }
        owned
    }

    /// The merged object in an API version, without the pruned fields. A pruned field stays if a manager of this
    /// version owns it.
    fn with_owned(
        &self,
        merged: &Value,
        pruned: &Value,
        version: &str,
        managers: &Managers,
    ) -> Option<Value> {
        let (schema, of) = self.versions.schema(version)?;
        let (merged, pruned) =
            (self.versions.convert(merged, version)?, self.versions.convert(pruned, version)?);
        let mut owned = FieldSet::default();
        for manager in managers.0.values().filter(|manager| manager.api_version == version) {
            owned.add(&manager.fields);
        }
        let lost =
            lost_fields(schema, of, &merged, &pruned).difference(&owned.with_declared_fields(schema, of));
        Some(remove(schema, of, &merged, &lost))
    }

    /// The managers with their sets adapted to the current schema. For example, a list that became atomic is owned as a
    /// whole.
    fn reconciled(&self, mut managers: Managers) -> Managers {
        for owned in managers.0.values_mut() {
            if let Some((schema, of)) = self.versions.schema(&owned.api_version)
                && !fits(schema, of, &owned.fields)
            {
                owned.fields = reconcile(schema, of, &owned.fields);
            }
        }
        managers
    }

    /// Removes conflicts over fields that still have the values of the last client-side apply. kubectl's server-side
    /// apply takes over these fields.
    fn without_last_applied(&self, live: &Value, mut conflicts: Conflicts) -> Conflicts {
        if let Some(allowed) = self.last_applied_fields(live) {
            conflicts.subtract(&allowed);
        }
        conflicts
    }

    fn last_applied_fields(&self, live: &Value) -> Option<FieldSet> {
        let (schema, of) = self.versions.schema(self.api_version)?;
        let config: Value = serde_json::from_str(annotation::last_applied(live)?).ok()?;
        if config["apiVersion"] != self.api_version {
            return None;
        }
        let changes = Comparison::new(schema, of, &config, live);
        let fields = fields_of(schema, of, &config);
        Some(fields.difference(&changes.modified).difference(&changes.added).difference(&changes.removed))
    }
}

/// The fields of the first object that the second does not have.
fn lost_fields(schema: &Schema, of: TypeId, before: &Value, after: &Value) -> FieldSet {
    let fields = |object: &Value| fields_of(schema, of, object).with_declared_fields(schema, of);
    fields(before).difference(&fields(after))
}

/// Fields that have no owner, because they identify the object or only the server sets them.
static UNOWNED: LazyLock<FieldSet> = LazyLock::new(unowned);

fn unowned() -> FieldSet {
    let mut fields = FieldSet::default();
    let metadata = PathElement::field("metadata");
    for name in ["apiVersion", "kind", "metadata"] {
        fields.insert(&[PathElement::field(name)]);
    }
    for name in [
        "name",
        "namespace",
        "creationTimestamp",
        "selfLink",
        "uid",
        "clusterName",
        "generation",
        "managedFields",
        "resourceVersion",
    ] {
        fields.insert(&[metadata.clone(), PathElement::field(name)]);
    }
    fields
}

/// Removes [`UNOWNED`] from the set of a manager.
fn strip(id: &ManagerId, managers: &mut Managers) {
    if let Some(owned) = managers.0.get_mut(id) {
        owned.fields.subtract(&UNOWNED);
        if owned.fields.is_empty() {
            managers.0.remove(id);
        }
    }
}

#[cfg(test)]
mod tests;
