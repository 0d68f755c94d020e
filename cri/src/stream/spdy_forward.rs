//! Port-forward over SPDY. For each connection the client opens two streams with the same `requestid`, one for errors and
//! one for data. Headers of the streams name the port.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use coracle_proto::cri;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::forward::{FORWARD_MEMORY, Forward, Forwarder, PortMessage};
use super::queue::{QueueMemory, QueueSender};
use super::spdy::{Event, Session, Writer, header};

const BACKLOG: usize = 2;
/// Maximum connections of a client. Each has two streams and a connection in the pod.
const MAX_CONNECTIONS: usize = 512;
/// Maximum bytes of a request id, which is kept until the second stream is open. Clients use decimal numbers.
const MAX_REQUEST_ID: usize = 128;

/// The streams of all connections.
#[derive(Debug)]
struct Connections {
    /// A permit for each connection, from its first stream until both sides are closed.
    permits: Arc<Semaphore>,
    /// Error streams that wait for their data stream, by request id.
    errors: HashMap<String, (u32, OwnedSemaphorePermit)>,
    /// The senders for the client's data, by data stream.
    inputs: HashMap<u32, QueueSender<Bytes>>,
}

/// Data stream and error stream of a connection.
type Pair = (u32, u32);

/// The result of a new stream.
#[derive(Debug)]
enum Opened {
    /// The first stream of a connection.
    Half,
    /// The second stream of a connection, with the port.
    Whole { pair: Pair, port: u16, permit: OwnedSemaphorePermit },
    /// The stream is invalid or exceeds a limit.
    Refused,
}

/// Serves a client until it disconnects.
pub(super) async fn forward(forwarder: &Forwarder, request: &cri::PortForwardRequest, mut session: Session) {
    let (back, mut answers) = mpsc::channel(BACKLOG);
    let memory = QueueMemory::new(FORWARD_MEMORY);
    let writer = session.writer.clone();
    let answering = async {
        while let Some((pair, what)) = answers.recv().await {
            answer(&writer, pair, what).await;
        }
    };
    let mut connections = Connections::new(MAX_CONNECTIONS);
    let serving = async {
        while let Some(event) = session.events.recv().await {
            match event {
                Event::Opened { id, headers } => match connections.opened(id, &headers) {
                    Opened::Half => {}
                    Opened::Whole { pair, port, permit } => {
                        let sandbox_id = request.pod_sandbox_id.clone();
                        let back = back.clone();
                        let forward = Forward { sandbox_id, port, key: pair, back, _permit: Some(permit) };
                        connections.inputs.insert(pair.0, forward.open(forwarder, &memory));
                    }
                    Opened::Refused => drop(session.writer.refuse(id).await),
                },
                Event::Data { id, bytes, fin } => connections.data(id, bytes, fin).await,
                Event::Reset { id } => connections.reset(id),
            }
        }
    };
    tokio::select! {
        // `serving` ends when the client is gone; its remaining data is dropped. `answering` does not end by itself,
        // because `back` stays open.
        () = serving => {}
        () = answering => {}
    }
}

async fn answer(writer: &Writer, (data, error): Pair, what: PortMessage) {
    match what {
        PortMessage::Data(bytes) => writer.data(data, bytes).await,
        PortMessage::End => writer.finish(data).await,
        PortMessage::Failed(text) => {
            writer.data(error, Bytes::from(text)).await;
            writer.reset(data).await
        }
        PortMessage::Closed => writer.finish(error).await,
    };
}

// === impl Connections ===

impl Connections {
    fn new(most: usize) -> Self {
        let permits = Arc::new(Semaphore::new(most));
        Self { permits, errors: HashMap::new(), inputs: HashMap::new() }
    }

    /// Adds a stream. Both streams of a request id make a connection.
    fn opened(&mut self, id: u32, headers: &[(String, String)]) -> Opened {
        // Removes closed connections, even if the client has not ended its stream.
        self.inputs.retain(|_, input| !input.is_closed());
        let request = header(headers, "requestid").to_owned();
        if request.len() > MAX_REQUEST_ID {
            return Opened::Refused;
        }
        if header(headers, "streamtype") == "error" {
            let Ok(permit) = self.permits.clone().try_acquire_owned() else { return Opened::Refused };
            self.errors.insert(request, (id, permit));
            return Opened::Half;
        }
        let Some((error, permit)) = self.errors.remove(&request) else { return Opened::Refused };
        let Ok(port) = header(headers, "port").parse() else { return Opened::Refused };
        Opened::Whole { pair: (id, error), port, permit }
    }

