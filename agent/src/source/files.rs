//! The manifests of static pods: the files of a directory, or one file. The agent reads them at its start and after
//! each change, which inotify reports. Source: `pkg/kubelet/config/file.go`.

mod plan;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use coracle_cni::DirectoryWatch;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::mpsc;

use super::PodChange;
use super::manifest;
use plan::{Content, ManifestFile, Plan, plan};

/// Pause between a change and the read. A program that makes a file usually has written it then.
const SETTLE: Duration = Duration::from_millis(100);
/// First and maximum pause after a failed watch.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// The static pods of a node.
pub(super) struct StaticPods {
    /// Directory or file of the manifests.
    path: Option<PathBuf>,
    node: String,
    /// The pods by their files.
    current: BTreeMap<PathBuf, Arc<Pod>>,
    /// Whether [`PodChange::StaticComplete`] was sent.
    is_listed: bool,
}

// === impl StaticPods ===

impl StaticPods {
    pub(super) fn new(path: Option<PathBuf>, node: &str) -> Self {
        Self { path, node: node.to_owned(), current: BTreeMap::new(), is_listed: false }
    }

    /// Reads the manifests and sends the changes: at first the uids of all static pods, then the pods. Returns false if
    /// there is no receiver.
    pub(super) async fn update(&mut self, changes: &mpsc::Sender<PodChange>) -> bool {
        // Without the manifests, the static pods of an earlier agent continue.
        let Some(plan) = self.read().await else { return true };
        for path in &plan.duplicates {
            let path = path.display();
            tracing::warn!(%path, "an earlier manifest has a static pod of the same name");
        }
        let mut sent = Vec::new();
        if !std::mem::replace(&mut self.is_listed, true) {
            let uids = plan.added.iter().filter_map(|pod| pod.metadata.uid.clone());
            sent.push(PodChange::StaticComplete(uids.collect()));
        }
        sent.extend(plan.removed.into_iter().map(PodChange::StaticRemoved));
        sent.extend(plan.added.into_iter().map(PodChange::Static));
        self.current = plan.next;
        for change in sent {
            if changes.send(change).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Sends changes until there is no receiver. Without a path it returns at once.
    pub(super) async fn follow(mut self, changes: mpsc::Sender<PodChange>) {
        let Some(path) = self.path.clone() else { return };
        let mut pause = RETRY[0];
        loop {
            let Err(error) = self.follow_events(&path, &changes, &mut pause).await else { return };
            let path = path.display();
            tracing::warn!(%path, %error, retry = ?pause, "cannot watch the manifests of static pods");
            tokio::time::sleep(pause).await;
            pause = RETRY[1].min(pause * 2);
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
        pause: &mut Duration,
    ) -> io::Result<()> {
        let mut watch = DirectoryWatch::on(path)?;
        loop {
            // The manifests may have changed before the watch began.
            if !self.update(changes).await {
                return Ok(());
            }
            watch.changed().await?;
            *pause = RETRY[0];
            tokio::time::sleep(SETTLE).await;
        }
    }

    /// Reads the manifests. None if the directory cannot be read: then the pods stay unchanged.
    async fn read(&self) -> Option<Plan> {
        let (path, node) = (self.path.clone(), self.node.clone());
        let read = tokio::task::spawn_blocking(move || {
            path.map_or_else(|| Ok(Vec::new()), |path| read_all(&path, &node))
        });
        match read.await {
            Ok(Ok(files)) => Some(plan(&self.current, files)),
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot read the manifests of static pods");
                None
            }
            Err(error) => {
                tracing::error!(%error, "the reader of static pods panicked");
                None
            }
        }
    }
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
    let content = match manifest::read(&path, node) {
        Ok(pod) => Content::Pod(Box::new(pod)),
        Err(error) if error.is_absent() => return None,
        Err(error) => {
            let (path, cause) = (path.display(), &error as &dyn std::error::Error);
            tracing::warn!(%path, error = cause, "cannot use the manifest of a static pod");
            if error.is_temporary() { Content::Unreadable } else { Content::Invalid }
        }
    };
    Some(ManifestFile { path, content })
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
        let mut pods = StaticPods::new(Some(dir.clone()), "n1");
        assert!(pods.update(&sender).await);
        assert_eq!(shown(changes.recv().await.unwrap()), "=0");
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
        let mut pods = StaticPods::new(Some(path.clone()), "n");
        assert!(pods.update(&sender).await);
        assert_eq!(shown(changes.recv().await.unwrap()), "=1");
        assert_eq!(shown(changes.recv().await.unwrap()), "+a-n");
        let following = tokio::spawn(pods.follow(sender));
        fs::write(&next, manifest("b")).unwrap();
        fs::rename(&next, &path).unwrap();
        assert_eq!(shown(changes.recv().await.unwrap()), "-32");
        assert_eq!(shown(changes.recv().await.unwrap()), "+b-n");
        following.abort();
    }
}
