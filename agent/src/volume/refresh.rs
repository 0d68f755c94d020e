//! Refresh of a pod's volume files: one task per pod, woken by changes of the used objects.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use coracle_cri::fair_permits::FairPermits;
use coracle_error_chain::chain;
use coracle_threads::off_worker;
use futures::future::{BoxFuture, FutureExt, select_all};
use k8s_openapi::api::core::v1::{Pod, ServiceAccountTokenProjection};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::error::{SetUpError, VolumeError};
use super::file_memory::FileVolume;
use super::objects::Object;
use super::payload::{self, Budget, Data, Part, Payload, Projection};
use super::token::Token;
use super::{Shared, Target, VolumeContext, atomic, lock, ownership};
use crate::event_recorder::Level;

/// Delay before a failed write is retried.
const WRITE_RETRY_DELAY: Duration = Duration::from_secs(30);

/// The delay after a refresh is this many times the duration of the refresh, up to [`DELAY_MAX`]. So an object that
/// changes all the time does not keep a processor busy.
const DELAY_FACTOR: u32 = 20;
/// Maximum delay after a refresh.
const DELAY_MAX: Duration = Duration::from_secs(10);
/// Minimum bytes of a large volume, with a page for each file. Only one large volume is written at a time.
const LARGE: usize = 1 << 20;

/// Permit to write the files of a large volume. Writing 16,000 files takes half a second, and the copy of a volume
/// takes up to 64 MiB of memory. Namespaces take turns.
pub(super) static LARGE_WRITES: FairPermits = FairPermits::new(1, 1);

/// One volume whose files the node writes.
pub(super) struct Source {
    volume: String,
    /// Directory of the files, in memory.
    dir: PathBuf,
    /// The kubelet's path of the volume: a symlink to the directory.
    link: PathBuf,
    projection: Projection,
    /// The used objects. The objects are held so that their watches run as long as the volume exists.
    objects: Vec<Option<Arc<Object>>>,
    /// Whether an event has reported that the current content is above a limit.
    is_refusal_reported: AtomicBool,
}

/// The content of a part of a projection.
enum Found {
    /// The data of an object. None if the object does not exist.
    Data(Option<Arc<Data>>),
    Token(Token),
    /// The part is computed from the pod.
    Nothing,
}

/// The refresh task of one pod.
pub(super) struct Refreshing {
    /// The pod's newest version; files show its labels, annotations and resources.
    pod: watch::Sender<Arc<Pod>>,
    /// Whether a volume shows fields of the pod.
    reads_pod_fields: bool,
    task: JoinHandle<()>,
}

// === impl Refreshing ===

impl Refreshing {
    /// Aborts the task and waits for its end.
    pub(super) async fn stop(self) {
        self.task.abort();
        // The join error means that the task was aborted.
        let _ = self.task.await;
    }
}

/// The events after which files must be written again.
struct RefreshTriggers {
    /// Futures that complete when a used object changes.
    changes: Vec<BoxFuture<'static, ()>>,
    /// Time until the next token is due.
    renew_in: Option<Duration>,
}

/// The volumes of a pod with their files written.
pub(super) struct Written {
    sources: Vec<Source>,
    triggers: RefreshTriggers,
}

/// Writes the files of new volumes.
///
/// # Errors
/// The error of the first volume that fails.
pub(super) async fn write(
    ctx: &VolumeContext,
    pod: &Pod,
    sources: Vec<Source>,
) -> Result<Written, VolumeError> {
    let mut triggers = RefreshTriggers::subscribe(&sources);
    for source in &sources {
        let failed = |reason| VolumeError::SetUp { volume: source.volume.clone(), reason };
        let due = source.write(ctx, pod).await.map_err(failed)?;
        triggers.renew_in = triggers.renew_in.into_iter().chain(due).min();
    }
    Ok(Written { sources, triggers })
}

