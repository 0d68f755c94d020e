//! Nodes that run no container: their pods are Running and Ready as soon as they are bound, and gone as soon as they are
//! deleted.

use std::collections::HashMap;
use std::io::{BufRead, Read};
use std::sync::{Arc, Mutex, mpsc};

use clap::Args;
use serde::Deserialize;

use crate::api::{Request, Server, Stream, body, head};

#[derive(Args)]
pub(crate) struct Nodes {
    #[command(flatten)]
    server: Server,
    /// Namespace of the pods.
    #[arg(long)]
    namespace: String,
    /// Status of a pod that runs, as JSON.
    #[arg(long)]
    status: String,
    /// Connections for the requests of all nodes.
    #[arg(long, default_value_t = 4)]
    clients: usize,
}

/// An event of the watch.
#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    object: Pod,
}

#[derive(Deserialize)]
struct Pod {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    #[serde(default)]
    name: String,
    deletion_timestamp: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    node_name: Option<String>,
}

/// The next step of a node for a pod.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Run,
    Remove,
}

/// Prints `ready` when the watch has begun, and acts until standard input closes.
pub(crate) fn run(arguments: Nodes) {
    let (steps, queue) = mpsc::channel();
    let shared = Arc::new((arguments, Mutex::new(queue)));
    for _ in 0..shared.0.clients {
        let shared = Arc::clone(&shared);
        std::thread::spawn(move || act(&shared.0, &shared.1));
    }
    std::thread::spawn(move || follow(&shared.0, &steps));
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// Sends one step for each pod that was bound, and one for each pod that was deleted.
fn follow(arguments: &Nodes, steps: &mpsc::Sender<(Step, String)>) {
    let config = arguments.server.config();
    let mut stream = arguments.server.connect(&config);
    let path = format!("/api/v1/namespaces/{}/pods?watch=1", arguments.namespace);
    arguments.server.send(&mut stream, &Request::get(&path));
    let (status, _) = head(&mut stream);
    assert_eq!(status, 200, "watch {path}");
    println!("ready");
    let (mut line, mut last) = (Vec::new(), HashMap::new());
    loop {
        line.clear();
        assert!(stream.read_until(b'\n', &mut line).unwrap() > 0, "the watch has ended");
        // The other lines are sizes of chunks.
        let Ok(Event { kind, object }) = serde_json::from_slice::<Event>(&line) else { continue };
        let name = object.metadata.name;
        if kind == "DELETED" {
            last.remove(&name);
            continue;
        }
        if object.spec.node_name.is_none() {
            continue;
        }
        let step = if object.metadata.deletion_timestamp.is_some() { Step::Remove } else { Step::Run };
        if last.insert(name.clone(), step) != Some(step) {
            steps.send((step, name)).unwrap();
        }
    }
}

/// Sends the requests of steps, one after the other.
fn act(arguments: &Nodes, steps: &Mutex<mpsc::Receiver<(Step, String)>>) {
    let config = arguments.server.config();
    let mut stream = arguments.server.connect(&config);
    let status = format!("{{\"status\":{}}}", arguments.status);
    loop {
        let step = steps.lock().unwrap().recv();
        let Ok((step, name)) = step else { return };
        let path = format!("/api/v1/namespaces/{}/pods/{name}", arguments.namespace);
        let code = match step {
            Step::Run => {
                let path = format!("{path}/status");
                let media = "application/strategic-merge-patch+json";
                let request = Request { method: "PATCH", path: &path, media, body: &status };
                status_of(arguments, &mut stream, &request)
            }
            Step::Remove => {
                let path = format!("{path}?gracePeriodSeconds=0");
                let request = Request { method: "DELETE", ..Request::get(&path) };
                status_of(arguments, &mut stream, &request)
            }
        };
        assert!(code < 300 || code == 404, "{path}: {code}");
    }
}

/// Sends a request. Returns the status code of the response.
fn status_of(arguments: &Nodes, stream: &mut Stream, request: &Request<'_>) -> u16 {
    arguments.server.send(stream, request);
    let (status, length) = head(stream);
    body(stream, length);
    status
}
