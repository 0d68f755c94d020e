//! Exec and attach over SPDY. The client opens one stream each for error, stdin, stdout, stderr and resize, named by the
//! header `streamtype`. The status is sent on the error stream.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::debug;

use super::client::{self, Client, Input, Output};
use super::queue::{QueueReceiver, QueueSender};
use super::spdy::{Event, Session, Writer, header};
use super::token::StreamRequest;

/// Timeout for the client to open all of its streams.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Capacity of the queue of outputs.
const BACKLOG: usize = 2;
/// Maximum bytes that a client may send before all streams are open. Real clients open the streams first.
const MAX_EARLY_BYTES: usize = 64 << 10;
/// Maximum events before all streams are open.
const MAX_EARLY_EVENTS: usize = 256;
/// Maximum bytes of a terminal size.
const MAX_SIZE_BYTES: usize = 1024;

/// The streams that a client will open in addition to the error stream.
pub(super) fn expected_streams(ticket: &StreamRequest) -> Vec<&'static str> {
    let (stdin, stdout, stderr, terminal) = match ticket {
        StreamRequest::Exec(request) => (request.stdin, request.stdout, request.stderr, request.tty),
        StreamRequest::Attach(request) => (request.stdin, request.stdout, request.stderr, request.tty),
        StreamRequest::PortForward(_) => (false, false, false, false),
    };
    // A terminal has a size, and one common output.
    [("stdin", stdin), ("stdout", stdout), ("stderr", stderr && !terminal), ("resize", terminal)]
        .into_iter()
        .filter_map(|(kind, wanted)| wanted.then_some(kind))
        .collect()
}

/// Ids of the opened streams; 0 if not open.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Opened {
    error: u32,
    stdin: u32,
    stdout: u32,
    stderr: u32,
    resize: u32,
}

// === impl Opened ===

impl Opened {
    fn note(&mut self, kind: &str, id: u32) {
        match kind {
            "error" => self.error = id,
            "stdin" => self.stdin = id,
            "stdout" => self.stdout = id,
            "stderr" => self.stderr = id,
            "resize" => self.resize = id,
            _ => {}
        }
    }

    fn complete(&self, wanted: &[&str]) -> bool {
        let is_open = |kind: &str| match kind {
            "stdin" => self.stdin != 0,
            "stdout" => self.stdout != 0,
            "stderr" => self.stderr != 0,
            _ => self.resize != 0,
        };
        self.error != 0 && wanted.iter().all(|kind| is_open(kind))
    }
}

/// Serves the client of a command.
pub(super) async fn command(mut session: Session, wanted: &[&str], run: impl AsyncFnOnce(Client)) {
    let mut early = Vec::new();
    let Ok(Some(opened)) = timeout(OPEN_TIMEOUT, open(&mut session, wanted, &mut early)).await else {
        return;
    };
    let Session { events, writer, connection } = session;
    let (input_sender, input) = client::input_queue();
    let (output, output_receiver) = mpsc::channel(BACKLOG);
    let receiving = coracle_threads::spawn(receive(events, early, opened.clone(), input_sender));
    let sending = coracle_threads::spawn(send(writer, opened, output_receiver));
    run(Client { input, output }).await;
    // The end of `send` drops the writer: the connection closes when the client has read everything.
    let _sent = sending.await;
    receiving.abort();
    // The caller closes the connection of a client that does not read.
    let _closed = connection.await;
}

/// Waits for all streams. Other events are kept in `early`. `None` if the client disconnects, or sends too much.
async fn open(session: &mut Session, wanted: &[&str], early: &mut Vec<Event>) -> Option<Opened> {
    let mut opened = Opened::default();
    let mut kept = 0;
    while !opened.complete(wanted) {
        match session.events.recv().await? {
            Event::Opened { id, headers } => opened.note(header(&headers, "streamtype"), id),
            other => {
                if let Event::Data { bytes, .. } = &other {
                    kept += bytes.len();
                }
                early.push(other);
            }
        }
        if kept > MAX_EARLY_BYTES || early.len() > MAX_EARLY_EVENTS {
            debug!("closed a SPDY connection: too much data before all streams were open");
            return None;
        }
    }
    Some(opened)
}

async fn receive(
    mut events: QueueReceiver<Event>,
    early: Vec<Event>,
    opened: Opened,
    input: QueueSender<Input>,
) {
    let mut early = early.into_iter();
    let mut sizes = BytesMut::new();
    loop {
        let event = match early.next() {
            Some(event) => event,
            None => match events.recv().await {
                Some(event) => event,
                None => return,
            },
        };
        for decoded in decode(&event, &opened, &mut sizes) {
            let _ended = input.send(decoded).await;
        }
    }
}

