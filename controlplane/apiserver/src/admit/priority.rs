//! Sets the priority of a pod from its priority class, or from the default class. At most one class can be the default.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::Value;

use super::{Admission, Admit, Attributes, Operation};
use crate::error::{ApiError, Result};

const GROUP: &str = "scheduling.k8s.io";
/// Name, value and description of the system classes. Pods can use them even before their objects exist.
pub(crate) const SYSTEM: [(&str, i64, &str); 2] = [
    (
        "system-cluster-critical",
        2_000_000_000,
        "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary.",
    ),
    (
        "system-node-critical",
        2_000_001_000,
        "Used for system critical pods that must not be moved from their current node.",
    ),
];
/// The fields of a PriorityClass that this plugin reads.
const FIELDS: &[&[&str]] = &[&["metadata", "name"], &["globalDefault"], &["value"], &["preemptionPolicy"]];
const PREEMPT: &str = "PreemptLowerPriority";

pub(super) struct Priority;

/// The fields of a PriorityClass that are copied to pods.
struct Class {
    name: String,
    value: i64,
    policy: String,
}

#[async_trait]
impl Admit for Priority {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if let (Some(old), true) = (attributes.old, attributes.is(Operation::Update, "Pod")) {
            if !attributes.writes_new_pod() {
                keep_priority(object, old);
                return Ok(());
            }
            remove_former_priority(object, old);
        }
        if !attributes.writes_new_pod() || !object["spec"].is_object() {
            return Ok(());
        }
        let refused = |why: String| ApiError::forbidden_object(attributes.kind, attributes.name, why);
        let name = object["spec"]["priorityClassName"].as_str().unwrap_or_default();
        let class = match name {
            "" => default_class(admission),
            name => Some(
                named(admission, name)
                    .ok_or_else(|| refused(format!("no PriorityClass with name {name} was found")))?,
            ),
        };
        let value = class.as_ref().map_or(0, |class| class.value);
        let given = object["spec"]["priority"].as_i64();
        if let Some(given) = given.filter(|given| *given != value) {
            return Err(refused(format!(
                "the integer value of priority ({given}) must not be provided in pod spec; \
                 priority admission controller computed {value} from the given PriorityClass name"
            )));
        }
        let policy = class.as_ref().map_or(PREEMPT, |class| &class.policy);
        let own = object["spec"]["preemptionPolicy"].as_str();
        if let Some(own) = own.filter(|own| *own != policy) {
            return Err(refused(format!(
                "the string value of PreemptionPolicy ({own}) must not be provided in pod spec; \
                 priority admission controller computed {policy} from the given PriorityClass name"
            )));
        }
        object["spec"]["priority"] = value.into();
        object["spec"]["preemptionPolicy"] = policy.into();
        if let Some(class) = class {
            object["spec"]["priorityClassName"] = class.name.into();
        }
        Ok(())
    }

    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let is_default = attributes.kind.is(GROUP, "PriorityClass") && object["globalDefault"] == true;
        if !is_default || attributes.operation == Operation::Delete {
            return Ok(());
        }
        match default_class(admission).filter(|class| class.name != attributes.name) {
            None => Ok(()),
            Some(class) => {
                let why = format!(
                    "PriorityClass {} is already marked as default. Only one default can exist",
                    class.name
                );
                Err(ApiError::forbidden_object(attributes.kind, attributes.name, why))
            }
        }
    }
}

/// Copies the priority of the stored pod to an update that omits it. Clients may update with the original manifest,
/// which does not contain the priority.
fn keep_priority(object: &mut Value, old: &Value) {
    let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return };
    for field in ["priority", "preemptionPolicy"] {
        let before = &old["spec"][field];
        if spec.get(field).is_none_or(Value::is_null) && !before.is_null() {
            spec.insert(field.to_owned(), before.clone());
        }
    }
}

/// Removes the priority of the stored pod, because an initializer may change the class.
fn remove_former_priority(object: &mut Value, old: &Value) {
    let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return };
    for field in ["priority", "preemptionPolicy"] {
        if spec.get(field) == old["spec"].get(field) {
            spec.remove(field);
        }
    }
}

fn named(admission: &Admission, name: &str) -> Option<Class> {
    let kind = by_resource(GROUP, "v1", "priorityclasses")?;
    let found = admission.cache.get(kind, "", name).map(|class| read(&class.part(FIELDS)));
    found.or_else(|| {
        let (_, value, _) = SYSTEM.iter().find(|(known, ..)| *known == name)?;
        Some(Class { name: name.to_owned(), value: *value, policy: PREEMPT.to_owned() })
    })
}

/// The default class. If concurrent requests have created several default classes, the class with the lowest value is
/// the default.
fn default_class(admission: &Admission) -> Option<Class> {
    let kind = by_resource(GROUP, "v1", "priorityclasses")?;
    let all = admission.cache.list(kind, "");
    let defaults = all.iter().map(|class| class.part(FIELDS)).filter(|class| class["globalDefault"] == true);
    defaults.map(|class| read(&class)).min_by_key(|class| class.value)
}

fn read(class: &Value) -> Class {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let policy = class["preemptionPolicy"].as_str().unwrap_or(PREEMPT).to_owned();
    Class { name: text(&class["metadata"]["name"]), value: class["value"].as_i64().unwrap_or(0), policy }
}
