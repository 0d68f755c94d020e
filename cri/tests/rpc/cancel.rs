//! Calls that are cancelled at any time leave nothing behind.

use std::time::Duration;

use coracle_proto::cri;
use coracle_proto::cri::image_service_server::ImageService;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::eventually_async;
use tokio::time::timeout;
use tonic::{Code, Request};

use crate::fixture::Machine;
use crate::wire::Wire;

/// Waits until cancelled operations are undone: first the objects of the machine, then the name.
async fn settles(machine: &Machine, before: &[String]) {
    eventually_async("cancelled operations to be undone", 20, async || {
        let traces = machine.traces().await;
        let is_listed = is_listed(machine, "cancelled").await;
        match traces == before && !is_listed {
            true => Ok(()),
            false => Err(format!("listed: {is_listed}; {traces:?}, and not {before:?}")),
        }
    })
    .await;
}

/// Whether a sandbox with this prefix of its name is listed.
async fn is_listed(machine: &Machine, name: &str) -> bool {
    let all = Request::new(cri::ListPodSandboxRequest::default());
    let list = machine.runtime.list_pod_sandbox(all).await.expect("list").into_inner();
    list.items.iter().any(|pod| pod.metadata.as_ref().is_some_and(|metadata| metadata.name.starts_with(name)))
}

pub(crate) async fn cancelled_calls_leave_nothing(machine: &mut Machine) {
    let pod = machine.pod("stays").await;
    let before = machine.traces().await;
    let mut cancelled = 0;
    for millis in [0, 1, 2, 4, 6, 8, 11, 15, 20] {
        let moment = Duration::from_millis(millis);
        let made = timeout(moment, machine.try_pod("cancelled", |_| {})).await;
        match made {
            Ok(made) => machine.remove_pod(&made.expect("sandbox")).await,
            Err(_) => cancelled += 1,
        }
        settles(machine, &before).await;
        let made = timeout(moment, machine.create(&pod, "cancelled", &["true"], |_| {})).await;
        match made {
            Ok(made) => machine.remove(&made.expect("container")).await,
            Err(_) => cancelled += 1,
        }
        settles(machine, &before).await;
    }
    assert!(cancelled > 4, "{cancelled}");
    // The names are free again.
    let again = machine.pod("cancelled").await;
    let id = machine.create(&pod, "cancelled", &["true"], |_| {}).await.expect("create");
    machine.remove(&id).await;
    machine.remove_pod(&again).await;
    machine.remove_pod(&pod).await;
}

/// Calls that end or change something are completed even if their caller has gone; later calls see the result.
pub(crate) async fn cancelled_changes_are_completed(machine: &mut Machine) {
    let before = machine.traces().await;
    for millis in [0, 1, 2, 4, 8, 16] {
        let moment = Duration::from_millis(millis);
        let pod = machine.pod("changes").await;
        let id = machine.create(&pod, "c", &["sleep", "1000"], |_| {}).await.expect("create");
        let runtime = &machine.runtime;
        // Each call may complete in time or not. No call may fail because of the previous ones.
        if let Ok(started) = timeout(moment, machine.try_start(&id)).await {
            started.expect("start");
        }
        let linux = cri::LinuxContainerResources { cpu_shares: 512, ..Default::default() };
        let update = cri::UpdateContainerResourcesRequest {
            container_id: id.clone(),
            linux: Some(linux),
            ..Default::default()
        };
        if let Ok(updated) = timeout(moment, runtime.update_container_resources(Request::new(update))).await {
            updated.expect("update");
        }
        let stop = cri::StopContainerRequest { container_id: id.clone(), timeout: 0 };
        if let Ok(stopped) = timeout(moment, runtime.stop_container(Request::new(stop))).await {
            stopped.expect("stop");
        }
        let remove = cri::RemoveContainerRequest { container_id: id.clone() };
        if let Ok(removed) = timeout(moment, runtime.remove_container(Request::new(remove))).await {
            removed.expect("remove");
        }
        let stop = cri::StopPodSandboxRequest { pod_sandbox_id: pod.clone() };
        if let Ok(stopped) = timeout(moment, runtime.stop_pod_sandbox(Request::new(stop))).await {
            stopped.expect("stop");
        }
        let remove = cri::RemovePodSandboxRequest { pod_sandbox_id: pod.clone() };
        if let Ok(removed) = timeout(moment, runtime.remove_pod_sandbox(Request::new(remove))).await {
            removed.expect("remove");
        }
        machine.remove_pod(&pod).await;
        settles(machine, &before).await;
    }
}