/// Starts the pod's task, or replaces the task of an older version of the pod.
pub(super) fn watch(ctx: &VolumeContext, pod: &Pod, written: Written) {
    let Written { mut sources, mut triggers } = written;
    sources.shrink_to_fit();
    let Some(uid) = pod.metadata.uid.clone() else { return };
    let mut refreshing = lock(&ctx.shared.refreshing);
    if sources.is_empty() || refreshing.get(&uid).is_some_and(|held| have_same_files(&held.pod.borrow(), pod))
    {
        return;
    }
    let old = refreshing.remove(&uid);
    let reads_pod_fields = sources.iter().any(Source::reads_pod_fields);
    let (newest, mut of) = watch::channel(Arc::new(pod.clone()));
    // The context holds the task. A strong reference from the task would be a cycle.
    let weak = Arc::downgrade(&ctx.shared);
    let task = coracle_threads::spawn(async move {
        if let Some(old) = old {
            old.stop().await;
            // The old task may have written files of the older version in the meantime.
            let Some(next) = write_again(&weak, &mut of, &sources).await else { return };
            triggers = next;
        }
        loop {
            tokio::select! {
                // Both arms are cancel-safe: they only wait.
                () = triggers.wait() => {}
                changed = of.changed() => if changed.is_err() { return },
            }
            let began = Instant::now();
            let Some(next) = write_again(&weak, &mut of, &sources).await else { return };
            tokio::time::sleep(delay_after(began.elapsed())).await;
            triggers = next;
        }
    });
    refreshing.insert(uid, Refreshing { pod: newest, reads_pod_fields, task });
}

/// Writes the files for the pod's newest version. None if the agent is ending.
async fn write_again(
    ctx: &Weak<Shared>,
    pod: &mut watch::Receiver<Arc<Pod>>,
    sources: &[Source],
) -> Option<RefreshTriggers> {
    let triggers = RefreshTriggers::subscribe(sources);
    let ctx = VolumeContext { shared: ctx.upgrade()? };
    // The task holds no version of the pod while it waits.
    let pod = Arc::clone(&pod.borrow_and_update());
    // The future is on the heap, because requests for tokens take kilobytes, and the task waits for most of its life.
    let renew_in = Box::pin(refresh(&ctx, &pod, sources)).await;
    Some(RefreshTriggers { renew_in, ..triggers })
}

/// Passes a newer version of the pod to its task. The task is woken if a file of a volume contains a changed field. The
/// older version is dropped: a pod takes about ten kilobytes.
pub(super) fn follow(ctx: &VolumeContext, pod: &Arc<Pod>) {
    let refreshing = lock(&ctx.shared.refreshing);
    if let Some(held) = pod.metadata.uid.as_deref().and_then(|uid| refreshing.get(uid)) {
        held.pod.send_if_modified(|shown| {
            let wakes = held.reads_pod_fields && !Arc::ptr_eq(shown, pod) && !have_same_files(shown, pod);
            *shown = Arc::clone(pod);
            wakes
        });
    }
}

/// Whether both versions of a pod have the same volume files.
fn have_same_files(a: &Pod, b: &Pod) -> bool {
    a.metadata.labels == b.metadata.labels
        && a.metadata.annotations == b.metadata.annotations
        && a.spec == b.spec
}

/// The kernel's page size in bytes: 4 KiB, on arm64 up to 64 KiB.
pub(super) fn page_size() -> usize {
    let found = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    found.and_then(|bytes| usize::try_from(bytes).ok()).filter(|bytes| *bytes > 0).unwrap_or(4096)
}

/// The delay after a refresh of this duration.
fn delay_after(duration: Duration) -> Duration {
    duration.saturating_mul(DELAY_FACTOR).min(DELAY_MAX)
}

/// Writes all volumes. Returns the time until the next token is due.
async fn refresh(ctx: &VolumeContext, pod: &Pod, sources: &[Source]) -> Option<Duration> {
    let mut next: Option<Duration> = None;
    for source in sources {
        let due = match source.write(ctx, pod).await {
            Ok(renew_in) => {
                source.is_refusal_reported.store(false, Ordering::Relaxed);
                renew_in
            }
            // A deleted object keeps its last content, as upstream.
            Err(error) => {
                source.log(pod, &error);
                let is_waiting = matches!(error, SetUpError::NotFound { .. } | SetUpError::NoKey { .. });
                let is_of_token = matches!(error, SetUpError::Token(_));
                let renew_in = if is_of_token { None } else { source.renew_tokens(ctx, pod).await };
                source.report_refusal(ctx, pod, error);
                renew_in.into_iter().chain((!is_waiting).then_some(WRITE_RETRY_DELAY)).min()
            }
        };
        next = next.into_iter().chain(due).min();
    }
    next
}

// === impl RefreshTriggers ===

impl RefreshTriggers {
    /// Begins to watch the objects. Called before the files are written, so that a change during the write is noticed.
    fn subscribe(sources: &[Source]) -> Self {
        let changes = sources.iter().flat_map(Source::changes).map(FutureExt::boxed).collect();
        Self { changes, renew_in: None }
    }

