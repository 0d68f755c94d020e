//! Score NodeResourcesFit: by the utilization of the node's resources, with the strategy of the profile.

use coracle_values::pod_resources::Resources;

use crate::config::{Fit, ShapePoint, Strategy};
use crate::node_score::{MAX_NODE_SCORE, share};
use crate::request::PodRequirements;
use crate::snapshot::Candidate;

/// The weighted mean of the scores of the node's resources. With `RequestedToCapacityRatio` the mean is rounded, and
/// resources with score 0 are ignored. Extended resources count only if the pod requests them.
pub(super) fn score(needs: &PodRequirements, fit: &Fit, node: Candidate<'_>) -> i64 {
    let (own, assumed) = (&needs.requests, &needs.assumed);
    let (has, weighed) = (&node.properties.allocatable, &node.info.weighed);
    let requested = &node.info.requested;
    let (mut sum, mut weights) = (0_i64, 0_i64);
    for (name, weight) in &fit.resources {
        let of = |map: &Resources| map.others.get(name).copied().unwrap_or_default();
        let (has, used) = match name.as_str() {
            "cpu" => (has.cpu_millis, weighed.cpu_millis + assumed.cpu_millis),
            "memory" => (has.memory, weighed.memory + assumed.memory),
            "ephemeral-storage" => {
                (has.ephemeral_storage, requested.ephemeral_storage + own.ephemeral_storage)
            }
            _ if of(own) == 0 => continue,
            _ => (of(has), of(requested) + of(own)),
        };
        if has <= 0 {
            continue;
        }
        let score = fit.strategy.score(has, used);
        if matches!(fit.strategy, Strategy::Ratio(_)) && score <= 0 {
            continue;
        }
        sum = sum.saturating_add(score.saturating_mul(*weight));
        weights += weight;
    }
    let half = if matches!(fit.strategy, Strategy::Ratio(_)) { weights / 2 } else { 0 };
    sum.saturating_add(half).checked_div(weights).unwrap_or_default()
}

impl Strategy {
    /// The score of one resource. `has` is above 0.
    fn score(&self, has: i128, used: i128) -> i64 {
        match self {
            Strategy::Least if used > has => 0,
            Strategy::Least => share(has - used, has),
            Strategy::Most => share(used.min(has), has),
            Strategy::Ratio(points) => {
                ratio(points, if used > has { MAX_NODE_SCORE } else { share(used, has) })
            }
        }
    }
}

/// The score between the two points around a utilization in percent.
fn ratio(points: &[ShapePoint], used: i64) -> i64 {
    // The configuration has scores from 0 to 10.
    let scaled = |score: i64| score * (MAX_NODE_SCORE / 10);
    let Some(next) = points.iter().position(|point| used <= point.utilization) else {
        return points.last().map_or(0, |point| scaled(point.score));
    };
    let ShapePoint { utilization: at, score } = points[next];
    match next.checked_sub(1).map(|before| points[before]) {
        None => scaled(score),
        Some(ShapePoint { utilization: start, score: first }) => {
            scaled(first) + (scaled(score) - scaled(first)) * (used - start) / (at - start)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::object::Pod;
    use serde_json::json;

    fn score(pod: &Pod, fit: &Fit, nodes: &[Candidate<'_>]) -> Vec<i64> {
        nodes.iter().map(|node| super::score(&PodRequirements::of(pod), fit, *node)).collect()
    }

    #[test]
    fn the_emptier_node_is_better() {
        let pod = |name: &str| {
            fixture::pod(
                name,
                json!({"containers": [{"resources": {"requests": {"cpu": "1", "memory": "2Gi"}}}]}),
            )
        };
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        snapshot.place(&pod("one"), "a");
        let nodes: Vec<_> = snapshot.candidates().collect();
        assert_eq!(score(&pod("p"), &Fit::default(), &nodes), [50, 75]);
        let most = Fit { strategy: Strategy::Most, ..Fit::default() };
        assert_eq!(score(&pod("p"), &most, &nodes), [50, 25]);
        let points = [(0, 0), (50, 10), (100, 0)];
        let points = points.map(|(utilization, score)| ShapePoint { utilization, score });
        let half = Fit { strategy: Strategy::Ratio(points.to_vec()), ..Fit::default() };
        assert_eq!(score(&pod("p"), &half, &nodes), [100, 50], "the node that is half full is best");
    }

    #[test]
    fn a_shape_has_straight_lines_between_its_points() {
        let point = |(utilization, score)| ShapePoint { utilization, score };
        let points = [(0, 0), (50, 10), (100, 4)].map(point);
        let scores = [0, 25, 50, 75, 100].map(|used| ratio(&points, used));
        assert_eq!(scores, [0, 50, 100, 70, 40]);
        assert_eq!(ratio(&[point((20, 3))], 90), 30);
    }
}
