//! Events: what happened to an object, for people to read. Written aside, so that nobody waits for them.
//!
//! Shared by the controllers and the scheduler. Knows the API as a [`kube::Client`] and nothing of who records.

use std::borrow::Cow;
use std::collections::HashMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Patch, PatchParams, PostParams, Request};
use kube::{Client, Resource};
use serde_json::json;
use tokio::sync::mpsc;

/// More than this many waiting events are dropped: they are a courtesy.
const WAITING: usize = 1000;
/// So many kinds of event are remembered for counting repeats.
const REMEMBERED: usize = 4096;

/// Takes events in, from any number of recorders.
#[derive(Clone, Debug)]
pub struct Recorder(mpsc::Sender<Note>);

/// How grave an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// All is well.
    Normal,
    /// Somebody should look.
    Warning,
}

/// One event.
#[derive(Clone, Debug)]
pub struct Note {
    /// What it happened to.
    pub about: ObjectReference,
    /// Who says so.
    pub component: Cow<'static, str>,
    /// How grave it is.
    pub kind: Kind,
    /// One word in CamelCase, for programs.
    pub reason: &'static str,
    /// A sentence, for people.
    pub message: String,
}

/// What makes two events repeats of one another.
type Sort = (Option<String>, Cow<'static, str>, &'static str, String);

struct Known {
    name: String,
    count: i32,
}

/// A [`Recorder`] and the task that writes what it takes in.
pub fn recorder(client: Client) -> (Recorder, impl Future<Output = ()> + Send) {
    let (sender, receiver) = mpsc::channel(WAITING);
    (Recorder(sender), write_all(client, receiver))
}

impl Recorder {
    /// Records an event; never waits.
    pub fn record(&self, note: Note) {
        if let Err(error) = self.0.try_send(note) {
            tracing::debug!("event dropped: {error}");
        }
    }
}

async fn write_all(client: Client, mut notes: mpsc::Receiver<Note>) {
    let mut known: HashMap<Sort, Known> = HashMap::new();
    while let Some(note) = notes.recv().await {
        if known.len() >= REMEMBERED {
            known.clear();
        }
        let sort = (note.about.uid.clone(), note.component.clone(), note.reason, note.message.clone());
        let repeated = match known.get_mut(&sort) {
            Some(known) => {
                known.count += 1;
                repeat(&client, &note, known).await
            }
            None => None,
        };
        let result = match repeated {
            Some(result) => result,
            None => first(&client, &note).await.map(|name| {
                known.insert(sort, Known { name, count: 1 });
            }),
        };
        if let Err(error) = result {
            tracing::debug!(reason = note.reason, "event not written: {error}");
        }
    }
}

fn namespace(note: &Note) -> &str {
    note.about.namespace.as_deref().unwrap_or("default")
}

fn events_of(note: &Note) -> Request {
    Request::new(k8s_openapi::api::core::v1::Event::url_path(&(), Some(namespace(note))))
}

async fn first(client: &Client, note: &Note) -> Result<String, kube::Error> {
    let now = Timestamp::now();
    let about = note.about.name.as_deref().unwrap_or_default();
    let name = format!("{about}.{:x}", now.as_nanosecond());
    let event = json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace(note)},
        "involvedObject": note.about,
        "reason": note.reason,
        "message": note.message,
        "type": match note.kind { Kind::Normal => "Normal", Kind::Warning => "Warning" },
        "source": {"component": note.component},
        "reportingComponent": note.component,
        "reportingInstance": "",
        "firstTimestamp": seconds(now),
        "lastTimestamp": seconds(now),
        "count": 1,
    });
    let body = serde_json::to_vec(&event).map_err(kube::Error::SerdeError)?;
    let request = events_of(note).create(&PostParams::default(), body).map_err(kube::Error::BuildRequest)?;
    client.request_text(request).await?;
    Ok(name)
}

/// Counts a repeat up; None when the first event has expired meanwhile.
async fn repeat(client: &Client, note: &Note, known: &Known) -> Option<Result<(), kube::Error>> {
    let patch = json!({
        "count": known.count,
        "lastTimestamp": seconds(Timestamp::now()),
    });
    let request = events_of(note).patch(&known.name, &PatchParams::default(), &Patch::Merge(patch));
    let request = match request {
        Ok(request) => request,
        Err(error) => return Some(Err(kube::Error::BuildRequest(error))),
    };
    match client.request_text(request).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => None,
        result => Some(result.map(drop)),
    }
}

/// A time as the API writes it: whole seconds.
#[must_use]
pub fn seconds(time: Timestamp) -> String {
    Timestamp::from_second(time.as_second()).unwrap_or(time).to_string()
}
