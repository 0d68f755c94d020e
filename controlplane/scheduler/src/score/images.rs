//! Score ImageLocality: nodes that have the pod's images get higher scores. Source: upstream's plugin of that name.

use crate::node_score::MAX_NODE_SCORE;
use crate::object::Pod;
use crate::snapshot::{Candidate, Images};

const MIB: i128 = 1024 * 1024;
/// Minimum size of an image that counts. Smaller images are pulled quickly.
const MIN_IMAGE_SIZE: i128 = 23 * MIB;
/// Size of a container's image above which the score does not increase.
const MAX_IMAGE_SIZE: i128 = 1000 * MIB;

pub(super) fn score(pod: &Pod, images: &Images, nodes: &[Candidate<'_>]) -> Vec<i64> {
    let containers = || pod.spec.containers.iter().chain(pod.spec.init_containers.iter().flatten());
    let volumes = pod.spec.volumes.iter().filter_map(|volume| volume.image.as_ref()?.reference.as_deref());
    let wanted = containers().map(|one| one.image.as_deref().unwrap_or_default());
    let wanted = wanted.chain(volumes).map(normalized);
    let wanted: Vec<String> = wanted.filter(|image| images.has(image)).collect();
    if wanted.is_empty() {
        return vec![0; nodes.len()];
    }
    let count = i128::try_from(containers().count()).unwrap_or_default();
    let largest = MAX_IMAGE_SIZE * count;
    let mark = |node: &Candidate<'_>| {
        // An image on few nodes counts less. Otherwise all pods with this image would be placed on the same node.
        let size = |image: &String| Some(scaled(*node.info.images.get(image.as_str())?, images.share(image)));
        let sum: i128 = wanted.iter().filter_map(size).sum();
        let above = sum.clamp(MIN_IMAGE_SIZE, largest.max(MIN_IMAGE_SIZE)) - MIN_IMAGE_SIZE;
        let score =
            (above * i128::from(MAX_NODE_SCORE)).checked_div(largest - MIN_IMAGE_SIZE).unwrap_or_default();
        i64::try_from(score).unwrap_or_default()
    };
    nodes.iter().map(mark).collect()
}

/// The size multiplied by the share, rounded down. As upstream, the multiplication uses floating-point numbers.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "upstream computes it in the same way"
)]
fn scaled(size: i64, share: f64) -> i128 {
    (size as f64 * share) as i128
}

/// An image name with the tag `latest` if it has no tag.
fn normalized(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or_default();
    if last.contains(':') { name.to_owned() } else { format!("{name}:latest") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn a_node_with_the_image_is_better() {
        let images = json!([{"names": ["r/big:latest"], "sizeBytes": 800 * MIB as i64},
            {"names": ["r/small:1"], "sizeBytes": 5 * MIB as i64}]);
        let with = fixture::node("a", json!({"/status/images": images}));
        let snapshot = fixture::snapshot(&[with, fixture::node("b", json!({}))]);
        let nodes: Vec<_> = snapshot.candidates().collect();
        let scores = |image: &str| {
            let pod = fixture::pod("p", json!({"containers": [{"image": image}]}));
            score(&pod, &snapshot.images, &nodes)
        };
        // Half of the nodes have the image: 400 MiB of 1000.
        assert_eq!(scores("r/big"), [38, 0]);
        assert_eq!(scores("r/small:1"), [0, 0]);
        assert_eq!(scores("r/absent"), [0, 0]);
        assert_eq!(score(&fixture::pod("p", json!({})), &snapshot.images, &nodes), [0, 0]);
    }
}
