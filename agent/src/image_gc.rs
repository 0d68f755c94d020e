//! Removes images that nobody uses before they fill the disk, by the kubelet's rules.
//!
//! ```text
//! a pull ended ─┐
//! a container   ├─► how full is the disk? ──at the high threshold──► what is here, who uses it ([`seen`])
//!   was removed │        (statvfs)                                     ──► what goes ([`plan`], pure) ──► RemoveImage
//! 5 minutes ────┘
//! ```
//! A pull that found no room asks for some also below the threshold. Never removed are pinned images, those of a
//! container in whatever state, those that a pod of this node names, and those pulled a moment ago.

mod plan;
mod seen;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coracle_proto::cri;
use k8s_openapi::jiff::Timestamp;
use nix::sys::statvfs::statvfs;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::pod::sync::Pods;
use crate::pod::{Level, Recorder};
use crate::runtime::Runtime;
use plan::{Disk, Need, Removal};

/// How often the disk is looked at though nothing of ours happened: others write to it too. And how often is told that
/// it stays full.
const PERIOD: Duration = Duration::from_secs(300);

/// The least time between two passes over all images, but for one that makes room for a pull: a disk that stays full
/// gives occasion to one with every container that goes.
const REST: Duration = Duration::from_secs(10);

/// When images are collected: the kubelet's settings of the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageGcPolicy {
    /// Percent of the images' file system in use from which on unused images are removed; with 100, never.
    pub high_threshold: u8,
    /// Percent in use down to which they are removed.
    pub low_threshold: u8,
    /// Images are kept for so long after they were pulled.
    pub minimum_age: Duration,
    /// Images that were of no use for longer are removed though there is room; with zero, never.
    pub maximum_age: Duration,
}

/// Where to say that something happened which may let an image go, or need one to. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Occasion {
    happened: Arc<Notify>,
    no_room: Arc<AtomicBool>,
    pods_known: Arc<Notify>,
}

/// What collects.
pub(crate) struct ImageGc {
    policy: ImageGcPolicy,
    runtime: Arc<dyn Runtime>,
    pods: Pods,
    recorder: Recorder,
    occasion: Occasion,
    /// Where the images are, once the runtime has said it.
    directory: Option<PathBuf>,
    failures: Failures,
    pace: Pace,
}

/// What is said of failures, and how often.
#[derive(Default)]
struct Failures {
    in_a_row: bool,
    /// When each reason was told of last.
    told: HashMap<&'static str, Instant>,
}

/// When there may be another pass.
#[derive(Debug, Default)]
struct Pace {
    rests_until: Option<Instant>,
}

