//! Container events for a runtime that sends no events. The events are the differences between two lists, as in the
//! kubelet's generic PLEG.
//!
//! One task lists sandboxes and containers every second while there are subscribers. containerd before 1.7 does not
//! implement events. CRI-O sends no events unless `enable_pod_events` is set.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use coracle_proto::cri::{self, ContainerEventResponse, ContainerEventType};
use futures::StreamExt;
use tokio::sync::broadcast;
use tokio::time::Instant;
use tokio_stream::wrappers::BroadcastStream;
use tonic::transport::Channel;

use super::deadline::within;
use super::{Events, RuntimeError};
use crate::kubelet_metrics::relist as metrics;

/// Delay between two lists: the kubelet's `genericPlegRelistPeriod`.
const PERIOD: Duration = Duration::from_secs(1);
/// Timeout of one list call.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of events that a slow subscriber may fall behind. A subscriber that falls further behind gets an error and
/// lists everything again.
const CAPACITY: usize = 1024;

/// The lister and its subscribers.
#[derive(Debug)]
pub(super) struct Relist {
    client: RuntimeServiceClient<Channel>,
    needed: AtomicBool,
    /// Sends the events of the running task to the subscribers. None if there is no task.
    sender: Arc<Mutex<Option<broadcast::Sender<ContainerEventResponse>>>>,
}

/// State of a sandbox or container, and the pod that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ListedObject {
    pod: String,
    /// Number of the state in the CRI. Sandboxes and containers have different enumerations of states.
    state: i32,
    is_sandbox: bool,
}

// === impl Relist ===

impl Relist {
    pub(super) fn new(client: RuntimeServiceClient<Channel>) -> Self {
        Self { client, needed: AtomicBool::new(false), sender: Arc::default() }
    }

    /// Whether the runtime is known to send no events.
    pub(super) fn is_needed(&self) -> bool {
        self.needed.load(Ordering::Acquire)
    }

    /// Notes that the runtime sends no events, and subscribes.
    pub(super) fn need(&self) -> Events {
        if !self.needed.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                "the container runtime sends no container events: its containers are listed every second"
            );
        }
        self.subscribe()
    }

    /// Events from now on. Starts the task if it does not run.
    pub(super) fn subscribe(&self) -> Events {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let receiver = match &*sender {
            Some(sender) => sender.subscribe(),
            None => {
                let (new, receiver) = broadcast::channel(CAPACITY);
                coracle_threads::spawn(run(self.client.clone(), Arc::clone(&self.sender)));
                *sender = Some(new);
                receiver
            }
        };
        let lagged = |_lagged| RuntimeError::Exhausted("container events were lost".to_owned());
        BroadcastStream::new(receiver).map(move |event| event.map_err(lagged)).boxed()
    }
}

/// Lists until the last subscriber is dropped.
async fn run(
    mut client: RuntimeServiceClient<Channel>,
    sender: Arc<Mutex<Option<broadcast::Sender<ContainerEventResponse>>>>,
) {
    let (mut known, mut previous) = (HashMap::new(), None);
    loop {
        let began = Instant::now();
        metrics::all().begun(previous.replace(began));
        let listed = list(&mut client).await;
        metrics::all().ended(began);
        match listed {
            Ok(found) => {
                let events = follow(&mut known, found);
                let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
                for (sender, event) in
                    sender.iter().flat_map(|sender| events.iter().map(move |e| (sender, e)))
                {
                    // An error means that there is no subscriber, which is checked below.
                    drop(sender.send(event.clone()));
                }
            }
            Err(error) => tracing::warn!(error = error.message(), "cannot list containers"),
        }
        tokio::time::sleep(PERIOD).await;
        let mut sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
        if sender.as_ref().is_none_or(|sender| sender.receiver_count() == 0) {
            // Subscribing holds the same lock: no subscriber can be left without a task.
            *sender = None;
            return;
        }
    }
}

/// Sandboxes and containers by id.
async fn list(
    client: &mut RuntimeServiceClient<Channel>,
) -> Result<HashMap<String, ListedObject>, RuntimeError> {
    let sandboxes = client.list_pod_sandbox(cri::ListPodSandboxRequest { filter: None });
    let sandboxes = within(Some(LIST_TIMEOUT), "list_pod_sandbox", sandboxes).await?.items;
    let containers = client.list_containers(cri::ListContainersRequest { filter: None });
    let containers = within(Some(LIST_TIMEOUT), "list_containers", containers).await?.containers;
    let pods: HashMap<String, String> = sandboxes
        .iter()
        .map(|s| (s.id.clone(), s.metadata.as_ref().map_or_else(String::new, |m| m.uid.clone())))
        .collect();
    let pod = |sandbox: &str| pods.get(sandbox).cloned().unwrap_or_default();
    let listed_sandboxes = sandboxes
        .iter()
        .map(|s| (s.id.clone(), ListedObject { pod: pod(&s.id), state: s.state, is_sandbox: true }));
    let listed_containers = containers.iter().map(|c| {
        (c.id.clone(), ListedObject { pod: pod(&c.pod_sandbox_id), state: c.state, is_sandbox: false })
    });
    Ok(listed_sandboxes.chain(listed_containers).collect())
}

