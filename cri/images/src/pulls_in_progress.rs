//! Pulls in progress; equal pulls are merged.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::error::Error;
use crate::image::{Image, Login, ProgressFn, PullProgress};
use crate::reference::Reference;

/// The pulls that run, by key.
#[derive(Default)]
pub(crate) struct PullsInProgress(Mutex<HashMap<PullKey, Weak<SharedPull>>>);

/// Pulls with equal keys are merged. Credentials are part of the key: no caller gets an image through another
/// caller's credentials. The owner is part of the key, too: no pull waits for the [slots](crate::fetch_slots) of another
/// owner.
#[derive(PartialEq, Eq, Hash, Clone)]
pub(crate) struct PullKey {
    pub(crate) owner: String,
    pub(crate) reference: Reference,
    pub(crate) login: Option<Login>,
}

/// A pull that runs while at least one caller awaits it.
pub(crate) struct SharedPull {
    pub(crate) progress: watch::Receiver<PullProgress>,
    pub(crate) result: watch::Receiver<Option<Result<Image, Error>>>,
    pub(crate) task: AbortHandle,
}

// === impl PullsInProgress ===

impl PullsInProgress {
    /// The running pull with this key. If no pull with this key runs, `start` starts it.
    pub(crate) fn join(&self, key: PullKey, start: impl FnOnce(PullKey) -> SharedPull) -> Arc<SharedPull> {
        let mut pulls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pulls.retain(|_, pull| pull.strong_count() > 0);
        if let Some(pull) = pulls.get(&key).and_then(Weak::upgrade)
            && pull.result.borrow().is_none()
        {
            return pull;
        }
        let pull = Arc::new(start(key.clone()));
        pulls.insert(key, Arc::downgrade(&pull));
        pull
    }
}

// === impl SharedPull ===

impl SharedPull {
    /// The result of the pull. `None` if its task was aborted, for example at shutdown.
    pub(crate) async fn wait(&self, on_progress: Option<ProgressFn>) -> Option<Result<Image, Error>> {
        let mut result = self.result.clone();
        let mut progress = self.progress.clone();
        let mut reporting = on_progress.is_some();
        loop {
            // Cancel-safe: both arms wait on watch channels, which lose nothing when dropped.
            tokio::select! {
                biased;
                done = result.wait_for(Option::is_some) => {
                    let done = done.ok().and_then(|done| done.clone());
                    if let Some(on_progress) = &on_progress {
                        on_progress(&progress.borrow_and_update().clone());
                    }
                    return done;
                }
                changed = progress.changed(), if reporting => {
                    reporting = changed.is_ok();
                    if let (Some(on_progress), true) = (&on_progress, reporting) {
                        on_progress(&progress.borrow_and_update().clone());
                    }
                }
            }
        }
    }
}

impl Drop for SharedPull {
    fn drop(&mut self) {
        self.task.abort();
    }
}
