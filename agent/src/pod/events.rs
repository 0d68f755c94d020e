//! Events about pods and the node to the API, as core/v1: equal ones are counted up in one object, and an object that
//! causes too many is quieted. Recording never waits.

mod correlate;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;

use crate::api_health::is_unavailable;

use super::foreign_text::printable;
use correlate::Correlator;

/// Largest message of an event in bytes, as events.k8s.io/v1 has it.
pub(crate) const MESSAGE_MAX: usize = 1024;
/// How many different events are remembered for counting up.
const REMEMBERED: usize = 1024;
const QUEUE: usize = 512;
/// Pause before an event is sent again that the API server did not answer; doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// How serious an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Normal,
    Warning,
}

/// Takes events; cheap to clone.
#[derive(Clone)]
pub(crate) struct Recorder {
    sender: mpsc::Sender<Record>,
    node: Arc<str>,
}

/// Sends what was recorded.
pub(crate) struct Sender {
    client: Client,
    receiver: mpsc::Receiver<Record>,
    node: Arc<str>,
    sent: HashMap<Key, Sent>,
    correlator: Correlator,
}

#[derive(Clone, Debug)]
struct Record {
    about: ObjectReference,
    level: Level,
    reason: &'static str,
    message: String,
    at: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    uid: String,
    path: String,
    reason: &'static str,
    message: String,
}

struct Sent {
    name: String,
    count: i32,
    last: Timestamp,
}

/// A recorder and what has to run for its events to be sent.
pub(crate) fn channel(client: Client, node: &str) -> (Recorder, Sender) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let node: Arc<str> = node.into();
    let recorder = Recorder { sender, node: Arc::clone(&node) };
    let correlator = Correlator::default();
    (recorder, Sender { client, receiver, node, sent: HashMap::new(), correlator })
}

impl Recorder {
    /// Records something about a pod.
    pub(crate) fn pod(&self, pod: &Pod, level: Level, reason: &'static str, message: impl Into<String>) {
        self.record(pod, None, (level, reason), message.into());
    }

    /// Records something about one of its containers.
    pub(crate) fn container(
        &self,
        pod: &Pod,
        container: &str,
        (level, reason): (Level, &'static str),
        message: impl Into<String>,
    ) {
        self.record(pod, Some(container), (level, reason), message.into());
    }

    /// Records something about the node itself.
    pub(crate) fn node(&self, level: Level, reason: &'static str, message: impl Into<String>) {
        let about = ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(self.node.to_string()),
            // As the kubelet has it: `kubectl describe node` looks for that.
            uid: Some(self.node.to_string()),
            ..ObjectReference::default()
        };
        self.send(about, (level, reason), message.into());
    }

    fn record(
        &self,
        pod: &Pod,
        container: Option<&str>,
        (level, reason): (Level, &'static str),
        message: String,
    ) {
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
        let meta = &pod.metadata;
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: meta.namespace.clone(),
            name: meta.name.clone(),
            uid: meta.uid.clone(),
            resource_version: meta.resource_version.clone(),
            field_path,
        };
        self.send(about, (level, reason), message);
    }

    fn send(&self, about: ObjectReference, (level, reason): (Level, &'static str), message: String) {
        let message = printable(&message, MESSAGE_MAX);
        tracing::debug!(node = &*self.node, about = about.name, reason, message, "event");
        let record = Record { about, level, reason, message, at: Timestamp::now() };
        // A full queue means that the API server is away; events are not worth more than the pods.
        let _ = self.sender.try_send(record);
    }
}

impl Sender {
    /// Sends until every recorder is gone.
    pub(crate) async fn run(mut self) {
        while let Some(mut record) = self.receiver.recv().await {
            if let Some(key) = self.correlator.admit(&mut record) {
                self.deliver(&key, &record).await;
            }
        }
    }

    /// Sends an event, and again until the API server is there: it tells of what the node did alone.
    async fn deliver(&mut self, key: &Key, record: &Record) {
        let mut pause = FIRST_PAUSE;
        while let Err(error) = self.send(key, record).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "event not taken");
            if !is_unavailable(&error) {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn send(&mut self, key: &Key, record: &Record) -> Result<(), kube::Error> {
        let namespace = record.about.namespace.as_deref().unwrap_or("default");
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        if let Some(sent) = self.sent.get_mut(key) {
            let count = sent.count + 1;
            let mut patch = json!({"count": count, "lastTimestamp": Time(record.at)});
            if key.message != record.message {
                patch["message"] = printable(&record.message, MESSAGE_MAX).into();
            }
            match api.patch(&sent.name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => return Err(error),
                Ok(_) => {
                    (sent.count, sent.last) = (count, record.at);
                    return Ok(());
                }
            }
        }
        let event = event(record, &self.node);
        let name = event.metadata.name.clone().unwrap_or_default();
        api.create(&PostParams::default(), &event).await?;
        self.forget_oldest();
        self.sent.insert(key.clone(), Sent { name, count: 1, last: record.at });
        Ok(())
    }

    fn forget_oldest(&mut self) {
        if self.sent.len() < REMEMBERED {
            return;
        }
        let mut times: Vec<Timestamp> = self.sent.values().map(|s| s.last).collect();
        times.sort();
        let middle = times[times.len() / 2];
        self.sent.retain(|_, sent| sent.last > middle);
    }
}

impl Record {
    fn key(&self) -> Key {
        Key {
            uid: self.about.uid.clone().unwrap_or_default(),
            path: self.about.field_path.clone().unwrap_or_default(),
            reason: self.reason,
            message: self.message.clone(),
        }
    }
}

fn event(record: &Record, node: &str) -> Event {
    let at = Timestamp::from_second(record.at.as_second()).unwrap_or(record.at);
    let object = record.about.name.as_deref().unwrap_or_default();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{object}.{:x}", record.at.as_nanosecond())),
            namespace: record.about.namespace.clone(),
            ..ObjectMeta::default()
        },
        involved_object: record.about.clone(),
        reason: Some(record.reason.to_owned()),
        message: Some(printable(&record.message, MESSAGE_MAX)),
        type_: Some(match record.level {
            Level::Normal => "Normal".to_owned(),
            Level::Warning => "Warning".to_owned(),
        }),
        count: Some(1),
        first_timestamp: Some(Time(at)),
        last_timestamp: Some(Time(at)),
        source: Some(EventSource { component: Some("kubelet".to_owned()), host: Some(node.to_owned()) }),
        reporting_component: Some("kubelet".to_owned()),
        reporting_instance: Some(node.to_owned()),
        ..Event::default()
    }
}
