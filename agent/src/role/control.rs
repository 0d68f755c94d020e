//! The control socket of a node. `coracle image` uses it because the image store has one owner at a time.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use coracle_agent::PullActivity;
use coracle_error_chain::chain;
use coracle_images::{Auth, Image, Images, ProgressFn, PullProgress};
use coracle_proto::node::images_client::ImagesClient;
use coracle_proto::node::images_server::{Images as Service, ImagesServer};
use coracle_proto::node::{
    self, ExportReply, ExportRequest, ImageList, ImportRequest, ListRequest, PullReply, PullRequest,
    RemoveReply, RemoveRequest,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

use crate::lock::Lock;

/// Maximum wait for the socket of a node that starts: the node recovers its pods before it serves the socket.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval of attempts to connect.
const CONNECT_INTERVAL: Duration = Duration::from_millis(50);

/// Path of the socket of a node with this run directory.
fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("node.sock")
}

/// Serves the socket until `shutdown`.
pub(crate) async fn serve(run_dir: &Path, served: Served, shutdown: CancellationToken) -> anyhow::Result<()> {
    let path = socket(run_dir);
    let listener = super::listen(&path)?;
    let served = Server::builder()
        .add_service(ImagesServer::new(served))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), shutdown.cancelled_owned())
        .await
        .context("the node's control socket failed");
    super::remove_socket(&path);
    served
}

/// A client of the running node with this run directory. Waits for a node that has just been started.
pub(crate) async fn images(run_dir: &Path) -> anyhow::Result<ImagesClient<tonic::transport::Channel>> {
    let path = socket(run_dir);
    let endpoint = Endpoint::try_from(format!("unix://{}", path.display()))?;
    let end = Instant::now() + START_TIMEOUT;
    loop {
        match endpoint.connect().await {
            Ok(channel) => return Ok(ImagesClient::new(channel)),
            Err(_) if Instant::now() < end && is_starting(run_dir) => {
                tokio::time::sleep(CONNECT_INTERVAL).await;
            }
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("cannot reach the running node at {}", path.display()));
            }
        }
    }
}

/// Whether a node has just been started. A node with another container runtime (`--container-runtime-endpoint`) never
/// serves the socket.
fn is_starting(run_dir: &Path) -> bool {
    Lock::holder(run_dir).is_some() && Lock::age(run_dir).is_none_or(|age| age < START_TIMEOUT)
}

/// An image in the messages of the socket.
pub(crate) fn shown(image: &Image) -> node::Image {
    let names = if image.tags.is_empty() { &image.digests } else { &image.tags };
    node::Image { id: image.id.clone(), names: names.clone(), size: image.size, pinned: image.pinned }
}

/// Progress of a pull in the messages of the socket.
pub(crate) fn progress(progress: &PullProgress) -> PullReply {
    PullReply {
        bytes_total: progress.bytes_total,
        bytes_done: progress.bytes_done,
        layers_total: progress.layers_total as u64,
        layers_done: progress.layers_done as u64,
        image: None,
    }
}

/// The service of the socket.
pub(crate) struct Served {
    images: Images,
    pulls: PullActivity,
}

/// Capacity of the progress channel. Further messages are dropped: a later message has newer values.
const STEPS: usize = 4;

// === impl Served ===

impl Served {
    /// Serves the images of this store. Records pulls, imports and exports in `pulls`.
    pub(crate) fn new(images: Images, pulls: PullActivity) -> Self {
        Self { images, pulls }
    }
}

#[tonic::async_trait]
impl Service for Served {
    async fn import(&self, request: Request<ImportRequest>) -> Result<Response<ImageList>, Status> {
        let ImportRequest { path, name } = request.into_inner();
        let name = Some(name.as_str()).filter(|n| !n.is_empty());
        let _active = self.pulls.begin();
        let imported = self.images.import(Path::new(&path), name).await;
        let images =
            imported.map_err(|e| Status::failed_precondition(chain(&e)))?.iter().map(shown).collect();
        Ok(Response::new(ImageList { images }))
    }

    async fn export(&self, request: Request<ExportRequest>) -> Result<Response<ExportReply>, Status> {
        let ExportRequest { image, path } = request.into_inner();
        let _active = self.pulls.begin();
        let exported = self.images.export(&image, Path::new(&path)).await;
        exported.map_err(|e| Status::failed_precondition(chain(&e)))?;
        Ok(Response::new(ExportReply {}))
    }

