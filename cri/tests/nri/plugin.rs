//! A test plugin with the real protocol. It records all calls and replies with the test's responses.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle_nri::connection::{CallError, Connection, Service};
use coracle_nri::mux;
use coracle_nri::ttrpc::code;
use coracle_proto::nri::{
    ConfigureRequest, ConfigureResponse, ContainerAdjustment, CreateContainerResponse, Empty,
    RegisterPluginRequest, StartContainerRequest, StateChangeEvent, SynchronizeRequest, SynchronizeResponse,
    UpdateContainersRequest, UpdateContainersResponse,
};
use coracle_proto::ttrpc::{Request, Status};
use coracle_testing::eventually_async;
use futures::future::BoxFuture;
use prost::Message;
use tokio::net::UnixStream;

const RUNTIME: &str = "nri.pkg.api.v1alpha1.Runtime";
/// A timeout that even a slow machine does not reach.
const LONG: Duration = Duration::from_secs(60);

/// The plugin's answer to a call.
pub(crate) enum PluginReply {
    /// An empty response.
    Yes,
    /// A response.
    Answer(Vec<u8>),
    /// An error with this message.
    No(&'static str),
    /// Unknown method.
    Unknown,
    /// No answer at all.
    Silence,
}

/// One received call. Pod and container have the same field numbers in every request.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedCall {
    pub(crate) method: String,
    pub(crate) about: StartContainerRequest,
    /// The configuration that the plugin had got before.
    pub(crate) config: String,
}

type Answer = dyn Fn(&ReceivedCall) -> PluginReply + Send + Sync;

struct TestService {
    events: i32,
    heard: Mutex<Vec<ReceivedCall>>,
    configured: Mutex<ConfigureRequest>,
    known: Mutex<SynchronizeRequest>,
    synchronized: tokio::sync::watch::Sender<bool>,
    answer: Box<Answer>,
}

pub(crate) struct Plugin {
    pub(crate) connection: Arc<Connection>,
    service: Arc<TestService>,
}

// === impl PluginReply ===

impl PluginReply {
    /// An adjustment of the container that is being created.
    pub(crate) fn adjust(adjust: ContainerAdjustment) -> Self {
        let answer = CreateContainerResponse { adjust: Some(adjust), ..Default::default() };
        Self::Answer(answer.encode_to_vec())
    }
}

// === impl TestService ===

impl Service for TestService {
    fn serve(&self, request: Request) -> BoxFuture<'_, Result<Vec<u8>, Status>> {
        Box::pin(async move {
            let payload = request.payload.as_slice();
            match request.method.as_str() {
                "Configure" => {
                    *self.configured.lock().unwrap() = ConfigureRequest::decode(payload).unwrap();
                    return Ok(ConfigureResponse { events: self.events }.encode_to_vec());
                }
                "Synchronize" => {
                    let part = SynchronizeRequest::decode(payload).unwrap();
                    let more = part.more;
                    let mut known = self.known.lock().unwrap();
                    known.pods.extend(part.pods);
                    known.containers.extend(part.containers);
                    self.synchronized.send_replace(!more);
                    return Ok(SynchronizeResponse { more, update: Vec::new() }.encode_to_vec());
                }
                _ => {}
            }
            let heard = heard(&request, self.configured.lock().unwrap().config.clone());
            let reply = (self.answer)(&heard);
            if !matches!(reply, PluginReply::Unknown) {
                self.heard.lock().unwrap().push(heard);
            }
            match reply {
                PluginReply::Yes => Ok(Vec::new()),
                PluginReply::Answer(bytes) => Ok(bytes),
                PluginReply::No(why) => Err(Status { code: code::UNKNOWN, message: why.into() }),
                PluginReply::Unknown => {
                    Err(Status { code: code::UNIMPLEMENTED, message: "unimplemented".into() })
                }
                PluginReply::Silence => std::future::pending().await,
            }
        })
    }
}

fn heard(request: &Request, config: String) -> ReceivedCall {
    let payload = request.payload.as_slice();
    if request.method == "StateChange" {
        let StateChangeEvent { event, pod, container } = StateChangeEvent::decode(payload).unwrap();
        return ReceivedCall {
            method: format!("StateChange {event}"),
            about: StartContainerRequest { pod, container },
            config,
        };
    }
    let about = StartContainerRequest::decode(payload).unwrap_or_default();
    ReceivedCall { method: request.method.clone(), about, config }
}