/// Converts an event to inputs of a command. A terminal size can arrive in pieces; it ends with a line break.
fn decode(event: &Event, opened: &Opened, sizes: &mut BytesMut) -> Vec<Input> {
    let mut inputs = Vec::new();
    match event {
        Event::Data { id, bytes, fin } if *id == opened.stdin => {
            if !bytes.is_empty() {
                inputs.push(Input::Stdin(bytes.clone()));
            }
            if *fin {
                inputs.push(Input::StdinClosed);
            }
        }
        Event::Reset { id } if *id == opened.stdin => inputs.push(Input::StdinClosed),
        Event::Data { id, bytes, .. } if *id == opened.resize => {
            sizes.extend_from_slice(bytes);
            while let Some(end) = sizes.iter().position(|byte| *byte == b'\n') {
                let line = sizes.split_to(end + 1);
                inputs.extend(client::resize(&line));
            }
            // Longer data without a line break is invalid.
            if sizes.len() > MAX_SIZE_BYTES {
                sizes.clear();
            }
        }
        Event::Data { .. } | Event::Reset { .. } | Event::Opened { .. } => {}
    }
    inputs
}

async fn send(writer: Writer, opened: Opened, mut output: mpsc::Receiver<Output>) {
    let mut status = Bytes::new();
    while let Some(output) = output.recv().await {
        let sent = match output {
            Output::Stdout(bytes) => writer.data(opened.stdout, bytes).await,
            Output::Stderr(bytes) => writer.data(opened.stderr, bytes).await,
            Output::Status(bytes) => {
                status = bytes;
                true
            }
        };
        if !sent {
            return;
        }
    }
    for id in [opened.stdout, opened.stderr] {
        if id != 0 {
            writer.finish(id).await;
        }
    }
    writer.data(opened.error, status).await;
    writer.finish(opened.error).await;
}

/// The resize stream of a terminal, in pieces of any length. The first byte is the length of a piece.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let (first, bytes) = data.split_first().unwrap_or((&0, &[]));
    let opened = Opened { stdin: 1, resize: 3, ..Opened::default() };
    let mut sizes = BytesMut::new();
    for piece in bytes.chunks(usize::from(*first) + 1) {
        let event = Event::Data { id: opened.resize, bytes: Bytes::copy_from_slice(piece), fin: false };
        let inputs = decode(&event, &opened, &mut sizes);
        assert!(inputs.iter().all(|input| matches!(input, Input::Resize { .. })), "{inputs:?}");
        assert!(sizes.len() <= MAX_SIZE_BYTES, "{} bytes of one size are kept", sizes.len());
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[test]
    fn all_expected_streams_must_be_open() {
        let request = coracle_proto::cri::ExecRequest {
            stdin: true,
            stdout: true,
            stderr: true,
            tty: true,
            ..Default::default()
        };
        let wanted = expected_streams(&StreamRequest::Exec(request));
        assert_eq!(wanted, ["stdin", "stdout", "resize"]);
        let mut opened = Opened::default();
        for (kind, id) in [("error", 1), ("stdin", 3), ("stdout", 5)] {
            opened.note(kind, id);
        }
        assert!(!opened.complete(&wanted));
        opened.note("resize", 7);
        assert!(opened.complete(&wanted));
    }

    #[tokio::test]
    async fn a_client_that_sends_too_much_before_its_streams_are_open_is_dropped() {
        for size in [32 << 10, 0] {
            let (client, server) = tokio::io::duplex(64 << 10);
            let session = Session::open(server);
            let (from, mut to) = tokio::io::split(client);
            // A data frame on stream 3, repeatedly.
            let writing = tokio::spawn(async move {
                let mut frame = vec![0, 0, 0, 3];
                frame.extend_from_slice(&u32::try_from(size).unwrap().to_be_bytes());
                frame.resize(8 + size, b'x');
                while to.write_all(&frame).await.is_ok() {}
            });
            let served = command(session, &["stdin"], async |_client| panic!("its streams are not open"));
            // The client is dropped long before the timeout.
            timeout(OPEN_TIMEOUT / 2, served).await.expect("the client is dropped");
            writing.abort();
            drop(from);
        }
    }

    #[test]
    fn a_size_in_pieces_is_parsed() {
        let opened = Opened { stdin: 3, resize: 7, ..Default::default() };
        let mut sizes = BytesMut::new();
        let piece = |text: &'static str| Event::Data {
            id: 7,
            bytes: Bytes::from_static(text.as_bytes()),
            fin: false,
        };
        assert!(decode(&piece("{\"Width\":80,"), &opened, &mut sizes).is_empty());
        let inputs = decode(&piece("\"Height\":24}\n"), &opened, &mut sizes);
        assert_eq!(inputs, [Input::Resize { width: 80, height: 24 }]);
        let last = Event::Data { id: 3, bytes: Bytes::from_static(b"x"), fin: true };
        let inputs = decode(&last, &opened, &mut sizes);
        assert_eq!(inputs, [Input::Stdin(Bytes::from_static(b"x")), Input::StdinClosed]);
    }
}
