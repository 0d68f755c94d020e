//! Selection of images to remove, and the space that their removal frees. Pure.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use crate::image_gc_policy::ImageGcPolicy;

/// Usage of the images' file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    pub(super) capacity: u64,
    pub(super) available: u64,
    /// 0 if the file system does not count inodes.
    pub(super) inodes: u64,
    pub(super) inodes_free: u64,
}

/// Space to free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpaceToFree {
    Nothing,
    Bytes(u64),
    /// All removable images: inodes are used up, and their number per image is unknown.
    All,
}

/// Properties of an image that the selection needs.
#[derive(Clone, Debug)]
pub(super) struct Image {
    pub(super) id: String,
    /// Tags and digests.
    pub(super) names: Vec<String>,
    pub(super) pinned: bool,
    /// Whether a container or a pod uses the image.
    pub(super) in_use: bool,
    /// Time of the pull; the epoch if unknown.
    pub(super) pulled: Timestamp,
    /// Time of the last use.
    pub(super) used: Timestamp,
    /// Layers with their sizes in bytes. Images may share layers.
    pub(super) layers: Vec<(String, u64)>,
}

/// An image to remove, and the number of free bytes after the removal of this image and all images before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Removal {
    pub(super) id: String,
    pub(super) names: Vec<String>,
    pub(super) bytes: u64,
    /// Whether the image is removed for its age alone.
    pub(super) for_age: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) removals: Vec<Removal>,
    /// The time until another image reaches the minimum age, if the removed images do not free enough space.
    pub(super) again: Option<Duration>,
}

// === impl Disk ===

impl Disk {
    /// Percent in use, computed as by the kubelet: blocks reserved for root count as used.
    pub(super) fn percent(&self) -> u64 {
        100 - percent_of(self.available.min(self.capacity), self.capacity)
    }

    /// Whether inodes are at the kubelet's and [the node condition's](crate::node) pressure threshold.
    fn is_short_of_inodes(&self) -> bool {
        self.inodes > 0 && self.inodes_free.saturating_mul(20) < self.inodes
    }
}

/// The space to free. A pull that failed on a full disk does not report how much space it needs. So images are removed
/// until at least twice as much space is available as now. The first attempt does not remove everything, and each later
/// attempt frees more.
pub(super) fn need(policy: &ImageGcPolicy, disk: &Disk, no_room: bool) -> SpaceToFree {
    if policy.high_threshold >= 100 {
        return SpaceToFree::Nothing;
    }
    if disk.is_short_of_inodes() {
        return SpaceToFree::All;
    }
    let is_over = disk.percent() >= policy.high_threshold.into();
    let low = share(disk.capacity, 100 - policy.low_threshold.min(100));
    let goal = match (is_over, no_room) {
        (_, true) => low.max(disk.available.saturating_mul(2)).min(disk.capacity),
        (true, false) => low,
        (false, false) => return SpaceToFree::Nothing,
    };
    match goal.saturating_sub(disk.available) {
        0 => SpaceToFree::Nothing,
        bytes => SpaceToFree::Bytes(bytes),
    }
}

/// Selects unused images, least recently used first.
pub(super) fn plan(policy: &ImageGcPolicy, need: SpaceToFree, images: &[Image], now: Timestamp) -> Plan {
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
            SpaceToFree::Nothing => false,
            SpaceToFree::Bytes(bytes) => {
                freed < bytes && image.layers.iter().any(|(layer, _)| !kept.contains(layer.as_str()))
            }
            SpaceToFree::All => true,
        };
        if !is_over_age && !is_needed {
            continue;
        }
        // Ignore timestamps in the future: the clock was set back.
        let until_old_enough = age(image.pulled, now).and_then(|age| policy.minimum_age.checked_sub(age));
        if let Some(left) = until_old_enough.filter(|left| !left.is_zero()) {
            plan.again = Some(plan.again.map_or(left, |again| again.min(left)));
            continue;
        }
        let bytes = release_layers(&mut users, image);
        freed += bytes;
        let (id, names) = (image.id.clone(), image.names.clone());
        plan.removals.push(Removal { id, names, bytes, for_age: !is_needed });
    }
    if matches!(need, SpaceToFree::Bytes(bytes) if freed >= bytes) {
        plan.again = None;
    }
    plan
}

/// Bytes of layers that no other image has.
fn release_layers<'a>(users: &mut HashMap<&'a str, usize>, image: &'a Image) -> u64 {
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
