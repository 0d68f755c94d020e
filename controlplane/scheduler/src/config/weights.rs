//! Weighted resources and the shape of a score, in both file formats.

use serde::Deserialize;

use super::ShapePoint;

/// A resource with its weight in a score.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ResourceWeight {
    name: String,
    weight: Option<i64>,
}

/// A shape, and the resources to which it applies.
pub(super) struct FitShape {
    pub(super) shape: Vec<Point>,
    pub(super) resources: Vec<ResourceWeight>,
}

/// A point of a shape: the score at a utilization in percent.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Point {
    utilization: i64,
    score: i64,
}

/// Resources with their weights, from 1 to 100.
pub(super) fn resources(listed: Vec<ResourceWeight>) -> Result<Vec<(String, i64)>, String> {
    let weight = |one: ResourceWeight| match one.weight.unwrap_or(1) {
        weight @ 1..=100 => Ok((one.name, weight)),
        weight => Err(format!("resources: weight {weight} must be from 1 to 100")),
    };
    listed.into_iter().map(weight).collect()
}

/// The points of a shape, sorted by utilization. Fails if they are not in this order or out of range.
pub(super) fn points(shape: &[Point]) -> Result<Vec<ShapePoint>, String> {
    let point =
        |Point { utilization, score }: &Point| ShapePoint { utilization: *utilization, score: *score };
    let points: Vec<ShapePoint> = shape.iter().map(point).collect();
    let is_in_range =
        |point: &ShapePoint| (0..=100).contains(&point.utilization) && (0..=10).contains(&point.score);
    let in_range = points.iter().all(is_in_range);
    let is_sorted = points.windows(2).all(|pair| pair[0].utilization < pair[1].utilization);
    if points.is_empty() || !in_range || !is_sorted {
        let range = "utilization from 0 to 100 in rising order and score from 0 to 10";
        return Err(format!("requestedToCapacityRatio.shape must have points with {range}"));
    }
    Ok(points)
}
