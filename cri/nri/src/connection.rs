//! The connection to one plugin. Both sides can call each other. One task reads and another task writes. Both tasks end
//! when one side closes the connection. Pending calls then fail immediately.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_proto::ttrpc::{Request, Response, Status};
use futures::future::BoxFuture;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::mux;
use crate::ttrpc::{Assembler, Body, Frame, FrameError, code};

/// Maximum messages queued for writing.
const WRITE_QUEUE: usize = 16;
/// Maximum calls of the plugin queued for serving.
const SERVE_QUEUE: usize = 32;

/// A service that the peer may call.
pub trait Service: Send + Sync + 'static {
    /// Serves one call.
    fn serve(&self, request: Request) -> BoxFuture<'_, Result<Vec<u8>, Status>>;
}

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The connection is closed.
    #[error("the connection is closed")]
    Closed,
    /// There was no response in time.
    #[error("no response within {0:?}")]
    Timeout(Duration),
    /// The request is too long.
    #[error("cannot send the request")]
    Frame(#[source] FrameError),
    /// The response is not a valid message.
    #[error("cannot decode the response")]
    Decode(#[source] prost::DecodeError),
    /// The peer returned an error.
    #[error("{message} (code {code})")]
    Status {
        /// A gRPC status code.
        code: i32,
        /// The error message of the peer.
        message: String,
    },
}

/// A connection, shared by all callers.
#[derive(Debug)]
pub struct Connection {
    writing: mpsc::Sender<Vec<u8>>,
    calls: Mutex<HashMap<u32, oneshot::Sender<Response>>>,
    last: AtomicU32,
    closed: CancellationToken,
    /// Number of the logical connection for calls of this side. Another logical connection is for calls of the peer.
    calling: u32,
}

/// Removes a pending call when its caller drops it.
struct RemoveOnDrop<'a>(&'a Connection, u32);

// === impl CallError ===

impl CallError {
    /// Whether the plugin has to be dropped, because its connection is closed or it gave no valid response in time.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Closed | Self::Timeout(_) | Self::Decode(_))
    }

    /// Whether the peer does not implement the method.
    #[must_use]
    pub fn is_unimplemented(&self) -> bool {
        matches!(self, Self::Status { code, .. } if *code == code::UNIMPLEMENTED)
    }
}

// === impl Connection ===

impl Connection {
    /// Opens a connection over `stream`. Calls of this side use the logical connection `calling`. The other logical
    /// connection is for calls of the peer.
    pub fn open<S>(stream: S, calling: u32, service: Arc<dyn Service>) -> Arc<Self>
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let (mut reading, mut writing) = tokio::io::split(stream);
        let (to_write, mut waiting) = mpsc::channel::<Vec<u8>>(WRITE_QUEUE);
        let connection = Arc::new(Self {
            writing: to_write,
            calls: Mutex::default(),
            last: AtomicU32::new(1),
            closed: CancellationToken::new(),
            calling,
        });
        let closed = connection.closed.clone();
        tokio::spawn(async move {
            let write = async {
                while let Some(bytes) = waiting.recv().await {
                    if let Err(error) = writing.write_all(&bytes).await {
                        debug!(%error, "cannot write to a plugin");
                        return;
                    }
                }
            };
            closed.run_until_cancelled(write).await;
            closed.cancel();
            // Notifies the plugin of the end, even while the reading half is open.
            let _gone = writing.shutdown().await;
        });
        let (closed, reader) = (connection.closed.clone(), Arc::downgrade(&connection));
        let served = CallQueue::start(&connection, service);
        tokio::spawn(async move {
            let read = async {
                let mut assemblers = [Assembler::default(), Assembler::default()];
                while let Ok(Some((from, bytes))) = mux::read(&mut reading).await {
                    let Some(connection) = reader.upgrade() else { return };
                    if let Err(error) = connection.receive(&served, &mut assemblers, from, &bytes) {
                        debug!(%error, "invalid ttrpc message from a plugin");
                        return;
                    }
                }
            };
            closed.run_until_cancelled(read).await;
            closed.cancel();
            if let Some(connection) = reader.upgrade() {
                connection.calls().clear();
            }
        });
        connection
    }

    fn receive(
        &self,
        served: &CallQueue,
        assemblers: &mut [Assembler; 2],
        from: u32,
        bytes: &[u8],
    ) -> Result<(), FrameError> {
        let [answers, requests] = assemblers;
        let (assembler, wants_answers) = match from {
            mux::PLUGIN | mux::RUNTIME if from == self.calling => (answers, true),
            mux::PLUGIN | mux::RUNTIME => (requests, false),
            // The frame is for an unknown logical connection.
            _ => return Ok(()),
        };
        assembler.push(bytes);
        while let Some(frame) = assembler.pop()? {
            match frame.body {
                Body::Response(response) if wants_answers => {
                    if let Some(caller) = self.calls().remove(&frame.stream) {
                        // The caller may not wait any more.
                        let _late = caller.send(response);
                    }
                }
                Body::Request(request) if !wants_answers => served.queue(frame.stream, request),
                Body::Request(_) | Body::Response(_) => {
                    debug!("message of a plugin on the wrong logical connection")
                }
            }
        }
        Ok(())
    }

    /// Calls a method and waits for its response, at most for `limit`.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn call<A: Message + Default>(
        &self,
        service: &str,
        method: &str,
        request: &impl Message,
        limit: Duration,
    ) -> Result<A, CallError> {
        let deadline = Instant::now() + limit;
        let stream = self.last.fetch_add(2, Ordering::Relaxed);
        let request = Request {
            service: service.to_owned(),
            method: method.to_owned(),
            payload: request.encode_to_vec(),
            timeout_nano: i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX),
            metadata: Vec::new(),
        };
        let frame = Frame { stream, body: Body::Request(request) };
        let bytes = frame.encode().map_err(CallError::Frame)?;
        let (answered, answer) = oneshot::channel();
        self.calls().insert(stream, answered);
        let _remove = RemoveOnDrop(self, stream);
        let exchange = async {
            self.send(&bytes, self.calling).await?;
            tokio::select! {
                answer = answer => answer.map_err(|_dropped| CallError::Closed),
                () = self.closed.cancelled() => Err(CallError::Closed),
            }
        };
        let response = timeout_at(deadline, exchange).await.map_err(|_late| CallError::Timeout(limit))??;
        match response.status {
            Some(Status { code, message }) if code != 0 => Err(CallError::Status { code, message }),
            _ => A::decode(response.payload.as_slice()).map_err(CallError::Decode),
        }
    }

    /// Queues a complete message. Only the writer task writes, so a cancelled caller cannot truncate a
    /// message.
    async fn send(&self, message: &[u8], connection: u32) -> Result<(), CallError> {
        let bytes = mux::frames(connection, message);
        tokio::select! {
            sent = self.writing.send(bytes) => sent.map_err(|_gone| CallError::Closed),
            () = self.closed.cancelled() => Err(CallError::Closed),
        }
    }

    /// Closes the connection.
    pub fn close(&self) {
        self.closed.cancel();
    }

    /// Returns when the connection is closed.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Whether the connection is closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<u32, oneshot::Sender<Response>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

