//! Usage of containers by namespace and image, in memory: the source of the admission plugin InitialResources.
//!
//! For each pair of namespace and image there is one histogram of each resource and week. The upper bound of a bucket
//! is at most an eighth above its lower bound; estimates are upper bounds.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Maximum pairs of namespace and image. Above this number, the pair with the oldest last sample is removed.
const MAX_SERIES: usize = 256;
/// Maximum images of one namespace, so that a tenant cannot displace the pairs of other tenants.
const MAX_SERIES_OF_NAMESPACE: usize = 64;
/// Maximum bytes of an image's name. Usage of images with longer names is not kept.
const MAX_NAME: usize = 512;
/// Weeks that are kept: a month and the current week.
const WEEKS: u64 = 5;
/// Seconds of a week.
const WEEK: u64 = 7 * 24 * 3600;
/// Buckets of each power of two.
const BUCKETS_OF_POWER: u64 = 8;
/// Smallest and largest value of each resource that gets a bucket of its own. These values limit the number of buckets.
const CPU_MILLIS: [u64; 2] = [1, 1 << 20];
const MEMORY_BYTES: [u64; 2] = [1 << 20, 1 << 46];
/// An estimate uses more distant data only if the nearer data have fewer samples than this, as upstream.
const MIN_SAMPLES: u64 = 30;

/// Options of the admission plugin InitialResources, with upstream's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitialResourcesOptions {
    /// Percentile of the samples, 1 to 100.
    pub percentile: u8,
    /// Whether only samples of the pod's own namespace are used.
    pub namespace_only: bool,
}

/// A resource with an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Estimated {
    /// CPU, in thousandths of a processor.
    Cpu,
    /// Memory, in bytes.
    Memory,
}

/// Usage of a container at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContainerUsage {
    pub(crate) cpu_millis: u64,
    pub(crate) memory_bytes: u64,
}

/// The usage of containers.
pub(crate) struct UsageHistory {
    options: InitialResourcesOptions,
    namespaces: Mutex<HashMap<String, HashMap<String, Series>>>,
}

/// The usage of an image in a namespace.
#[derive(Default)]
struct Series {
    /// Time of the last sample, in seconds since 1970.
    last: u64,
    /// Histograms of CPU and memory, by the number of the week since 1970.
    weeks: BTreeMap<u64, [Histogram; 2]>,
}

/// Counts by bucket.
#[derive(Clone, Default)]
struct Histogram(Vec<(u16, u32)>);

/// The series that a query reads.
#[derive(Clone, Copy)]
struct Selection<'a> {
    /// The namespace. `None` for all namespaces.
    namespace: Option<&'a str>,
    image: &'a str,
    /// Whether the tag must match as well.
    with_tag: bool,
    weeks: u64,
}

// === impl InitialResourcesOptions ===

impl Default for InitialResourcesOptions {
    fn default() -> Self {
        Self { percentile: 90, namespace_only: false }
    }
}

// === impl UsageHistory ===

impl UsageHistory {
    pub(crate) fn new(options: InitialResourcesOptions) -> Self {
        Self { options, namespaces: Mutex::default() }
    }

    /// Counts the usage of a container at the time `now`, in seconds since 1970.
    pub(crate) fn record(&self, namespace: &str, image: &str, usage: ContainerUsage, now: u64) {
        if image.is_empty() || image.len() > MAX_NAME {
            return;
        }
        let mut namespaces = self.lock();
        make_room(&mut namespaces, namespace, image);
        let series = namespaces.entry(namespace.to_owned()).or_default().entry(image.to_owned()).or_default();
        series.last = now;
        let week = now / WEEK;
        series.weeks.retain(|number, _| number + WEEKS > week && *number <= week);
        let [cpu, memory] = series.weeks.entry(week).or_default();
        cpu.add(usage.cpu_millis.clamp(CPU_MILLIS[0], CPU_MILLIS[1]));
        memory.add(usage.memory_bytes.clamp(MEMORY_BYTES[0], MEMORY_BYTES[1]));
    }

