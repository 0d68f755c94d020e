//! Restart of all containers of a pod in its sandbox: stops and removes them. The next plan starts the init containers.

use std::path::Path;

use coracle_proto::cri;

use super::{ApplyError, Job, Report};
use crate::pod::config::sandbox::log_dir_name;
use crate::pod::removed::RemovedContainers;
use crate::pod::restart;
use crate::pod::state::ObservedContainer;
use crate::pod_logs;
use crate::runtime::RuntimeError;

/// Seconds from the stop signal to SIGKILL, as upstream: the pod's grace period and the preStop hooks do not count.
const STOP_TIMEOUT: i64 = 2;

impl Job {
    /// Stops the containers at the same time, then removes them one by one, `triggers` last. Ends at the first error:
    /// the next plan repeats the restart, because a trigger still exists.
    pub(super) async fn restart_all(
        &self,
        others: &[String],
        triggers: &[String],
    ) -> Result<(), Vec<ApplyError>> {
        let running = self.observed.containers.iter().filter(|c| others.contains(&c.id) && c.may_run());
        let stops = futures::future::join_all(running.map(|c| self.stop_at_once(c)));
        let Some(stopped) = self.interrupt.run_until_cancelled(stops).await else { return Ok(()) };
        let errors: Vec<ApplyError> = stopped.into_iter().filter_map(Result::err).collect();
        if !errors.is_empty() {
            return Err(errors);
        }
        let removed = restart::removed(&self.observed, others, triggers);
        if let Err(error) = restart::record::add(&self.node.volumes.pod_dir(&self.uid), &removed) {
            // The pod's status also records the attempts. The attempts are lost only if the agent ends before it writes
            // the status.
            tracing::warn!(uid = self.uid, %error, "cannot record a restart of all containers");
        }
        self.report(Report::Removing(removed.clone()));
        for id in others.iter().chain(triggers) {
            if self.interrupt.is_cancelled() {
                return Ok(());
            }
            let request = cri::RemoveContainerRequest { container_id: id.clone() };
            let result = self.node.runtime.remove_container(request).await;
            result.map_err(|error| vec![self.runtime_error("RemoveContainer", id)(error)])?;
        }
        self.report(Report::AllRemoved);
        self.remove_older_logs(&removed).await;
        Ok(())
    }

    async fn stop_at_once(&self, observed: &ObservedContainer) -> Result<(), ApplyError> {
        self.announce_stop(observed);
        let request = cri::StopContainerRequest { container_id: observed.id.clone(), timeout: STOP_TIMEOUT };
        match self.node.runtime.stop_container(request).await {
            Ok(_) | Err(RuntimeError::NotFound(_)) => Ok(()),
            Err(error) => Err(self.runtime_error("StopContainer", &observed.id)(error)),
        }
    }

    /// Removes the logs of the removed containers, except the logs of the last attempts.
    async fn remove_older_logs(&self, removed: &RemovedContainers) {
        let logs = self.node.config.pod_log_dir.join(log_dir_name(&self.pod));
        for (name, removed) in removed {
            let last = removed.attempt.saturating_sub(1);
            let remove = move |dir: &Path| {
                remove_logs_before(dir, last);
                Ok(())
            };
            // The removal of the pod removes the rest of the logs.
            let _left = pod_logs::change(logs.join(name), remove).await;
        }
    }
}

/// Removes the log files of attempts before this one, including rotated files: `<attempt>.log`, `<attempt>.log.<time>`.
fn remove_logs_before(dir: &Path, attempt: u32) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let of = name.to_string_lossy().split_once(".log").and_then(|(of, _)| of.parse::<u32>().ok());
        if of.is_some_and(|of| of < attempt) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_logs_of_earlier_attempts_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["0.log", "8.log", "9.log", "9.log.20260101-000000.gz", "10.log", "11.log", "notes.txt"] {
            std::fs::write(dir.path().join(name), name).unwrap();
        }
        remove_logs_before(dir.path(), 10);
        let mut left: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        left.sort();
        assert_eq!(left, ["10.log", "11.log", "notes.txt"]);
    }
}
