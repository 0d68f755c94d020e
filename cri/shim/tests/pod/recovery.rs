//! Tests in which the client, the shim, or a creator at work is killed.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use futures::StreamExt as _;

use crate::fixture::{self, Pod, until};
use crate::shim_client::{Closed, ErrorKind, Shim};

pub(crate) async fn exits_wait_for_the_next_agent_and_are_repeated_until_acknowledged(mut pod: Pod) {
    pod.run("c", "sleep 0.2; exit 4").await;
    let dir = pod.shim.dir().to_owned();
    drop(std::mem::replace(&mut pod.events, futures::channel::mpsc::unbounded().1));
    let exits = dir.join("exits/c");
    until(|| exits.exists()).await;
    for _ in 0..2 {
        let (shim, state) = Shim::connect(&dir).await.unwrap();
        assert_eq!((state.pending_events, state.containers[0].exit.unwrap().code), (1, 4));
        let event = shim.events().unwrap().next().await.unwrap();
        assert_eq!((event.sequence, event.exited.unwrap().code), (1, 4));
    }
    // The later connections replaced the first client.
    assert_eq!(pod.shim.closed().await, Closed::Replaced);
    assert_eq!(pod.shim.hello().await.unwrap_err().kind, ErrorKind::Gone);
    let (shim, _) = Shim::connect(&dir).await.unwrap();
    shim.acknowledge(1).await.unwrap();
    assert_eq!(shim.hello().await.unwrap().pending_events, 0);
    pod.shim = shim;
    pod.end().await;
}

/// The client that is killed, as a role of this test binary. It starts a pod and a container in `dir`, then hangs.
pub(crate) async fn client(dir: PathBuf) -> ExitCode {
    let cgroup = format!("/{}", dir.file_name().unwrap().to_string_lossy());
    fixture::make_lower(&dir);
    let config = fixture::config(&dir, &cgroup);
    let shim = fixture::spawn(&dir, config).await;
    let spec = fixture::spec(shim.pid(), &format!("{cgroup}/c"), "echo up; sleep 0.5; echo still; exit 8");
    shim.create(fixture::create_request(&dir, "c", &spec)).await.unwrap();
    shim.start("c").await.unwrap();
    println!("started");
    std::future::pending().await
}

pub(crate) async fn a_client_killed_in_the_middle_leaves_the_pod_running(mut pod: Pod) {
    use std::io::BufRead as _;
    let name = format!("coracle-test-{}-client", fixture::run_name());
    let dir = Path::new("/tmp").join(&name);
    let mut client = Command::new(std::env::current_exe().unwrap());
    let mut client = client.arg("client").arg(&dir).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufReader::new(client.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "started\n");
    client.kill().unwrap();
    client.wait().unwrap();
    let (shim, _) = Shim::connect(&dir.join("shim")).await.unwrap();
    let mut events = shim.events().unwrap();
    assert_eq!(events.next().await.unwrap().exited.unwrap().code, 8);
    let log = std::fs::read_to_string(dir.join("c.log")).unwrap();
    assert!(log.contains("up") && log.contains("still"), "{log}");
    shim.shutdown().await.unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    // The cgroups of the killed client's pod are removed together with the cgroups of the fixture.
    let own = std::mem::replace(&mut pod.cgroup, format!("/{name}"));
    fixture::remove_cgroup(&pod.cgroup).await;
    pod.cgroup = own;
    pod.end().await;
}

pub(crate) async fn a_killed_shim_ends_its_containers(pod: Pod) {
    let pid = pod.run("c", "sleep 1000").await;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pod.shim.pid()), nix::sys::signal::Signal::SIGKILL)
        .unwrap();
    assert_eq!(pod.shim.closed().await, Closed::Exited);
    until(|| !Path::new(&format!("/proc/{pid}/cwd")).exists()).await;
    // An absent shim counts as shut down.
    pod.shim.shutdown().await.unwrap();
    pod.abandon().await;
}

pub(crate) async fn a_creator_ends_when_its_shim_is_killed(pod: Pod) {
    // A hook blocks the creator.
    let mut spec = pod.spec("c", "true");
    spec["hooks"] = serde_json::json!({
        "createRuntime": [{ "path": "/bin/busybox", "args": ["busybox", "sleep", "60"] }],
    });
    let (shim, create) = (pod.shim.clone(), pod.create_request("c", &spec));
    let creating = tokio::spawn(async move { shim.create(create).await });
    until(has_creator).await;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pod.shim.pid()), nix::sys::signal::Signal::SIGKILL)
        .unwrap();
    assert!(creating.await.unwrap().is_err());
    until(|| !has_creator()).await;
    pod.abandon().await;
}

/// Whether a creator runs in this pid namespace.
fn has_creator() -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    // A zombie has no working directory.
    let alive = processes.filter(|process| process.path().join("cwd").exists());
    let mut names = alive.filter_map(|process| std::fs::read_to_string(process.path().join("comm")).ok());
    names.any(|name| name.trim_end() == "coracle-create")
}

pub(crate) async fn a_delete_during_creation_leaves_nothing(pod: Pod) {
    for round in 0..5 {
        let id = format!("c{round}");
        let create = pod.create_request(&id, &pod.spec(&id, "sleep 1000"));
        let (shim, deleting) = (pod.shim.clone(), pod.shim.clone());
        let creating = tokio::spawn(async move { shim.create(create).await });
        tokio::time::sleep(std::time::Duration::from_millis(3 * round)).await;
        deleting.delete(&id).await.unwrap();
        // Whether or not the creation succeeded, the container is gone.
        let _ = creating.await.unwrap();
        deleting.delete(&id).await.unwrap();
        assert!(pod.shim.hello().await.unwrap().containers.is_empty());
    }
    pod.end().await;
}

pub(crate) async fn a_terminated_shim_ends_its_pod_at_once(pod: Pod) {
    pod.run("c", "trap '' TERM; sleep 1000").await;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pod.shim.pid()), nix::sys::signal::Signal::SIGTERM)
        .unwrap();
    // The container ignores the signal for 1,000 s.
    let closed = tokio::time::timeout(std::time::Duration::from_secs(60), pod.shim.closed()).await;
    assert_eq!(closed.expect("the shim does not wait for the container"), Closed::Exited);
    pod.nothing_left().await;
}
