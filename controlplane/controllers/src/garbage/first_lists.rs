//! The first lists of the watched kinds.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::api_kind::ApiKind;

/// Maximum wait for the first lists, as upstream. Kinds whose first list takes longer are added later.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Tasks that end with the first lists of kinds.
#[derive(Default)]
pub(super) struct FirstLists {
    /// The kinds of the core group, which no aggregated server serves.
    core: JoinSet<()>,
    others: JoinSet<()>,
}

// === impl FirstLists ===

impl FirstLists {
    /// Adds a kind. Its watch drops the sender of `first` after its first list.
    pub(super) fn add(&mut self, kind: &ApiKind, first: oneshot::Receiver<()>) {
        let tasks = if kind.resource.group.is_empty() { &mut self.core } else { &mut self.others };
        tasks.spawn(async move {
            let _ = first.await;
        });
    }

    /// Waits for all lists up to [`TIMEOUT`]. An aggregated server that does not respond must not stop the garbage
    /// collection of all kinds.
    pub(super) async fn wait(&mut self) {
        let all = async {
            // `join_next` is used, because `join_all` panics if a task is cancelled. Tasks are cancelled at the end of
            // the process.
            while self.core.join_next().await.is_some() {}
            while self.others.join_next().await.is_some() {}
        };
        let _late = tokio::time::timeout(TIMEOUT, all).await;
    }

    /// Waits for the lists of the core group, without a limit.
    pub(super) async fn wait_for_core(mut self) {
        while self.core.join_next().await.is_some() {}
    }

    /// Lets the tasks continue without a wait for the lists.
    pub(super) fn detach(mut self) {
        self.core.detach_all();
        self.others.detach_all();
    }
}
