use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};
use tokio::sync::watch;

use super::writer::{COLLECT, COLLECT_MAX, OPEN_RECORDS_MAX};
use super::*;

fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open(&dir.join("agent"), &dir.join("sealing.key")).unwrap()
}

/// Every file of the checkpoint, by its path.
fn all_files(dir: &Path) -> Vec<PathBuf> {
    let kinds = Kind::ALL.map(|kind| dir.join("agent/checkpoint").join(kind.directory()));
    kinds.iter().flat_map(|dir| fs::read_dir(dir).unwrap()).map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_value_is_encrypted_and_read_back_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let key = Key::secret("ns", "password");
    {
        let checkpoint = open(dir.path());
        checkpoint.own("u", vec![key.clone()]);
        checkpoint.put(key.clone(), &json!({"data": "hunter2"}));
        assert_eq!(checkpoint.get::<Value>(&key), Some(json!({"data": "hunter2"})), "before it is written");
        assert!(!checkpoint.flush());
    }
    let files = all_files(dir.path());
    assert_eq!(files.len(), 1);
    let content = fs::read(&files[0]).unwrap();
    for secret in [&b"hunter2"[..], b"password"] {
        assert!(!content.windows(secret.len()).any(|part| part == secret));
        assert!(!files[0].to_str().unwrap().contains("password"));
    }
    assert_eq!(fs::metadata(&files[0]).unwrap().permissions().mode() & 0o777, 0o600);
    for parent in files[0].ancestors().skip(1).take(2) {
        assert_eq!(fs::metadata(parent).unwrap().permissions().mode() & 0o777, 0o700);
    }
    assert_eq!(open(dir.path()).get::<Value>(&key), Some(json!({"data": "hunter2"})));
}

#[test]
fn records_of_a_killed_agent_have_the_old_or_the_new_value() {
    const TEST: &str = "checkpoint::tests::records_of_a_killed_agent_have_the_old_or_the_new_value";
    let put = |dir: &Path, value: i32| {
        let checkpoint = open(dir);
        ["a", "b"].iter().for_each(|uid| checkpoint.put(Key::pod(uid), &value));
        assert!(!checkpoint.flush());
    };
    if let Some(dir) = coracle_testing::killed_dir() {
        return put(&dir, 2);
    }
    let dir = tempfile::tempdir().unwrap();
    for (point, left) in
        [("record.written", [1, 1]), ("record.replaced:1", [1, 2]), ("record.replaced:2", [2, 2])]
    {
        put(dir.path(), 1);
        coracle_testing::run_until_killed_in(TEST, point, dir.path());
        let mut found = open(dir.path()).all::<i32>(Kind::Pod);
        found.sort_unstable();
        assert_eq!(found, left, "{point}");
        put(dir.path(), 3);
        assert_eq!(open(dir.path()).all::<i32>(Kind::Pod), [3, 3]);
        assert_eq!(all_files(dir.path()).len(), 2, "temporary files are removed");
    }
}

#[test]
fn an_unchanged_value_is_not_written_again_even_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let key = Key::pod("u");
    open(dir.path()).put(key.clone(), &1);
    let checkpoint = open(dir.path());
    checkpoint.put(key.clone(), &1);
    checkpoint.flush();
    let before = fs::metadata(&all_files(dir.path())[0]).unwrap().modified().unwrap();
    let checkpoint = open(dir.path());
    assert_eq!(checkpoint.all::<i32>(Kind::Pod), [1]);
    checkpoint.put(key, &1);
    assert!(checkpoint.state().due.is_empty());
    assert_eq!(fs::metadata(&all_files(dir.path())[0]).unwrap().modified().unwrap(), before);
}