    type PullStream = ReceiverStream<Result<PullReply, Status>>;

    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let PullRequest { image, username, password } = request.into_inner();
        let auth = (!username.is_empty()).then_some(Auth::Basic { username, password });
        let (replies, stream) = mpsc::channel(STEPS);
        let (images, active) = (self.images.clone(), self.pulls.begin());
        coracle_threads::spawn(async move {
            let steps = replies.clone();
            let report: ProgressFn = std::sync::Arc::new(move |step| {
                let _left_out_or_gone = steps.try_send(Ok(progress(step)));
            });
            let pulled = tokio::select! {
                pulled = images.pull(&image, auth.map(Into::into), Some(report)) => pulled,
                () = replies.closed() => return,
            };
            // A client that reads no replies must not keep the pull running.
            drop(active);
            let last = pulled.map(|image| PullReply { image: Some(shown(&image)), ..PullReply::default() });
            let _gone = replies.send(last.map_err(|e| Status::failed_precondition(chain(&e)))).await;
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ImageList>, Status> {
        Ok(Response::new(ImageList { images: self.images.list().iter().map(shown).collect() }))
    }

    async fn remove(&self, request: Request<RemoveRequest>) -> Result<Response<RemoveReply>, Status> {
        let removed = self.images.remove(&request.into_inner().image).await;
        removed.map_err(|e| Status::failed_precondition(chain(&e)))?;
        Ok(Response::new(RemoveReply {}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_import_an_export_and_a_pull_count_as_pulls_of_the_node() {
        let dir = tempfile::tempdir().expect("directory");
        let config = coracle_images::ImagesConfig::new(dir.path());
        let images = Images::open(config).await.expect("store");
        let (pulls, begin) = (PullActivity::default(), Instant::now());
        let served = Served::new(images.clone(), pulls.clone());
        let path = dir.path().join("absent").display().to_string();
        let import = ImportRequest { path, name: String::new() };
        assert!(served.import(Request::new(import)).await.is_err());
        assert!(pulls.was_active_since(begin), "the import");
        let (pulls, begin) = (PullActivity::default(), Instant::now());
        let served = Served::new(images.clone(), pulls.clone());
        let path = dir.path().join("archive").display().to_string();
        let export = ExportRequest { image: "absent".to_owned(), path };
        assert!(served.export(Request::new(export)).await.is_err());
        assert!(pulls.was_active_since(begin), "the export");
        let (pulls, begin) = (PullActivity::default(), Instant::now());
        let served = Served::new(images, pulls.clone());
        let request = PullRequest { image: "not an image".to_owned(), ..PullRequest::default() };
        let replies = served.pull(Request::new(request)).await.expect("replies");
        assert!(pulls.was_active_since(begin), "the pull");
        drop(replies);
    }

    #[tokio::test]
    async fn a_node_that_starts_is_waited_for() {
        let dir = tempfile::tempdir().expect("directory");
        let lock = Lock::acquire(dir.path()).expect("lock");
        let listen = async {
            tokio::time::sleep(CONNECT_INTERVAL * 3).await;
            tokio::net::UnixListener::bind(socket(dir.path()))
        };
        let (client, listener) = tokio::join!(images(dir.path()), listen);
        drop((client.expect("the node is reached"), listener.expect("the socket")));
        drop(lock);
        assert!(images(dir.path()).await.is_err(), "without a node there is no wait");
    }

    #[tokio::test]
    async fn a_node_without_the_socket_is_not_waited_for_after_its_start() {
        let dir = tempfile::tempdir().expect("directory");
        let _lock = Lock::acquire(dir.path()).expect("lock");
        assert!(is_starting(dir.path()));
        let file = std::fs::File::options().write(true).open(dir.path().join("coracle.lock")).expect("open");
        file.set_modified(std::time::SystemTime::now() - START_TIMEOUT).expect("an earlier start");
        assert!(!is_starting(dir.path()));
        assert!(images(dir.path()).await.is_err());
        file.set_modified(std::time::SystemTime::now() + START_TIMEOUT).expect("the clock was set back");
        assert!(is_starting(dir.path()));
    }
}
