//! Sets the pull policy `Always` for every container. So a pod without the credentials for a private image cannot use
//! the image that another pod has pulled.
//!
//! Source: `plugin/pkg/admission/alwayspullimages`.

use std::collections::BTreeSet;

use async_trait::async_trait;
use serde_json::Value;

use super::{CONTAINERS, PodContainer, containers, forbidden, writes_pod};
use crate::{
    admit::{Admission, Admit, Attributes, Operation},
    error::Result,
};

pub(in crate::admit) struct AlwaysPullImages;

#[async_trait]
impl Admit for AlwaysPullImages {
    async fn mutate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if !applies(attributes, object) {
            return Ok(());
        }
        let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return Ok(()) };
        for field in CONTAINERS {
            for container in spec.get_mut(field).and_then(Value::as_array_mut).into_iter().flatten() {
                set(container, "imagePullPolicy");
            }
        }
        for volume in spec.get_mut("volumes").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(image) = volume.get_mut("image") {
                set(image, "pullPolicy");
            }
        }
        Ok(())
    }

    async fn validate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if !applies(attributes, object) {
            return Ok(());
        }
        let wrong = containers(&object["spec"]).find(|one| one.value["imagePullPolicy"] != "Always");
        match wrong {
            None => Ok(()),
            Some(PodContainer { field, index, value: container }) => Err(forbidden(
                attributes,
                format!(
                    "spec.{field}[{index}].imagePullPolicy: Unsupported value: {}: supported values: \"Always\"",
                    container["imagePullPolicy"]
                ),
            )),
        }
    }
}

fn set(target: &mut Value, field: &str) {
    if let Some(target) = target.as_object_mut() {
        target.insert(field.to_owned(), "Always".into());
    }
}

/// Whether the request adds images to a pod.
fn applies(attributes: &Attributes<'_>, object: &Value) -> bool {
    let ephemeral = attributes.operation == Operation::Update
        && attributes.kind.is("", "Pod")
        && attributes.subresource == "ephemeralcontainers";
    if !ephemeral && !writes_pod(attributes) {
        return false;
    }
    let Some(old) = attributes.old else { return true };
    let known = images(old);
    images(object).iter().any(|image| !known.contains(image))
}

fn images(pod: &Value) -> BTreeSet<&str> {
    containers(&pod["spec"]).filter_map(|container| container.value["image"].as_str()).collect()
}
