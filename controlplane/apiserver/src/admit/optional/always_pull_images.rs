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
        match other_policy(&object["spec"]) {
            None => Ok(()),
            Some((field, policy)) => Err(forbidden(
                attributes,
                format!("{field}: Unsupported value: {policy}: supported values: \"Always\""),
            )),
        }
    }
}

/// The first field with another pull policy, and its value. A later plugin may have set it.
fn other_policy(spec: &Value) -> Option<(String, &Value)> {
    let of_containers = containers(spec).map(|PodContainer { field, index, value }| {
        (format!("spec.{field}[{index}].imagePullPolicy"), &value["imagePullPolicy"])
    });
    let volumes = spec["volumes"].as_array().into_iter().flatten().enumerate();
    let images = volumes.filter(|(_, volume)| volume["image"].is_object());
    let of_images = images.map(|(index, volume)| {
        (format!("spec.volumes[{index}].image.pullPolicy"), &volume["image"]["pullPolicy"])
    });
    of_containers.chain(of_images).find(|(_, policy)| **policy != "Always")
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn containers_and_image_volumes_are_checked() {
        let (always, never) = (json!("Always"), json!("Never"));
        let spec = |container: &Value, volume: &Value| {
            json!({"containers": [{"imagePullPolicy": container}],
                "volumes": [{"emptyDir": {}}, {"image": {"reference": "i", "pullPolicy": volume}}]})
        };
        assert_eq!(other_policy(&spec(&always, &always)), None);
        let found = spec(&never, &always);
        assert_eq!(other_policy(&found), Some(("spec.containers[0].imagePullPolicy".to_owned(), &never)));
        let found = spec(&always, &never);
        assert_eq!(other_policy(&found), Some(("spec.volumes[1].image.pullPolicy".to_owned(), &never)));
    }
}