    /// Waits for a change or a due token. Cancel safe.
    async fn wait(&mut self) {
        let Self { changes, renew_in } = self;
        let due = async {
            match renew_in {
                Some(renew_in) => tokio::time::sleep((*renew_in).max(Duration::from_secs(1))).await,
                None => std::future::pending().await,
            }
        };
        let changed = async {
            if changes.is_empty() {
                std::future::pending::<()>().await;
            }
            select_all(changes).await;
        };
        tokio::select! {
            // Both arms are cancel-safe: they only wait.
            () = due => {}
            () = changed => {}
        }
    }
}

// === impl Source ===

impl Source {
    pub(super) fn new(target: &Target<'_>, volume: &str, projection: Projection) -> Source {
        let object = |part: &Part| match part {
            Part::Object(object) => {
                Some(target.ctx.shared.objects.get(object.kind, target.namespace, &object.name))
            }
            Part::Downward(_) | Part::Token(_) => None,
        };
        Source {
            volume: volume.to_owned(),
            dir: target.ctx.memory_dir(target.uid).join(projection.plugin).join(volume),
            link: target.volume_dir(projection.plugin, volume),
            objects: projection.parts.iter().map(object).collect(),
            projection,
            is_refusal_reported: AtomicBool::new(false),
        }
    }

    fn reads_pod_fields(&self) -> bool {
        self.projection.parts.iter().any(|part| matches!(part, Part::Downward(_)))
    }