#[test]
fn torn_misplaced_and_incomplete_records_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = open(dir.path());
    for uid in ["a", "b", "c"] {
        checkpoint.put(Key::pod(uid), &uid);
    }
    checkpoint.flush();
    let path = |uid: &str| checkpoint.path(&Key::pod(uid));
    let whole = fs::read(path("a")).unwrap();
    fs::write(path("a"), &whole[..whole.len() - 1]).unwrap();
    fs::copy(path("c"), path("b")).unwrap();
    fs::write(path("d").with_extension("tmp"), "half").unwrap();
    let again = open(dir.path());
    assert_eq!(again.all::<String>(Kind::Pod), ["c"]);
    assert!(path("a").with_extension("bad").exists() && path("b").with_extension("bad").exists());
    assert!(!path("d").with_extension("tmp").exists());
    again.put(Key::pod("a"), &"a");
    again.flush();
    assert!(!path("a").with_extension("bad").exists(), "replaced by the valid record");
}

#[test]
fn records_are_removed_with_their_last_pod_and_unowned_ones_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let (shared, own) = (Key::secret("ns", "shared"), Key::config_map("ns", "own"));
    let checkpoint = open(dir.path());
    checkpoint.own("1", vec![shared.clone(), own.clone()]);
    checkpoint.own("2", vec![shared.clone()]);
    for key in [&shared, &own] {
        checkpoint.put(key.clone(), &true);
    }
    checkpoint.put(Key::secret("ns", "unused"), &true);
    checkpoint.flush();
    assert_eq!(all_files(dir.path()).len(), 2);
    checkpoint.release("1");
    checkpoint.flush();
    assert_eq!(all_files(dir.path()), [checkpoint.path(&shared)]);
    checkpoint.put(own, &true);
    assert!(!checkpoint.flush() && all_files(dir.path()).len() == 1, "it came after the pod's end");
    let next = open(dir.path());
    next.remove_unowned();
    assert!(all_files(dir.path()).is_empty());
}

#[test]
fn a_large_batch_is_written_whole_except_for_the_records_that_fail() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = open(dir.path());
    let keys: Vec<Key> = (0..2 * OPEN_RECORDS_MAX + 2).map(|uid| Key::pod(&uid.to_string())).collect();
    for key in &keys {
        checkpoint.put(key.clone(), &1);
    }
    let blocked = checkpoint.path(&keys[7]).with_extension("tmp");
    fs::create_dir(&blocked).unwrap();
    assert!(checkpoint.flush(), "one record failed");
    let due: Vec<Key> = checkpoint.state().due.keys().cloned().collect();
    assert_eq!(due, [keys[7].clone()]);
    let mut files = all_files(dir.path());
    files.retain(|path| path.extension().is_some_and(|found| found == "tmp"));
    assert_eq!(files, std::slice::from_ref(&blocked));
    fs::remove_dir(&blocked).unwrap();
    assert!(!checkpoint.flush());
    assert_eq!(open(dir.path()).all::<i32>(Kind::Pod), vec![1; keys.len()]);
}

/// A checkpoint that is opened again. It has the record of a secret of the pod `u`.
fn reopened_with_a_secret(dir: &Path) -> (Checkpoint, Key) {
    let secret = Key::secret("ns", "s");
    let checkpoint = open(dir);
    checkpoint.own("u", vec![secret.clone()]);
    checkpoint.put(secret.clone(), &1);
    checkpoint.flush();
    (open(dir), secret)
}

#[test]
fn no_record_is_removed_as_unowned_while_the_record_of_a_pod_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let (next, secret) = reopened_with_a_secret(dir.path());
    next.state().is_pod_unread = true;
    next.remove_unowned();
    assert_eq!(next.get::<i32>(&secret), Some(1));
    next.state().is_pod_unread = false;
    next.remove_unowned();
    assert_eq!(open(dir.path()).get::<i32>(&secret), None);
}

#[test]
fn no_record_is_removed_as_unowned_while_the_records_of_pods_cannot_be_listed() {
    let dir = tempfile::tempdir().unwrap();
    let (next, secret) = reopened_with_a_secret(dir.path());
    let pods = dir.path().join("agent/checkpoint/pods");
    fs::remove_dir_all(&pods).unwrap();
    fs::write(&pods, "").unwrap();
    assert!(next.all::<i32>(Kind::Pod).is_empty());
    next.remove_unowned();
    assert_eq!(next.get::<i32>(&secret), Some(1));
}

