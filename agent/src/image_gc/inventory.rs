//! Images and their users, from the runtime and the pods of this node.

use std::collections::HashSet;
use std::sync::Arc;

use coracle_images::Reference;
use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;

use super::plan::Image;
use crate::pod::{Pods, has_ended};
use crate::runtime::{Runtime, RuntimeError};

/// Additional data of an image in the built-in runtime's verbose status.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Info {
    layers: Vec<String>,
    layer_bytes: Vec<u64>,
    pulled_at: Option<Timestamp>,
    last_used_at: Option<Timestamp>,
    in_use: bool,
}

/// Reads all images from the runtime, and whether they are in use.
pub(super) async fn images(runtime: &dyn Runtime, pods: &Pods) -> Result<Vec<Image>, RuntimeError> {
    // Containers are listed before the pods are read. A container that is created in between uses the image of a pod.
    let containers = runtime.list_containers(cri::ListContainersRequest::default()).await?.containers;
    let mut used: HashSet<String> = HashSet::new();
    for container in containers {
        used.insert(container.image_ref);
        used.insert(container.image_id);
        used.extend(container.image.map(|image| image.image));
    }
    let listed = runtime.list_images(cri::ListImagesRequest::default()).await?.images;
    let mut images = Vec::new();
    for image in listed {
        let Some(info) = info(runtime, &image).await? else { continue };
        images.push(to_image(image, info, &used));
    }
    let named = named(&pods.all());
    for image in &mut images {
        image.in_use |= has_name(&named, &image.id, &image.names);
    }
    Ok(images)
}

/// The images that pods of this node name.
#[derive(Default)]
pub(super) struct NamedImages {
    pods: Vec<Arc<Pod>>,
    names: HashSet<String>,
}

// === impl NamedImages ===

impl NamedImages {
    /// Whether one of these pods names an image. The names are collected again only if the pods have changed. A user
    /// can create pods that name a hundred thousand images, and there can be many images.
    pub(super) fn contains(&mut self, pods: Vec<Arc<Pod>>, id: &str, names: &[String]) -> bool {
        let is_same = |(one, other): (&Arc<Pod>, &Arc<Pod>)| Arc::ptr_eq(one, other);
        if pods.len() != self.pods.len() || !pods.iter().zip(&self.pods).all(is_same) {
            self.names = named(&pods);
            self.pods = pods;
        }
        has_name(&self.names, id, names)
    }
}

/// Additional data of an image; None if it was removed.
async fn info(runtime: &dyn Runtime, image: &cri::Image) -> Result<Option<Info>, RuntimeError> {
    let spec = cri::ImageSpec { image: image.id.clone(), ..cri::ImageSpec::default() };
    let request = cri::ImageStatusRequest { image: Some(spec), verbose: true };
    let status = runtime.image_status(request).await?;
    Ok(status.image.map(|_| {
        let info = status.info.get("info").and_then(|text| serde_json::from_str(text).ok());
        info.unwrap_or_default()
    }))
}

fn to_image(image: cri::Image, info: Info, used: &HashSet<String>) -> Image {
    let pulled = info.pulled_at.unwrap_or(Timestamp::UNIX_EPOCH);
    let layers = if info.layers.is_empty() || info.layers.len() != info.layer_bytes.len() {
        // The runtime does not report the layers: the whole image counts as one layer.
        vec![(image.id.clone(), image.size)]
    } else {
        info.layers.into_iter().zip(info.layer_bytes).collect()
    };
    let names: Vec<String> = image.repo_tags.into_iter().chain(image.repo_digests).collect();
    Image {
        in_use: info.in_use || has_name(used, &image.id, &names),
        id: image.id,
        names,
        pinned: image.pinned,
        pulled,
        used: info.last_used_at.unwrap_or(pulled),
        layers,
    }
}

fn has_name(among: &HashSet<String>, id: &str, names: &[String]) -> bool {
    among.contains(id) || names.iter().any(|name| among.contains(name))
}

/// Normalised names of all images that these pods use, and the ids that they use as names. Pods that have ended are
/// skipped.
fn named(pods: &[impl AsRef<Pod>]) -> HashSet<String> {
    let specs =
        pods.iter().map(AsRef::as_ref).filter(|pod| !has_ended(pod)).filter_map(|pod| pod.spec.as_ref());
    specs.flat_map(references).flat_map(|image| [normalised(image)].into_iter().chain(id(image))).collect()
}

