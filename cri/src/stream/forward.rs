//! One forwarded connection between a client and a port in a pod, for all transports.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use coracle_connections::Share;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::sleep;

use super::queue::{QueueMemory, QueueReceiver, QueueSender, queue};
use crate::error::Error;
use crate::namespace_limit::{NamespaceLimit, NamespacePermit};
use crate::tables::Tables;

const READ_SIZE: usize = 16 << 10;
/// Maximum bytes of one client's data that wait for ports, over all of its connections. One user can have hundreds of
/// clients.
pub(super) const FORWARD_MEMORY: u32 = 128 << 10;
/// Time for the pod to read the rest of the data of a client that has disconnected.
const LINGER: Duration = Duration::from_secs(5);

/// Forwards connections of all clients to pods, within a common limit.
#[derive(Clone, Debug)]
pub(crate) struct Forwarder {
    tables: Arc<Tables>,
    limit: NamespaceLimit,
}

/// Messages from a pod's port.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PortMessage {
    Data(Bytes),
    /// The pod closed its sending side.
    End,
    /// The connection failed.
    Failed(String),
    /// Both sides are closed. Always the last message.
    Closed,
}

/// A connection to open, and the channel for its answers.
#[derive(Debug)]
pub(super) struct Forward<K> {
    pub(super) sandbox_id: String,
    pub(super) port: u16,
    /// Identifies the connection in the channel.
    pub(super) key: K,
    pub(super) back: mpsc::Sender<(K, PortMessage)>,
    /// Permit of the client's connection limit, if there is a limit.
    pub(super) _permit: Option<OwnedSemaphorePermit>,
}

// === impl Forwarder ===

impl Forwarder {
    pub(crate) fn new(tables: Arc<Tables>) -> Self {
        Self { tables, limit: NamespaceLimit::new(Share::Forwards.count()) }
    }

    /// Connects to a TCP port in a pod.
    async fn connect(&self, sandbox_id: &str, port: u16) -> Result<(TcpStream, NamespacePermit), Error> {
        let sandbox = self.tables.sandbox(sandbox_id)?;
        let permit = self.limit.take(sandbox.namespace()).ok_or(Error::ForwardLimit)?;
        let shim = sandbox.shim()?;
        let connection = shim.connect_port(port).await.map_err(Error::shim("connect inside the pod"))?;
        let kernel = |source| Error::Kernel { doing: "register a connection", source };
        connection.set_nonblocking(true).map_err(kernel)?;
        Ok((TcpStream::from_std(connection).map_err(kernel)?, permit))
    }
}

// === impl Forward ===

impl<K: Copy + Send + Sync + 'static> Forward<K> {
    /// Connects in a task. Returns the sender for the client's data; dropping it is the client's end of file.
    /// The data waits in the client's `memory`.
    pub(super) fn open(self, forwarder: &Forwarder, memory: &QueueMemory) -> QueueSender<Bytes> {
        let (sender, receiver) = queue(memory);
        let forwarder = forwarder.clone();
        coracle_threads::spawn(async move {
            if let Err(error) = self.run(&forwarder, receiver).await {
                self.send(PortMessage::Failed(format!("port {}: {}", self.port, error.chain()))).await;
            }
            self.send(PortMessage::Closed).await;
        });
        sender
    }

    async fn run(&self, forwarder: &Forwarder, input: QueueReceiver<Bytes>) -> Result<(), Error> {
        let broken = |source| Error::Kernel { doing: "forward a connection", source };
        let (connection, _permit) = forwarder.connect(&self.sandbox_id, self.port).await?;
        let (mut from_pod, to_pod) = connection.into_split();
        let answers = async {
            let mut buffer = BytesMut::new();
            loop {
                buffer.reserve(READ_SIZE);
                if from_pod.read_buf(&mut buffer).await.map_err(broken)? == 0 {
                    self.send(PortMessage::End).await;
                    return Ok(());
                }
                if !self.send(PortMessage::Data(buffer.split().freeze())).await {
                    return Ok(());
                }
            }
        };
        let requests = async {
            let (mut input, mut to_pod) = (input, to_pod);
            while let Some(bytes) = input.recv().await {
                to_pod.write_all(&bytes).await.map_err(broken)?;
            }
            to_pod.shutdown().await.map_err(broken)
        };
        // After the client's end of file, the pod's data is still delivered. After the pod's end of file, the exchange is over.
        let exchange = async {
            let mut answers = std::pin::pin!(answers);
            tokio::select! {
                // Cancel safe: `answers` is outside of the select, and `requests` is not needed after the select.
                answered = &mut answers => answered,
                // The answer is read even after a failed write, because the pod may have answered before.
                _sent = requests => answers.await,
            }
        };
        let gone = async {
            self.back.closed().await;
            sleep(LINGER).await;
        };
        tokio::select! {
            exchanged = exchange => exchanged,
            // The client is gone and the pod keeps its side open.
            () = gone => Ok(()),
        }
    }

    /// Sends a message. False if the client is gone.
    async fn send(&self, message: PortMessage) -> bool {
        self.back.send((self.key, message)).await.is_ok()
    }
}
