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
    self, ExportReply, ExportRequest, ImageList, ImportReply, ImportRequest, ListRequest, Progress,
    PullReply, PullRequest, RemoveReply, RemoveRequest,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

use crate::lock::Lock;

/// Maximum wait for the socket of a node that starts: the node recovers its pods before it serves the socket.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The error if the last message of a stream is missing.
const STOPPED: &str = "the node stopped";
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

/// Imports an archive into a running node, and returns its images.
pub(crate) async fn import(
    client: &mut ImagesClient<tonic::transport::Channel>,
    request: ImportRequest,
    show: impl Fn(&Progress),
) -> anyhow::Result<Vec<node::Image>> {
    let mut replies = client.import(request).await.map_err(status_message)?.into_inner();
    loop {
        let reply = replies.message().await.map_err(status_message)?.context(STOPPED)?;
        match reply.progress {
            Some(at) => show(&at),
            None => return Ok(reply.images),
        }
    }
}

/// Exports an image of a running node.
pub(crate) async fn export(
    client: &mut ImagesClient<tonic::transport::Channel>,
    request: ExportRequest,
    show: impl Fn(&Progress),
) -> anyhow::Result<()> {
    let mut replies = client.export(request).await.map_err(status_message)?.into_inner();
    while let Some(at) = replies.message().await.map_err(status_message)?.context(STOPPED)?.progress {
        show(&at);
    }
    Ok(())
}

/// The node's error message without gRPC's prefix.
pub(super) fn status_message(status: Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message())
}

/// An image in the messages of the socket.
pub(crate) fn shown(image: &Image) -> node::Image {
    let names = if image.tags.is_empty() { &image.digests } else { &image.tags };
    node::Image { id: image.id.clone(), names: names.clone(), size: image.size, pinned: image.pinned }
}

/// Progress in the messages of the socket.
pub(crate) fn progress(progress: &PullProgress) -> Progress {
    Progress {
        bytes_total: progress.bytes_total,
        bytes_done: progress.bytes_done,
        layers_total: progress.layers_total as u64,
        layers_done: progress.layers_done as u64,
    }
}

/// Messages of an operation: its progress, then its result.
type Replies<R> = ReceiverStream<Result<R, Status>>;

/// Runs an operation, and drops it if the client disconnects. `step` makes a message of its progress. `active` is dropped
/// when the operation ends.
fn streamed<R, F>(
    active: impl Send + 'static,
    step: fn(Progress) -> R,
    operation: impl FnOnce(ProgressFn) -> F,
) -> Response<Replies<R>>
where
    R: Send + 'static,
    F: Future<Output = Result<R, coracle_images::Error>> + Send + 'static,
{
    let (replies, stream) = mpsc::channel(STEPS);
    let steps = replies.clone();
    let report: ProgressFn = std::sync::Arc::new(move |at| {
        let _left_out_or_gone = steps.try_send(Ok(step(progress(at))));
    });
    let running = operation(report);
    coracle_threads::spawn(async move {
        let last = tokio::select! {
            last = running => last,
            () = replies.closed() => return,
        };
        // A client that reads no replies must not keep the operation running.
        drop(active);
        let _gone = replies.send(last.map_err(|e| Status::failed_precondition(chain(&e)))).await;
    });
    Response::new(ReceiverStream::new(stream))
}

/// The service of the socket.
pub(crate) struct Served {
    images: Images,
    pulls: PullActivity,
}

/// Capacity of the progress channel. Further messages are dropped: a later message has newer values.
const STEPS: usize = 64;

// === impl Served ===

impl Served {
    /// Serves the images of this store. Records pulls, imports and exports in `pulls`.
    pub(crate) fn new(images: Images, pulls: PullActivity) -> Self {
        Self { images, pulls }
    }
}

#[tonic::async_trait]
impl Service for Served {
    type ImportStream = Replies<ImportReply>;

    async fn import(&self, request: Request<ImportRequest>) -> Result<Response<Self::ImportStream>, Status> {
        let ImportRequest { path, name } = request.into_inner();
        let images = self.images.clone();
        let step = |at| ImportReply { progress: Some(at), images: Vec::new() };
        Ok(streamed(self.pulls.begin(), step, move |report| async move {
            let name = Some(name.as_str()).filter(|n| !n.is_empty());
            let imported = images.import_with(Path::new(&path), name, Some(report)).await;
            imported.map(|images| ImportReply { images: images.iter().map(shown).collect(), progress: None })
        }))
    }

    type ExportStream = Replies<ExportReply>;

    async fn export(&self, request: Request<ExportRequest>) -> Result<Response<Self::ExportStream>, Status> {
        let ExportRequest { image, path } = request.into_inner();
        let images = self.images.clone();
        let step = |at| ExportReply { progress: Some(at) };
        Ok(streamed(self.pulls.begin(), step, move |report| async move {
            let exported = images.export_with(&image, Path::new(&path), Some(report)).await;
            exported.map(|()| ExportReply { progress: None })
        }))
    }

    type PullStream = Replies<PullReply>;

    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let PullRequest { image, username, password } = request.into_inner();
        let auth = (!username.is_empty()).then_some(Auth::Basic { username, password });
        let images = self.images.clone();
        let step = |at| PullReply { progress: Some(at), image: None };
        Ok(streamed(self.pulls.begin(), step, move |report| async move {
            let pulled = images.pull(&image, auth.map(Into::into), Some(report)).await;
            pulled.map(|image| PullReply { image: Some(shown(&image)), progress: None })
        }))
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
    use tokio_stream::StreamExt as _;

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
        let mut replies = served.import(Request::new(import)).await.expect("replies").into_inner();
        assert!(replies.next().await.is_some_and(|reply| reply.is_err()));
        assert!(pulls.was_active_since(begin), "the import");
        let (pulls, begin) = (PullActivity::default(), Instant::now());
        let served = Served::new(images.clone(), pulls.clone());
        let path = dir.path().join("archive").display().to_string();
        let export = ExportRequest { image: "absent".to_owned(), path };
        let mut replies = served.export(Request::new(export)).await.expect("replies").into_inner();
        assert!(replies.next().await.is_some_and(|reply| reply.is_err()));
        assert!(pulls.was_active_since(begin), "the export");
        let (pulls, begin) = (PullActivity::default(), Instant::now());
        let served = Served::new(images, pulls.clone());
        let request = PullRequest { image: "not an image".to_owned(), ..PullRequest::default() };
        let replies = served.pull(Request::new(request)).await.expect("replies");
        assert!(pulls.was_active_since(begin), "the pull");
        drop(replies);
    }

    #[tokio::test(start_paused = true)]
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
