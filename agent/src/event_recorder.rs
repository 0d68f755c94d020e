//! Events about pods and the node, recorded by `coracle_events`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use coracle_events::Event;
use k8s_openapi::api::core::v1::{ObjectReference, Pod, Service};
use kube::Client;
use tokio::sync::watch;

pub(crate) use coracle_events::{EventType as Level, MESSAGE_MAX, Sender};

/// The reporting component. The agent stands for the kubelet, and `kubectl describe` shows this name.
const COMPONENT: &str = "kubelet";

/// Number of concurrent starts of pods at which events begin to wait. Then the requests that make the pods ready are
/// sent first.
const MANY_STARTS: usize = 8;

/// Records events of this node. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Recorder {
    recorder: coracle_events::Recorder,
    node: Arc<str>,
    starts: Arc<Starts>,
}

/// Counts the running starts of pods.
#[derive(Default)]
struct Starts {
    running: AtomicUsize,
    /// Whether at least [`MANY_STARTS`] are running.
    are_many: watch::Sender<bool>,
}

/// A running start of a pod. The start counts until this value is dropped.
pub(crate) struct PodStart(Arc<Starts>);

/// A container of a pod, by its name in the spec.
#[derive(Clone, Copy)]
pub(crate) struct ContainerRef<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) name: &'a str,
}

/// A recorder and its sender, which must run for events to be sent.
pub(crate) fn channel(client: Client, node: &str) -> (Recorder, Sender) {
    let starts = Arc::new(Starts::default());
    let (recorder, sender) = coracle_events::yielding_recorder(client, node, starts.are_many.subscribe());
    (Recorder { recorder, node: node.into(), starts }, sender)
}

// === impl Starts ===

impl Starts {
    /// Counts a start until the returned value is dropped.
    fn begin(self: &Arc<Self>) -> PodStart {
        self.running.fetch_add(1, Ordering::SeqCst);
        self.update();
        PodStart(Arc::clone(self))
    }

    fn update(&self) {
        // The closure runs under the channel's lock, so the last caller sends the newest number.
        self.are_many.send_if_modified(|are_many| {
            let new = self.running.load(Ordering::SeqCst) >= MANY_STARTS;
            std::mem::replace(are_many, new) != new
        });
    }
}

// === impl PodStart ===

impl Drop for PodStart {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
        self.0.update();
    }
}

// === impl Recorder ===

impl Recorder {
    /// Counts a start of a pod until the returned value is dropped. While many starts are running, events wait for at
    /// most two seconds.
    pub(crate) fn pod_start(&self) -> PodStart {
        self.starts.begin()
    }

    /// Whether many starts are running.
    pub(crate) fn many_starts(&self) -> watch::Receiver<bool> {
        self.starts.are_many.subscribe()
    }

    /// Records an event about a pod.
    pub(crate) fn pod(&self, pod: &Pod, level: Level, reason: &'static str, message: impl Into<String>) {
        self.send(pod_reference(pod, None), level, reason, message.into());
    }

    /// Records an event about a container of a pod.
    pub(crate) fn container(
        &self,
        container: ContainerRef<'_>,
        level: Level,
        reason: &'static str,
        message: impl Into<String>,
    ) {
        self.send(pod_reference(container.pod, Some(container.name)), level, reason, message.into());
    }

    /// Records a warning about a service.
    pub(crate) fn service(&self, service: &Service, reason: &'static str, message: impl Into<String>) {
        let about = coracle_values::object::ObjectExt::object_reference(service);
        self.send(about, Level::Warning, reason, message.into());
    }

    /// Records a warning about another object.
    pub(crate) fn warning(&self, about: ObjectReference, reason: &'static str, message: impl Into<String>) {
        self.send(about, Level::Warning, reason, message.into());
    }

    /// Records an event about the node.
    pub(crate) fn node(&self, level: Level, reason: &'static str, message: impl Into<String>) {
        let about = ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(self.node.to_string()),
            // As in the kubelet, the uid is the node's name: `kubectl describe node` searches for it.
            uid: Some(self.node.to_string()),
            ..ObjectReference::default()
        };
        self.send(about, level, reason, message.into());
    }

    fn send(&self, about: ObjectReference, level: Level, reason: &'static str, message: String) {
        self.recorder.record(about, COMPONENT, Event { event_type: level, reason, message });
    }
}

/// A reference to a pod, or to one of its containers by its field path.
fn pod_reference(pod: &Pod, container: Option<&str>) -> ObjectReference {
    let spec = pod.spec.as_ref();
    let inits = spec.and_then(|s| s.init_containers.as_deref()).unwrap_or_default();
    let added = spec.and_then(|s| s.ephemeral_containers.as_deref()).unwrap_or_default();
    let field_path = container.map(|name| {
        let list = match () {
            () if inits.iter().any(|c| c.name == name) => "initContainers",
            () if added.iter().any(|c| c.name == name) => "ephemeralContainers",
            () => "containers",
        };
        format!("spec.{list}{{{name}}}")
    });
    ObjectReference { field_path, ..coracle_values::object::ObjectExt::object_reference(pod) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_wait_while_many_pods_start() {
        let starts = Arc::new(Starts::default());
        let are_many = starts.are_many.subscribe();
        let mut running: Vec<PodStart> = (1..MANY_STARTS).map(|_| starts.begin()).collect();
        assert!(!*are_many.borrow());
        running.push(starts.begin());
        assert!(*are_many.borrow());
        running.pop();
        assert!(!*are_many.borrow());
    }

    #[tokio::test(start_paused = true)]
    async fn the_sender_of_events_waits_while_many_pods_start() {
        let (sent, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            let _delivered = sent.send(tokio::time::Instant::now());
            async { http::Response::builder().body(kube::client::Body::from(b"{}".to_vec())) }
        });
        let (recorder, sender) = channel(Client::new(service, "default"), "n1");
        tokio::spawn(sender.run());
        let (begun, begun_simulated) = (std::time::Instant::now(), tokio::time::Instant::now());
        let _running: Vec<PodStart> = (0..MANY_STARTS).map(|_| recorder.pod_start()).collect();
        recorder.node(Level::Normal, "Starting", "Starting kubelet.");
        let sent_at = requests.recv().await.expect("a request");
        // The age of an event is measured in real time, but its wait elapses in simulated time.
        assert!(sent_at - begun_simulated + begun.elapsed() >= std::time::Duration::from_secs(1));
    }
}