    fn reset(&mut self, id: u32) {
        self.inputs.remove(&id);
        self.errors.retain(|_, (error, _)| *error != id);
    }

    async fn data(&mut self, id: u32, bytes: Bytes, fin: bool) {
        if !bytes.is_empty()
            && let Some(input) = self.inputs.get(&id)
            && !input.send(bytes).await
        {
            self.inputs.remove(&id);
        }
        if fin {
            self.inputs.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::super::queue::queue;
    use super::*;

    fn headers(kind: &str, request: &str) -> Vec<(String, String)> {
        [("streamtype", kind), ("port", "80"), ("requestid", request)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into()
    }

    fn pair(opened: Opened) -> Option<Pair> {
        match opened {
            Opened::Whole { pair, port: 80, .. } => Some(pair),
            _ => None,
        }
    }

    #[test]
    fn two_streams_with_one_request_id_are_a_connection() {
        let mut connections = Connections::new(9);
        assert!(matches!(connections.opened(1, &headers("error", "0")), Opened::Half));
        assert!(matches!(connections.opened(3, &headers("error", "1")), Opened::Half));
        assert_eq!(pair(connections.opened(5, &headers("data", "1"))), Some((5, 3)));
        assert_eq!(pair(connections.opened(7, &headers("data", "0"))), Some((7, 1)));
        assert!(matches!(connections.opened(9, &headers("data", "9")), Opened::Refused));
    }

    #[test]
    fn the_number_of_connections_is_limited() {
        let mut connections = Connections::new(2);
        assert!(matches!(connections.opened(1, &headers("error", "0")), Opened::Half));
        assert!(matches!(connections.opened(3, &headers("error", "1")), Opened::Half));
        assert!(matches!(connections.opened(5, &headers("error", "2")), Opened::Refused));
        // A reset and a closed connection free their permits.
        connections.reset(1);
        assert!(matches!(connections.opened(7, &headers("error", "3")), Opened::Half));
        assert!(matches!(connections.opened(9, &headers("error", "4")), Opened::Refused));
        let whole = connections.opened(11, &headers("data", "1"));
        assert!(matches!(connections.opened(13, &headers("error", "5")), Opened::Refused));
        drop(whole);
        assert!(matches!(connections.opened(15, &headers("error", "6")), Opened::Half));
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_does_not_read_takes_bounded_memory() {
        let memory = QueueMemory::new(FORWARD_MEMORY);
        let mut connections = Connections::new(9);
        let mut ports = Vec::new();
        for id in [1, 3] {
            let (input, port) = queue(&memory);
            connections.inputs.insert(id, input);
            ports.push(port);
        }
        let mut sent = 0;
        for id in [1, 3].into_iter().cycle().take(100) {
            let data = connections.data(id, Bytes::from(vec![0; 64 << 10]), false);
            if timeout(Duration::from_secs(1), data).await.is_err() {
                break;
            }
            sent += 64 << 10;
        }
        assert_eq!(sent, FORWARD_MEMORY);
        // A closed connection does not wait, and releases what it holds.
        ports.remove(0);
        connections.data(1, Bytes::from(vec![0; 64 << 10]), false).await;
        assert!(!connections.inputs.contains_key(&1));
        connections.data(3, Bytes::from(vec![0; 64 << 10]), false).await;
        assert!(connections.inputs.contains_key(&3));
    }

    #[test]
    fn request_ids_take_little_memory() {
        let mut connections = Connections::new(9);
        let id = "1".repeat(MAX_REQUEST_ID);
        assert!(matches!(connections.opened(1, &headers("error", &id)), Opened::Half));
        let longer = format!("{id}1");
        assert!(matches!(connections.opened(3, &headers("error", &longer)), Opened::Refused));
        assert_eq!(connections.errors.len(), 1);
    }
}
