//! Checkpoints and restores of pods. If CRIU does not work, the calls are refused.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::{eventually_async, until};
use tonic::{Code, Request, Status};

use crate::checkpoint::works;
use crate::fixture::{Machine, container_config, security};

/// Counts in memory, writes each count to a file, and logs every tenth count. Exits with 3 on a signal. Also runs a
/// server, and has a connection to itself once port 7001 (1B59) has a listener.
const COUNTER: &str = "trap 'echo bye; exit 3' TERM; httpd -p 8080 -h /etc; \
    (nc -l -p 7001 -e sleep 10000 &); until grep -qs ':1B59 .* 0A ' /proc/net/tcp /proc/net/tcp6; do sleep 0.1; done; \
    (nc 127.0.0.1 7001 </dev/zero >/dev/null &); echo mine > /mine; ln /mine /link; rm /bin/true; i=0; \
    while :; do i=$((i+1)); echo $i > /count; [ $((i % 10)) != 0 ] || echo count $i; sleep 0.1; done";
/// The capability CAP_NET_RAW as an extended attribute (`struct vfs_cap_data`).
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// A child of the first process writes lines to a pipe, and `cat` copies them to standard output. Standard error is
/// /dev/null.
const TALKER: &str = "exec 2>/dev/null; i=0; while :; do i=$((i+1)); echo said $i; sleep 0.2; done | cat";

/// Container configurations for a pod of this name, with its own volume.
fn configs(machine: &Machine, pod: &str) -> Vec<cri::ContainerConfig> {
    let volume = empty_directory(machine, &format!("volume-{pod}"));
    std::fs::write(volume.join("name"), pod).expect("write");
    let mount = |readonly: bool, container_path: &str, host: PathBuf| cri::Mount {
        container_path: container_path.into(),
        host_path: host.display().to_string(),
        readonly,
        ..Default::default()
    };
    let mut counter = container_config("counter", &["sh", "-c", COUNTER]);
    // The kubelet's masked paths.
    security(&mut counter).masked_paths =
        ["/proc/acpi", "/proc/kcore", "/proc/keys", "/sys/firmware"].map(str::to_owned).into();
    security(&mut counter).readonly_paths =
        ["/proc/bus", "/proc/sys", "/proc/sysrq-trigger"].map(str::to_owned).into();
    let mut talker = container_config("talker", &["sh", "-c", TALKER]);
    talker.stdin = true;
    let default = || {
        let profile_type = cri::security_profile::ProfileType::RuntimeDefault.into();
        Some(cri::SecurityProfile { profile_type, localhost_ref: String::new() })
    };
    let confined = security(&mut talker);
    confined.run_as_user = Some(cri::Int64Value { value: 1000 });
    confined.readonly_rootfs = true;
    confined.no_new_privs = true;
    (confined.seccomp, confined.apparmor) = (default(), default());
    counter.mounts = vec![
        mount(false, "/my data", volume.clone()),
        mount(true, "/etc/name", volume.join("name")),
        mount(false, "/dev/termination-log", volume.join("name")),
    ];
    vec![counter, talker]
}

pub(crate) async fn pod(machine: &Machine, name: &str) -> (String, Vec<String>) {
    let pod = machine.try_pod(name, |config| config.hostname = "same".into()).await.expect("sandbox");
    let mut ids = Vec::new();
    for config in configs(machine, name) {
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: pod.clone(),
            config: Some(config),
            sandbox_config: None,
        };
        let made = machine.runtime.create_container(Request::new(request)).await.expect("create");
        ids.push(made.into_inner().container_id);
    }
    for id in &ids {
        machine.start(id).await;
    }
    (pod, ids)
}

pub(crate) async fn count(machine: &Machine, id: &str) -> u32 {
    eventually_async(&format!("{id} counts"), 20, async || {
        let read = machine.exec(id, &["cat", "/count"], 0).await.expect("exec");
        String::from_utf8_lossy(&read.stdout).trim().parse::<u32>().ok()
    })
    .await
}

pub(crate) async fn goes_on(machine: &Machine, id: &str) {
    let before = count(machine, id).await;
    let what = format!("the counter of {id} is above {before}");
    eventually_async(&what, 20, async || count(machine, id).await > before).await;
}

