//! Log directories of pods: `NAMESPACE_NAME_UID` in the log directory, as the kubelet's.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use coracle_cri::blocking;

/// Runs work on logs at a path in a blocking thread. Logs may be on a separate file system, which might not respond.
///
/// # Errors
/// Errors of the work, or a timeout: the work on this path does not end, or earlier work has not ended.
pub(crate) async fn change(
    path: PathBuf,
    work: impl FnOnce(&Path) -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    let place = path.clone();
    let done = blocking::run(&place, move |_abandoned| work(&path)).await;
    done.unwrap_or_else(|blocked| Err(io::Error::other(blocked)))
}

/// Removes the log directories of the pods with these uids. After a crash there may be no other record of a pod.
/// Continues after a failure.
///
/// # Errors
/// When the log directory cannot be read, or the first failure of a removal.
pub fn remove(log_dir: &Path, uids: &BTreeSet<String>) -> io::Result<()> {
    let entries = match std::fs::read_dir(log_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let mut removed = Ok(());
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let uid = name.to_str().and_then(|name| name.rsplit_once('_')).map(|(_, uid)| uid);
        if uid.is_some_and(|uid| uids.contains(uid)) {
            removed = removed.and(coracle_tree::remove(&entry.path()));
        }
    }
    removed
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn logs_that_do_not_respond_block_no_other_work() {
        let dir = tempfile::tempdir().expect("directory");
        let logs = dir.path().join("ns_web_1");
        let make = |logs: &Path| std::fs::create_dir(logs);
        let (release, released) = mpsc::channel::<()>();
        let blocked = blocking::run(&logs, move |_abandoned| released.recv().is_ok());
        let attempt = async {
            let refused = change(logs.clone(), make).await;
            drop(release);
            refused
        };
        let (_, refused) = tokio::join!(blocked, attempt);
        assert!(refused.is_err(), "the attempt is not made beside one that blocks");
        change(logs.clone(), make).await.expect("made");
        assert!(logs.is_dir());
    }

    #[test]
    fn logs_of_these_pods_are_removed_and_those_of_others_kept() {
        let dir = tempfile::tempdir().expect("directory");
        for name in ["ns_web_1/c", "kube-system_web_1/c", "ns_web_11/c", "1/c", "ns_1_2/c"] {
            std::fs::create_dir_all(dir.path().join(name)).expect("directories");
        }
        let uids = BTreeSet::from(["1".to_owned()]);
        remove(dir.path(), &uids).expect("removed");
        remove(&dir.path().join("absent"), &uids).expect("nothing to remove");
        let left = std::fs::read_dir(dir.path()).expect("list").map(|e| e.expect("entry").file_name());
        let left: BTreeSet<_> = left.collect();
        assert_eq!(left, BTreeSet::from(["1", "ns_1_2", "ns_web_11"].map(OsString::from)));
    }
}
