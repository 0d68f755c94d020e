//! UpdateContainerResources: new limits for a container that was created or runs, all of them or none.

use coracle_proto::cri;
use tracing::{info, warn};

use super::container_create::{PROCESS_FILE, read_process, write_json};
use crate::container::Container;
use crate::error::Error;
use crate::records::{ContainerPhase, ContainerRecord};
use crate::resize::apply::Resize;
use crate::resize::merged;
use crate::resize::note::Note;
use crate::runtime::Runtime;

impl Runtime {
    /// Changes a container's limits. What the request leaves at 0 or empty stays as it is. Its annotations are for
    /// limits and options that the CRI has no field for, of which there is none here; they mean nothing, as elsewhere.
    pub(crate) async fn container_update(
        &self,
        request: cri::UpdateContainerResourcesRequest,
    ) -> Result<cri::UpdateContainerResourcesResponse, Error> {
        let container = self.container(&request.container_id)?;
        if request.windows.is_some() {
            return Err(Error::invalid("windows", "this is Linux"));
        }
        updatable(&container)?;
        let Some(asked) = request.linux else { return Ok(cri::UpdateContainerResourcesResponse {}) };
        let asked = self.ask_about_update(&container, asked).await?;
        self.update_limits(&container, asked).await?;
        self.tell_updated(&container).await;
        Ok(cri::UpdateContainerResourcesResponse {})
    }

    /// The same without asking plugins.
    pub(crate) async fn update_limits(
        &self,
        container: &Container,
        asked: cri::LinuxContainerResources,
    ) -> Result<(), Error> {
        // One change at a time, and none while it starts or its end is recorded.
        let _alone = container.starting.lock().await;
        updatable(container)?;
        let before = container.resources();
        let after = merged(before.clone().unwrap_or_default(), &asked);
        let score = (asked.oom_score_adj != 0).then(|| self.inner.host.oom_score(asked.oom_score_adj));
        self.resize(container, before.as_ref(), (asked, after.clone())).await?;
        coracle_fault::point("update.written");
        // After the kernel: a client that got no answer asks again when it sees the old values.
        container.resized(Some(after));
        if let Err(error) = self.inner.records.write_container(&container.record_now()) {
            container.resized(before);
            self.settle_limits(&container.record_now()).await;
            return Err(error);
        }
        coracle_fault::point("update.recorded");
        if let Some(error) = score.and_then(|score| self.note_score(&container.id, score).err()) {
            warn!(container = container.id, error = error.chain(), "commands run with an old OOM score");
        }
        coracle_fault::point("update.scored");
        Note::done(&self.inner.records.container_dir(&container.id));
        Ok(())
    }

    /// What is left of a change of limits that did not come to its end: brought to it when it is on record, and put back
    /// when it is not.
    pub(crate) async fn settle_limits(&self, record: &ContainerRecord) {
        let bundle = self.inner.records.container_dir(&record.id);
        let Some(note) = Note::read(&bundle) else { return };
        let (id, group) = (record.id.clone(), record.cgroup.clone());
        let on_record = record.config.linux.as_ref().and_then(|linux| linux.resources.as_ref());
        let is_complete = on_record == Some(&note.after);
        let runtime = self.clone();
        // Off the async executor: the kernel may free memory before it answers.
        let settled = tokio::task::spawn_blocking(move || {
            if is_complete {
                note.score().map_or(Ok(()), |score| runtime.note_score(&id, score))?;
            } else {
                info!(container = id, "put limits back whose change was not completed");
                note.put_back(&runtime.inner.cgroups, &group);
            }
            Note::forget(&bundle)
        });
        if let Ok(Err(error)) = settled.await {
            warn!(container = record.id, error = error.chain(), "could not settle a container's limits");
        }
    }

    /// What runs in the container from now on begins with this score, as what runs in it already has it.
    fn note_score(&self, id: &str, score: i32) -> Result<(), Error> {
        let path = self.inner.records.container_dir(id).join(PROCESS_FILE);
        let mut process = read_process(&path)?;
        process.set_oom_score_adj(Some(score));
        write_json(&path, &process)
    }

    /// Off the async executor: the kernel may free memory before it answers.
    async fn resize(
        &self,
        container: &Container,
        before: Option<&cri::LinuxContainerResources>,
        (asked, after): (cri::LinuxContainerResources, cri::LinuxContainerResources),
    ) -> Result<(), Error> {
        let score = |adjustment| self.inner.host.oom_score(adjustment);
        let oom_score = (asked.oom_score_adj != 0)
            .then(|| (score(before.map_or(0, |before| before.oom_score_adj)), score(asked.oom_score_adj)));
        let (runtime, group) = (self.clone(), container.record.cgroup.clone());
        let bundle = self.inner.records.container_dir(&container.id);
        let resized = tokio::task::spawn_blocking(move || {
            let cgroups = &runtime.inner.cgroups;
            Resize { cgroups, group: &group, oom_score, bundle: &bundle }.apply(&asked, after)
        });
        resized.await.map_err(|panic| Error::Kernel {
            doing: "write the container's limits",
            source: std::io::Error::other(panic),
        })?
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
