//! Computes the names and conditions in the status of definitions (`controller/status`, `controller/establish`).

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use crate::definition::{Condition, Definition, Names, Status};

/// The finalizer that keeps a definition until its objects are gone.
pub const FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";

/// The desired status of a definition. `None` if the current status is equal.
///
/// `others` are the other definitions of the same group. A definition whose names are accepted becomes established in
/// the same step: its resource is served before its status is written.
pub fn plan(definition: &Definition, others: &[&Definition]) -> Option<StatusChange> {
    let taken = TakenNames::new(others);
    let (accepted, names) = accept(definition, &taken);
    let established = established(definition, names.status == "True");
    let mut conditions = Vec::new();
    for wanted in [Some(names), established].into_iter().flatten() {
        if definition.status.conditions.iter().find(|old| old.kind == wanted.kind) != Some(&wanted) {
            conditions.push(wanted);
        }
    }
    if conditions.is_empty() && accepted == definition.status.accepted_names {
        return None;
    }
    Some(StatusChange { accepted, conditions })
}

/// A change of a definition's status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusChange {
    /// The names to serve.
    pub accepted: Names,
    /// Conditions that are new or different.
    pub conditions: Vec<Condition>,
}

impl StatusChange {
    /// Applies the change to a definition in its JSON form. A definition that another server has established meanwhile
    /// stays established.
    pub fn apply(&self, object: &mut Value, now: &str) {
        let Some(status) = object_of(object, "status") else { return };
        status.insert("acceptedNames".to_owned(), names_json(&self.accepted));
        let is_established = is_established(status);
        for condition in &self.conditions {
            if !(is_established && condition.kind == "Established") {
                set_condition(status, condition, now);
            }
        }
    }

    /// The change while the resource cannot be served: the definition does not become established. As upstream, an
    /// established definition stays established. `None` if the current status is equal.
    pub fn not_served(mut self, current: &Status, reason: &str) -> Option<Self> {
        for wanted in &mut self.conditions {
            if wanted.kind == "Established" && wanted.status == "True" {
                *wanted = condition("Established", "False", "Installing", reason);
            }
        }
        self.conditions.retain(|wanted| !current.conditions.contains(wanted));
        let is_new = !self.conditions.is_empty() || self.accepted != current.accepted_names;
        is_new.then_some(self)
    }
}

/// Sets a condition of a definition in its JSON form. The transition time changes with the status only.
pub fn set(object: &mut Value, condition: &Condition, now: &str) {
    if let Some(status) = object_of(object, "status") {
        set_condition(status, condition, now);
    }
}

fn object_of<'a>(object: &'a mut Value, field: &str) -> Option<&'a mut Map<String, Value>> {
    let map = object.as_object_mut()?;
    let inner = map.entry(field).or_insert_with(|| json!({}));
    if !inner.is_object() {
        *inner = json!({});
    }
    inner.as_object_mut()
}

fn set_condition(status: &mut Map<String, Value>, condition: &Condition, now: &str) {
    let list = status.entry("conditions").or_insert_with(|| json!([]));
    let Some(list) = list.as_array_mut() else { return };
    let old = list.iter().position(|old| old["type"] == condition.kind.as_str());
    let since = old
        .filter(|index| list[*index]["status"] == condition.status.as_str())
        .and_then(|index| list[index]["lastTransitionTime"].as_str().map(str::to_owned))
        .unwrap_or_else(|| now.to_owned());
    let new = json!({
        "lastTransitionTime": since,
        "message": condition.message,
        "reason": condition.reason,
        "status": condition.status,
        "type": condition.kind,
    });
    match old {
        Some(index) => list[index] = new,
        None => list.push(new),
    }
}

fn is_established(status: &Map<String, Value>) -> bool {
    let mut conditions = status.get("conditions").and_then(Value::as_array).into_iter().flatten();
    conditions.any(|condition| condition["type"] == "Established" && condition["status"] == "True")
}

fn names_json(names: &Names) -> Value {
    let mut map = Map::new();
    map.insert("plural".to_owned(), names.plural.clone().into());
    map.insert("kind".to_owned(), names.kind.clone().into());
    for (name, value) in [("singular", &names.singular), ("listKind", &names.list_kind)] {
        if !value.is_empty() {
            map.insert(name.to_owned(), value.clone().into());
        }
    }
    for (name, list) in [("shortNames", &names.short_names), ("categories", &names.categories)] {
        if !list.is_empty() {
            map.insert(name.to_owned(), list.clone().into());
        }
    }
    Value::Object(map)
}

/// The names that other definitions of the group have.
struct TakenNames<'a> {
    resources: HashSet<&'a str>,
    kinds: HashSet<&'a str>,
}

