//! Lists, their streams and filters, and invalid requests.

use coracle_proto::cri;
use coracle_proto::cri::image_service_server::ImageService;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::eventually_async;
use futures::{Stream, StreamExt};
use tonic::{Code, Request, Response, Status};

use crate::fixture::Machine;
use crate::wire::Wire;

/// All items of a stream of batches. No batch may be empty.
async fn all<R, T>(
    stream: Result<Response<impl Stream<Item = Result<R, Status>>>, Status>,
    items: fn(R) -> Vec<T>,
) -> Vec<T> {
    let mut stream = std::pin::pin!(stream.expect("stream").into_inner());
    let mut found = Vec::new();
    while let Some(batch) = stream.next().await {
        let batch = items(batch.expect("batch"));
        assert!(!batch.is_empty());
        found.extend(batch);
    }
    found
}

pub(crate) async fn streamed_lists_equal_lists(machine: &mut Machine) {
    let pod = machine.pod("streams").await;
    let other = machine.pod("other").await;
    let first = machine.run(&pod, "first", &["sleep", "1000"]).await;
    let second = machine.create(&pod, "second", &["sleep", "1000"], |_| {}).await.expect("create");
    machine.run(&other, "third", &["sleep", "1000"]).await;
    let runtime = &machine.runtime;

    let filter = cri::ContainerFilter { pod_sandbox_id: pod.clone(), ..Default::default() };
    let request = cri::StreamContainersRequest { filter: Some(filter.clone()) };
    let streamed =
        all(runtime.stream_containers(Request::new(request)).await, |batch| batch.containers).await;
    let request = cri::ListContainersRequest { filter: Some(filter) };
    let listed = runtime.list_containers(Request::new(request)).await.expect("list").into_inner().containers;
    assert_eq!(streamed, listed);
    let ids: Vec<&str> = listed.iter().map(|container| container.id.as_str()).collect();
    assert_eq!(ids, [second.as_str(), first.as_str()], "newest first");

    let request = Request::new(cri::StreamPodSandboxesRequest::default());
    let streamed = all(runtime.stream_pod_sandboxes(request).await, |batch| batch.pod_sandboxes).await;
    let request = Request::new(cri::ListPodSandboxRequest::default());
    assert_eq!(streamed, runtime.list_pod_sandbox(request).await.expect("list").into_inner().items);
    assert_eq!(streamed.len(), 2);

    let request = Request::new(cri::StreamImagesRequest::default());
    let streamed = all(runtime.stream_images(request).await, |batch| batch.images).await;
    let request = Request::new(cri::ListImagesRequest::default());
    assert_eq!(streamed, runtime.list_images(request).await.expect("list").into_inner().images);
    assert_eq!(streamed.len(), 1);

    let filter = cri::ContainerStatsFilter { id: first[..12].to_owned(), ..Default::default() };
    let request = Request::new(cri::StreamContainerStatsRequest { filter: Some(filter) });
    let stats = all(runtime.stream_container_stats(request).await, |batch| batch.container_stats).await;
    assert_eq!(stats.len(), 1);
    assert_eq!(stats[0].attributes.as_ref().expect("attributes").id, first);
    let request = Request::new(cri::StreamPodSandboxStatsRequest::default());
    let stats = all(runtime.stream_pod_sandbox_stats(request).await, |batch| batch.pod_sandbox_stats).await;
    assert_eq!(stats.len(), 2);
    let request = Request::new(cri::StreamPodSandboxMetricsRequest::default());
    let metrics = runtime.stream_pod_sandbox_metrics(request).await;
    let metrics = all(metrics, |batch| batch.pod_sandbox_metrics).await;
    let running: usize = metrics.iter().map(|pod| pod.container_metrics.len()).sum();
    assert_eq!((metrics.len(), running), (2, 2));
    machine.remove_pod(&pod).await;
    machine.remove_pod(&other).await;
}

