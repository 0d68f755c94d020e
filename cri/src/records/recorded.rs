//! Tests with records of earlier versions, as files: every later version must read them.
//!
//! If a test fails, a runtime would take running pods for incomplete pods after an upgrade or downgrade. A new field
//! does not change existing files. For a new kind of record, `RECORD=1 cargo test -p coracle-cri recorded` writes a new
//! file. An existing file is never written again.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};

use coracle_proto::cri;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::file::FILE;
use super::tests::records;
use super::{
    ContainerPhase, ContainerRecord, ExitRecord, RestoreRecord, SandboxPhase, SandboxRecord, Transition,
};
use crate::error::Error;
use crate::selinux::Labels;

fn path_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("recorded").join(name)
}

/// Compares a recorded file with the current serialization, which may have more fields.
fn assert_recorded<T: Serialize + DeserializeOwned + PartialEq + Debug>(name: &str, expected: &T) {
    let path = path_of(name);
    let today = serde_json::to_value(expected).unwrap();
    if !path.exists() && std::env::var_os("RECORD").is_some() {
        std::fs::write(&path, format!("{today:#}\n")).unwrap();
    }
    let recorded = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(&serde_json::from_slice::<T>(&recorded).unwrap(), expected, "{name} is read differently");
    let recorded: Value = serde_json::from_slice(&recorded).unwrap();
    for (field, value) in recorded.as_object().unwrap() {
        assert_eq!(today.get(field), Some(value), "{field} of {name} is written differently");
    }
}

fn labels() -> Option<Labels> {
    let label = |text: &str| Some(text.parse().unwrap());
    Some(Labels {
        process: label("system_u:system_r:container_t:s0:c1,c2"),
        mount: label("system_u:object_r:container_file_t:s0:c1,c2"),
    })
}

fn transitions() -> Vec<Transition> {
    vec![Transition { number: 3, what: 1, at: 1_700_000_000_000_000_004 }]
}

fn sandbox(phase: SandboxPhase) -> SandboxRecord {
    let metadata = cri::PodSandboxMetadata {
        name: "web".into(),
        uid: "1-2-3".into(),
        namespace: "default".into(),
        attempt: 1,
    };
    let config = cri::PodSandboxConfig {
        metadata: Some(metadata),
        hostname: "web-host".into(),
        log_directory: "/var/log/pods/web".into(),
        labels: [("app".to_owned(), "web".to_owned())].into(),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: "/kubepods/web".into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    SandboxRecord {
        version: 1,
        id: "5a".into(),
        phase,
        runtime_handler: "default".into(),
        created_at: 1_700_000_000_000_000_001,
        config,
        addresses: vec!["10.42.0.7".into(), "fd00::7".into()],
        selinux: labels(),
        restoring: true,
        stopping: true,
        transitions: transitions(),
    }
}

fn container(phase: ContainerPhase) -> ContainerRecord {
    let config = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "nginx".into(), attempt: 2 }),
        image: Some(cri::ImageSpec { image: "nginx:1".into(), ..Default::default() }),
        command: vec!["nginx".into()],
        log_path: "nginx/0.log".into(),
        ..Default::default()
    };
    let restore = RestoreRecord {
        external: vec!["/data".into()],
        streams: BTreeMap::from([("pipe:[7]".to_owned(), 1)]),
    };
    ContainerRecord {
        version: 1,
        id: "c0".into(),
        sandbox_id: "5a".into(),
        phase,
        created_at: 1_700_000_000_000_000_002,
        config,
        image_id: "sha256:00".into(),
        image_digest: "nginx@sha256:11".into(),
        log_path: "/var/log/pods/web/nginx/0.log".into(),
        cgroup: "/kubepods/web/c0".into(),
        stop_signal: 15,
        uid: 1000,
        gid: 1001,
        groups: vec![1002],
        late_hooks: true,
        selinux: labels(),
        pid: 4242,
        restore: Some(Box::new(restore)),
        transitions: transitions(),
    }
}

#[test]
fn sandboxes_of_earlier_versions_are_read() {
    assert_recorded("sandbox-creating.json", &sandbox(SandboxPhase::Creating));
    assert_recorded("sandbox-ready.json", &sandbox(SandboxPhase::Ready));
    assert_recorded("sandbox-not-ready.json", &sandbox(SandboxPhase::NotReady));
}

#[test]
fn containers_of_earlier_versions_are_read() {
    let exit = ExitRecord {
        started_at: 1_700_000_000_000_000_003,
        finished_at: 1_700_000_000_000_000_005,
        code: 137,
        reason: "OOMKilled".into(),
        message: "what there is to say".into(),
    };
    assert_recorded("container-creating.json", &container(ContainerPhase::Creating));
    assert_recorded("container-created.json", &container(ContainerPhase::Created));
    let running = ContainerPhase::Running { started_at: 1_700_000_000_000_000_003 };
    assert_recorded("container-running.json", &container(running));
    assert_recorded("container-exited.json", &container(ContainerPhase::Exited(exit)));
}

/// The first version's records: every later field has a default.
#[test]
fn fields_of_later_versions_may_be_missing() {
    const ADDED: [&str; 11] = [
        "addresses",
        "selinux",
        "restoring",
        "stopping",
        "transitions",
        "imageDigest",
        "groups",
        "lateHooks",
        "pid",
        "restore",
        "message",
    ];
    let without = |name: &str| {
        let mut record: Value = serde_json::from_slice(&std::fs::read(path_of(name)).unwrap()).unwrap();
        record.as_object_mut().unwrap().retain(|field, _| !ADDED.contains(&field.as_str()));
        record
    };
    let sandbox: SandboxRecord = serde_json::from_value(without("sandbox-ready.json")).unwrap();
    assert!(sandbox.phase == SandboxPhase::Ready && !sandbox.stopping && !sandbox.restoring);
    let container: ContainerRecord = serde_json::from_value(without("container-running.json")).unwrap();
    assert!(container.restore.is_none() && container.pid == 0);
}

/// A record of a later version with a new field: an earlier version can read it.
#[test]
fn new_fields_of_later_versions_are_ignored() {
    for name in ["sandbox-ready.json", "container-exited.json"] {
        let mut record: Value = serde_json::from_slice(&std::fs::read(path_of(name)).unwrap()).unwrap();
        record["somethingNew"] = serde_json::json!({ "of": ["a", "later", "version"] });
        let text = record.to_string();
        let read = match name.starts_with("sandbox") {
            true => serde_json::from_str::<SandboxRecord>(&text).map(drop),
            false => serde_json::from_str::<ContainerRecord>(&text).map(drop),
        };
        read.unwrap();
    }
}

/// A record of a later version that an earlier version cannot read: it is neither incomplete nor lost.
#[test]
fn records_of_later_versions_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let records = records(dir.path());
    let later = r#"{"version":2,"id":"a","phase":{"asleep":{"since":7}}}"#;
    for dir in [records.sandbox_dir("a"), records.container_dir("a")] {
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(FILE), later).unwrap();
    }
    let refused = records.sandboxes().map(drop).unwrap_err();
    assert!(matches!(refused, Error::Later { version: 2, known: 1, .. }), "{refused}");
    assert!(refused.to_string().contains("by a later version"), "{refused}");
    assert!(matches!(records.containers(), Err(Error::Later { version: 2, .. })));
    let removed = dir.path().join("state/removed/7.8.sandbox");
    std::fs::write(&removed, later).unwrap();
    assert_eq!(records.removed().unwrap(), []);
    assert!(removed.exists(), "the later version replays the event");
}