/// Why a pass did not free what was to be freed.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("the runtime failed: {0}")]
    Runtime(String),
    #[error("cannot look at the file system of {path}")]
    Look {
        path: PathBuf,
        #[source]
        source: nix::Error,
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

// === impl ImageGcPolicy ===

impl Default for ImageGcPolicy {
    fn default() -> Self {
        Self {
            high_threshold: 85,
            low_threshold: 80,
            minimum_age: Duration::from_secs(120),
            maximum_age: Duration::ZERO,
        }
    }
}

impl ImageGcPolicy {
    fn is_off(&self) -> bool {
        self.high_threshold >= 100 && self.maximum_age.is_zero()
    }
}

// === impl Occasion ===

impl Occasion {
    /// A pull ended, or a container is gone: the disk is worth a look.
    pub(crate) fn look(&self) {
        self.happened.notify_one();
    }

    /// A pull ended for want of room.
    pub(crate) fn no_room(&self) {
        self.no_room.store(true, Ordering::Release);
        self.happened.notify_one();
    }

    /// All pods of this node are known, and with them the images that are in use.
    pub(crate) fn pods_are_known(&self) {
        self.pods_known.notify_one();
    }
}

// === impl Failures ===

impl Failures {
    /// Whether it is time to tell of a reason.
    fn tell(&mut self, reason: &'static str, now: Instant) -> bool {
        let is_time = self.told.get(reason).is_none_or(|told| now.duration_since(*told) >= PERIOD);
        if is_time {
            self.told.insert(reason, now);
        }
        is_time
    }
}

// === impl Pace ===

impl Pace {
    fn worked(&mut self, now: Instant) {
        self.rests_until = Some(now + REST);
    }

    /// When the next pass may be. None is now.
    fn wait(&self, no_room: bool, now: Instant) -> Option<Instant> {
        self.rests_until.filter(|until| !no_room && now < *until)
    }
}

// === impl ImageGc ===

impl ImageGc {
    pub(crate) fn new(
        policy: ImageGcPolicy,
        (runtime, pods, recorder): (Arc<dyn Runtime>, Pods, Recorder),
        occasion: Occasion,
    ) -> Self {
        let (failures, pace) = (Failures::default(), Pace::default());
        Self { policy, runtime, pods, recorder, occasion, directory: None, failures, pace }
    }

    /// Collects whenever there is an occasion, for ever.
    pub(crate) async fn run(mut self) {
        if self.policy.is_off() {
            return;
        }
        let mut next = Instant::now() + PERIOD;
        tokio::select! {
            // Whose images are in use is not known before the pods are.
            () = self.occasion.pods_known.notified() => {}
            // While the API does not tell, those that are remembered must do.
            () = sleep_until(next) => {}
        }
        loop {
            tokio::select! {
                // An occasion that is not heard in this turn is heard in the next.
                () = self.occasion.happened.notified() => {}
                () = sleep_until(next) => {}
            }
            let no_room = self.occasion.no_room.swap(false, Ordering::AcqRel);
            if let Some(later) = self.pace.wait(no_room, Instant::now()) {
                next = next.min(later);
                continue;
            }
            let again = match self.pass(no_room).await {
                Ok(again) => {
                    self.failures.in_a_row = false;
                    again
                }
                Err(failed) => {
                    self.failed(&failed);
                    None
                }
            };
            next = Instant::now() + again.unwrap_or(PERIOD).min(PERIOD);
        }
    }

    /// One look, and what follows from it; when to look again, if something is worth the wait.
    async fn pass(&mut self, no_room: bool) -> Result<Option<Duration>, Failed> {
        let directory = self.directory().await?;
        let mut disk = look(&directory)?;
        let mut need = plan::need(&self.policy, &disk, no_room);
        if need != Need::Nothing {
            // What is removed already, and only not off the disk yet, is not to be freed twice.
            self.wait_for_disk().await?;
            disk = look(&directory)?;
            need = plan::need(&self.policy, &disk, no_room);
        }
        if need == Need::Nothing && self.policy.maximum_age.is_zero() {
            return Ok(None);
        }
        self.pace.worked(Instant::now());
        let images = seen::images(&*self.runtime, &self.pods).await.map_err(|s| runtime_failed(&s))?;
        let planned = plan::plan(&self.policy, need, &images, Timestamp::now());
        let (freed, errors) = self.remove(planned.removals).await;
        if need != Need::Nothing {
            tracing::info!(?need, freed, percent = disk.percent(), "collected unused images");
        }
        let wanted = match need {
            Need::Bytes(bytes) => bytes,
            Need::Nothing | Need::All => 0,
        };
        if !errors.is_empty() {
            return Err(Failed::Removing { wanted, freed, errors: errors.join("; ") });
        }
        // Those that are only too young are waited for, before anybody is told.
        if freed < wanted && planned.again.is_none() && disk.percent() >= self.policy.high_threshold.into() {
            let capacity = size(disk.capacity);
            return Err(Failed::Full { percent: disk.percent(), capacity, freed });
        }
        Ok(planned.again)
    }

    /// Removes one after the other, but none that a pod has come to name meanwhile.
    async fn remove(&self, removals: Vec<Removal>) -> (u64, Vec<String>) {
        let (mut freed, mut errors) = (0, Vec::new());
        for removal in removals {
            if seen::is_named(&self.pods, &removal.id, &removal.names) {
                continue;
            }
            let image = cri::ImageSpec { image: removal.id.clone(), ..cri::ImageSpec::default() };
            let removed = self.runtime.remove_image(cri::RemoveImageRequest { image: Some(image) }).await;
            match removed {
                Ok(_) => {
                    tracing::info!(id = removal.id, names = ?removal.names, bytes = removal.bytes, "removed an unused image");
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
        let directory = mountpoint.ok_or_else(|| Failed::Runtime("it names no image filesystem".into()))?;
        self.directory = Some(directory.clone());
        Ok(directory)
    }

    /// The runtime answers when what was removed is off the disk.
    async fn wait_for_disk(&self) -> Result<(), Failed> {
        let info = self.runtime.image_fs_info(cri::ImageFsInfoRequest {}).await;
        info.map(drop).map_err(|s| runtime_failed(&s))
    }

    /// Tells the log each time, the API of each reason at most once in a period; and as the kubelet does, of any failure only when it
    /// is the second in a row.
    fn failed(&mut self, failed: &Failed) {
        let message = coracle_error_chain::chain(failed);
        tracing::warn!(error = message, "cannot collect images");
        let again = std::mem::replace(&mut self.failures.in_a_row, true);
        let reason = match failed {
            Failed::Full { .. } => Some("FreeDiskSpaceFailed"),
            Failed::NoCapacity => Some("InvalidDiskCapacity"),
            Failed::Runtime(_) | Failed::Look { .. } | Failed::Removing { .. } => None,
        };
        let reasons = reason.into_iter().chain(again.then_some("ImageGCFailed"));
        for reason in reasons {
            if self.failures.tell(reason, Instant::now()) {
                self.recorder.node(Level::Warning, reason, message.clone());
            }
        }
    }
}

fn look(directory: &Path) -> Result<Disk, Failed> {
    let found = statvfs(directory).map_err(|source| Failed::Look { path: directory.to_owned(), source })?;
    let disk = Disk {
        capacity: found.blocks() * found.fragment_size(),
        available: found.blocks_available() * found.fragment_size(),
        inodes: found.files(),
        inodes_free: found.files_available(),
    };
    if disk.capacity == 0 { Err(Failed::NoCapacity) } else { Ok(disk) }
}

fn runtime_failed(status: &tonic::Status) -> Failed {
    Failed::Runtime(status.message().to_owned())
}

/// In words, to a tenth.
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
    fn a_disk_that_stays_full_is_not_worked_on_without_rest() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        assert_eq!(pace.wait(false, now), None);
        pace.worked(now);
        assert_eq!(pace.wait(false, now + REST / 2), Some(now + REST));
        assert_eq!(pace.wait(true, now), None, "a pull waits for room");
        assert_eq!(pace.wait(false, now + REST), None);
    }

    #[test]
    fn each_reason_has_its_own_time() {
        let (mut failures, now) = (Failures::default(), Instant::now());
        assert!(failures.tell("ImageGCFailed", now) && failures.tell("FreeDiskSpaceFailed", now));
        assert!(!failures.tell("ImageGCFailed", now + PERIOD / 2));
        assert!(failures.tell("ImageGCFailed", now + PERIOD));
    }
}