/// A client retries with the same name immediately after a timeout.
pub(crate) async fn a_retry_gets_the_name_after_the_first_attempt_is_undone(machine: &mut Machine) {
    let pod = machine.pod("stays").await;
    let before = machine.traces().await;
    let mut cancelled = 0;
    for millis in [0, 1, 3, 6, 10] {
        let moment = Duration::from_millis(millis);
        match timeout(moment, machine.try_pod("again", |_| {})).await {
            Ok(made) => machine.remove_pod(&made.expect("sandbox")).await,
            Err(_) => cancelled += 1,
        }
        let again = machine.try_pod("again", |_| {}).await.expect("the retry gets the name");
        let taken = machine.try_pod("again", |_| {}).await.expect_err("the pod has the name");
        assert_eq!(taken.code(), Code::AlreadyExists, "{taken}");
        machine.remove_pod(&again).await;
        match timeout(moment, machine.create(&pod, "again", &["true"], |_| {})).await {
            Ok(made) => machine.remove(&made.expect("container")).await,
            Err(_) => cancelled += 1,
        }
        let again = machine.create(&pod, "again", &["true"], |_| {}).await.expect("the retry gets the name");
        let taken = machine.create(&pod, "again", &["true"], |_| {}).await.expect_err("the pod has the name");
        assert_eq!(taken.code(), Code::AlreadyExists, "{taken}");
        machine.remove(&again).await;
    }
    assert!(cancelled > 4, "{cancelled}");
    settles(machine, &before).await;
    machine.remove_pod(&pod).await;
}

/// Calls that the client's deadline cancels over the wire.
pub(crate) async fn deadlines_leave_nothing(machine: &mut Machine) {
    let mut wire = Wire::open(machine).await;
    let before = machine.traces().await;
    let mut late = 0;
    // No machine makes a pod within this time. A pod whose response is sent while the client gives up belongs to the
    // client.
    for millis in [1, 1, 2] {
        let metadata = cri::PodSandboxMetadata {
            name: "late".into(),
            uid: "uid-late".into(),
            namespace: "default".into(),
            attempt: 0,
        };
        let config = cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() };
        let mut request =
            Request::new(cri::RunPodSandboxRequest { config: Some(config), ..Default::default() });
        request.set_timeout(Duration::from_millis(millis));
        match wire.client.run_pod_sandbox(request).await {
            Ok(made) => machine.remove_pod(&made.into_inner().pod_sandbox_id).await,
            Err(status) => {
                assert!(matches!(status.code(), Code::Cancelled | Code::DeadlineExceeded), "{status}");
                late += 1;
            }
        }
        settles(machine, &before).await;
    }
    assert!(late > 0);
    // A closed server has received every call, so that the restart finds no call in progress.
    wire.close().await;
    eventually_async("the call is undone", 20, async || !is_listed(machine, "late").await).await;
    machine.restart(Duration::ZERO).await;
}

pub(crate) async fn a_cancelled_exec_is_killed(machine: &mut Machine) {
    let pod = machine.pod("exec-gone").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let processes = async || {
        let answer = machine.exec(&id, &["ps"], 0).await.expect("exec");
        String::from_utf8_lossy(&answer.stdout).into_owned()
    };
    let until_running = async |wanted: &[&str]| {
        eventually_async(&format!("{wanted:?} run"), 20, async || {
            let now = processes().await;
            let runs = ["sleep 997", "sleep 996"].into_iter().filter(|command| now.contains(command));
            runs.eq(wanted.iter().copied()).then_some(now)
        })
        .await
    };
    tokio::select! {
        ended = machine.exec(&id, &["sh", "-c", "sleep 997 & sleep 996"], 0) => panic!("it ended: {ended:?}"),
        _begun = until_running(&["sleep 997", "sleep 996"]) => {}
    }
    // The caller has disconnected.
    assert!(until_running(&[]).await.contains("sleep 1000"), "the first process of the container continues");
    machine.remove_pod(&pod).await;
}

pub(crate) async fn a_cancelled_pull_leaves_no_image(machine: &mut Machine) {
    machine.loopback_up();
    let registry = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("listen");
    let reference = format!("{}/slow:latest", registry.local_addr().expect("address"));
    let image = cri::ImageSpec { image: reference, ..Default::default() };
    let request = cri::PullImageRequest { image: Some(image.clone()), ..Default::default() };
    // A registry that accepts connections and never answers.
    let accepted = tokio::select! {
        pulled = machine.runtime.pull_image(Request::new(request)) => panic!("the pull ended without an answer of the registry: {pulled:?}"),
        accepted = timeout(Duration::from_secs(60), registry.accept()) => accepted,
    };
    // The caller has disconnected.
    let (mut connection, _) = accepted.expect("a connection").expect("accept");
    let mut rest = Vec::new();
    let hung_up = tokio::io::AsyncReadExt::read_to_end(&mut connection, &mut rest);
    timeout(Duration::from_secs(60), hung_up).await.expect("the connection ends").expect("read");
    let status = cri::ImageStatusRequest { image: Some(image), verbose: false };
    let status = machine.runtime.image_status(Request::new(status)).await.expect("status");
    assert_eq!(status.into_inner().image, None);
}
