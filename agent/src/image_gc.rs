//! Image garbage collection: removes unused images before they fill the disk, by the kubelet's rules.
//!
//! ```text
//! a pull ended ─┐
//! a container   ├─► disk usage ──at the high threshold──► images and their users ([`inventory`])
//!   was removed │    (statvfs)                        ──► removals ([`plan`], pure) ──► RemoveImage
//! 5 minutes ────┘
//! ```
//! A pull that failed on a full disk triggers a pass below the threshold, too. Some images are never removed: pinned
//! images, images younger than the minimum age, and images of an existing container or of a pod of this node.

mod inventory;
mod plan;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_proto::cri;
use k8s_openapi::jiff::Timestamp;
use rustix::fs::statvfs;
use tokio::time::{Instant, sleep_until};

use crate::event_recorder::{Level, Recorder};
use crate::image_gc_policy::ImageGcPolicy;
use crate::image_gc_trigger::Trigger;
use crate::kubelet_metrics::KubeletMetrics;
use crate::pod::{Pods, PullRecords};
use crate::runtime::{Runtime, RuntimeError};
use plan::{Disk, Removal, SpaceToFree};

/// Period of checks without a trigger: other programs write to the disk, too. It is also the period of repeated events
/// while the disk stays full.
const PERIOD: Duration = Duration::from_secs(300);

/// Minimum time between two passes. Without this time, every removed container would trigger a pass while the disk
/// stays full. A pass for a pull that needs space does not wait.
const MIN_PASS_INTERVAL: Duration = Duration::from_secs(10);

/// Objects that image garbage collection reads and reports to.
pub(crate) struct Collected {
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) pods: Pods,
    pub(crate) recorder: Recorder,
    pub(crate) pull_records: Arc<PullRecords>,
    pub(crate) metrics: Arc<KubeletMetrics>,
}

/// The image garbage collector.
pub(crate) struct ImageGc {
    policy: ImageGcPolicy,
    runtime: Arc<dyn Runtime>,
    pods: Pods,
    recorder: Recorder,
    pull_records: Arc<PullRecords>,
    metrics: Arc<KubeletMetrics>,
    trigger: Trigger,
    /// Directory of the images, once the runtime has reported it.
    directory: Option<PathBuf>,
    failures: Failures,
    timer: PassTimer,
}

/// Rate limit of events and log lines about failures.
#[derive(Default)]
struct Failures {
    in_a_row: bool,
    /// The kind of the last logged failure. None after a successful pass.
    logged: Option<std::mem::Discriminant<Failed>>,
    /// Time of the last event of each reason.
    reported: HashMap<&'static str, Instant>,
}

/// Earliest time of the next pass.
#[derive(Debug, Default)]
struct PassTimer {
    delayed_until: Option<Instant>,
}

/// The reason why a pass did not free enough space.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("the runtime failed: {0}")]
    Runtime(String),
    #[error("cannot read the usage of the file system of {path}")]
    Look {
        path: PathBuf,
        #[source]
        source: rustix::io::Errno,
    },
    #[error("invalid capacity 0 on image filesystem")]
    NoCapacity,
    #[error(
        "wanted to free {wanted} bytes, but freed {freed} bytes space with errors in image deletion: {errors}"
    )]
    Removing { wanted: u64, freed: u64, errors: String },
    #[error(
        "Insufficient free disk space on the node's image filesystem ({percent}% of {capacity} used). Failed to free \
         sufficient space by deleting unused images (freed {freed} bytes). Investigate disk usage, as it could be used \
         by active images, logs, volumes, or other data."
    )]
    Full { percent: u64, capacity: String, freed: u64 },
}

// === impl Failures ===

impl Failures {
    /// Stores the kind of a failure. Returns whether it differs from the kind of the previous failure.
    fn is_new(&mut self, failed: &Failed) -> bool {
        let kind = std::mem::discriminant(failed);
        self.logged.replace(kind) != Some(kind)
    }

    fn succeeded(&mut self) {
        (self.in_a_row, self.logged) = (false, None);
    }

    /// Whether an event of this reason is due.
    fn is_due(&mut self, reason: &'static str, now: Instant) -> bool {
        let is_time =
            self.reported.get(reason).is_none_or(|reported| now.duration_since(*reported) >= PERIOD);
        if is_time {
            self.reported.insert(reason, now);
        }
        is_time
    }
}

// === impl PassTimer ===

impl PassTimer {
    fn record_pass(&mut self, now: Instant) {
        self.delayed_until = Some(now + MIN_PASS_INTERVAL);
    }

