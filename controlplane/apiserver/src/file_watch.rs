//! Follows the content of a configuration file.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Calls `changed` at the start and after each change of the file's content, until `shutdown` is cancelled. `changed`
/// may block: it runs on a blocking thread. If the directory cannot be watched, the function logs it and returns.
///
/// The function watches the directory of `path`, because programs replace the file, or a symbolic link, by a rename.
pub async fn follow_file(
    path: PathBuf,
    shutdown: CancellationToken,
    changed: impl Fn() + Send + Sync + 'static,
) {
    let woken = Arc::new(Notify::new());
    if let Err(error) = watch(&path, woken.clone()) {
        tracing::warn!(path = %path.display(), %error, "cannot follow a configuration file: changes need a restart");
        return;
    }
    let changed = Arc::new(changed);
    let mut known = None;
    loop {
        // A missing file is skipped: its creation is an event. The first pass also finds a change between the read of
        // the caller and the start of the watch.
        if let Some(now) = digest(&path)
            && known.replace(now) != Some(now)
        {
            let changed = changed.clone();
            if tokio::task::spawn_blocking(move || changed()).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = woken.notified() => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Starts a thread that waits for changes in the directory of the file. The thread ends with the process, or at the
/// first change after `woken` was dropped.
fn watch(path: &Path, woken: Arc<Notify>) -> std::io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC)?;
    inotify.add_watch(
        directory,
        AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_CREATE,
    )?;
    let listener = Arc::downgrade(&woken);
    drop(woken);
    std::thread::Builder::new().name("file-watch".to_owned()).spawn(move || {
        while inotify.read_events().is_ok() {
            let Some(woken) = listener.upgrade() else { return };
            woken.notify_one();
        }
    })?;
    Ok(())
}

fn digest(path: &Path) -> Option<[u8; 32]> {
    std::fs::read(path).ok().map(|bytes| Sha256::digest(bytes).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn changes_by_write_rename_and_link_are_seen_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        std::fs::write(&path, "a").unwrap();
        let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let shutdown = CancellationToken::new();
        let of_file = path.clone();
        let read = move || drop(sender.send(std::fs::read_to_string(&of_file).unwrap()));
        let following = tokio::spawn(follow_file(path.clone(), shutdown.clone(), read));
        tokio::task::yield_now().await;
        let replace = |name: &str, text: &str| {
            let other = directory.path().join(name);
            std::fs::write(&other, text).unwrap();
            std::fs::rename(&other, &path).unwrap();
        };
        // The watch starts some time after the task.
        let mut number = 0;
        let first = loop {
            number += 1;
            replace("new", &format!("b{number}"));
            let soon = std::time::Duration::from_millis(20);
            if let Ok(Some(first)) = tokio::time::timeout(soon, seen.recv()).await
                && first != "a"
            {
                break first;
            }
        };
        assert!(first.starts_with('b'));
        std::fs::write(directory.path().join("target"), "last").unwrap();
        std::os::unix::fs::symlink("target", directory.path().join("link")).unwrap();
        std::fs::rename(directory.path().join("link"), &path).unwrap();
        while seen.recv().await.unwrap() != "last" {}
        shutdown.cancel();
        following.await.unwrap();
    }
}