#[test]
fn a_failed_removal_stays_due() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = open(dir.path());
    let key = Key::pod("u");
    // A directory is in the place of the record, so its removal as a file fails.
    let path = checkpoint.path(&key);
    fs::create_dir(&path).unwrap();
    checkpoint.remove(&key);
    assert!(checkpoint.flush(), "it failed");
    assert!(checkpoint.state().due.contains_key(&key));
    fs::remove_dir(&path).unwrap();
    fs::write(&path, "").unwrap();
    assert!(!checkpoint.flush());
    assert!(!path.exists() && checkpoint.state().due.is_empty());
}

#[test]
fn a_failed_write_stays_due_and_readable() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = open(dir.path());
    let pods = dir.path().join("agent/checkpoint/pods");
    fs::remove_dir(&pods).unwrap();
    fs::write(&pods, "in the way").unwrap();
    checkpoint.put(Key::pod("u"), &1);
    assert!(checkpoint.flush());
    assert_eq!(checkpoint.get::<i32>(&Key::pod("u")), Some(1));
    fs::remove_file(&pods).unwrap();
    fs::create_dir(&pods).unwrap();
    assert!(!checkpoint.flush());
    assert_eq!(open(dir.path()).all::<i32>(Kind::Pod), [1]);
}

#[test]
fn plain_records_of_earlier_versions_are_encrypted_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (pods, values) = (dir.path().join("agent/pods"), dir.path().join("agent/values"));
    fs::create_dir_all(&pods).unwrap();
    fs::create_dir_all(&values).unwrap();
    let pod = json!({"metadata": {"uid": "u", "namespace": "ns", "name": "p"}, "spec": {"containers": [],
        "volumes": [{"name": "v", "secret": {"secretName": "s"}}]}});
    fs::write(pods.join("u.json"), pod.to_string()).unwrap();
    let secret = json!({"metadata": {"name": "s"}, "data": {"k": "dg=="}});
    fs::write(values.join("Secret_ns_s.json"), secret.to_string()).unwrap();
    fs::write(values.join("Services_ns.json"), "[]").unwrap();
    let checkpoint = open(dir.path());
    assert!(!pods.exists() && !values.exists());
    assert_eq!(checkpoint.all::<Value>(Kind::Pod).len(), 1);
    assert!(checkpoint.get::<Value>(&Key::secret("ns", "s")).is_some());
    assert!(checkpoint.get::<Value>(&Key::services("ns")).is_some());
}

/// The time for which writes are collected.
async fn collected(checkpoint: &Checkpoint, many_starts: &mut watch::Receiver<bool>) -> Duration {
    let begun = tokio::time::Instant::now();
    checkpoint.collect(many_starts).await;
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn writes_wait_while_many_pods_start_unless_a_caller_waits() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, key) = (open(dir.path()), Key::pod("u"));
    let (starts, mut many_starts) = watch::channel(false);
    checkpoint.put(key.clone(), &1);
    let waited = collected(&checkpoint, &mut many_starts).await;
    assert!(waited >= COLLECT && waited < COLLECT_MAX, "{waited:?}");
    starts.send_replace(true);
    let waited = collected(&checkpoint, &mut many_starts).await;
    assert!(waited >= COLLECT_MAX, "{waited:?}");
    let ((), waited) = tokio::join!(checkpoint.written(&key), collected(&checkpoint, &mut many_starts));
    assert_eq!(waited, Duration::ZERO);
    checkpoint.flush();
    checkpoint.put(Key::pod("v"), &1);
    let waited = collected(&checkpoint, &mut many_starts).await;
    assert!(waited >= COLLECT_MAX, "the change that a caller waited for is written: {waited:?}");
    checkpoint.remove(&key);
    assert_eq!(collected(&checkpoint, &mut many_starts).await, Duration::ZERO);
}