impl<'a> TakenNames<'a> {
    fn new(others: &[&'a Definition]) -> TakenNames<'a> {
        let mut taken = TakenNames { resources: HashSet::new(), kinds: HashSet::new() };
        for other in others {
            let names = &other.status.accepted_names;
            taken.resources.extend([names.plural.as_str(), names.singular.as_str()]);
            taken.resources.extend(names.short_names.iter().map(String::as_str));
            taken.kinds.extend([names.kind.as_str(), names.list_kind.as_str()]);
        }
        taken
    }
}

fn accept(definition: &Definition, taken: &TakenNames<'_>) -> (Names, Condition) {
    let wanted = &definition.spec.names;
    let mut accepted = definition.status.accepted_names.clone();
    let mut conflict: Option<(&str, String)> = None;
    let in_use = |name: &str| format!("{name:?} is already in use");
    let mut one = |name: &String, slot: &mut String, names: &HashSet<&str>, reason: &'static str| {
        if name != slot && names.contains(name.as_str()) {
            conflict = Some((reason, in_use(name)));
        } else {
            slot.clone_from(name);
        }
    };
    one(&wanted.plural, &mut accepted.plural, &taken.resources, "PluralConflict");
    one(&wanted.singular, &mut accepted.singular, &taken.resources, "SingularConflict");
    one(&wanted.kind, &mut accepted.kind, &taken.kinds, "KindConflict");
    one(&wanted.list_kind, &mut accepted.list_kind, &taken.kinds, "ListKindConflict");
    let new = wanted.short_names.iter().filter(|name| !accepted.short_names.contains(name));
    let clashes: Vec<String> =
        new.filter(|name| taken.resources.contains(name.as_str())).map(|name| in_use(name)).collect();
    if clashes.is_empty() {
        accepted.short_names.clone_from(&wanted.short_names);
    } else if conflict.is_none() {
        let text = if clashes.len() == 1 { clashes.concat() } else { format!("[{}]", clashes.join(", ")) };
        conflict = Some(("ShortNamesConflict", text));
    }
    accepted.categories.clone_from(&wanted.categories);
    let (status, reason, message) = match conflict {
        Some((reason, message)) => ("False", reason, message),
        None => ("True", "NoConflicts", "no conflicts found".to_owned()),
    };
    (accepted, condition("NamesAccepted", status, reason, &message))
}

fn established(definition: &Definition, names_accepted: bool) -> Option<Condition> {
    if definition.is_condition_true("Established") {
        return None;
    }
    Some(if names_accepted {
        condition("Established", "True", "InitialNamesAccepted", "the initial names have been accepted")
    } else {
        condition("Established", "False", "NotAccepted", "not all names are accepted")
    })
}

/// A condition with these values.
pub fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Condition {
    Condition { kind: kind.into(), status: status.into(), reason: reason.into(), message: message.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(plural: &str, kind: &str, accepted: bool) -> Definition {
        let names = json!({"plural": plural, "singular": kind.to_lowercase(), "kind": kind,
            "listKind": format!("{kind}List"), "shortNames": ["x"]});
        let mut object = json!({"spec": {"group": "g.io", "names": names}});
        if accepted {
            object["status"] = json!({"acceptedNames": names});
        }
        Definition::parse(&object).unwrap()
    }

    #[test]
    fn free_names_are_accepted_and_the_definition_is_established() {
        let change = plan(&definition("foos", "Foo", false), &[]).unwrap();
        assert_eq!(change.accepted.plural, "foos");
        let kinds: Vec<_> = change.conditions.iter().map(|c| (c.kind.as_str(), c.status.as_str())).collect();
        assert_eq!(kinds, [("NamesAccepted", "True"), ("Established", "True")]);
    }

    #[test]
    fn names_of_another_definition_are_refused() {
        let other = definition("foos", "Foo", true);
        let change = plan(&definition("bars", "Foo", false), &[&other]).unwrap();
        assert_eq!(change.accepted.plural, "bars");
        assert_eq!(change.accepted.kind, "");
        assert_eq!(change.conditions[0].status, "False");
        assert_eq!(change.conditions[0].message, "\"FooList\" is already in use");
        assert_eq!(change.conditions[1].reason, "NotAccepted");
    }

    #[test]
    fn a_definition_that_is_not_served_is_not_established_and_has_the_reason_once() {
        let mut object = json!({"spec": {"group": "g.io", "names": {"plural": "foos", "kind": "Foo"}}});
        for reason in ["the store is down", "the store is slow"] {
            let definition = Definition::parse(&object).unwrap();
            let change = plan(&definition, &[]).unwrap().not_served(&definition.status, reason).unwrap();
            change.apply(&mut object, "2024-01-01T00:00:00Z");
            let definition = Definition::parse(&object).unwrap();
            assert!(
                !definition.is_condition_true("Established") && definition.is_condition_true("NamesAccepted")
            );
            let established = &definition.status.conditions[1];
            assert_eq!((established.reason.as_str(), established.message.as_str()), ("Installing", reason));
            assert_eq!(plan(&definition, &[]).unwrap().not_served(&definition.status, reason), None);
        }
    }

    #[test]
    fn a_definition_that_another_server_has_established_stays_established() {
        let mut object = json!({"spec": {"group": "g.io", "names": {"plural": "foos", "kind": "Foo"}}});
        let definition = Definition::parse(&object).unwrap();
        let change = plan(&definition, &[]).unwrap();
        change.apply(&mut object, "2024-01-01T00:00:00Z");
        let late = change.not_served(&definition.status, "the store is down").unwrap();
        late.apply(&mut object, "2024-01-02T00:00:00Z");
        assert!(Definition::parse(&object).unwrap().is_condition_true("Established"));
    }

    #[test]
    fn a_settled_definition_needs_no_change() {
        let mut object = json!({"spec": {"group": "g.io", "names": {"plural": "foos", "kind": "Foo"}}});
        plan(&Definition::parse(&object).unwrap(), &[]).unwrap().apply(&mut object, "2024-01-01T00:00:00Z");
        assert_eq!(plan(&Definition::parse(&object).unwrap(), &[]), None);
    }
}
