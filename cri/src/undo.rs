//! What a multi-step creation has done so far, and how to take it back: on failure in reverse order,
//! and also when the caller went away in the middle.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tracing::warn;

use crate::error::Error;
use crate::nri::Told;
use crate::runtime::Inner;
use crate::shim_client::{ErrorKind, Shim};

/// How long after a failure it is tried again first, and at most.
const RETRY: Duration = Duration::from_secs(1);
const RARELY: Duration = Duration::from_secs(300);

/// One step that was taken, or is about to be: all of these succeed on the absent.
#[derive(Debug)]
pub(crate) enum Step {
    /// The level of a sandbox's or container's SELinux labels.
    Level(String),
    /// A sandbox's directory with its record.
    SandboxRecord(String),
    /// A sandbox's shim.
    Shim(Shim),
    /// A sandbox's network.
    Network(String),
    /// A container in the table.
    Container(String),
    /// A container's directories with its record.
    ContainerRecord(String),
    /// A container of a shim.
    ShimContainer(Shim, String),
    /// A cgroup.
    Cgroup(String),
    /// What plugins were told.
    Told(Told),
}

/// The steps taken. Dropped without [`Undo::keep`], it takes them back in a task of its own.
#[derive(Debug)]
pub(crate) struct Undo {
    inner: Weak<Inner>,
    steps: Vec<Step>,
}

// === impl Undo ===

impl Undo {
    pub(crate) fn new(inner: &Arc<Inner>) -> Self {
        Self { inner: Arc::downgrade(inner), steps: Vec::new() }
    }

    pub(crate) fn push(&mut self, step: Step) {
        self.steps.push(step);
    }

    /// The creation is complete: nothing is taken back.
    pub(crate) fn keep(mut self) {
        self.steps.clear();
    }

    /// Takes all steps back, to the end, whatever fails.
    pub(crate) async fn run(mut self) {
        take_back(self.inner.upgrade(), std::mem::take(&mut self.steps)).await;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if self.steps.is_empty() {
            return;
        }
        let steps = std::mem::take(&mut self.steps);
        let inner = self.inner.upgrade();
        if let Ok(handle) = tokio::runtime::Handle::try_current() {
            handle.spawn(take_back(inner, steps));
        }
    }
}

/// Takes steps back, to the end, whatever fails. What failed is tried again, ever more rarely, for as long as the
/// runtime is there: nobody else knows of it before the next start.
async fn take_back(inner: Option<Arc<Inner>>, steps: Vec<Step>) {
    let Some(inner) = inner else { return };
    let mut left = try_back(&inner, steps).await;
    let inner = Arc::downgrade(&inner);
    if left.is_empty() {
        return;
    }
    tokio::spawn(async move {
        let mut pause = RETRY;
        while !left.is_empty() {
            tokio::time::sleep(pause).await;
            let Some(inner) = inner.upgrade() else { return };
            left = try_back(&inner, left).await;
            pause = (pause * 2).min(RARELY);
        }
    });
}

/// Takes steps back, the last first. Returns what is left to do, in the order in which the steps were taken.
async fn try_back(inner: &Inner, steps: Vec<Step>) -> Vec<Step> {
    let mut left = Vec::new();
    for step in steps.into_iter().rev() {
        // By its record the next start finds what could not be taken back.
        if !left.is_empty() && step.is_record() {
            left.push(step);
        } else if let Err(error) = step.take_back(inner).await {
            let (what, of) = step.about();
            warn!(what, of, error = error.chain(), "could not take back what was not completely made");
            left.push(step);
        }
    }
    left.reverse();
    left
}

// === impl Step ===

impl Step {
    fn is_record(&self) -> bool {
        matches!(self, Self::SandboxRecord(_) | Self::ContainerRecord(_))
    }

    /// What it made, and whose that is.
    fn about(&self) -> (&'static str, String) {
        match self {
            Self::Level(id) => ("SELinux level", id.clone()),
            Self::SandboxRecord(id) => ("sandbox", id.clone()),
            Self::Shim(shim) => ("shim", shim.dir().display().to_string()),
            Self::Network(id) => ("network", id.clone()),
            Self::Container(id) | Self::ContainerRecord(id) | Self::ShimContainer(_, id) => {
                ("container", id.clone())
            }
            Self::Cgroup(group) => ("cgroup", group.clone()),
            Self::Told(_) => ("news for plugins", String::new()),
        }
    }

    async fn take_back(&self, inner: &Inner) -> Result<(), Error> {
        match self {
            Self::Level(id) => {
                inner.selinux.release(id);
                Ok(())
            }
            Self::SandboxRecord(id) => inner.records.remove_sandbox(id),
            Self::Shim(shim) => shim.shutdown().await.map_err(Error::shim("end the pod's shim")),
            Self::Network(id) => {
                inner.network.del(id).await.map_err(|source| Error::Network { id: id.clone(), source })
            }
            Self::Container(id) => {
                inner.containers.remove(id);
                Ok(())
            }
            Self::ContainerRecord(id) => inner.records.remove_container(id),
            Self::ShimContainer(shim, id) => match shim.delete(id).await {
                // Its containers ended with it.
                Err(error) if error.kind == ErrorKind::Gone => Ok(()),
                deleted => deleted.map_err(Error::shim("delete the container")),
            },
            Self::Told(told) => {
                told.take_back(inner).await;
                Ok(())
            }
            Self::Cgroup(group) => {
                inner.cgroups.kill(group).await;
                inner.cgroups.remove(group).await
            }
        }
    }
}
