//! UpdateContainerResources: changes the limits of a created or running container, all of them or none.

use std::sync::Arc;

use coracle_proto::cri;
use tracing::{info, warn};

use super::service::ContainerService;
use crate::container::Container;
use crate::error::Error;
use crate::json_file::replace_json;
use crate::records::{ContainerPhase, ContainerRecord};
use crate::resize::apply::{Resize, ScoreChange};
use crate::resize::merged;
use crate::resize::note::Note;
use crate::services::process_file::{PROCESS_FILE, read_process};

/// A change of a container's limits.
struct LimitChange {
    requested: cri::LinuxContainerResources,
    /// All limits after the change.
    after: cri::LinuxContainerResources,
}

impl ContainerService {
    /// Changes a container's limits. A limit that is 0 or empty in the request stays unchanged. Annotations of the request
    /// are ignored, as in other runtimes: they are for limits without a CRI field, and this runtime has no such limits.
    pub(crate) async fn container_update(
        &self,
        request: cri::UpdateContainerResourcesRequest,
    ) -> Result<cri::UpdateContainerResourcesResponse, Error> {
        let container = self.objects.tables.container(&request.container_id)?;
        if request.windows.is_some() {
            return Err(Error::invalid("windows", "is not supported on Linux"));
        }
        updatable(&container)?;
        let Some(requested) = request.linux else { return Ok(cri::UpdateContainerResourcesResponse {}) };
        let requested = self.transitions.hooks.update_container(&container, requested).await?;
        self.update_limits(&container, requested).await?;
        self.transitions.hooks.post_update_container(&container).await;
        Ok(cri::UpdateContainerResourcesResponse {})
    }

    /// Changes a container's limits without calling plugins.
    pub(crate) async fn update_limits(
        &self,
        container: &Container,
        requested: cri::LinuxContainerResources,
    ) -> Result<(), Error> {
        // One change at a time, and not during a start or while the end is recorded.
        let _guard = container.starting.lock().await;
        updatable(container)?;
        let before = container.resources();
        let after = merged(before.clone().unwrap_or_default(), &requested);
        let score =
            (requested.oom_score_adj != 0).then(|| self.machine.host.oom_score(requested.oom_score_adj));
        self.resize(container, before.as_ref(), LimitChange { requested, after: after.clone() }).await?;
        coracle_fault::point("update.written");
        // The limits are recorded after the kernel's limits are changed: a client without a response sees the old
        // values and retries.
        container.resized(Some(after));
        if let Err(error) = self.objects.records.write_container(&container.record_now()) {
            container.resized(before);
            self.finish_limit_change(&container.record_now()).await;
            return Err(error);
        }
        coracle_fault::point("update.recorded");
        if let Some(error) = score.and_then(|score| self.write_oom_score(&container.id, score).err()) {
            warn!(
                container = container.id,
                error = error.chain(),
                "cannot write the OOM score for new execs"
            );
        }
        coracle_fault::point("update.scored");
        Note::remove(&self.objects.records.container_dir(&container.id));
        Ok(())
    }

    /// Finishes an interrupted change of limits: completes it if the container's record contains it, else reverts it.
    pub(crate) async fn finish_limit_change(&self, record: &ContainerRecord) {
        let bundle = self.objects.records.container_dir(&record.id);
        let Some(note) = Note::read(&bundle) else { return };
        let (id, group) = (record.id.clone(), record.cgroup.clone());
        let on_record = record.config.linux.as_ref().and_then(|linux| linux.resources.as_ref());
        let is_complete = on_record == Some(&note.after);
        let service = self.clone();
        // This runs off the async executor, because the kernel may reclaim memory before a write returns.
        let settled = coracle_threads::spawn_blocking(move || {
            if is_complete {
                note.score().map_or(Ok(()), |score| service.write_oom_score(&id, score))?;
            } else {
                info!(container = id, "reverting an incomplete change of limits");
                note.revert(&service.machine.cgroups, &group);
            }
            Note::try_remove(&bundle)
        });
        if let Ok(Err(error)) = settled.await {
            warn!(
                container = record.id,
                error = error.chain(),
                "cannot complete or revert a change of limits"
            );
        }
    }

    /// Sets the OOM score of future execs. Running processes already have it.
    fn write_oom_score(&self, id: &str, score: i32) -> Result<(), Error> {
        let path = self.objects.records.container_dir(id).join(PROCESS_FILE);
        let mut process = read_process(&path)?;
        process.set_oom_score_adj(Some(score));
        replace_json(&path, &process)
    }

    /// Writes new limits to the kernel, off the async executor: the kernel may reclaim memory before a write returns.
    async fn resize(
        &self,
        container: &Container,
        before: Option<&cri::LinuxContainerResources>,
        change: LimitChange,
    ) -> Result<(), Error> {
        let LimitChange { requested, after } = change;
        let score = |adjustment| self.machine.host.oom_score(adjustment);
        let oom_score = (requested.oom_score_adj != 0).then(|| {
            let from = score(before.map_or(0, |before| before.oom_score_adj));
            ScoreChange { from, to: score(requested.oom_score_adj) }
        });
        let (cgroups, group) = (Arc::clone(&self.machine.cgroups), container.record.cgroup.clone());
        let bundle = self.objects.records.container_dir(&container.id);
        let resized = coracle_threads::spawn_blocking(move || {
            Resize { cgroups: &cgroups, group: &group, oom_score, bundle: &bundle }.apply(&requested, after)
        });
        resized.await.map_err(Error::panicked("write the container's limits"))?
    }
}

fn updatable(container: &Container) -> Result<(), Error> {
    let state = match container.phase() {
        ContainerPhase::Created | ContainerPhase::Running { .. } => return Ok(()),
        ContainerPhase::Creating => "being created",
        ContainerPhase::Exited(_) => "exited",
    };
    Err(Error::WrongState { what: "container", id: container.id.clone(), state })
}
