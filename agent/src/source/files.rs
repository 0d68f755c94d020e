//! The manifests of static pods: the files of a directory, or one file. The agent reads them at its start, after each
//! change that inotify reports, and every 20 seconds. Source: `pkg/kubelet/config/file.go`.

mod plan;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use coracle_backoff::Backoff;
use coracle_cni::DirectoryWatch;
use coracle_error_chain::chain;
use coracle_values::object::Key;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{mpsc, watch};

use super::PodChange;
use super::manifest;
use super::manifest_url::FetchedPods;
use plan::{Content, ManifestFile, Plan, plan};

/// Delay between a change and the read. In this time, a program usually completes a file that it creates.
const SETTLE: Duration = Duration::from_millis(100);
/// Interval of the reads without a reported change, as upstream's default of `fileCheckFrequency`. inotify does not
/// report changes of a symbolic link's target or of a network file system. It also does not report that a single
/// manifest with another hard link was replaced. A read that failed is repeated, too.
const CHECK: Duration = Duration::from_secs(20);
/// First back-off after a failed watch. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// The static pods of a node.
pub(super) struct StaticPods {
    /// Directory or file of the manifests.
    path: Option<PathBuf>,
    /// The pods of a URL. None without a URL.
    fetched: Option<watch::Receiver<FetchedPods>>,
    node: String,
    /// The pods by their files.
    current: BTreeMap<PathBuf, Arc<Pod>>,
    /// The reason why files are not used. Each cause is logged once.
    failures: BTreeMap<PathBuf, String>,
    /// Whether [`PodChange::StaticComplete`] was sent.
    is_listed: bool,
}

// === impl StaticPods ===

impl StaticPods {
    pub(super) fn new(
        path: Option<PathBuf>,
        fetched: Option<watch::Receiver<FetchedPods>>,
        node: &str,
    ) -> Self {
        let (node, current, failures) = (node.to_owned(), BTreeMap::new(), BTreeMap::new());
        Self { path, fetched, node, current, failures, is_listed: false }
    }