// === impl Plugin ===

impl Plugin {
    /// Connects a plugin for all events, and waits until it is synchronized.
    pub(crate) async fn join(
        socket: &Path,
        index: &str,
        answer: impl Fn(&ReceivedCall) -> PluginReply + Send + Sync + 'static,
    ) -> Self {
        Self::join_for(socket, index, 0, answer).await
    }

    /// Like `join`, for the given events only.
    pub(crate) async fn join_for(
        socket: &Path,
        index: &str,
        events: i32,
        answer: impl Fn(&ReceivedCall) -> PluginReply + Send + Sync + 'static,
    ) -> Self {
        let stream = UnixStream::connect(socket).await.expect("connect");
        let plugin = Self::speak(stream, events, answer);
        plugin.register(index, "test").await.expect("register");
        plugin.synchronized().await;
        plugin
    }

    /// Uses a connection, without registering yet.
    pub(crate) fn speak(
        stream: UnixStream,
        events: i32,
        answer: impl Fn(&ReceivedCall) -> PluginReply + Send + Sync + 'static,
    ) -> Self {
        let service = Arc::new(TestService {
            events,
            heard: Mutex::default(),
            configured: Mutex::default(),
            known: Mutex::default(),
            synchronized: tokio::sync::watch::Sender::new(false),
            answer: Box::new(answer),
        });
        let handler: Arc<dyn Service> = Arc::<TestService>::clone(&service);
        Self { connection: Connection::open(stream, mux::RUNTIME, handler), service }
    }

    pub(crate) async fn register(&self, index: &str, name: &str) -> Result<(), CallError> {
        let request = RegisterPluginRequest {
            plugin_name: name.into(),
            plugin_idx: index.into(),
            nri_version: "v0.13.0".into(),
        };
        self.connection.call::<Empty>(RUNTIME, "RegisterPlugin", &request, LONG).await.map(drop)
    }

    pub(crate) async fn synchronized(&self) {
        let mut done = self.service.synchronized.subscribe();
        let wait = done.wait_for(|done| *done);
        let _seen = tokio::time::timeout(LONG, wait).await.expect("in time").expect("alive");
    }

    /// Sends UpdateContainers to the runtime.
    pub(crate) async fn update(&self, request: &UpdateContainersRequest) -> UpdateContainersResponse {
        self.connection.call(RUNTIME, "UpdateContainers", request, LONG).await.expect("update")
    }

    /// The pods and containers of all Synchronize requests.
    pub(crate) fn known(&self) -> SynchronizeRequest {
        self.service.known.lock().unwrap().clone()
    }

    pub(crate) fn configured(&self) -> ConfigureRequest {
        self.service.configured.lock().unwrap().clone()
    }

    /// All calls about a pod or container.
    pub(crate) fn heard_of(&self, id: &str) -> Vec<ReceivedCall> {
        let heard = self.service.heard.lock().unwrap();
        let id_of = |heard: &ReceivedCall| match &heard.about.container {
            Some(container) => container.id.clone(),
            None => heard.about.pod.clone().unwrap_or_default().id,
        };
        heard.iter().filter(|heard| id_of(heard) == id).cloned().collect()
    }

    /// The method names of all calls about a pod or container.
    pub(crate) fn methods_of(&self, id: &str) -> Vec<String> {
        self.heard_of(id).into_iter().map(|heard| heard.method).collect()
    }

    /// All calls of one method.
    pub(crate) fn all(&self, method: &str) -> Vec<ReceivedCall> {
        self.service.heard.lock().unwrap().iter().filter(|heard| heard.method == method).cloned().collect()
    }

    /// Waits for a call of this method about a pod or container.
    pub(crate) async fn hears(&self, id: &str, method: &str) {
        eventually_async(&format!("a call of {method} for {id}"), 10, async || {
            self.methods_of(id).iter().any(|heard| heard == method)
        })
        .await;
    }

    /// Disconnects. The runtime may notice it only at its next call, which does not fail for that reason.
    pub(crate) fn leave(self) {
        self.connection.close();
    }
}
