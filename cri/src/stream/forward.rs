//! One forwarded connection: bytes between a client and a port inside a pod, whatever the transport.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::sleep;

use crate::error::Error;
use crate::runtime::Runtime;

const READ_SIZE: usize = 32 << 10;
const BACKLOG: usize = 16;
/// How long a pod may take to read what a client has said that is gone.
const LINGER: Duration = Duration::from_secs(5);

/// What comes back from a pod's port.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Back {
    Data(Bytes),
    /// The pod says no more.
    End,
    /// There is no connection, or it broke.
    Failed(String),
    /// Both sides are done; always the last.
    Closed,
}

/// Where to connect, and where the answers go under which key.
#[derive(Debug)]
pub(super) struct Forward<K> {
    pub(super) sandbox_id: String,
    pub(super) port: u16,
    pub(super) key: K,
    pub(super) back: mpsc::Sender<(K, Back)>,
    /// Its place among the connections that its client may have at once, if there is such a limit.
    pub(super) _place: Option<OwnedSemaphorePermit>,
}

// === impl Forward ===

impl<K: Copy + Send + Sync + 'static> Forward<K> {
    /// Connects, in a task of its own. What the client says goes into the sender that is returned;
    /// dropping that is the client's end of file.
    pub(super) fn open(self, runtime: &Runtime) -> mpsc::Sender<Bytes> {
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let runtime = runtime.clone();
        tokio::spawn(async move {
            if let Err(error) = self.run(&runtime, receiver).await {
                self.say(Back::Failed(format!("port {}: {}", self.port, error.chain()))).await;
            }
            self.say(Back::Closed).await;
        });
        sender
    }

    async fn run(&self, runtime: &Runtime, input: mpsc::Receiver<Bytes>) -> Result<(), Error> {
        let broken = |source| Error::Kernel { doing: "forward a connection", source };
        let connection = runtime.connect(&self.sandbox_id, self.port).await?;
        let (mut from_pod, to_pod) = connection.into_split();
        let answers = async {
            let mut buffer = BytesMut::new();
            loop {
                buffer.reserve(READ_SIZE);
                if from_pod.read_buf(&mut buffer).await.map_err(broken)? == 0 {
                    self.say(Back::End).await;
                    return Ok(());
                }
                if !self.say(Back::Data(buffer.split().freeze())).await {
                    return Ok(());
                }
            }
        };
        let questions = async {
            let (mut input, mut to_pod) = (input, to_pod);
            while let Some(bytes) = input.recv().await {
                to_pod.write_all(&bytes).await.map_err(broken)?;
            }
            to_pod.shutdown().await.map_err(broken)
        };
        // A client that has said its last word still hears the pod out; a pod that has, is done.
        let exchange = async {
            let mut answers = std::pin::pin!(answers);
            tokio::select! {
                // The answers live on outside of the select; questions are over when it ends.
                answered = &mut answers => answered,
                // Also when the pod refused what was said: it may have answered before.
                _asked = questions => answers.await,
            }
        };
        let gone = async {
            self.back.closed().await;
            sleep(LINGER).await;
        };
        tokio::select! {
            exchanged = exchange => exchanged,
            // Nobody hears a pod that keeps its end open.
            () = gone => Ok(()),
        }
    }

    /// False when nobody listens.
    async fn say(&self, what: Back) -> bool {
        self.back.send((self.key, what)).await.is_ok()
    }
}

impl Runtime {
    /// A connection to a TCP port inside a pod.
    async fn connect(&self, sandbox_id: &str, port: u16) -> Result<TcpStream, Error> {
        let sandbox = self.inner.sandboxes.get(sandbox_id).ok_or_else(|| Error::no_sandbox(sandbox_id))?;
        let connection =
            sandbox.shim()?.connect_port(port).await.map_err(Error::shim("connect inside the pod"))?;
        let kernel = |source| Error::Kernel { doing: "watch a connection", source };
        connection.set_nonblocking(true).map_err(kernel)?;
        TcpStream::from_std(connection).map_err(kernel)
    }
}
