//! The pods that were last wanted here, on disk, so that they start with the API server absent: one record per
//! pod, written when its spec (or what else decides about it) changed.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;

use super::record;

/// The remembered set; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Remembered {
    dir: PathBuf,
}

impl Remembered {
    pub(crate) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_path_buf() }
    }

    /// All remembered pods; what cannot be read is set aside with a warning.
    pub(crate) fn all(&self) -> Vec<Pod> {
        record::list(&self.dir).iter().filter_map(|path| record::read(path)).collect()
    }

    /// Remembers a pod, if what decides about it changed.
    pub(crate) fn keep(&self, pod: &Pod) {
        let Some(path) = pod.metadata.uid.as_deref().and_then(|uid| self.path(uid)) else { return };
        if let Err(error) = record::write(&path, &essence(pod)) {
            tracing::warn!(%error, path = %path.display(), "cannot remember a pod");
        }
    }

    /// Forgets a pod; the absent is forgotten.
    pub(crate) fn forget(&self, uid: &str) {
        if let Some(path) = self.path(uid) {
            record::remove(&path);
        }
    }

    fn path(&self, uid: &str) -> Option<PathBuf> {
        let safe = !uid.is_empty() && !uid.starts_with('.') && !uid.contains('/');
        safe.then(|| self.dir.join(format!("{uid}.json")))
    }
}

/// A pod without what changes as it runs: the status keeps only when it began and whether it ended for good.
fn essence(pod: &Pod) -> Pod {
    let mut pod = pod.clone();
    pod.metadata.resource_version = None;
    pod.metadata.managed_fields = None;
    if let Some(status) = pod.status.take() {
        pod.status = Some(k8s_openapi::api::core::v1::PodStatus {
            phase: status.phase.filter(|phase| phase == "Failed" || phase == "Succeeded"),
            start_time: status.start_time,
            qos_class: status.qos_class,
            ..Default::default()
        });
    }
    pod
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(status: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"uid": "u", "name": "p"}, "status": status})).unwrap()
    }

    #[test]
    fn what_a_running_pod_reports_is_no_reason_to_write() {
        let a = essence(&pod(json!({"phase": "Pending", "podIP": "1.1.1.1"})));
        let b = essence(&pod(json!({"phase": "Running", "podIP": "1.1.1.2"})));
        assert_eq!(a, b);
        assert_ne!(a, essence(&pod(json!({"phase": "Failed"}))));
    }

    #[test]
    fn a_pod_comes_back_until_it_is_forgotten() {
        let dir = std::env::temp_dir().join(format!("coracle-pods-{}", uuid::Uuid::new_v4()));
        let remembered = Remembered::new(&dir);
        remembered.keep(&pod(json!({})));
        assert_eq!(remembered.all().len(), 1);
        remembered.forget("u");
        remembered.forget("../x");
        assert!(remembered.all().is_empty());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
