//! GetContainerEvents: events while the runtime is stopped, and the end of a server.

use std::time::Duration;

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::until;
use cri::ContainerEventType::{ContainerDeletedEvent, ContainerStartedEvent, ContainerStoppedEvent};
use futures::{Stream, StreamExt};
use tonic::{Request, Status};

use crate::fixture::Machine;
use crate::wire::Wire;

type ReceivedEvent = Result<cri::ContainerEventResponse, Status>;

async fn listen(machine: &Machine) -> impl Stream<Item = ReceivedEvent> + Unpin + use<> {
    let request = Request::new(cri::GetEventsRequest {});
    machine.runtime.get_container_events(request).await.expect("events").into_inner()
}

/// A listener that has received all previous events. To get there, this function makes and removes a pod, and waits for
/// the event of the removal.
async fn up_to_date(machine: &mut Machine) -> impl Stream<Item = ReceivedEvent> + Unpin + use<> {
    // A server of an earlier test has ended the streams of its runtime.
    machine.restart(Duration::ZERO).await;
    let mut events = listen(machine).await;
    let last = machine.pod("last").await;
    machine.remove_pod(&last).await;
    let deleted = (last, i32::from(ContainerDeletedEvent));
    while next(&mut events, 1).await != std::slice::from_ref(&deleted) {}
    events
}

/// Asserts that the listener has received all previous events: the next ones are those of a pod that this function
/// makes and removes.
async fn assert_up_to_date(machine: &Machine, events: &mut (impl Stream<Item = ReceivedEvent> + Unpin)) {
    let pod = machine.pod("next").await;
    machine.remove_pod(&pod).await;
    let deleted = (pod.clone(), i32::from(ContainerDeletedEvent));
    loop {
        let received = next(events, 1).await;
        assert_eq!(received[0].0, pod, "{received:?}");
        if received[0] == deleted {
            return;
        }
    }
}

/// The next `count` events. Panics if one does not arrive in time.
async fn next(events: &mut (impl Stream<Item = ReceivedEvent> + Unpin), count: usize) -> Vec<(String, i32)> {
    let mut received = Vec::new();
    while received.len() < count {
        let event = tokio::time::timeout(Duration::from_secs(60), events.next()).await;
        let event = event.unwrap_or_else(|_late| panic!("{count} events, and not {received:?}"));
        let event = event.expect("more events").expect("event");
        received.push((event.container_id, event.container_event_type));
    }
    received
}

/// A script that waits for a file.
fn waiting(then: &str) -> String {
    format!("while [ ! -e /tmp/go ]; do usleep 20000; done; {then}")
}

pub(crate) async fn a_start_that_cannot_be_recorded_still_has_an_event(machine: &mut Machine) {
    let pod = machine.pod("unwritten").await;
    let id = machine.create(&pod, "c", &["sleep", "1000"], |_| {}).await.expect("create");
    let mut events = up_to_date(machine).await;
    let in_the_way = machine.path("state/containers").join(&id).join("record.new");
    std::fs::create_dir(&in_the_way).expect("directory");
    machine.start(&id).await;
    assert_eq!(next(&mut events, 1).await, [(id.clone(), ContainerStartedEvent.into())]);
    std::fs::remove_dir(&in_the_way).expect("directory");
    // The record has "created", the shim reports "running".
    machine.restart(Duration::ZERO).await;
    assert_eq!(machine.status(&id).await.state, i32::from(cri::ContainerState::ContainerRunning));
    machine.remove_pod(&pod).await;
}