    /// Time of the next pass. None means now.
    fn wait(&self, no_room: bool, now: Instant) -> Option<Instant> {
        self.delayed_until.filter(|until| !no_room && now < *until)
    }
}

// === impl ImageGc ===

impl ImageGc {
    pub(crate) fn new(policy: ImageGcPolicy, collected: Collected, trigger: Trigger) -> Self {
        let Collected { runtime, pods, recorder, pull_records, metrics } = collected;
        Self {
            policy,
            runtime,
            pods,
            recorder,
            pull_records,
            metrics,
            trigger,
            directory: None,
            failures: Failures::default(),
            timer: PassTimer::default(),
        }
    }

    /// Collects at each trigger. Runs until dropped.
    pub(crate) async fn run(mut self) {
        if self.policy.is_off() {
            // An eviction must not wait for a collector that does nothing.
            self.trigger.complete(u64::MAX);
            return;
        }
        let mut next = Instant::now() + PERIOD;
        tokio::select! {
            // The pods are needed to know which images are in use.
            () = self.trigger.pods_known.notified() => {}
            // While the API does not answer, the stored pods are used.
            () = sleep_until(next) => {}
        }
        loop {
            tokio::select! {
                // Cancel-safe: a trigger that is not received here is received in the next iteration.
                () = self.trigger.check.notified() => {}
                () = sleep_until(next) => {}
            }
            let requested = self.trigger.pending();
            if let Some(later) = self.timer.wait(requested.is_some(), Instant::now()) {
                next = next.min(later);
                continue;
            }
            let again = match self.collect(requested.is_some()).await {
                Ok(again) => {
                    self.failures.succeeded();
                    again
                }
                Err(failed) => {
                    self.failed(&failed);
                    None
                }
            };
            if let Some(number) = requested {
                self.trigger.complete(number);
            }
            next = Instant::now() + again.unwrap_or(PERIOD).min(PERIOD);
        }
    }

    /// Runs one pass. Returns the time after which the next pass is useful, if it is known.
    async fn collect(&mut self, no_room: bool) -> Result<Option<Duration>, Failed> {
        let directory = self.directory().await?;
        let mut disk = read_disk(&directory)?;
        let mut need = plan::need(&self.policy, &disk, no_room);
        if need != SpaceToFree::Nothing {
            // Wait until removed images have released their space. Otherwise this pass would remove more images for the
            // same space.
            self.wait_for_disk().await?;
            disk = read_disk(&directory)?;
            need = plan::need(&self.policy, &disk, no_room);
        }
        if need == SpaceToFree::Nothing && self.policy.maximum_age.is_zero() {
            return Ok(None);
        }
        self.timer.record_pass(Instant::now());
        let recorded = self.pull_records.snapshot();
        let images = inventory::images(&*self.runtime, &self.pods).await.map_err(|s| runtime_failed(&s))?;
        let present: HashSet<&str> = images.iter().map(|image| image.id.as_str()).collect();
        self.pull_records.remove_absent(recorded, |id| present.contains(id));
        let planned = plan::plan(&self.policy, need, &images, Timestamp::now());
        let (freed, errors) = self.remove(planned.removals).await;
        // A pass that frees nothing is not logged: while the disk stays full, there is a pass every ten seconds.
        if freed > 0 && need != SpaceToFree::Nothing {
            tracing::info!(?need, freed, percent = disk.percent(), "collected unused images");
            // After the pass, an eviction reads the free space.
            self.wait_for_disk().await?;
        }
        let wanted = match need {
            SpaceToFree::Bytes(bytes) => bytes,
            SpaceToFree::Nothing | SpaceToFree::All => 0,
        };
        if !errors.is_empty() {
            return Err(Failed::Removing { wanted, freed, errors: errors.join("; ") });
        }
        // A failure is reported only if no image waits for its minimum age.
        if freed < wanted && planned.again.is_none() && disk.percent() >= self.policy.high_threshold.into() {
            let capacity = size(disk.capacity);
            return Err(Failed::Full { percent: disk.percent(), capacity, freed });
        }
        Ok(planned.again)
    }

    /// Removes images one by one, except those that a pod has started to use.
    async fn remove(&self, removals: Vec<Removal>) -> (u64, Vec<String>) {
        let (mut freed, mut errors) = (0, Vec::new());
        let mut named = inventory::NamedImages::default();
        for removal in removals {
            if named.contains(self.pods.all(), &removal.id, &removal.names) {
                continue;
            }
            let image = cri::ImageSpec { image: removal.id.clone(), ..cri::ImageSpec::default() };
            let removed = self.runtime.remove_image(cri::RemoveImageRequest { image: Some(image) }).await;
            match removed {
                Ok(_) => {
                    tracing::info!(id = removal.id, names = ?removal.names, bytes = removal.bytes, "removed an unused image");
                    self.metrics.image_collected(removal.for_age);
                    freed += removal.bytes;
                }
                Err(status) => errors.push(status.message().to_owned()),
            }
        }
        (freed, errors)
    }