/// The events of a new list, which replaces the known list. As in the kubelet, the first list has an event for each
/// object. Without these events, a subscriber would miss the end of a container that it has observed before this list.
fn follow(
    known: &mut HashMap<String, ListedObject>,
    found: HashMap<String, ListedObject>,
) -> Vec<ContainerEventResponse> {
    let events = differences(known, &found);
    *known = found;
    events
}

/// An event for each sandbox and container that is new, has another state or was removed.
fn differences(
    known: &HashMap<String, ListedObject>,
    found: &HashMap<String, ListedObject>,
) -> Vec<ContainerEventResponse> {
    let changed = found.iter().filter(|(id, listed)| known.get(*id) != Some(*listed));
    let changed = changed.map(|(id, listed)| event(id, listed, kind(listed)));
    let gone = known.iter().filter(|(id, _)| !found.contains_key(*id));
    changed
        .chain(gone.map(|(id, listed)| event(id, listed, ContainerEventType::ContainerDeletedEvent)))
        .collect()
}

fn kind(listed: &ListedObject) -> ContainerEventType {
    const CREATED: i32 = cri::ContainerState::ContainerCreated as i32;
    const RUNNING: i32 = cri::ContainerState::ContainerRunning as i32;
    const READY: i32 = cri::PodSandboxState::SandboxReady as i32;
    match (listed.is_sandbox, listed.state) {
        (true, READY) | (false, RUNNING) => ContainerEventType::ContainerStartedEvent,
        (false, CREATED) => ContainerEventType::ContainerCreatedEvent,
        _ => ContainerEventType::ContainerStoppedEvent,
    }
}

fn event(id: &str, listed: &ListedObject, kind: ContainerEventType) -> ContainerEventResponse {
    let metadata = cri::PodSandboxMetadata { uid: listed.pod.clone(), ..Default::default() };
    ContainerEventResponse {
        container_id: id.to_owned(),
        container_event_type: kind.into(),
        pod_sandbox_status: Some(cri::PodSandboxStatus { metadata: Some(metadata), ..Default::default() }),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(pod: &str, state: cri::ContainerState) -> ListedObject {
        ListedObject { pod: pod.to_owned(), state: state.into(), is_sandbox: false }
    }

    #[test]
    fn the_first_list_has_an_event_for_each_object_and_an_equal_one_has_none() {
        let found =
            || HashMap::from([("a".to_owned(), container("p", cri::ContainerState::ContainerExited))]);
        let mut known = HashMap::new();
        let kinds: Vec<_> =
            follow(&mut known, found()).iter().map(ContainerEventResponse::container_event_type).collect();
        assert_eq!(kinds, [ContainerEventType::ContainerStoppedEvent]);
        assert!(follow(&mut known, found()).is_empty());
    }

    #[test]
    fn each_change_between_two_lists_is_an_event_of_its_pod() {
        use cri::ContainerState::{ContainerExited, ContainerRunning};
        let known = HashMap::from([
            ("same".to_owned(), container("p", ContainerRunning)),
            ("ended".to_owned(), container("p", ContainerRunning)),
            ("gone".to_owned(), container("q", ContainerExited)),
        ]);
        let found = HashMap::from([
            ("same".to_owned(), container("p", ContainerRunning)),
            ("ended".to_owned(), container("p", ContainerExited)),
            ("new".to_owned(), container("r", ContainerRunning)),
        ]);
        let mut events: Vec<(String, String, ContainerEventType)> = differences(&known, &found)
            .into_iter()
            .map(|event| {
                let kind = event.container_event_type();
                let pod = event.pod_sandbox_status.unwrap().metadata.unwrap().uid;
                (event.container_id, pod, kind)
            })
            .collect();
        events.sort_by(|a, b| a.0.cmp(&b.0));
        let expected = [
            ("ended", "p", ContainerEventType::ContainerStoppedEvent),
            ("gone", "q", ContainerEventType::ContainerDeletedEvent),
            ("new", "r", ContainerEventType::ContainerStartedEvent),
        ];
        assert_eq!(events, expected.map(|(id, pod, kind)| (id.to_owned(), pod.to_owned(), kind)));
    }
}