    /// Reads the manifests and sends the changes: at first the uids of all static pods, then the pods. Before the first
    /// response of the URL only pods are sent. Returns false if there is no receiver.
    pub(super) async fn update(&mut self, changes: &mpsc::Sender<PodChange>) -> bool {
        // Without the manifests, the static pods of an earlier agent continue.
        let Some(plan) = self.read().await else { return true };
        self.log(plan.failures);
        let mut sent = Vec::new();
        let is_complete = self.fetched.as_ref().is_none_or(|fetched| fetched.borrow().is_some());
        let is_first = is_complete && !std::mem::replace(&mut self.is_listed, true);
        if is_first {
            let uids = plan.next.values().filter_map(|pod| pod.metadata.uid.clone());
            sent.push(PodChange::StaticComplete(uids.collect()));
        }
        sent.extend(plan.removed.into_iter().map(PodChange::StaticRemoved));
        sent.extend(plan.added.into_iter().map(PodChange::Static));
        sent.extend(is_first.then_some(PodChange::StaticSent));
        self.current = plan.next;
        for change in sent {
            if changes.send(change).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Sends changes until there is no receiver. Without a path and a URL the function returns at once.
    pub(super) async fn follow(mut self, changes: mpsc::Sender<PodChange>) {
        let Some(path) = self.path.clone() else { return self.follow_url(&changes).await };
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        loop {
            let Err(error) = self.follow_events(&path, &changes, &mut backoff).await else { return };
            let (path, delay) = (path.display(), backoff.next_delay());
            tracing::warn!(%path, %error, retry = ?delay, "cannot watch the manifests of static pods");
            tokio::time::sleep(delay).await;
            // Manifests that cannot be watched are read nevertheless.
            if !self.update(&changes).await {
                return;
            }
        }
    }

    /// Sends changes of the URL until there is no receiver. Without a URL the function returns at once.
    async fn follow_url(&mut self, changes: &mpsc::Sender<PodChange>) {
        while self.fetched.is_some() {
            // The arms are cancel-safe: they receive nothing.
            tokio::select! {
                () = fetched_change(&mut self.fetched) => {}
                () = changes.closed() => return,
            }
            if !self.update(changes).await {
                return;
            }
        }
    }

    /// Sends changes until there is no receiver.
    ///
    /// # Errors
    /// When the watch fails.
    async fn follow_events(
        &mut self,
        path: &Path,
        changes: &mpsc::Sender<PodChange>,
        backoff: &mut Backoff,
    ) -> io::Result<()> {
        let of_watch = path.to_owned();
        // A network file system may not respond.
        let watch = coracle_threads::spawn_blocking(move || DirectoryWatch::on(&of_watch)).await;
        let mut watch = watch.map_err(io::Error::other)??;
        loop {
            // The manifests may have changed before the watch began.
            if !self.update(changes).await {
                return Ok(());
            }
            // All arms are cancel-safe: an event that is not received stays in the queue of the kernel.
            tokio::select! {
                () = fetched_change(&mut self.fetched) => {}
                changed = watch.changed() => {
                    changed?;
                    backoff.reset();
                    tokio::time::sleep(SETTLE).await;
                }
                () = tokio::time::sleep(CHECK) => {}
            }
        }
    }

    /// Reads the manifests. None if the directory cannot be read: then the pods stay unchanged.
    async fn read(&mut self) -> Option<Plan> {
        let mut manifests = self.read_files().await?;
        // If a file and the URL have pods of the same name, the pod of the file counts.
        manifests.extend(self.fetched.iter().flat_map(|fetched| of_url(&fetched.borrow())));
        Some(plan(&self.current, manifests))
    }

    async fn read_files(&mut self) -> Option<Vec<ManifestFile>> {
        let Some(path) = self.path.clone() else { return Some(Vec::new()) };
        let (of_reader, node) = (path.clone(), self.node.clone());
        let read = coracle_threads::spawn_blocking(move || read_all(&of_reader, &node));
        match read.await {
            Ok(Ok(files)) => Some(files),
            Ok(Err(error)) => {
                self.log(BTreeMap::from([(path, chain(&error))]));
                None
            }
            Err(error) => {
                tracing::error!(%error, "the reader of static pods panicked");
                None
            }
        }
    }

    /// Logs the failures that differ from those of the last read.
    fn log(&mut self, failures: BTreeMap<PathBuf, String>) {
        for (path, error) in &failures {
            if self.failures.get(path) != Some(error) {
                tracing::warn!(path = %path.display(), error, "cannot use the manifest of a static pod");
            }
        }
        self.failures = failures;
    }
}

/// Waits for other pods of the URL. Pending without a URL. Cancel-safe.
async fn fetched_change(fetched: &mut Option<watch::Receiver<FetchedPods>>) {
    if let Some(fetched) = fetched
        && fetched.changed().await.is_ok()
    {
        return;
    }
    // There is no URL, or its reader has ended with the agent.
    std::future::pending().await
}

/// The pods of the URL, each with its name in place of a file.
fn of_url(pods: &FetchedPods) -> Vec<ManifestFile> {
    let file = |pod: &Pod| {
        let key = Key::of(&pod.metadata);
        let path = PathBuf::from(format!("static pod URL: {}/{}", key.namespace, key.name));
        ManifestFile { path, content: Content::Pod(Box::new(pod.clone())), failure: None }
    };
    pods.iter().flat_map(|pods| pods.iter()).map(file).collect()
}

/// Reads the file, or all files of the directory in the order of their names.
fn read_all(path: &Path, node: &str) -> io::Result<Vec<ManifestFile>> {
    let files = match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => files_of(path)?,
        Ok(_) => vec![path.to_owned()],
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    Ok(files.into_iter().filter_map(|path| read_one(path, node)).collect())
}

/// The files of a directory, without those whose names begin with a dot, as upstream.
fn files_of(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        if !name.as_encoded_bytes().starts_with(b".") {
            files.push(dir.join(name));
        }
    }
    files.sort_unstable();
    Ok(files)
}

/// Reads one file. None for a directory, and for a file that was removed meanwhile.
fn read_one(path: PathBuf, node: &str) -> Option<ManifestFile> {
    if path.is_dir() {
        return None;
    }
    let (content, failure) = match manifest::read(&path, node) {
        Ok(pod) => (Content::Pod(Box::new(pod)), None),
        Err(error) if error.is_absent() => return None,
        Err(error) => {
            let content = if error.is_temporary() { Content::Unreadable } else { Content::Invalid };
            (content, Some(chain(&error)))
        }
    };
    Some(ManifestFile { path, content, failure })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(name: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{containers: [{{name: c, image: i}}]}}\n"
        )
    }

    fn shown(change: PodChange) -> String {
        match change {
            PodChange::Static(pod) => format!("+{}", pod.metadata.name.as_deref().unwrap()),
            PodChange::StaticRemoved(uid) => format!("-{}", uid.len()),
            PodChange::StaticComplete(uids) => format!("={}", uids.len()),
            other => format!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn changes_of_a_directory_are_sent() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("manifests");
        let (sender, mut changes) = mpsc::channel(16);
        let mut pods = StaticPods::new(Some(dir.clone()), None, "n1");
        assert!(pods.update(&sender).await);
        assert_eq!(shown(changes.recv().await.unwrap()), "=0");
        assert_eq!(shown(changes.recv().await.unwrap()), "StaticSent");
        let following = tokio::spawn(pods.follow(sender));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join(".hidden.yaml"), manifest("h")).unwrap();
        fs::write(dir.join("invalid.yaml"), "kind: [").unwrap();
        fs::write(dir.join("a.yaml"), manifest("a")).unwrap();
        assert_eq!(shown(changes.recv().await.unwrap()), "+a-n1");
        fs::write(dir.join("a.yaml"), manifest("b")).unwrap();
        assert_eq!(shown(changes.recv().await.unwrap()), "-32");
        assert_eq!(shown(changes.recv().await.unwrap()), "+b-n1");
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(shown(changes.recv().await.unwrap()), "-32");
        following.abort();
    }

    #[tokio::test]
    async fn one_file_is_followed_when_it_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (path, next) = (dir.path().join("pod.yaml"), dir.path().join("next"));
        fs::write(&path, manifest("a")).unwrap();
        let (sender, mut changes) = mpsc::channel(16);
        let mut pods = StaticPods::new(Some(path.clone()), None, "n");
        assert!(pods.update(&sender).await);
        assert_eq!(shown(changes.recv().await.unwrap()), "=1");
        assert_eq!(shown(changes.recv().await.unwrap()), "+a-n");
        assert_eq!(shown(changes.recv().await.unwrap()), "StaticSent");
        let following = tokio::spawn(pods.follow(sender));
        fs::write(&next, manifest("b")).unwrap();
        fs::rename(&next, &path).unwrap();
        assert_eq!(shown(changes.recv().await.unwrap()), "-32");
        assert_eq!(shown(changes.recv().await.unwrap()), "+b-n");
        following.abort();
    }

    /// The clock advances only while no task can run, so the write follows the first read of the task.
    #[tokio::test(start_paused = true)]
    async fn a_change_that_the_kernel_does_not_report_is_found() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let target = outside.path().join("a.yaml");
        fs::write(&target, manifest("a")).unwrap();
        std::os::unix::fs::symlink(&target, dir.path().join("a.yaml")).unwrap();
        let (sender, mut changes) = mpsc::channel(16);
        let mut pods = StaticPods::new(Some(dir.path().to_owned()), None, "n");
        assert!(pods.update(&sender).await);
        for expected in ["=1", "+a-n", "StaticSent"] {
            assert_eq!(shown(changes.recv().await.unwrap()), expected);
        }
        let following = tokio::spawn(pods.follow(sender));
        tokio::time::sleep(CHECK / 2).await;
        fs::write(&target, manifest("b")).unwrap();
        for expected in ["-32", "+b-n"] {
            let change = tokio::time::timeout(CHECK * 2, changes.recv()).await;
            assert_eq!(shown(change.expect("a regular read").unwrap()), expected);
        }
        following.abort();
    }

    #[tokio::test]
    async fn pods_of_a_url_are_added_and_all_pods_are_known_after_its_first_response() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.yaml");
        fs::write(&path, manifest("a")).unwrap();
        let of_url = |names: &[&str]| -> FetchedPods {
            let pods = names.iter().map(|name| manifest::of_url(manifest(name).as_bytes(), "http://h/", "n"));
            Some(pods.flat_map(Result::unwrap).collect())
        };
        let (fetched, receiver) = watch::channel(None);
        let (sender, mut changes) = mpsc::channel(16);
        let mut pods = StaticPods::new(Some(dir.path().to_owned()), Some(receiver), "n");
        assert!(pods.update(&sender).await);
        assert_eq!(shown(changes.recv().await.unwrap()), "+a-n", "it does not wait for the URL");
        assert!(changes.try_recv().is_err(), "an earlier agent may have static pods of the URL");
        fetched.send_replace(of_url(&["a", "b"]));
        let following = tokio::spawn(pods.follow(sender));
        for expected in ["=2", "+b-n", "StaticSent"] {
            assert_eq!(shown(changes.recv().await.unwrap()), expected, "the pod of the file counts");
        }
        fetched.send_replace(of_url(&["c"]));
        assert_eq!(shown(changes.recv().await.unwrap()), "-32");
        assert_eq!(shown(changes.recv().await.unwrap()), "+c-n");
        following.abort();
    }

    #[tokio::test]
    async fn a_url_without_a_directory_is_followed_until_there_is_no_receiver() {
        let (fetched, receiver) = watch::channel(None);
        let (sender, mut changes) = mpsc::channel(16);
        let mut pods = StaticPods::new(None, Some(receiver), "n");
        assert!(pods.update(&sender).await);
        let following = tokio::spawn(pods.follow(sender));
        let none: Vec<Pod> = Vec::new();
        fetched.send_replace(Some(none.into()));
        assert_eq!(shown(changes.recv().await.unwrap()), "=0");
        assert_eq!(shown(changes.recv().await.unwrap()), "StaticSent");
        drop(changes);
        following.await.unwrap();
    }

    #[tokio::test]
    async fn the_static_pods_are_not_known_while_the_manifests_cannot_be_read() {
        let parent = tempfile::tempdir().unwrap();
        let (file, dir) = (parent.path().join("parent"), parent.path().join("parent/manifests"));
        fs::write(&file, "").unwrap();
        let (sender, mut changes) = mpsc::channel(16);
        let mut pods = StaticPods::new(Some(dir.clone()), None, "n");
        assert!(pods.update(&sender).await);
        assert!(changes.try_recv().is_err(), "an earlier agent may have static pods");
        assert!(pods.failures.contains_key(&dir));
        fs::remove_file(&file).unwrap();
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("a.yaml"), manifest("a")).unwrap();
        assert!(pods.update(&sender).await);
        for expected in ["=1", "+a-n", "StaticSent"] {
            assert_eq!(shown(changes.recv().await.unwrap()), expected);
        }
        assert!(pods.failures.is_empty());
    }
}
