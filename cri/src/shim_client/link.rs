//! One connection to a shim: sends requests, passes replies to their callers, and queues events.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use coracle_proto::shim::{self, packet, reply, request};
use futures::channel::mpsc;
use prost::Message as _;
use tokio::sync::{oneshot, watch};

use super::error::Error;
use super::socket::{MAX_PACKET, Socket};

type Answer = (reply::Result, Vec<OwnedFd>);

/// The connection; dropping it closes the socket.
#[derive(Debug)]
pub(super) struct Link {
    shared: Arc<Shared>,
    reader: tokio::task::AbortHandle,
    open: watch::Receiver<bool>,
}

#[derive(Debug)]
struct Shared {
    socket: Socket,
    waiting: Mutex<Waiting>,
}

/// The calls that wait for a reply. `calls` is `None` after the connection has ended, so that no new call waits.
#[derive(Debug)]
struct Waiting {
    next: u64,
    calls: Option<HashMap<u64, oneshot::Sender<Answer>>>,
}

// === impl Link ===

impl Link {
    pub(super) fn open(socket: Socket, events: mpsc::UnboundedSender<shim::Event>) -> Self {
        let waiting = Waiting { next: 1, calls: Some(HashMap::new()) };
        let shared = Arc::new(Shared { socket, waiting: Mutex::new(waiting) });
        let (closed, open) = watch::channel(true);
        let reader = coracle_threads::spawn(read(Arc::clone(&shared), events, closed)).abort_handle();
        Self { shared, reader, open }
    }

    /// Waits until the connection has ended.
    pub(super) async fn closed(&self) {
        let mut open = self.open.clone();
        // An error means that the reader has ended.
        let _ = open.wait_for(|open| !open).await;
    }

    /// Sends a request and waits for the reply. If the caller cancels, the late reply is dropped on arrival, with its
    /// descriptors.
    pub(super) async fn call(&self, call: request::Call, fds: Vec<OwnedFd>) -> Result<Answer, Error> {
        let (sender, receiver) = oneshot::channel();
        let id = self.shared.register(sender)?;
        let request = shim::Request { call: Some(call) };
        let packet = shim::Packet { id, body: Some(packet::Body::Request(request)) }.encode_to_vec();
        if packet.len() > MAX_PACKET {
            // The packet is too large: the shim would read only its beginning, and close the connection.
            self.shared.take_call(id);
            return Err(Error::too_large(packet.len(), MAX_PACKET));
        }
        if let Err(error) = self.shared.socket.send(&packet, &fds).await {
            self.shared.take_call(id);
            return Err(match error.raw_os_error() {
                Some(libc::EMSGSIZE) => Error::invalid("send to the shim", &error),
                _ => Error::gone(),
            });
        }
        drop(fds);
        receiver.await.map_err(|_closed| Error::gone())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

// === impl Shared ===

impl Shared {
    fn register(&self, sender: oneshot::Sender<Answer>) -> Result<u64, Error> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let id = waiting.next;
        waiting.next += 1;
        match waiting.calls.as_mut() {
            Some(calls) => calls.insert(id, sender),
            None => return Err(Error::gone()),
        };
        Ok(id)
    }

    fn take_call(&self, id: u64) -> Option<oneshot::Sender<Answer>> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.calls.as_mut().and_then(|calls| calls.remove(&id))
    }

    fn end(&self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.calls = None;
    }
}

async fn read(shared: Arc<Shared>, events: mpsc::UnboundedSender<shim::Event>, closed: watch::Sender<bool>) {
    loop {
        let (bytes, fds) = match shared.socket.receive().await {
            Ok(Some(received)) => received,
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "the connection to a shim ended");
                break;
            }
        };
        let packet = match shim::Packet::decode(bytes.as_slice()) {
            Ok(packet) => packet,
            Err(error) => {
                tracing::warn!(%error, "a shim sent an invalid message");
                break;
            }
        };
        match packet.body {
            Some(packet::Body::Reply(shim::Reply { result })) => {
                let result = result.unwrap_or_else(unknown_reply);
                if let Some(sender) = shared.take_call(packet.id) {
                    // The caller may have stopped waiting.
                    let _ = sender.send((result, fds));
                }
            }
            // The receiver may have been dropped.
            Some(packet::Body::Event(event)) => drop(events.unbounded_send(event)),
            // The packet is of a later version. It is not a reply to a call of this client.
            _ => {}
        }
    }
    shared.end();
    let _ = closed.send(false);
}

/// The result for an unknown reply of a later version, so that the caller does not wait.
fn unknown_reply() -> reply::Result {
    let message = "the shim's answer has an unknown type of a later version".to_owned();
    reply::Result::Error(shim::Error { kind: shim::error::Kind::Unsupported.into(), message })
}

/// Accepts any packets: a waiting call gets a reply or an error.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn fuzz(data: &[u8]) {
    let Ok(tokio) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
    tokio.block_on(async {
        use futures::StreamExt as _;
        let Ok((socket, shim)) = Socket::pair() else { return };
        let (events, mut received) = mpsc::unbounded();
        let link = Link::open(socket, events);
        let call = request::Call::Hello(shim::Hello::default());
        let (first, rest) = data.split_first().unwrap_or((&0, &[]));
        let shim = async move {
            for packet in rest.chunks(usize::from(*first) + 1) {
                drop(shim.send(packet, &[]).await);
            }
            drop(shim);
        };
        let (answer, ()) = tokio::join!(link.call(call, Vec::new()), shim);
        link.closed().await;
        assert!(answer.is_ok() || link.shared.register(oneshot::channel().0).is_err());
        while received.next().await.is_some() {}
    });
}