pub(crate) async fn exits_without_a_runtime_are_reported(machine: &mut Machine) {
    let mut before = up_to_date(machine).await;
    let pod = machine.pod("away").await;
    let limited = |config: &mut cri::ContainerConfig| {
        let limits = cri::LinuxContainerResources { memory_limit_in_bytes: 16 << 20, ..Default::default() };
        config.linux.get_or_insert_default().resources = Some(limits);
    };
    let ends = machine.run(&pod, "ends", &["sh", "-c", &waiting("exit 3")]).await;
    let hog = ["sh", "-c", &waiting("x=a; while :; do x=$x$x; done")];
    let hog = machine.create(&pod, "hog", &hog, limited).await.expect("create");
    machine.start(&hog).await;
    let stays = machine.run(&pod, "stays", &["sleep", "1000"]).await;
    next(&mut before, 8).await;
    let pids = [machine.pid(&ends).await, machine.pid(&hog).await];
    machine.close_runtime().await;
    // The containers end one after the other. The shim records an exit after it has read the container's outputs.
    let exits = machine.path("state/sandboxes").join(&pod).join("exits");
    for (pid, id) in pids.into_iter().zip([&ends, &hog]) {
        std::fs::write(format!("/proc/{pid}/root/tmp/go"), "").expect("write");
        let is_recorded = || std::fs::metadata(exits.join(id)).is_ok_and(|record| record.len() > 0);
        until("the shim records the exit", 20, is_recorded).await;
    }
    machine.open_runtime().await;
    let mut events = listen(machine).await;
    let stopped = i32::from(ContainerStoppedEvent);
    let mut received = Vec::new();
    let mut reason = String::new();
    while received.len() < 2 {
        let event = tokio::time::timeout(Duration::from_secs(60), events.next()).await.expect("two events");
        let event = event.expect("two events").expect("event");
        assert_eq!(event.pod_sandbox_status.as_ref().expect("pod").id, pod);
        if let Some(status) = event.containers_statuses.iter().find(|status| status.id == hog) {
            reason.clone_from(&status.reason);
        }
        received.push((event.container_id, event.container_event_type));
    }
    assert_eq!(received, [(ends.clone(), stopped), (hog, stopped)], "each once, in order");
    assert_eq!(reason, "OOMKilled");
    // Each event is delivered once, even across runtimes.
    assert_up_to_date(machine, &mut events).await;
    drop(events);
    let mut second = listen(machine).await;
    assert_up_to_date(machine, &mut second).await;
    drop(second);
    machine.restart(Duration::ZERO).await;
    assert_up_to_date(machine, &mut listen(machine).await).await;
    // Two listeners get the same events.
    let (mut first, mut second) = (listen(machine).await, listen(machine).await);
    let late = machine.run(&pod, "late", &["true"]).await;
    machine.wait_exited(&late).await;
    machine.remove(&ends).await;
    machine.stop(&stays, 0).await;
    let received = next(&mut first, 5).await;
    assert_eq!(received, next(&mut second, 5).await);
    let of =
        |id: &str| received.iter().filter(|event| event.0 == id).map(|event| event.1).collect::<Vec<_>>();
    assert_eq!(of(&late), [0, i32::from(ContainerStartedEvent), stopped]);
    assert_eq!(of(&ends), [i32::from(ContainerDeletedEvent)]);
    assert_eq!(of(&stays), [stopped]);
    machine.remove_pod(&pod).await;
}

pub(crate) async fn an_event_reports_a_pod_that_ended_without_a_runtime(machine: &mut Machine) {
    let mut before = up_to_date(machine).await;
    let pod = machine.pod("alone").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let shim = nix::unistd::Pid::from_raw(machine.shim_pid(&pod).await);
    next(&mut before, 4).await;
    machine.close_runtime().await;
    nix::sys::signal::kill(shim, nix::sys::signal::Signal::SIGKILL).expect("kill");
    machine.open_runtime().await;
    let stopped = i32::from(ContainerStoppedEvent);
    let mut events = listen(machine).await;
    assert_eq!(next(&mut events, 2).await, [(id, stopped), (pod.clone(), stopped)]);
    assert_up_to_date(machine, &mut events).await;
    // A runtime delivers the events that the listener of the previous runtime did not read.
    drop(events);
    machine.remove_pod(&pod).await;
}

pub(crate) async fn undelivered_events_are_sent_by_the_next_runtime(machine: &mut Machine) {
    drop(up_to_date(machine).await);
    machine.restart(Duration::ZERO).await;
    let pod = machine.pod("unheard").await;
    let first = machine.run(&pod, "first", &["sleep", "1000"]).await;
    machine.stop(&first, 0).await;
    machine.remove(&first).await;
    let second = machine.run(&pod, "second", &["sleep", "1000"]).await;
    machine.restart(Duration::ZERO).await;
    machine.remove_pod(&pod).await;
    machine.restart(Duration::ZERO).await;
    let mut events = listen(machine).await;
    let (mut received, mut last) = (Vec::new(), 0);
    while received.len() < 12 {
        let event =
            tokio::time::timeout(Duration::from_secs(60), events.next()).await.expect("twelve events");
        let event = event.expect("twelve events").expect("event");
        assert_eq!(event.pod_sandbox_status.expect("pod").id, pod, "also of a pod that is gone");
        assert!(event.created_at >= last, "the event has the time of the exit");
        last = event.created_at;
        received.push((event.container_id, event.container_event_type));
    }
    let [created, started, stopped, deleted] = [0, 1, 2, 3];
    let expected = [
        (&pod, created),
        (&pod, started),
        (&first, created),
        (&first, started),
        (&first, stopped),
        (&first, deleted),
        (&second, created),
        (&second, started),
        (&second, stopped),
        (&pod, stopped),
        (&second, deleted),
        (&pod, deleted),
    ];
    assert_eq!(received, expected.map(|(id, what)| (id.clone(), what)), "each once, in order");
    machine.restart(Duration::ZERO).await;
    assert_up_to_date(machine, &mut listen(machine).await).await;
}

pub(crate) async fn the_server_stops_despite_listeners(machine: &mut Machine) {
    let mut wire = Wire::open(machine).await;
    let mut events =
        wire.client.get_container_events(cri::GetEventsRequest {}).await.expect("events").into_inner();
    wire.stop();
    let end = tokio::time::timeout(Duration::from_secs(60), events.next()).await.expect("it ends");
    assert!(end.is_none(), "{end:?}");
    wire.close().await;
    // The runtime continues with a new server.
    machine.restart(Duration::ZERO).await;
}
