//! Which images go, in which order, and how many bytes that frees. Pure.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use super::ImageGcPolicy;

/// The images' file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    pub(super) capacity: u64,
    pub(super) available: u64,
    /// 0 where inodes are not counted.
    pub(super) inodes: u64,
    pub(super) inodes_free: u64,
}

/// How much there is to be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Nothing,
    Bytes(u64),
    /// All that may go: inodes run out, and nobody counts those of an image.
    All,
}

/// An image, as far as it matters here.
#[derive(Clone, Debug)]
pub(super) struct Image {
    pub(super) id: String,
    /// Its tags and digests.
    pub(super) names: Vec<String>,
    pub(super) pinned: bool,
    /// By a container in whatever state, or by a pod that names it.
    pub(super) in_use: bool,
    /// When it came; at the beginning of time if nobody knows.
    pub(super) pulled: Timestamp,
    /// When it was last of use.
    pub(super) used: Timestamp,
    /// What it consists of, and the bytes of each: two images may have one layer.
    pub(super) layers: Vec<(String, u64)>,
}

/// An image that goes, and what is free when all before it are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Removal {
    pub(super) id: String,
    pub(super) names: Vec<String>,
    pub(super) bytes: u64,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) removals: Vec<Removal>,
    /// When it is not enough: the time after which the next image is old enough to go.
    pub(super) again: Option<Duration>,
}

// === impl Disk ===

impl Disk {
    /// How much of it is in use, as the kubelet reckons: what is kept for root counts too.
    pub(super) fn percent(&self) -> u64 {
        100 - percent_of(self.available.min(self.capacity), self.capacity)
    }

    /// The share of inodes at which the kubelet and [the node's condition](crate::node) see pressure.
    fn lacks_inodes(&self) -> bool {
        self.inodes > 0 && self.inodes_free.saturating_mul(20) < self.inodes
    }
}

/// What has to be freed. A pull that found no room says by that only that there is too little: then twice as much is
/// made free as there is, so that with each try it comes nearer and the first does not take everything.
pub(super) fn need(policy: &ImageGcPolicy, disk: &Disk, no_room: bool) -> Need {
    if policy.high_threshold >= 100 {
        return Need::Nothing;
    }
    if disk.lacks_inodes() {
        return Need::All;
    }
    let is_over = disk.percent() >= policy.high_threshold.into();
    let low = share(disk.capacity, 100 - policy.low_threshold.min(100));
    let goal = match (is_over, no_room) {
        (_, true) => low.max(disk.available.saturating_mul(2)).min(disk.capacity),
        (true, false) => low,
        (false, false) => return Need::Nothing,
    };
    match goal.saturating_sub(disk.available) {
        0 => Need::Nothing,
        bytes => Need::Bytes(bytes),
    }
}

/// Chooses among unused images, those first that were of no use for the longest time.
pub(super) fn plan(policy: &ImageGcPolicy, need: Need, images: &[Image], now: Timestamp) -> Plan {
    let (mut unused, kept): (Vec<&Image>, Vec<&Image>) =
        images.iter().partition(|image| !image.pinned && !image.in_use);
    unused.sort_by(|a, b| (a.used, a.pulled, &a.id).cmp(&(b.used, b.pulled, &b.id)));
    let mut users: HashMap<&str, usize> = HashMap::new();
    for (layer, _) in images.iter().flat_map(|image| &image.layers) {
        *users.entry(layer).or_default() += 1;
    }
    let kept: HashSet<&str> =
        kept.iter().flat_map(|image| &image.layers).map(|(id, _)| id.as_str()).collect();
    let mut plan = Plan::default();
    let mut freed = 0;
    for image in unused {
        let is_over_age =
            !policy.maximum_age.is_zero() && age(image.used, now).is_some_and(|age| age > policy.maximum_age);
        let is_needed = match need {
            Need::Nothing => false,
            Need::Bytes(bytes) => {
                freed < bytes && image.layers.iter().any(|(layer, _)| !kept.contains(layer.as_str()))
            }
            Need::All => true,
        };
        if !is_over_age && !is_needed {
            continue;
        }
        // A time that lies ahead is none: the clock was set back.
        let young = age(image.pulled, now).and_then(|age| policy.minimum_age.checked_sub(age));
        if let Some(left) = young.filter(|left| !left.is_zero()) {
            plan.again = Some(plan.again.map_or(left, |again| again.min(left)));
            continue;
        }
        let bytes = let_go(&mut users, image);
        freed += bytes;
        plan.removals.push(Removal { id: image.id.clone(), names: image.names.clone(), bytes });
    }
    if matches!(need, Need::Bytes(bytes) if freed >= bytes) {
        plan.again = None;
    }
    plan
}

/// The bytes of the layers that nobody has after this image.
fn let_go<'a>(users: &mut HashMap<&'a str, usize>, image: &'a Image) -> u64 {
    let mut bytes = 0;
    for (layer, size) in &image.layers {
        if let Some(left) = users.get_mut(layer.as_str()) {
            *left -= 1;
            if *left == 0 {
                bytes += size;
            }
        }
    }
    bytes
}

fn age(since: Timestamp, now: Timestamp) -> Option<Duration> {
    Duration::try_from(now.duration_since(since)).ok()
}

fn percent_of(part: u64, whole: u64) -> u64 {
    u64::try_from(u128::from(part) * 100 / u128::from(whole.max(1))).unwrap_or(100)
}

fn share(whole: u64, percent: u8) -> u64 {
    u64::try_from(u128::from(whole) * u128::from(percent) / 100).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