    async fn directory(&mut self) -> Result<PathBuf, Failed> {
        if let Some(directory) = &self.directory {
            return Ok(directory.clone());
        }
        let info = self.runtime.image_fs_info(cri::ImageFsInfoRequest {}).await;
        let images = info.map_err(|s| runtime_failed(&s))?.image_filesystems.into_iter().next();
        let mountpoint = images.and_then(|images| images.fs_id).map(|id| PathBuf::from(id.mountpoint));
        let directory = mountpoint.ok_or_else(|| Failed::Runtime("it reports no image filesystem".into()))?;
        self.directory = Some(directory.clone());
        Ok(directory)
    }

    /// Waits until the space of removed images is released: the runtime responds only then.
    async fn wait_for_disk(&self) -> Result<(), Failed> {
        let info = self.runtime.image_fs_info(cri::ImageFsInfoRequest {}).await;
        info.map(drop).map_err(|s| runtime_failed(&s))
    }

    /// Logs a failure, once while it lasts. Records an event for a full disk and for an invalid capacity. As in the
    /// kubelet, records `ImageGCFailed` if the previous pass failed as well. Each reason is recorded at most once in a
    /// period.
    fn failed(&mut self, failed: &Failed) {
        let message = coracle_error_chain::chain(failed);
        if self.failures.is_new(failed) {
            tracing::warn!(error = message, "cannot collect unused images");
        }
        let again = std::mem::replace(&mut self.failures.in_a_row, true);
        let reason = match failed {
            Failed::Full { .. } => Some("FreeDiskSpaceFailed"),
            Failed::NoCapacity => Some("InvalidDiskCapacity"),
            Failed::Runtime(_) | Failed::Look { .. } | Failed::Removing { .. } => None,
        };
        let reasons = reason.into_iter().chain(again.then_some("ImageGCFailed"));
        for reason in reasons {
            if self.failures.is_due(reason, Instant::now()) {
                self.recorder.node(Level::Warning, reason, message.clone());
            }
        }
    }
}

fn read_disk(directory: &Path) -> Result<Disk, Failed> {
    let found = statvfs(directory).map_err(|source| Failed::Look { path: directory.to_owned(), source })?;
    let disk = Disk {
        capacity: found.f_blocks * found.f_frsize,
        available: found.f_bavail * found.f_frsize,
        inodes: found.f_files,
        inodes_free: found.f_favail,
    };
    if disk.capacity == 0 { Err(Failed::NoCapacity) } else { Ok(disk) }
}

fn runtime_failed(error: &RuntimeError) -> Failed {
    Failed::Runtime(error.message().to_owned())
}

/// Binary units with one decimal place.
fn size(bytes: u64) -> String {
    let (unit, name) = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
        .into_iter()
        .find(|(unit, _)| bytes >= *unit)
        .unwrap_or((1, "B"));
    format!("{}.{} {name}", bytes / unit, bytes % unit * 10 / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_on_a_disk_that_stays_full_have_pauses() {
        let (mut timer, now) = (PassTimer::default(), Instant::now());
        assert_eq!(timer.wait(false, now), None);
        timer.record_pass(now);
        assert_eq!(timer.wait(false, now + MIN_PASS_INTERVAL / 2), Some(now + MIN_PASS_INTERVAL));
        assert_eq!(timer.wait(true, now), None, "a pull waits for disk space");
        assert_eq!(timer.wait(false, now + MIN_PASS_INTERVAL), None);
    }

    #[test]
    fn a_failure_that_lasts_is_logged_once() {
        let full = |freed| Failed::Full { percent: 99, capacity: "1 GiB".to_owned(), freed };
        let mut failures = Failures::default();
        let logged = [full(0), full(1), Failed::NoCapacity, full(0)].map(|failed| failures.is_new(&failed));
        assert_eq!(logged, [true, false, true, true]);
        failures.succeeded();
        assert!(failures.is_new(&full(0)));
    }

    #[test]
    fn each_reason_has_its_own_time() {
        let (mut failures, now) = (Failures::default(), Instant::now());
        assert!(failures.is_due("ImageGCFailed", now) && failures.is_due("FreeDiskSpaceFailed", now));
        assert!(!failures.is_due("ImageGCFailed", now + PERIOD / 2));
        assert!(failures.is_due("ImageGCFailed", now + PERIOD));
    }
}