pub(crate) async fn checkpoint(
    machine: &Machine,
    pod: &str,
    ids: &[String],
    output: &Path,
) -> Result<(), Status> {
    let request = cri::CheckpointPodRequest {
        pod_sandbox_id: pod.into(),
        output_path: output.display().to_string(),
        container_ids: ids.to_vec(),
        options: Default::default(),
    };
    machine.runtime.checkpoint_pod(Request::new(request)).await.map(|_| ())
}

pub(crate) fn restore_request(machine: &Machine, from: &Path) -> cri::RestorePodRequest {
    let config = cri::PodSandboxConfig { hostname: "same".into(), ..machine.pod_config("restored") };
    cri::RestorePodRequest {
        checkpoint_path: from.display().to_string(),
        config: Some(config),
        runtime_handler: String::new(),
        options: Default::default(),
        container_configs: configs(machine, "restored"),
    }
}

async fn restore(
    machine: &Machine,
    request: cri::RestorePodRequest,
) -> Result<cri::RestorePodResponse, Status> {
    machine.runtime.restore_pod(Request::new(request)).await.map(tonic::Response::into_inner)
}

pub(crate) fn empty_directory(machine: &Machine, name: &str) -> PathBuf {
    let path = machine.path(name);
    std::fs::create_dir_all(&path).expect("directory");
    path
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("list").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

pub(crate) async fn a_pod_is_restored_where_it_was(machine: &mut Machine) {
    let (source, ids) = pod(machine, "source").await;
    let output = empty_directory(machine, "pod-checkpoint");
    eventually_async("the counter counts", 20, async || count(machine, &ids[0]).await >= 5).await;
    eventually_async("the connection exists", 20, async || {
        let found = machine.exec(&ids[0], &["grep", "-q", " 01 00", "/proc/net/tcp"], 0).await;
        found.expect("exec").exit_code == 0
    })
    .await;
    xattr::set(in_root(machine, &ids[0], "mine").await, "security.capability", &CAPABILITY).expect("set");
    is_cancelled_without_a_trace(machine, &source, &ids, &output).await;
    // A probe's command is not part of the container's checkpoint.
    let (probe, made) = tokio::join!(machine.exec(&ids[0], &["sleep", "5"], 0), async {
        eventually_async("the probe's command runs", 20, async || {
            let processes = machine.exec(&ids[0], &["ps"], 0).await.expect("exec").stdout;
            String::from_utf8_lossy(&processes).contains("sleep 5")
        })
        .await;
        checkpoint(machine, &source, &ids, &output).await
    });
    assert_eq!(probe.expect("exec").exit_code, 0);
    goes_on(machine, &ids[0]).await;
    match works() {
        Some(true) => made.expect("a checkpoint"),
        works => {
            let error = made.expect_err("CRIU does not work here");
            let expected = if works.is_none() { "CRIU is not installed" } else { "criu failed: " };
            assert!(error.message().contains(expected), "{error}");
            assert_eq!(error.code() == Code::Unimplemented, works.is_none(), "{error}");
            assert_eq!(names(&output), Vec::<String>::new());
            machine.remove_pod(&source).await;
            std::fs::remove_dir(&output).expect("remove");
            coracle_testing::skip!("CRIU does not work on this machine");
        }
    }
    assert_eq!(names(&output).len(), 3, "{:?}", names(&output));
    let again = checkpoint(machine, &source, &ids, &output).await.expect_err("not empty");
    assert_eq!(again.code(), Code::InvalidArgument, "{again}");
    let later = count(machine, &ids[0]).await;
    let end = machine.status(&ids[0]).await;
    machine.remove_pod(&source).await;
    assert_eq!(end.exit_code, 0);
    a_different_pod_is_refused(machine, &output).await;
    ends_if_criu_fails(machine, &output).await;
    continues_from_the_checkpoint(machine, &output, later).await;
    std::fs::remove_dir_all(&output).expect("remove");
}

/// A file of a container, seen from outside.
async fn in_root(machine: &Machine, id: &str, name: &str) -> PathBuf {
    Path::new("/proc").join(machine.pid(id).await.to_string()).join("root").join(name)
}

/// The hard link shares content and attributes with the file.
fn is_hard_linked(link: &Path) {
    assert_eq!(std::os::unix::fs::MetadataExt::nlink(&link.metadata().expect("the link")), 2);
    assert_eq!(xattr::get(link, "security.capability").expect("get").as_deref(), Some(CAPABILITY.as_slice()));
}

/// The caller disconnects during the checkpoint.
async fn is_cancelled_without_a_trace(machine: &Machine, pod: &str, ids: &[String], output: &Path) {
    let call = checkpoint(machine, pod, ids, output);
    let late = tokio::time::timeout(Duration::from_millis(20), call).await;
    assert!(!matches!(late, Ok(Ok(()))), "the checkpoint was complete too early");
    let layer = machine.path("root/containers").join(&ids[0]);
    until("nothing of the checkpoint is left", 20, || {
        let is_left = names(&layer).iter().any(|name| name.starts_with("checkpoint"));
        !is_left && names(output).is_empty()
    })
    .await;
    goes_on(machine, &ids[0]).await;
}

/// CRIU cannot read the images: the start fails with its message and ends the container.
async fn ends_if_criu_fails(machine: &Machine, output: &Path) {
    let restored = restore(machine, restore_request(machine, output)).await.expect("a pod");
    let id = &restored.restored_containers[0].container_id;
    let images = machine.path("root/containers").join(id).join("restore/checkpoint");
    std::fs::write(images.join("pstree.img"), "").expect("empty");
    let error = machine.try_start(id).await.expect_err("no processes");
    assert!(error.message().contains("criu failed: "), "{error:?}");
    let status = machine.wait_exited(id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (128, "StartError"), "{status:?}");
    // The other container does not depend on the failed container.
    machine.start(&restored.restored_containers[1].container_id).await;
    machine.remove_pod(&restored.pod_sandbox_id).await;
}

/// A runtime that dies before the pod is completely restored. The client has not got a response.
pub(crate) async fn a_partly_restored_pod_is_undone(machine: &mut Machine) {
    let (pod, _) = pod(machine, "half").await;
    machine.close_runtime().await;
    let path = machine.path("state/sandboxes").join(&pod).join("record.json");
    let text = std::fs::read_to_string(&path).expect("record");
    let mut record: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(record["restoring"], false);
    record["restoring"] = true.into();
    std::fs::write(&path, record.to_string()).expect("write");
    machine.open_runtime().await;
    assert_eq!(machine.traces().await, Vec::<String>::new());
}

/// As in RunPodSandbox: a retry succeeds once the first attempt is undone. After a success the name is in use.
async fn can_be_retried_once(machine: &Machine, output: &Path) -> cri::RestorePodResponse {
    for millis in [1, 300, 1000] {
        let call = restore(machine, restore_request(machine, output));
        if let Ok(made) = tokio::time::timeout(Duration::from_millis(millis), call).await {
            machine.remove_pod(&made.expect("a pod").pod_sandbox_id).await;
        }
    }
    let restored = restore(machine, restore_request(machine, output)).await.expect("a pod");
    let taken = restore(machine, restore_request(machine, output)).await.expect_err("the pod has the name");
    assert_eq!(taken.code(), Code::AlreadyExists, "{taken}");
    assert!(taken.message().contains(&restored.pod_sandbox_id), "{taken}");
    restored
}

async fn continues_from_the_checkpoint(machine: &mut Machine, output: &Path, later: u32) {
    let restored = can_be_retried_once(machine, output).await;
    let pod = restored.pod_sandbox_id;
    let names: Vec<&str> = restored.restored_containers.iter().map(|made| made.name.as_str()).collect();
    assert_eq!(names, ["counter", "talker"]);
    let ids: Vec<String> =
        restored.restored_containers.iter().map(|made| made.container_id.clone()).collect();
    // Restored containers wait to be started, even across a restart of the runtime.
    machine.restart(Duration::ZERO).await;
    let began = Instant::now();
    for id in &ids {
        assert_eq!(machine.status(id).await.state, i32::from(cri::ContainerState::ContainerCreated));
        machine.start(id).await;
    }
    let first = count(machine, &ids[0]).await;
    // The counter counts at most ten times a second.
    let since = u32::try_from(began.elapsed().as_secs()).expect("seconds") * 10;
    assert!((5..later + 50 + since).contains(&first), "{first} after {later}");
    goes_on(machine, &ids[0]).await;
    let files = machine
        .exec(
            &ids[0],
            &["sh", "-c", "cat /mine; ls /bin/true; hostname; cat /etc/name '/my data/name'; cat /etc/hosts"],
            0,
        )
        .await;
    let files = files.expect("exec");
    let (stdout, stderr) = (String::from_utf8_lossy(&files.stdout), String::from_utf8_lossy(&files.stderr));
    assert!(
        stdout.starts_with("mine\nsame\nrestoredrestored") && stderr.contains("/bin/true"),
        "{stdout} {stderr}"
    );
    is_hard_linked(&in_root(machine, &ids[0], "link").await);
    let page = machine.exec(&ids[0], &["wget", "-q", "-O", "-", "http://127.0.0.1:8080/passwd"], 0).await;
    assert!(String::from_utf8_lossy(&page.expect("exec").stdout).starts_with("root:"), "the server listens");
    let address = machine.sandbox(&pod).await.network.expect("network").ip;
    assert!(stdout.contains(&address), "/etc/hosts does not have {address}: {stdout}");
    for (name, words) in [("counter", "stdout F count "), ("talker", "stdout F said ")] {
        let log = machine.path("logs/restored").join(name).join("0.log");
        eventually_async(&format!("{name} writes {words:?}"), 20, async || {
            std::fs::read_to_string(&log).unwrap_or_default().contains(words)
        })
        .await;
    }
    is_in_its_cgroups(machine, &pod, &ids[0]).await;
    // The restored process is a child of the shim, so a restart of the runtime does not affect it.
    let before = machine.pid(&ids[0]).await;
    machine.restart(Duration::ZERO).await;
    assert_eq!(machine.pid(&ids[0]).await, before);
    goes_on(machine, &ids[0]).await;
    // A restored pod can be checkpointed again.
    let second = empty_directory(machine, "second-checkpoint");
    checkpoint(machine, &pod, &ids, &second).await.expect("a checkpoint of the restored pod");
    std::fs::remove_dir_all(&second).expect("remove");
    machine.stop(&ids[0], 30).await;
    assert_eq!(machine.status(&ids[0]).await.exit_code, 3);
    machine.stop(&ids[1], 0).await;
    assert_eq!(machine.status(&ids[1]).await.exit_code, 137);
    machine.remove_pod(&pod).await;
}

/// The restored processes are in the new container's cgroups only, and see no other path.
async fn is_in_its_cgroups(machine: &Machine, pod: &str, restored: &str) {
    let plain = machine.run(pod, "plain", &["sleep", "1000"]).await;
    let mut found = Vec::new();
    for id in [restored, &plain] {
        let from_inside = machine.exec(id, &["cat", "/proc/1/cgroup"], 0).await.expect("exec").stdout;
        let from_outside = std::fs::read_to_string(format!("/proc/{}/cgroup", machine.pid(id).await));
        let from_outside = from_outside.expect("cgroups");
        assert!(from_outside.contains(id), "{from_outside}");
        let without_id = |text: &str| text.replace(id, "ID");
        found.push((without_id(&from_outside), without_id(&String::from_utf8_lossy(&from_inside))));
    }
    assert_eq!(found[0], found[1]);
}

/// Changed requests are refused with the right code and create nothing.
async fn a_different_pod_is_refused(machine: &mut Machine, output: &Path) {
    let before = machine.traces().await;
    type Change = fn(&mut cri::RestorePodRequest);
    let changes: [(Change, Code, &str); 8] = [
        (|request| request.checkpoint_path = "relative".into(), Code::InvalidArgument, "checkpoint_path"),
        (
            |request| request.container_configs[0] = request.container_configs[1].clone(),
            Code::InvalidArgument,
            "talker",
        ),
        (|request| request.config = None, Code::InvalidArgument, "config"),
        (|request| drop(request.container_configs.pop()), Code::FailedPrecondition, "talker"),
        (|request| request.container_configs[0].args.push("x".into()), Code::FailedPrecondition, "arguments"),
        (|request| request.config.as_mut().unwrap().hostname.clear(), Code::FailedPrecondition, "host name"),
        (
            |request| {
                request.container_configs[0].image =
                    Some(cri::ImageSpec { image: "absent".into(), ..Default::default() })
            },
            Code::NotFound,
            "absent",
        ),
        (|request| drop(request.options.insert("lazy".into(), "yes".into())), Code::InvalidArgument, "lazy"),
    ];
    for (change, code, word) in changes {
        let mut request = restore_request(machine, output);
        change(&mut request);
        let error = restore(machine, request).await.expect_err(word);
        assert!(error.code() == code && error.message().contains(word), "{word}: {error:?}");
    }
    // Changes one byte of an archive.
    let archive = names(output).into_iter().find(|name| name.ends_with(".tar")).expect("an archive");
    let whole = std::fs::read(output.join(&archive)).expect("read");
    let mut torn = whole.clone();
    *torn.last_mut().expect("bytes") ^= 1;
    std::fs::write(output.join(&archive), torn).expect("write");
    let error = restore(machine, restore_request(machine, output)).await.expect_err("torn");
    assert!(error.code() == Code::InvalidArgument && error.message().contains("manifest"), "{error:?}");
    std::fs::write(output.join(&archive), whole).expect("write");
    assert_eq!(machine.traces().await, before, "nothing was made");
}

pub(crate) async fn unsupported_checkpoints_are_refused(machine: &mut Machine) {
    let (one, ids) = pod(machine, "one").await;
    let other = machine.pod("other").await;
    let foreign = machine.run(&other, "c", &["sleep", "1000"]).await;
    let ended = machine.run(&one, "ended", &["true"]).await;
    machine.wait_exited(&ended).await;
    let output = empty_directory(machine, "refused");
    let refused = async |pod: &str, ids: &[String], output: &Path| {
        let error = checkpoint(machine, pod, ids, output).await.expect_err("refused");
        (error.code(), error.message().to_owned())
    };
    assert_eq!(refused("absent", &ids, &output).await.0, Code::NotFound);
    assert_eq!(refused(&one, &[], &output).await.0, Code::InvalidArgument);
    assert_eq!(refused(&one, &["absent".to_owned()], &output).await.0, Code::NotFound);
    let twice = [ids[0].clone(), ids[0].clone()];
    assert_eq!(refused(&one, &twice, &output).await.0, Code::InvalidArgument);
    assert_eq!(refused(&one, std::slice::from_ref(&foreign), &output).await.0, Code::InvalidArgument);
    assert_eq!(refused(&one, &[ended], &output).await.0, Code::FailedPrecondition);
    for place in ["", "relative", "/absent"] {
        assert_eq!(refused(&one, &ids, Path::new(place)).await.0, Code::InvalidArgument, "{place:?}");
    }
    std::fs::write(output.join("file"), "").expect("write");
    assert_eq!(refused(&one, &ids, &output).await.0, Code::InvalidArgument);
    let request = cri::CheckpointPodRequest {
        pod_sandbox_id: one.clone(),
        output_path: output.display().to_string(),
        container_ids: ids.clone(),
        options: [("leaveRunning".to_owned(), "false".to_owned())].into(),
    };
    let error = machine.runtime.checkpoint_pod(Request::new(request)).await.expect_err("an option");
    assert!(error.code() == Code::InvalidArgument && error.message().contains("leaveRunning"), "{error}");
    let error = restore(machine, restore_request(machine, &output)).await.expect_err("no manifest");
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: other.clone() };
    machine.runtime.stop_pod_sandbox(Request::new(stop)).await.expect("stop");
    std::fs::remove_file(output.join("file")).expect("remove");
    assert_eq!(refused(&other, &[foreign], &output).await.0, Code::FailedPrecondition);
    goes_on(machine, &ids[0]).await;
    for pod in [one, other] {
        machine.remove_pod(&pod).await;
    }
    std::fs::remove_dir(&output).expect("the directory exists and is empty");
}