pub(crate) async fn filters_take_truncated_ids_that_name_one(machine: &mut Machine) {
    let mut pods = Vec::new();
    // Among 17 ids at least two begin with the same digit.
    for number in 0..17 {
        pods.push(machine.try_pod(&format!("filter{number}"), |_| {}).await.expect("sandbox"));
    }
    let list = async |id: &str| {
        let filter = cri::PodSandboxFilter { id: id.to_owned(), ..Default::default() };
        let request = cri::ListPodSandboxRequest { filter: Some(filter) };
        let listed = machine.runtime.list_pod_sandbox(Request::new(request)).await.expect("list");
        listed.into_inner().items.into_iter().map(|item| item.id).collect::<Vec<_>>()
    };
    assert_eq!(list(&pods[3]).await, [pods[3].clone()]);
    assert_eq!(list(&pods[3][..13]).await, [pods[3].clone()]);
    assert_eq!(list("unknown").await, Vec::<String>::new());
    let twice = pods
        .iter()
        .map(|id| &id[..1])
        .find(|digit| pods.iter().filter(|id| id.starts_with(*digit)).count() > 1);
    assert_eq!(list(twice.expect("17 ids")).await, Vec::<String>::new(), "the prefix is ambiguous");
    let status = cri::PodSandboxStatusRequest { pod_sandbox_id: pods[5][..13].into(), verbose: false };
    let status = machine.runtime.pod_sandbox_status(Request::new(status)).await.expect("status").into_inner();
    assert_eq!(status.status.expect("status").id, pods[5]);
    for pod in &pods {
        machine.remove_pod(&pod[..20]).await;
    }
}

pub(crate) async fn unknown_ids_are_reported(machine: &mut Machine) {
    let runtime = &machine.runtime;
    let unknown = || "unknown".to_owned();
    let request = cri::ContainerStatsRequest { container_id: unknown() };
    let error = runtime.container_stats(Request::new(request)).await.expect_err("unknown");
    assert_eq!(error.code(), Code::NotFound);
    let request = cri::PodSandboxStatsRequest { pod_sandbox_id: unknown() };
    let error = runtime.pod_sandbox_stats(Request::new(request)).await.expect_err("unknown");
    assert_eq!(error.code(), Code::NotFound);
    let request = cri::CheckpointContainerRequest { container_id: unknown(), ..Default::default() };
    let error = runtime.checkpoint_container(Request::new(request)).await.expect_err("unknown");
    assert_eq!(error.code(), Code::NotFound);
    let request = cri::CheckpointPodRequest { pod_sandbox_id: unknown(), ..Default::default() };
    let error = runtime.checkpoint_pod(Request::new(request)).await.expect_err("unknown");
    assert_eq!(error.code(), Code::NotFound);
    let image = cri::ImageSpec { image: "registry.test/never:seen".into(), ..Default::default() };
    let request = cri::RemoveImageRequest { image: Some(image) };
    runtime.remove_image(Request::new(request)).await.expect("the removal of an absent image succeeds");
}

pub(crate) async fn a_too_large_message_is_refused(machine: &mut Machine) {
    let mut wire = Wire::open(machine).await;
    let mut code = async |bytes: usize| {
        let version = "x".repeat(bytes);
        wire.client.version(cri::VersionRequest { version }).await.err().map(|status| status.code())
    };
    assert_eq!(code((16 << 20) - 100).await, None);
    assert_eq!(code(16 << 20).await, Some(Code::OutOfRange));
    assert_eq!(code(1).await, None, "the connection can still be used");
    wire.close().await;
}

pub(crate) async fn a_log_is_reopened_while_its_container_runs(machine: &mut Machine) {
    let pod = machine.pod("reopen").await;
    let id = machine
        .run(&pod, "c", &["sh", "-c", "echo one; while [ ! -e /go ]; do sleep 0.05; done; echo two"])
        .await;
    let log = machine.status(&id).await.log_path;
    eventually_async("the container writes", 20, async || {
        std::fs::read_to_string(&log).unwrap_or_default().contains("one")
    })
    .await;
    let old = format!("{log}.old");
    std::fs::rename(&log, &old).expect("rotate");
    let reopen = || Request::new(cri::ReopenContainerLogRequest { container_id: id.clone() });
    machine.runtime.reopen_container_log(reopen()).await.expect("reopen");
    assert!(std::path::Path::new(&log).exists(), "the new file is there when the call ends");
    machine.exec(&id, &["touch", "/go"], 0).await.expect("exec");
    machine.wait_exited(&id).await;
    assert!(std::fs::read_to_string(&log).expect("log").contains("stdout F two"));
    assert!(!std::fs::read_to_string(&old).expect("log").contains("two"));
    // "Once it returns error, new container log file MUST NOT be created."
    std::fs::remove_file(&log).expect("remove");
    let error = machine.runtime.reopen_container_log(reopen()).await.expect_err("it ended");
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(!std::path::Path::new(&log).exists());
    machine.remove_pod(&pod).await;
}
