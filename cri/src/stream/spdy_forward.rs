//! Port-forward over SPDY: for each connection the client opens two streams with the same
//! `requestid`, one for errors and one for data, that name the port.

use std::collections::HashMap;

use bytes::Bytes;
use coracle_proto::cri;
use tokio::sync::mpsc;

use super::forward::{Back, Forward};
use super::spdy::{Event, Session, Writer, header};
use crate::runtime::Runtime;

const BACKLOG: usize = 16;

/// The streams of all connections.
#[derive(Debug, Default)]
struct Connections {
    /// Error streams that wait for their data stream, by request.
    errors: HashMap<String, u32>,
    /// Where the client's bytes go, by data stream.
    inputs: HashMap<u32, mpsc::Sender<Bytes>>,
}

/// Data stream and error stream of a connection.
type Pair = (u32, u32);

/// Serves a client until it closes.
pub(super) async fn forward(runtime: &Runtime, request: &cri::PortForwardRequest, mut session: Session) {
    let (back, mut answers) = mpsc::channel(BACKLOG);
    let writer = session.writer.clone();
    let answering = tokio::spawn(async move {
        while let Some((pair, what)) = answers.recv().await {
            answer(&writer, pair, what).await;
        }
    });
    let mut connections = Connections::default();
    while let Some(event) = session.events.recv().await {
        match event {
            Event::Opened { id, headers } => {
                if let Some((pair, port)) = connections.opened(id, &headers) {
                    let sandbox_id = request.pod_sandbox_id.clone();
                    let forward = Forward { sandbox_id, port, key: pair, back: back.clone() };
                    connections.inputs.insert(pair.0, forward.open(runtime));
                }
            }
            Event::Data { id, bytes, fin } => connections.data(id, bytes, fin).await,
            Event::Reset { id } => drop(connections.inputs.remove(&id)),
        }
    }
    answering.abort();
}

async fn answer(writer: &Writer, (data, error): Pair, what: Back) {
    match what {
        Back::Data(bytes) => writer.data(data, bytes).await,
        Back::End => writer.finish(data).await,
        Back::Failed(text) => {
            writer.data(error, Bytes::from(text)).await;
            writer.reset(data).await
        }
        Back::Closed => writer.finish(error).await,
    };
}

// === impl Connections ===

impl Connections {
    /// Notes a stream. Both of a request make a connection to the port.
    fn opened(&mut self, id: u32, headers: &[(String, String)]) -> Option<(Pair, u16)> {
        let request = header(headers, "requestid").to_owned();
        if header(headers, "streamtype") == "error" {
            self.errors.insert(request, id);
            return None;
        }
        let error = self.errors.remove(&request)?;
        let port = header(headers, "port").parse().ok()?;
        Some(((id, error), port))
    }

    async fn data(&mut self, id: u32, bytes: Bytes, fin: bool) {
        if !bytes.is_empty()
            && let Some(input) = self.inputs.get(&id)
            && input.send(bytes).await.is_err()
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
    use super::*;

    fn headers(kind: &str, request: &str) -> Vec<(String, String)> {
        [("streamtype", kind), ("port", "80"), ("requestid", request)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into()
    }

    #[test]
    fn two_streams_of_one_request_are_a_connection() {
        let mut connections = Connections::default();
        assert_eq!(connections.opened(1, &headers("error", "0")), None);
        assert_eq!(connections.opened(3, &headers("error", "1")), None);
        assert_eq!(connections.opened(5, &headers("data", "1")), Some(((5, 3), 80)));
        assert_eq!(connections.opened(7, &headers("data", "0")), Some(((7, 1), 80)));
        assert_eq!(connections.opened(9, &headers("data", "9")), None);
    }
}
