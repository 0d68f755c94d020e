//! Checkpoints with the CRIU of the machine. If CRIU does not work, the calls return its error and leave nothing.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use tonic::{Code, Request, Status};

use crate::checkpoint_pod::{count, goes_on};
use crate::fixture::Machine;

pub(crate) async fn a_checkpointed_container_continues(machine: &mut Machine) {
    let pod = machine.pod("checkpoint").await;
    let script = "echo begun; echo mine > /mine; rm /bin/true; i=0; while :; do i=$((i+1)); echo $i > /count; sleep 0.1; done";
    let id = machine.run(&pod, "c", &["sh", "-c", script]).await;
    count(machine, &id).await;
    let location = machine.path("checkpoint.tar");
    for location in ["", "relative.tar", "/"] {
        let error = checkpoint(machine, &id, Path::new(location)).await.expect_err("no place");
        assert_eq!(error.code(), Code::InvalidArgument, "{location:?}");
    }
    let made = checkpoint(machine, &id, &location).await;
    match (works(), made) {
        (Some(true), made) => {
            made.expect("a checkpoint");
            archive_is_complete(&location);
            checkpoint(machine, &id, &location).await.expect("replaces the first checkpoint");
        }
        (Some(false), made) => {
            coracle_testing::skip_part!("CRIU does not work on this machine");
            let error = made.expect_err("criu check reports that CRIU does not work");
            assert!(error.message().contains("criu failed: "), "{error}");
            assert!(!location.exists());
        }
        (None, made) => {
            coracle_testing::skip_part!("CRIU is not installed");
            let error = made.expect_err("there is no CRIU");
            assert!(error.code() == Code::Unimplemented && error.message().contains("CRIU"), "{error}");
            assert!(!location.exists());
        }
    }
    goes_on(machine, &id).await;
    std::fs::remove_file(&location).ok();
    machine.remove_pod(&pod).await;
    let error = checkpoint(machine, &id, &location).await.expect_err("gone");
    assert_eq!(error.code(), Code::NotFound);
}

pub(crate) async fn checkpoint(machine: &Machine, id: &str, location: &Path) -> Result<(), Status> {
    let request = cri::CheckpointContainerRequest {
        container_id: id.into(),
        location: location.display().to_string(),
        timeout: 300,
    };
    machine.runtime.checkpoint_container(Request::new(request)).await.map(|_| ())
}

/// Whether the machine's CRIU works, by `criu check`. `None` without CRIU.
pub(crate) fn works() -> Option<bool> {
    let mut check = Command::new("criu");
    let status = check.arg("check").stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.ok().map(|status| status.success())
}

fn archive_is_complete(location: &Path) {
    let mut archive = tar::Archive::new(File::open(location).expect("the archive"));
    let (mut names, mut deleted, mut diff) = (BTreeSet::new(), String::new(), BTreeSet::new());
    for entry in archive.entries().expect("entries") {
        let mut entry = entry.expect("entry");
        let name = entry.path().expect("path").display().to_string();
        if name == "deleted.files" {
            std::io::Read::read_to_string(&mut entry, &mut deleted).expect("text");
        }
        if name == "rootfs-diff.tar" {
            let mut inner = tar::Archive::new(&mut entry);
            let paths = inner
                .entries()
                .expect("entries")
                .map(|entry| entry.expect("entry").path().expect("path").display().to_string());
            diff.extend(paths);
        }
        names.insert(name);
    }
    for name in
        ["config.dump", "spec.dump", "dump.log", "stats-dump", "container.log", "checkpoint/inventory.img"]
    {
        assert!(names.contains(name), "{name} is missing: {names:?}");
    }
    assert_eq!(deleted, r#"["/bin/true"]"#);
    assert!(diff.contains("mine") && diff.contains("count") && !diff.contains("etc/hosts"), "{diff:?}");
}