    /// The estimate of a container's usage; `None` without samples. Source: `getEstimation` of
    /// `plugin/pkg/admission/initialresources`. The order is: own namespace before all namespaces, the current and the
    /// previous week before all kept weeks, same tag before all tags.
    pub(crate) fn estimate(
        &self,
        resource: Estimated,
        namespace: &str,
        image: &str,
        now: u64,
    ) -> Option<u64> {
        if image.len() > MAX_NAME {
            return None;
        }
        let select = |namespace, with_tag, weeks| Selection { namespace, image, with_tag, weeks };
        let own = Some(namespace);
        let near = [select(own, true, 2), select(own, true, WEEKS)];
        let far: &[Selection<'_>] = match self.options.namespace_only {
            true => &[select(own, false, WEEKS)],
            false => &[select(None, true, 2), select(None, true, WEEKS), select(None, false, WEEKS)],
        };
        let namespaces = self.lock();
        let mut found = Histogram::default();
        for selection in near.iter().chain(far) {
            found = select_from(&namespaces, resource, *selection, now);
            if found.samples() >= MIN_SAMPLES {
                break;
            }
        }
        found.percentile(self.options.percentile)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, HashMap<String, Series>>> {
        self.namespaces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes the oldest series of the namespace, or of all namespaces, if a new series would exceed a limit.
fn make_room(namespaces: &mut HashMap<String, HashMap<String, Series>>, namespace: &str, image: &str) {
    let own = namespaces.get(namespace);
    if own.is_some_and(|images| images.contains_key(image)) {
        return;
    }
    let of_own = own.map_or(0, HashMap::len);
    let total: usize = namespaces.values().map(HashMap::len).sum();
    if of_own < MAX_SERIES_OF_NAMESPACE && total < MAX_SERIES {
        return;
    }
    let candidates =
        namespaces.iter().filter(|(name, _)| of_own < MAX_SERIES_OF_NAMESPACE || *name == namespace);
    let all =
        candidates.flat_map(|(name, images)| images.iter().map(move |(image, series)| (name, image, series)));
    let oldest = all.min_by_key(|(_, _, series)| series.last);
    let oldest = oldest.map(|(name, image, _)| (name.clone(), image.clone()));
    let Some((name, image)) = oldest else { return };
    if let Some(images) = namespaces.get_mut(&name) {
        images.remove(&image);
        if images.is_empty() {
            namespaces.remove(&name);
        }
    }
}

/// The sum of the selected series.
fn select_from(
    namespaces: &HashMap<String, HashMap<String, Series>>,
    resource: Estimated,
    selection: Selection<'_>,
    now: u64,
) -> Histogram {
    let week = now / WEEK;
    let (mut sum, untagged) = (Histogram::default(), without_tag(selection.image));
    let named = |name: &str| selection.namespace.is_none_or(|namespace| namespace == name);
    let fits = |image: &str| match selection.with_tag {
        true => image == selection.image,
        false => without_tag(image) == untagged,
    };
    for (_, images) in namespaces.iter().filter(|(name, _)| named(name)) {
        for (_, series) in images.iter().filter(|(image, _)| fits(image)) {
            let recent = series.weeks.iter().filter(|(number, _)| **number + selection.weeks > week);
            for (_, [cpu, memory]) in recent {
                sum.merge(if resource == Estimated::Cpu { cpu } else { memory });
            }
        }
    }
    sum
}

/// The image's name without tag and digest.
fn without_tag(image: &str) -> &str {
    let name = image.split('@').next().unwrap_or_default();
    let last = name.rfind('/').map_or(0, |slash| slash + 1);
    name[last..].find(':').map_or(name, |colon| &name[..last + colon])
}

// === impl Histogram ===

impl Histogram {
    fn add(&mut self, value: u64) {
        self.count(bucket(value), 1);
    }

    fn count(&mut self, bucket: u16, count: u32) {
        match self.0.binary_search_by_key(&bucket, |(known, _)| *known) {
            Ok(at) => self.0[at].1 = self.0[at].1.saturating_add(count),
            Err(at) => self.0.insert(at, (bucket, count)),
        }
    }

    fn merge(&mut self, other: &Self) {
        other.0.iter().for_each(|(bucket, count)| self.count(*bucket, *count));
    }

    fn samples(&self) -> u64 {
        self.0.iter().map(|(_, count)| u64::from(*count)).sum()
    }

    /// The upper bound of the bucket with the percentile. `None` without samples.
    fn percentile(&self, percentile: u8) -> Option<u64> {
        let wanted = (self.samples() * u64::from(percentile)).div_ceil(100).max(1);
        let mut below = 0;
        for (bucket, count) in &self.0 {
            below += u64::from(*count);
            if below >= wanted {
                return Some(upper_bound(*bucket));
            }
        }
        None
    }
}

/// The bucket of a value. Each power of two has eight buckets; values below 8 have buckets of their own.
fn bucket(value: u64) -> u16 {
    let power = value.max(1).ilog2();
    let part = if power >= 3 { (value >> (power - 3)) & 7 } else { (value.max(1) << (3 - power)) & 7 };
    u16::try_from(u64::from(power) * BUCKETS_OF_POWER + part).unwrap_or(u16::MAX)
}

/// The largest value of a bucket.
fn upper_bound(bucket: u16) -> u64 {
    let (power, part) = (u64::from(bucket) / BUCKETS_OF_POWER, u64::from(bucket) % BUCKETS_OF_POWER);
    let next = (u128::from(BUCKETS_OF_POWER + part + 1) << power) / u128::from(BUCKETS_OF_POWER);
    let exact = (u128::from(BUCKETS_OF_POWER + part) << power) / u128::from(BUCKETS_OF_POWER);
    // Below 8 a bucket has one value.
    u64::try_from(next.saturating_sub(1).max(exact)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 3000 * WEEK;

    fn history(namespace_only: bool) -> UsageHistory {
        UsageHistory::new(InitialResourcesOptions { percentile: 90, namespace_only })
    }

    /// Equal samples of one time.
    struct Samples {
        count: u64,
        cpu_millis: u64,
        at: u64,
    }

    fn fill(history: &UsageHistory, namespace: &str, image: &str, samples: Samples) {
        let Samples { count, cpu_millis, at } = samples;
        let usage = ContainerUsage { cpu_millis, memory_bytes: cpu_millis << 20 };
        (0..count).for_each(|_| history.record(namespace, image, usage, at));
    }

    #[test]
    fn buckets_are_narrow_and_in_order() {
        let mut before = 0;
        for value in (1..5000).chain([1 << 20, (1 << 30) + 12345, 1 << 46]) {
            let bound = upper_bound(bucket(value));
            assert!(bound >= value && bound - value <= value / 8, "{value} {bound}");
            assert!(bucket(value) >= before, "{value}");
            before = bucket(value);
        }
        assert_eq!(bucket(0), bucket(1));
    }

    #[test]
    fn the_percentile_counts_samples() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile(90), None);
        (1..=10).for_each(|value| histogram.add(value * 100));
        let [median, high, all] = [50, 90, 100].map(|percentile| histogram.percentile(percentile).unwrap());
        assert!((500..=562).contains(&median) && (900..=1012).contains(&high), "{median} {high}");
        assert!((1000..=1125).contains(&all), "{all}");
    }

    #[test]
    fn near_samples_come_before_distant_ones() {
        let near = |estimate: Option<u64>, value: u64| {
            assert!(
                estimate.is_some_and(|found| found >= value && found <= value + value / 8),
                "{estimate:?} {value}"
            );
        };
        let all = history(false);
        let estimate =
            |history: &UsageHistory, image: &str| history.estimate(Estimated::Cpu, "ns", image, NOW);
        assert_eq!(estimate(&all, "web:1"), None);
        fill(&all, "other", "web:2", Samples { count: MIN_SAMPLES, cpu_millis: 800, at: NOW });
        near(estimate(&all, "web:1"), 800);
        fill(&all, "other", "web:1", Samples { count: MIN_SAMPLES, cpu_millis: 400, at: NOW });
        near(estimate(&all, "web:1"), 400);
        fill(&all, "ns", "web:1", Samples { count: MIN_SAMPLES, cpu_millis: 200, at: NOW - 3 * WEEK });
        near(estimate(&all, "web:1"), 200);
        fill(&all, "ns", "web:1", Samples { count: MIN_SAMPLES - 1, cpu_millis: 100, at: NOW });
        near(estimate(&all, "web:1"), 200);
        fill(&all, "ns", "web:1", Samples { count: 1, cpu_millis: 100, at: NOW });
        near(estimate(&all, "web:1"), 100);
        let memory = all.estimate(Estimated::Memory, "ns", "web:1", NOW);
        near(memory, 100 << 20);
        let own = history(true);
        fill(&own, "other", "web:1", Samples { count: MIN_SAMPLES, cpu_millis: 400, at: NOW });
        assert_eq!(estimate(&own, "web:1"), None);
        fill(&own, "ns", "web:2", Samples { count: 1, cpu_millis: 100, at: NOW });
        near(estimate(&own, "web:1"), 100);
    }

    #[test]
    fn old_weeks_are_removed() {
        let all = history(false);
        fill(&all, "ns", "web", Samples { count: 50, cpu_millis: 100, at: NOW - WEEKS * WEEK });
        assert_eq!(all.estimate(Estimated::Cpu, "ns", "web", NOW), None);
        fill(&all, "ns", "web", Samples { count: 1, cpu_millis: 100, at: NOW });
        assert_eq!(all.lock()["ns"]["web"].weeks.len(), 1);
    }

    #[test]
    fn names_of_images_are_split_at_their_tags() {
        for (image, expect) in [
            ("nginx", "nginx"),
            ("nginx:1.25", "nginx"),
            ("localhost:5000/a/nginx", "localhost:5000/a/nginx"),
            ("localhost:5000/nginx:1@sha256:00", "localhost:5000/nginx"),
        ] {
            assert_eq!(without_tag(image), expect, "{image}");
        }
    }

    #[test]
    fn the_number_of_series_and_buckets_is_limited() {
        let all = history(false);
        fill(&all, "quiet", "web", Samples { count: 1, cpu_millis: 100, at: NOW - 1 });
        for number in 0..2 * MAX_SERIES_OF_NAMESPACE {
            fill(&all, "loud", &format!("image:{number}"), Samples { count: 1, cpu_millis: 100, at: NOW });
        }
        assert_eq!(all.lock()["loud"].len(), MAX_SERIES_OF_NAMESPACE);
        assert!(all.lock().contains_key("quiet"), "one namespace does not remove the series of others");
        for number in 0..2 * MAX_SERIES {
            fill(&all, &format!("ns-{number}"), "web", Samples { count: 1, cpu_millis: 100, at: NOW + 1 });
        }
        assert_eq!(all.lock().values().map(HashMap::len).sum::<usize>(), MAX_SERIES);
        let hostile = history(false);
        for power in 0..64 {
            let usage = ContainerUsage { cpu_millis: 1 << power, memory_bytes: u64::MAX >> power };
            hostile.record("ns", "web", usage, NOW);
        }
        hostile.record(
            "ns",
            &"x".repeat(MAX_NAME + 1),
            ContainerUsage { cpu_millis: 1, memory_bytes: 1 },
            NOW,
        );
        let namespaces = hostile.lock();
        assert_eq!(namespaces["ns"].len(), 1);
        let [cpu, memory] = &namespaces["ns"]["web"].weeks[&(NOW / WEEK)];
        assert!(cpu.0.len() <= 21 && memory.0.len() <= 28, "{} {}", cpu.0.len(), memory.0.len());
    }
}
