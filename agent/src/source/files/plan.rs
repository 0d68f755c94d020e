//! The changes of the static pods that follow from the manifests. Pure.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use coracle_values::object::Key;
use k8s_openapi::api::core::v1::Pod;

/// A file and its content.
pub(super) struct ManifestFile {
    pub(super) path: PathBuf,
    pub(super) content: Content,
    /// The reason why the file has no pod.
    pub(super) failure: Option<String>,
}

/// Content of a file.
pub(super) enum Content {
    /// The static pod of the manifest.
    Pod(Box<Pod>),
    /// The file exists and could not be read now: its pod stays unchanged.
    Unreadable,
    /// The file has no valid pod. As upstream, an earlier pod of the file ends.
    Invalid,
}

/// The changes, in the order in which they are sent: removed pods first.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// All static pods by their files.
    pub(super) next: BTreeMap<PathBuf, Arc<Pod>>,
    /// Uids of pods to end.
    pub(super) removed: Vec<String>,
    /// Pods to start.
    pub(super) added: Vec<Arc<Pod>>,
    /// Files whose content is not used, with the causes.
    pub(super) failures: BTreeMap<PathBuf, String>,
}

/// Compares the files, in the order of their names, with the current pods. Of two files with pods of the same name, the
/// first file counts.
pub(super) fn plan(current: &BTreeMap<PathBuf, Arc<Pod>>, files: Vec<ManifestFile>) -> Plan {
    let mut plan = Plan::default();
    let mut names = HashSet::new();
    for ManifestFile { path, content, failure } in files {
        plan.failures.extend(failure.map(|cause| (path.clone(), cause)));
        let known = current.get(&path);
        let pod = match content {
            // A pod with the same uid is unchanged. The pod keeps the time at which it was first seen.
            Content::Pod(pod) => match known.filter(|known| uid(known) == uid(&pod)) {
                Some(known) => Arc::clone(known),
                None => Arc::from(pod),
            },
            Content::Unreadable => match known {
                Some(known) => Arc::clone(known),
                None => continue,
            },
            Content::Invalid => continue,
        };
        if names.insert(Key::of(&pod.metadata)) {
            plan.next.insert(path, pod);
        } else {
            plan.failures.insert(path, "an earlier file has a static pod of the same name".to_owned());
        }
    }
    let (before, after) = (uids(current), uids(&plan.next));
    plan.removed =
        current.values().map(|pod| uid(pod)).filter(|uid| !after.contains(*uid)).map(str::to_owned).collect();
    plan.added = plan.next.values().filter(|pod| !before.contains(uid(pod))).cloned().collect();
    plan
}

fn uids(pods: &BTreeMap<PathBuf, Arc<Pod>>) -> HashSet<String> {
    pods.values().map(|pod| uid(pod).to_owned()).collect()
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file(path: &str, name: &str, uid: &str) -> ManifestFile {
        let pod = json!({"metadata": {"namespace": "default", "name": name, "uid": uid}});
        let content = Content::Pod(serde_json::from_value(pod).unwrap());
        ManifestFile { path: path.into(), content, failure: None }
    }

    fn shown(plan: &Plan) -> (Vec<&str>, Vec<&str>) {
        (plan.removed.iter().map(String::as_str).collect(), plan.added.iter().map(|pod| uid(pod)).collect())
    }

    #[test]
    fn pods_start_change_and_end_with_their_files() {
        let first = plan(&BTreeMap::new(), vec![file("/a", "a", "1"), file("/b", "b", "2")]);
        assert_eq!(shown(&first), (vec![], vec!["1", "2"]));
        let same = plan(&first.next, vec![file("/a", "a", "1"), file("/b", "b", "2")]);
        assert_eq!(shown(&same), (vec![], vec![]));
        assert!(Arc::ptr_eq(&same.next[&PathBuf::from("/a")], &first.next[&PathBuf::from("/a")]));
        let changed = plan(&first.next, vec![file("/a", "a", "3"), file("/b", "b", "2")]);
        assert_eq!(shown(&changed), (vec!["1"], vec!["3"]));
        let removed = plan(&first.next, vec![file("/b", "b", "2")]);
        assert_eq!(shown(&removed), (vec!["1"], vec![]));
    }

    #[test]
    fn a_pod_stays_while_its_file_cannot_be_read_and_ends_when_it_is_invalid() {
        let first = plan(&BTreeMap::new(), vec![file("/a", "a", "1"), file("/b", "b", "2")]);
        let of = |path: &str, content| {
            let failure = Some("cannot use it".to_owned());
            ManifestFile { path: path.into(), content, failure }
        };
        let files =
            vec![of("/a", Content::Unreadable), of("/b", Content::Invalid), of("/c", Content::Unreadable)];
        let next = plan(&first.next, files);
        assert_eq!(shown(&next), (vec!["2"], vec![]));
        assert_eq!(next.next.len(), 1);
        assert_eq!(next.failures.len(), 3);
    }

    #[test]
    fn the_first_of_two_files_with_the_same_pod_counts() {
        let found = plan(&BTreeMap::new(), vec![file("/a", "a", "1"), file("/b", "a", "2")]);
        assert_eq!(shown(&found), (vec![], vec!["1"]));
        assert!(found.failures.keys().eq([&PathBuf::from("/b")]), "{:?}", found.failures);
    }
}