impl Drop for RemoveOnDrop<'_> {
    fn drop(&mut self) {
        self.0.calls().remove(&self.1);
    }
}

/// Serves the peer's calls, one after the other, in a separate task, so that the reader never blocks.
struct CallQueue {
    waiting: mpsc::Sender<(u32, Request)>,
    connection: std::sync::Weak<Connection>,
}

// === impl CallQueue ===

impl CallQueue {
    fn start(connection: &Arc<Connection>, service: Arc<dyn Service>) -> Self {
        let (waiting, mut requests) = mpsc::channel::<(u32, Request)>(SERVE_QUEUE);
        let (weak, closed) = (Arc::downgrade(connection), connection.closed.clone());
        let server = weak.clone();
        tokio::spawn(async move {
            let serve = async {
                while let Some((stream, request)) = requests.recv().await {
                    let result = service.serve(request).await;
                    let Some(connection) = server.upgrade() else { return };
                    connection.answer(stream, result).await;
                }
            };
            closed.run_until_cancelled(serve).await;
        });
        Self { waiting, connection: weak }
    }

    fn queue(&self, stream: u32, request: Request) {
        if self.waiting.try_send((stream, request)).is_ok() {
            return;
        }
        let Some(connection) = self.connection.upgrade() else { return };
        let status = Status { code: code::RESOURCE_EXHAUSTED, message: "too many calls at once".to_owned() };
        if let Ok(bytes) = Frame::answer(stream, Err(status)).encode() {
            // If the peer does not read the refusals, they are dropped.
            let _full = connection.writing.try_send(mux::frames(connection.serving(), &bytes));
        }
    }
}

impl Connection {
    fn serving(&self) -> u32 {
        if self.calling == mux::PLUGIN { mux::RUNTIME } else { mux::PLUGIN }
    }

    async fn answer(&self, stream: u32, result: Result<Vec<u8>, Status>) {
        let bytes = Frame::answer(stream, result).encode().or_else(|error| {
            let status = Status { code: code::RESOURCE_EXHAUSTED, message: error.to_string() };
            Frame::answer(stream, Err(status)).encode()
        });
        if let Ok(bytes) = bytes {
            // On a closed connection the response is dropped.
            let _closed = self.send(&bytes, self.serving()).await;
        }
    }
}

#[cfg(test)]
mod tests;
