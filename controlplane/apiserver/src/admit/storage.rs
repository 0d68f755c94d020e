//! Claims and volumes: the default storage class, the protection of objects in use, and the expansion of claims.
//!
//! Source: upstream's plugins DefaultStorageClass, StorageObjectInUseProtection and PersistentVolumeClaimResize.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use coracle_values::Quantity;
use serde_json::{Map, Value};

use super::{Admission, Admit, Attributes, Operation};
use crate::error::{ApiError, Result};

const GROUP: &str = "storage.k8s.io";
const CLAIM: &str = "PersistentVolumeClaim";
const VOLUME: &str = "PersistentVolume";
const ATTRIBUTES_CLASS: &str = "VolumeAttributesClass";
/// Annotations of the default class. The second annotation is deprecated.
const IS_DEFAULT: [&str; 2] =
    ["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"];
const OLD_CLASS: &str = "volume.beta.kubernetes.io/storage-class";

pub(super) struct DefaultStorageClass;
pub(super) struct InUseProtection;
pub(super) struct ClaimResize;

#[async_trait]
impl Admit for DefaultStorageClass {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        let has_class = !object["spec"]["storageClassName"].is_null()
            || !object["metadata"]["annotations"][OLD_CLASS].is_null();
        if !attributes.is(Operation::Create, CLAIM) || has_class {
            return Ok(());
        }
        if let Some(name) = default_class(admission)
            && let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut)
        {
            spec.insert("storageClassName".to_owned(), name.into());
        }
        Ok(())
    }
}

#[async_trait]
impl Admit for InUseProtection {
    async fn mutate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        let finalizer = if attributes.is(Operation::Create, CLAIM) {
            "kubernetes.io/pvc-protection"
        } else if attributes.is(Operation::Create, VOLUME) {
            "kubernetes.io/pv-protection"
        } else if attributes.operation == Operation::Create && attributes.kind.is(GROUP, ATTRIBUTES_CLASS) {
            "kubernetes.io/vac-protection"
        } else {
            return Ok(());
        };
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            protect(metadata, finalizer);
        }
        Ok(())
    }
}

#[async_trait]
impl Admit for ClaimResize {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let Some(old) = attributes.old.filter(|_| attributes.is(Operation::Update, CLAIM)) else {
            return Ok(());
        };
        if !grows(old, object) {
            return Ok(());
        }
        let refused = |why: &str| Err(ApiError::forbidden_object(attributes.kind, attributes.name, why));
        if old["status"]["phase"] != "Bound" {
            return refused("Only bound persistent volume claims can be expanded");
        }
        let (before, after) = (class_of(old), class_of(object));
        if before.is_empty() || before != after || !allows_expansion(admission, before) {
            return refused(
                "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must \
                 support resize",
            );
        }
        Ok(())
    }
}

/// Adds a finalizer.
pub(super) fn protect(metadata: &mut Map<String, Value>, finalizer: &str) {
    let list = metadata.entry("finalizers").or_insert_with(|| Value::Array(Vec::new()));
    if list.is_null() {
        *list = Value::Array(Vec::new());
    }
    if let Some(list) = list.as_array_mut()
        && !list.iter().any(|known| known == finalizer)
    {
        list.push(finalizer.into());
    }
}

fn grows(old: &Value, new: &Value) -> bool {
    let size = |claim: &Value| {
        let text = claim["spec"]["resources"]["requests"]["storage"].as_str()?;
        Quantity::parse(text).ok()
    };
    size(old).zip(size(new)).is_some_and(|(old, new)| new > old)
}

fn class_of(claim: &Value) -> &str {
    let old = claim["metadata"]["annotations"][OLD_CLASS].as_str();
    old.or(claim["spec"]["storageClassName"].as_str()).unwrap_or_default()
}

fn allows_expansion(admission: &Admission, class: &str) -> bool {
    let kind = by_resource(GROUP, "v1", "storageclasses");
    let class = kind.and_then(|kind| admission.cache.get(kind, "", class));
    class.is_some_and(|class| class.value()["allowVolumeExpansion"] == true)
}

/// Name of the default class. If there are several default classes, the newest is used, as upstream.
fn default_class(admission: &Admission) -> Option<String> {
    let kind = by_resource(GROUP, "v1", "storageclasses")?;
    let classes: Vec<Value> = admission.cache.list(kind, "").iter().map(|class| class.value()).collect();
    newest_default(&classes)
}

fn newest_default(classes: &[Value]) -> Option<String> {
    let text = |class: &Value, field: &str| class["metadata"][field].as_str().unwrap_or_default().to_owned();
    let marked =
        |class: &&Value| IS_DEFAULT.iter().any(|name| class["metadata"]["annotations"][*name] == "true");
    let newest = classes.iter().filter(marked).max_by(|a, b| {
        let created = |class: &Value| text(class, "creationTimestamp");
        created(a).cmp(&created(b)).then_with(|| text(b, "name").cmp(&text(a, "name")))
    });
    newest.map(|class| text(class, "name"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_newest_marked_class_is_the_default() {
        let class = |name: &str, created: &str, value: &str| json!({"metadata": {"name": name, "creationTimestamp": created, "annotations": {IS_DEFAULT[0]: value}}});
        let classes = [
            class("old", "2026-01-01T00:00:00Z", "true"),
            class("b", "2026-01-02T00:00:00Z", "true"),
            class("a", "2026-01-02T00:00:00Z", "true"),
            class("unmarked", "2026-01-03T00:00:00Z", "false"),
        ];
        assert_eq!(newest_default(&classes).as_deref(), Some("a"));
        assert_eq!(newest_default(&classes[3..]), None);
    }

    #[test]
    fn a_finalizer_is_added_once_and_growth_is_recognized() {
        let mut object = json!({"finalizers": null});
        let metadata = object.as_object_mut().unwrap();
        protect(metadata, "f");
        protect(metadata, "f");
        assert_eq!(object, json!({"finalizers": ["f"]}));
        let claim = |size: &str| json!({"spec": {"resources": {"requests": {"storage": size}}}});
        assert!(grows(&claim("1Gi"), &claim("1025Mi")));
        assert!(!grows(&claim("1Gi"), &claim("1024Mi")));
    }
}