/// The id that a pod uses as a name, in the runtime's form. A text such as `sha256:…` can also be a name with a tag,
/// so it is additional to the name.
fn id(image: &str) -> Option<String> {
    let (algorithm, digits) = image.split_once(':').unwrap_or(("", image));
    let algorithm = match (algorithm, digits.len()) {
        ("" | "sha256", 64) => "sha256",
        ("" | "sha512", 128) => "sha512",
        _ => return None,
    };
    let is_id = digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    is_id.then(|| format!("{algorithm}:{digits}"))
}

fn references(spec: &PodSpec) -> Vec<&str> {
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let volumes = spec.volumes.iter().flatten().filter_map(|volume| volume.image.as_ref());
    let references = containers.map(|container| &container.image);
    let references = references.chain(ephemeral.map(|container| &container.image));
    references.chain(volumes.map(|image| &image.reference)).filter_map(|image| image.as_deref()).collect()
}

fn normalised(image: &str) -> String {
    Reference::parse(image).map_or_else(|_invalid| image.to_owned(), |reference| reference.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(value: serde_json::Value) -> Arc<Pod> {
        Arc::new(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn all_images_of_containers_and_volumes_are_named_by_a_pod_that_has_not_ended() {
        let pods = [
            pod(json!({"spec": {
                "initContainers": [{"name": "i", "image": "first"}],
                "containers": [{"name": "c", "image": "registry.example/app:1"}],
                "ephemeralContainers": [{"name": "e", "image": "busybox"}],
                "volumes": [{"name": "v", "image": {"reference": "data:2"}}],
            }})),
            pod(
                json!({"spec": {"containers": [{"name": "c", "image": "done"}]}, "status": {"phase": "Succeeded"}}),
            ),
        ];
        let mut names: Vec<String> = named(&pods).into_iter().collect();
        names.sort();
        let expected = [
            "docker.io/library/busybox:latest",
            "docker.io/library/data:2",
            "docker.io/library/first:latest",
            "registry.example/app:1",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn names_are_read_again_only_after_pods_have_changed() {
        let of = |image: &str| pod(json!({"spec": {"containers": [{"name": "c", "image": image}]}}));
        let name = |image: &str| [format!("docker.io/library/{image}:latest")];
        let (one, other, mut named) = (of("a"), of("b"), NamedImages::default());
        assert!(!named.contains(Vec::new(), "i", &name("a")));
        assert!(named.contains(vec![one.clone()], "i", &name("a")));
        named.names.clear();
        assert!(!named.contains(vec![one.clone()], "i", &name("a")), "the names were read again");
        assert!(named.contains(vec![one, other.clone()], "i", &name("a")));
        assert!(!named.contains(vec![other], "i", &name("a")));
    }

    #[test]
    fn an_image_that_a_pod_names_by_id_is_in_use() {
        let digits = "0123456789abcdef".repeat(4);
        for written in [digits.clone(), format!("sha256:{digits}")] {
            let pods = [pod(json!({"spec": {"containers": [{"name": "c", "image": written}]}}))];
            assert!(has_name(&named(&pods), &format!("sha256:{digits}"), &[]), "{written}");
        }
        let pods = [pod(json!({"spec": {"containers": [{"name": "c", "image": "sha256:latest"}]}}))];
        assert!(!has_name(&named(&pods), "sha256:latest", &[]));
    }

    #[test]
    fn verbose_status_of_an_image_is_parsed() {
        let text = json!({
            "imageSpec": {}, "layers": ["/l/2", "/l/1"], "layerBytes": [2, 1], "inUse": false,
            "pulledAt": "2026-11-01T00:00:00Z", "lastUsedAt": "2026-11-02T00:00:00Z",
        });
        let info: Info = serde_json::from_value(text).unwrap();
        let image = cri::Image {
            id: "sha256:1".into(),
            repo_digests: vec!["a.b/c@sha256:2".into()],
            size: 9,
            ..cri::Image::default()
        };
        let found = to_image(image.clone(), info, &HashSet::from(["a.b/c@sha256:2".to_owned()]));
        assert_eq!(found.layers, [("/l/2".to_owned(), 2), ("/l/1".to_owned(), 1)]);
        assert!(found.in_use && found.used.duration_since(found.pulled).as_hours() == 24);
        let little = to_image(image, Info::default(), &HashSet::new());
        assert_eq!(little.layers, [("sha256:1".to_owned(), 9)]);
        assert!(!little.in_use && little.used == Timestamp::UNIX_EPOCH);
    }
}
