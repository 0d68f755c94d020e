//! Release of an ended pod's resources.

use std::collections::BTreeSet;

use super::{ApplyError, Job, Report};
use crate::pod::config::sandbox::log_dir_name;
use crate::pod_logs;
use crate::volume;

impl Job {
    /// Releases claims, devices, volumes, cgroup, CPUs and memory of an ended pod. Its containers and logs stay
    /// readable until its object is deleted. `unstopped` has the ids of sandboxes that this agent has not stopped:
    /// their networks and shims would otherwise stay as long as the object.
    pub(super) async fn release(&mut self, unstopped: &[String]) -> Result<(), Vec<ApplyError>> {
        let mut errors = self.stop_sandboxes(unstopped).await;
        if errors.is_empty() {
            // The pod's sandbox has ended: another pod may get its addresses.
            self.node.policies.release(&self.uid);
        }
        errors.extend(self.free().await);
        if errors.is_empty() {
            self.report(Report::Released);
            return Ok(());
        }
        Err(errors)
    }

    /// Removes everything of the pod. Continues after an error and returns all errors. The call is retried until there
    /// is no error.
    pub(super) async fn finish(&mut self) -> Result<(), Vec<ApplyError>> {
        let sandboxes = self.observed.sandboxes.iter().map(|s| s.id.clone()).collect();
        let removed = self.remove_sandboxes(sandboxes).await;
        if removed.is_ok() {
            self.node.policies.release(&self.uid);
        }
        let mut errors = removed.err().unwrap_or_default();
        let orphans: Vec<String> = self
            .observed
            .containers
            .iter()
            .filter(|c| self.observed.sandboxes.iter().all(|s| s.id != c.sandbox))
            .map(|c| c.id.clone())
            .collect();
        errors.extend(self.remove_containers(orphans).await.err().unwrap_or_default());
        // The logs are removed before the pod's directory: after a crash, the directory is the record of the pod, see
        // `pod_logs`.
        errors.extend(self.remove_logs().await.err());
        errors.extend(self.free().await);
        if !errors.is_empty() {
            return Err(errors);
        }
        self.node.user_ids.release(&self.uid);
        self.node.checkpoint.remove_durably(&self.uid).await;
        self.report(Report::Finished);
        Ok(())
    }

    async fn free(&self) -> Vec<ApplyError> {
        let mut errors = Vec::new();
        self.node.devices.release(&self.uid).await;
        let unprepared = self.node.dra.unprepare(&self.uid).await;
        errors.extend(unprepared.map_err(ApplyError::Claims).err());
        let unmounted = volume::unmount_all(&self.node.volumes, &self.uid).await;
        errors.extend(unmounted.map_err(ApplyError::Volume).err());
        let removed = self.node.cgroups.remove_pod(&self.uid).await;
        match removed {
            // CPUs and memory are released even if a volume cannot be unmounted.
            Ok(()) => self.node.managers.release(&self.uid),
            // CPUs and memory stay allocated, because the cgroup may have processes on exclusive CPUs.
            Err(error) => errors.push(ApplyError::Cgroup(error)),
        }
        errors
    }

    async fn remove_logs(&self) -> Result<(), ApplyError> {
        let dir = self.node.config.pod_log_dir.clone();
        let path = dir.join(log_dir_name(&self.pod));
        let removed = if self.pod.metadata.name.is_some() {
            pod_logs::change(path.clone(), coracle_tree::remove).await
        } else {
            // After a crash only the uid may be known, see `orphan`.
            let uids = BTreeSet::from([self.uid.clone()]);
            pod_logs::change(path.clone(), move |_| pod_logs::remove(&dir, &uids)).await
        };
        removed.map_err(|source| ApplyError::File { verb: "remove", path, source })
    }
}
