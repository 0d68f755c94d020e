//! Undo of a multi-step creation: the completed steps are undone in reverse order when the creation fails or is cancelled.

use std::sync::{Arc, Weak};
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_cni::Network;
use coracle_nri::Nri;
use futures::FutureExt as _;
use tracing::warn;

use crate::announcement::Announcement;
use crate::cgroup::Cgroups;
use crate::error::Error;
use crate::records::Records;
use crate::selinux::Selinux;
use crate::shim_client::{ErrorKind, Shim};
use crate::tables::Tables;

/// First back-off after a failed undo. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(300);

/// A step that is complete or about to begin. Undoing a step that did not happen succeeds.
#[derive(Debug)]
pub(crate) enum Step {
    /// The SELinux level of a sandbox or container, by its id.
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
    /// The cgroup of a pod's shim.
    ShimCgroup(String),
    /// An announcement to NRI plugins.
    Announced(Announcement),
}

/// The components that undo steps use.
pub(crate) struct UndoContext {
    pub(crate) selinux: Arc<Selinux>,
    pub(crate) records: Arc<Records>,
    pub(crate) network: Network,
    pub(crate) tables: Arc<Tables>,
    pub(crate) cgroups: Arc<Cgroups>,
    pub(crate) nri: Nri,
}

/// The steps of a creation. If this value is dropped without [`Undo::finish`], a task undoes the steps.
pub(crate) struct Undo {
    /// A weak reference: a pending undo does not keep the runtime alive.
    context: Weak<UndoContext>,
    steps: Vec<Step>,
}

// === impl Undo ===

impl Undo {
    pub(crate) fn new(context: &Arc<UndoContext>) -> Self {
        Self { context: Arc::downgrade(context), steps: Vec::new() }
    }

    pub(crate) fn push(&mut self, step: Step) {
        self.steps.push(step);
    }

    /// Ends the creation, and returns its result. If the creation has failed, all steps are undone. If the undo of a
    /// step fails, the undo of the other steps continues.
    pub(crate) async fn finish<T, E>(mut self, result: Result<T, E>) -> Result<T, E> {
        let steps = std::mem::take(&mut self.steps);
        if result.is_err() {
            undo_steps(self.context.upgrade(), steps).await;
        }
        result
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if self.steps.is_empty() {
            return;
        }
        let steps = std::mem::take(&mut self.steps);
        let context = self.context.upgrade();
        if let Ok(handle) = tokio::runtime::Handle::try_current() {
            handle.spawn(undo_steps(context, steps).boxed());
        }
    }
}

/// Undoes all steps. Failed steps are retried with back-off as long as the runtime runs. Without the retries,
/// only the next start of the runtime would undo them.
async fn undo_steps(context: Option<Arc<UndoContext>>, steps: Vec<Step>) {
    let Some(context) = context else { return };
    let mut left = try_undo(&context, steps).await;
    let context = Arc::downgrade(&context);
    if left.is_empty() {
        return;
    }
    coracle_threads::spawn(async move {
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        while !left.is_empty() {
            tokio::time::sleep(backoff.next_delay()).await;
            let Some(context) = context.upgrade() else { return };
            left = try_undo(&context, left).await;
        }
    });
}

/// Undoes steps in reverse order. Returns the failed steps in their original order.
async fn try_undo(context: &UndoContext, steps: Vec<Step>) -> Vec<Step> {
    let mut left = Vec::new();
    for step in steps.into_iter().rev() {
        // The record is kept until all other steps are undone: the next start finds the object by its record.
        if !left.is_empty() && step.is_record() {
            left.push(step);
        } else if let Err(error) = step.undo(context).await {
            let (what, of) = step.describe();
            warn!(what, of, error = error.chain(), "cannot undo a step of an incomplete creation, retrying");
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

    /// The kind of the created object, and its id or path.
    fn describe(&self) -> (&'static str, String) {
        match self {
            Self::Level(id) => ("SELinux level", id.clone()),
            Self::SandboxRecord(id) => ("sandbox", id.clone()),
            Self::Shim(shim) => ("shim", shim.dir().display().to_string()),
            Self::Network(id) => ("network", id.clone()),
            Self::Container(id) | Self::ContainerRecord(id) | Self::ShimContainer(_, id) => {
                ("container", id.clone())
            }
            Self::Cgroup(group) | Self::ShimCgroup(group) => ("cgroup", group.clone()),
            Self::Announced(_) => ("announcement to NRI plugins", String::new()),
        }
    }

    async fn undo(&self, context: &UndoContext) -> Result<(), Error> {
        match self {
            Self::Level(id) => {
                context.selinux.release(id);
                Ok(())
            }
            Self::SandboxRecord(id) => context.records.remove_sandbox(id),
            Self::Shim(shim) => shim.shutdown().await.map_err(Error::shim("end the pod's shim")),
            Self::Network(id) => {
                context.network.del(id).await.map_err(|source| Error::Network { id: id.clone(), source })
            }
            Self::Container(id) => {
                context.tables.containers.remove(id);
                Ok(())
            }
            Self::ContainerRecord(id) => context.records.remove_container(id),
            Self::ShimContainer(shim, id) => match shim.delete(id).await {
                // The shim has ended, and its containers with it.
                Err(error) if error.kind == ErrorKind::Gone => Ok(()),
                deleted => deleted.map_err(Error::shim("delete the container")),
            },
            Self::Announced(announcement) => {
                announcement.revoke(&context.nri).await;
                Ok(())
            }
            Self::Cgroup(group) => {
                context.cgroups.kill(group).await;
                context.cgroups.remove(group).await
            }
            Self::ShimCgroup(group) => {
                context.cgroups.remove_shim(group).await;
                Ok(())
            }
        }
    }
}
