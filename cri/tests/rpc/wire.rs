//! The runtime behind a Unix socket, and a client of it.

use std::time::Duration;

use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use crate::fixture::Machine;

/// A server on a socket.
pub(crate) struct Wire {
    pub(crate) client: RuntimeServiceClient<Channel>,
    stop: CancellationToken,
    server: JoinHandle<Result<(), coracle_cri::Error>>,
    _dir: TempDir,
}

impl Wire {
    pub(crate) async fn open(machine: &Machine) -> Self {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("cri.sock");
        let listener = tokio::net::UnixListener::bind(&path).expect("listen");
        let stop = CancellationToken::new();
        let server = tokio::spawn(machine.runtime.clone().serve(listener, stop.clone()));
        let endpoint = Endpoint::try_from(format!("unix://{}", path.display())).expect("address");
        // The limit of the kubelet and of crictl.
        let client = RuntimeServiceClient::new(endpoint.connect().await.expect("connect"))
            .max_decoding_message_size(16 << 20);
        Self { client, stop, server, _dir: dir }
    }

    pub(crate) fn stop(&self) {
        self.stop.cancel();
    }

    /// Stops the server, within a short time.
    pub(crate) async fn close(self) {
        self.stop.cancel();
        drop(self.client);
        let ended = tokio::time::timeout(Duration::from_secs(60), self.server).await;
        ended.expect("it ends").expect("no panic").expect("served");
    }
}