    /// Directory of the files.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    fn changes(&self) -> impl Iterator<Item = impl Future<Output = ()> + Send + use<>> {
        self.objects.iter().flatten().map(|object| object.changes())
    }

    /// Updates the files. Returns the time until their next token is due.
    async fn write(&self, ctx: &VolumeContext, pod: &Pod) -> Result<Option<Duration>, SetUpError> {
        let found = self.find(ctx, pod).await?;
        let is_large = self.weight(&found) > LARGE;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let _turn = if is_large { Some(LARGE_WRITES.take(namespace).await) } else { None };
        if is_large { off_worker(|| self.put(ctx, pod, found)) } else { self.put(ctx, pod, found) }
    }

    /// Writes the files of all parts. The function is synchronous, so that few copies of files exist at the same time
    /// when many pods start. A copy can be large.
    fn put(&self, ctx: &VolumeContext, pod: &Pod, found: Vec<Found>) -> Result<Option<Duration>, SetUpError> {
        let volume = FileVolume {
            namespace: pod.metadata.namespace.as_deref().unwrap_or_default(),
            uid: pod.metadata.uid.as_deref().unwrap_or_default(),
            name: &self.volume,
        };
        let files = &ctx.shared.files;
        // Files that a failed refresh of another volume has left count, too.
        let mut budget = Budget::new(page_size(), files.of_other_volumes(volume));
        let (payload, renew_in) = self.payload(ctx, pod, found, &mut budget)?;
        files.reserve(volume, budget.taken(), atomic::exists(&self.dir))?;
        self.prepare()?;
        atomic::write(&self.dir, &payload, ownership::fs_group(pod))?;
        files.written(volume, budget.taken());
        Ok(renew_in)
    }

    fn log(&self, pod: &Pod, error: &SetUpError) {
        let uid = pod.metadata.uid.as_deref();
        tracing::warn!(error = chain(error), volume = self.volume, uid, "cannot refresh a volume");
    }

    /// Records an event about files above a limit, once until the files are refreshed.
    fn report_refusal(&self, ctx: &VolumeContext, pod: &Pod, reason: SetUpError) {
        if reason.is_limit() && !self.is_refusal_reported.swap(true, Ordering::Relaxed) {
            let (event, message) = VolumeError::SetUp { volume: self.volume.clone(), reason }.event();
            ctx.shared.recorder.pod(pod, Level::Warning, event, message);
        }
    }

    /// Writes new tokens although the other files cannot be refreshed. The other files keep their content. Returns the
    /// time until the next token is due.
    async fn renew_tokens(&self, ctx: &VolumeContext, pod: &Pod) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        for part in &self.projection.parts {
            let Part::Token(wanted) = part else { continue };
            let due = match self.renew_token(ctx, pod, wanted).await {
                Ok(due) => due,
                Err(error) => {
                    self.log(pod, &error);
                    WRITE_RETRY_DELAY
                }
            };
            next = next.into_iter().chain([due]).min();
        }
        next
    }

    async fn renew_token(
        &self,
        ctx: &VolumeContext,
        pod: &Pod,
        wanted: &ServiceAccountTokenProjection,
    ) -> Result<Duration, SetUpError> {
        let written = self.dir.join("..data").join(&wanted.path);
        let token = ctx.shared.tokens.get(ctx, pod, wanted, &written).await?;
        let (owner, group) = (ownership::fs_user(pod), ownership::fs_group(pod));
        let file = payload::token_file(token.token, self.projection.mode, owner, group);
        atomic::replace(&self.dir, &payload::clean(&wanted.path), &file, group)?;
        Ok(token.renew_in)
    }

    /// Waits for the objects and tokens of all parts.
    async fn find(&self, ctx: &VolumeContext, pod: &Pod) -> Result<Vec<Found>, SetUpError> {
        let mut all = Vec::with_capacity(self.projection.parts.len());
        for (part, object) in self.projection.parts.iter().zip(&self.objects) {
            all.push(match (part, object) {
                (Part::Object(_), Some(object)) => Found::Data(object.data().await?),
                (Part::Token(wanted), _) => {
                    let written = self.dir.join("..data").join(&wanted.path);
                    Found::Token(ctx.shared.tokens.get(ctx, pod, wanted, &written).await?)
                }
                (Part::Downward(_) | Part::Object(_), _) => Found::Nothing,
            });
        }
        Ok(all)
    }

    /// Bytes of the files, with a page for each file and each directory. The value is an estimate.
    fn weight(&self, found: &[Found]) -> usize {
        let page = page_size();
        let parts = self.projection.parts.iter().zip(found).map(|(part, found)| match (part, found) {
            (Part::Object(part), Found::Data(Some(data))) => part.weight(data, page),
            (Part::Downward(items), _) => payload::downward_weight(items, page),
            _ => page,
        });
        parts.fold(0, usize::saturating_add)
    }

    /// The files of all parts, and the time until the next token is due.
    fn payload(
        &self,
        ctx: &VolumeContext,
        pod: &Pod,
        found: Vec<Found>,
        budget: &mut Budget,
    ) -> Result<(Payload, Option<Duration>), SetUpError> {
        let (mut all, mut renew_in) = (Payload::new(), None::<Duration>);
        let mode = self.projection.mode;
        for (part, found) in self.projection.parts.iter().zip(found) {
            match (part, found) {
                (Part::Object(part), Found::Data(data)) => {
                    all.extend(part.files(data.as_deref(), mode, budget)?)
                }
                (Part::Downward(items), _) => {
                    let allocatable = &ctx.shared.node.allocatable;
                    all.extend(payload::downward_files(pod, allocatable, items, mode, budget)?)
                }
                (Part::Token(wanted), Found::Token(token)) => {
                    budget.take(&wanted.path, token.token.len())?;
                    let (owner, group) = (ownership::fs_user(pod), ownership::fs_group(pod));
                    let file = payload::token_file(token.token, mode, owner, group);
                    all.insert(payload::clean(&wanted.path), file);
                    renew_in = renew_in.into_iter().chain([token.renew_in]).min();
                }
                (Part::Object(_) | Part::Token(_), _) => {}
            }
        }
        Ok((all, renew_in))
    }

    /// Creates the directory in memory, and the symlink at the kubelet's path.
    fn prepare(&self) -> Result<(), SetUpError> {
        if !self.dir.is_dir() {
            ownership::make_private(&self.dir).map_err(SetUpError::io("create the directory", &self.dir))?;
            ownership::chmod(&self.dir, 0o755).map_err(SetUpError::io("set the mode of", &self.dir))?;
        }
        if fs::read_link(&self.link).is_ok_and(|found| found == self.dir) {
            return Ok(());
        }
        if let Some(parent) = self.link.parent() {
            ownership::make_private(parent).map_err(SetUpError::io("create the directory", parent))?;
        }
        let _ = fs::remove_file(&self.link);
        symlink(&self.dir, &self.link).map_err(SetUpError::io("create the link", &self.link))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_refresh_delays_the_next_one_longer() {
        let delays = [0, 5, 400, 60_000].map(|millis| delay_after(Duration::from_millis(millis)).as_millis());
        assert_eq!(delays, [0, 100, 8_000, 10_000]);
    }
}
