//! One plugin: its registration, its subscription, and calls to it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use coracle_proto::nri::{
    ConfigureRequest, ConfigureResponse, Container, ContainerUpdate, Empty, Event, PodSandbox,
    RegisterPluginRequest, StartContainerRequest, StateChangeEvent, SynchronizeRequest, SynchronizeResponse,
    UpdateContainersRequest, UpdateContainersResponse,
};
use coracle_proto::ttrpc::{Request, Status};
use futures::future::BoxFuture;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::process::Child;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::Host;
use crate::connection::{CallError, Connection, Service};
use crate::events;
use crate::mux;
use crate::settings::Settings;
use crate::ttrpc::{MAX_LENGTH, code};

const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";
const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";
/// The NRI version of this implementation.
const NRI_VERSION: &str = "v0.13.0";
/// Maximum bytes of a message's content; the rest is for framing.
const MAX_CONTENT: usize = MAX_LENGTH - 4096;

/// Index and name of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Two digits; plugins are called in ascending order.
    pub(crate) index: String,
    pub(crate) name: String,
}

/// A registered and configured plugin.
#[derive(Debug)]
pub(crate) struct Plugin {
    pub(crate) identity: Identity,
    pub(crate) events: u32,
    pub(crate) connection: Arc<Connection>,
    /// Mask of events that the plugin receives only as StateChange, because it is older than NRI 0.10.
    state_change_events: AtomicU32,
    request_timeout: Duration,
    registration_timeout: Duration,
    /// The process of a pre-installed plugin. It is killed when the plugin is dropped.
    _child: Option<Child>,
}

/// The reason why a plugin cannot join.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JoinError {
    #[error("the plugin did not register within {0:?}")]
    NotRegistered(Duration),
    #[error("the plugin disconnected before its registration")]
    Gone,
    #[error("{0}")]
    Name(String),
    #[error("the plugin subscribed to unknown events ({0:#x})")]
    Events(i32),
    #[error("cannot {doing}")]
    Call { doing: &'static str, source: CallError },
    #[error("the plugin does not support a synchronization in several messages")]
    Parts,
}

// === impl Identity ===

impl Identity {
    pub(crate) fn new(index: &str, name: &str) -> Result<Self, JoinError> {
        if index.len() != 2 || !index.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(JoinError::Name(format!("the plugin's index {index:?} is not two digits")));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
        if name.is_empty() || !name.chars().all(allowed) {
            return Err(JoinError::Name(format!(
                "the plugin's name {name:?} is empty or has characters other than a-zA-Z0-9_.+-"
            )));
        }
        Ok(Self { index: index.to_owned(), name: name.to_owned() })
    }

    /// The full name: index and name. It identifies the owner of a field.
    pub(crate) fn full(&self) -> String {
        format!("{}-{}", self.index, self.name)
    }
}

/// The service that plugins may call.
struct RuntimeService {
    host: Weak<dyn Host>,
    registered: Mutex<Option<oneshot::Sender<RegisterPluginRequest>>>,
}

// === impl RuntimeService ===

impl Service for RuntimeService {
    fn serve(&self, request: Request) -> BoxFuture<'_, Result<Vec<u8>, Status>> {
        Box::pin(async move {
            if request.service != RUNTIME_SERVICE {
                return Err(status(code::UNIMPLEMENTED, format!("no service {}", request.service)));
            }
            match request.method.as_str() {
                "RegisterPlugin" => self.register(&request.payload),
                "UpdateContainers" => self.update(&request.payload).await,
                other => Err(status(code::UNIMPLEMENTED, format!("no method {other}"))),
            }
        })
    }
}

impl RuntimeService {
    fn register(&self, payload: &[u8]) -> Result<Vec<u8>, Status> {
        let registration = RegisterPluginRequest::decode(payload).map_err(not_decoded)?;
        let waiting = self.registered.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(waiting) = waiting else {
            return Err(status(code::FAILED_PRECONDITION, "the plugin is registered already".to_owned()));
        };
        // After the registration timeout there is no receiver; the connection is closed then.
        let _late = waiting.send(registration);
        Ok(Empty {}.encode_to_vec())
    }

    async fn update(&self, payload: &[u8]) -> Result<Vec<u8>, Status> {
        let request = UpdateContainersRequest::decode(payload).map_err(not_decoded)?;
        if self.registered.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return Err(status(code::FAILED_PRECONDITION, "the plugin is not registered yet".to_owned()));
        }
        let Some(host) = self.host.upgrade() else {
            return Err(status(code::FAILED_PRECONDITION, "the runtime is shutting down".to_owned()));
        };
        for eviction in request.evict {
            let id = eviction.container_id.clone();
            if let Err(error) = Arc::clone(&host).evict(eviction).await {
                warn!(container = id, error, "cannot evict container for NRI plugin");
            }
        }
        let failed = update_all(&host, request.update).await;
        Ok(UpdateContainersResponse { failed }.encode_to_vec())
    }
}

/// Updates containers one after the other. Returns the failed updates, except updates that are permitted to fail
/// (`ignore_failure`).
pub(crate) async fn update_all(host: &Arc<dyn Host>, updates: Vec<ContainerUpdate>) -> Vec<ContainerUpdate> {
    let mut failed = Vec::new();
    for update in updates {
        let id = &update.container_id;
        if let Err(error) = Arc::clone(host).update(update.clone()).await {
            warn!(container = id, error, "cannot update container for NRI plugin");
            if !update.ignore_failure {
                failed.push(update);
            }
        }
    }
    failed
}

fn status(code: i32, message: String) -> Status {
    Status { code, message }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn not_decoded(error: prost::DecodeError) -> Status {
    status(code::INVALID_ARGUMENT, error.to_string())
}

/// A plugin that joins: an accepted connection, or a started program.
pub(crate) struct Candidate<S> {
    pub(crate) stream: S,
    /// Identity from the file name of a started program. `None` for an accepted connection.
    pub(crate) identity: Option<Identity>,
    pub(crate) config: String,
    pub(crate) child: Option<Child>,
}

// === impl Plugin ===

impl Plugin {
    /// Waits for the registration and configures the plugin.
    pub(crate) async fn join<S>(
        candidate: Candidate<S>,
        settings: &Settings,
        host: Weak<dyn Host>,
    ) -> Result<Self, JoinError>
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let (register, registered) = oneshot::channel();
        let service = RuntimeService { host, registered: Mutex::new(Some(register)) };
        let connection = Connection::open(candidate.stream, mux::PLUGIN, Arc::new(service));
        let limit = settings.registration_timeout;
        let registration = tokio::select! {
            registration = timeout(limit, registered) => match registration {
                Ok(registration) => registration.map_err(|_dropped| JoinError::Gone)?,
                Err(_elapsed) => return Err(JoinError::NotRegistered(limit)),
            },
            () = connection.closed() => return Err(JoinError::Gone),
        };
        let identity = match candidate.identity {
            Some(identity) => identity,
            None => Identity::new(&registration.plugin_idx, &registration.plugin_name)?,
        };
        info!(plugin = identity.full(), version = registration.nri_version, "NRI plugin registered");
        let request = ConfigureRequest {
            config: candidate.config,
            runtime_name: settings.runtime_name.clone(),
            runtime_version: settings.runtime_version.clone(),
            registration_timeout: millis(settings.registration_timeout),
            request_timeout: millis(settings.request_timeout),
            nri_version: NRI_VERSION.to_owned(),
        };
        let answer: ConfigureResponse = connection
            .call(PLUGIN_SERVICE, "Configure", &request, settings.request_timeout)
            .await
            .map_err(|source| JoinError::Call { doing: "configure the plugin", source })?;
        Ok(Self {
            identity,
            events: events::subscription(answer.events).map_err(JoinError::Events)?,
            connection,
            state_change_events: AtomicU32::new(0),
            request_timeout: settings.request_timeout,
            registration_timeout: settings.registration_timeout,
            _child: candidate.child,
        })
    }

    pub(crate) fn is_subscribed(&self, event: Event) -> bool {
        self.events & events::bit(event) != 0
    }

    /// Sends all existing pods and containers. Returns the updates that the plugin requests. The registration
    /// timeout applies to all messages together.
    pub(crate) async fn synchronize(
        &self,
        pods: Vec<PodSandbox>,
        containers: Vec<Container>,
    ) -> Result<Vec<ContainerUpdate>, JoinError> {
        let limit = self.registration_timeout;
        let all = async {
            let mut parts = parts(pods, containers, MAX_CONTENT).into_iter().peekable();
            while let Some(mut part) = parts.next() {
                part.more = parts.peek().is_some();
                let answer: SynchronizeResponse = self
                    .call_for("Synchronize", &part, limit)
                    .await
                    .map_err(|source| JoinError::Call { doing: "synchronize the plugin", source })?;
                if !part.more {
                    return Ok(answer.update);
                }
                if !answer.more || !answer.update.is_empty() {
                    return Err(JoinError::Parts);
                }
            }
            Ok(Vec::new())
        };
        let late =
            |_elapsed| JoinError::Call { doing: "synchronize the plugin", source: CallError::Timeout(limit) };
        timeout(limit, all).await.map_err(late)?
    }

    /// Calls a method of the plugin, with the request timeout.
    pub(crate) async fn call<A: Message + Default>(
        &self,
        method: &str,
        request: &impl Message,
    ) -> Result<A, CallError> {
        self.call_for(method, request, self.request_timeout).await
    }

    async fn call_for<A: Message + Default>(
        &self,
        method: &str,
        request: &impl Message,
        limit: Duration,
    ) -> Result<A, CallError> {
        self.connection.call(PLUGIN_SERVICE, method, request, limit).await
    }

    /// Sends an event whose response is empty. Plugins before NRI 0.10 receive the event as a state change.
    pub(crate) async fn send(
        &self,
        event: Event,
        pod: &PodSandbox,
        container: Option<&Container>,
    ) -> Result<(), CallError> {
        let container = container.map(|container| fitted_beside(container, &[pod.encoded_len()]));
        if self.state_change_events.load(Ordering::Relaxed) & events::bit(event) == 0 {
            // The requests of all these events have the same fields with the same numbers.
            let request = StartContainerRequest { pod: Some(pod.clone()), container: container.clone() };
            match self.call::<Empty>(events::name(event), &request).await {
                Err(error) if error.is_unimplemented() => {
                    self.state_change_events.fetch_or(events::bit(event), Ordering::Relaxed);
                }
                other => return other.map(drop),
            }
        }
        let change = StateChangeEvent { event: event.into(), pod: Some(pod.clone()), container };
        self.call::<Empty>("StateChange", &change).await.map(drop)
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Bytes of a field with its tag and length.
fn framed(length: usize) -> usize {
    length + 6
}

/// A copy of the container that fits into a message beside other fields. `fields` are their lengths in bytes.
pub(crate) fn fitted_beside(container: &Container, fields: &[usize]) -> Container {
    let used: usize = fields.iter().map(|length| framed(*length)).sum();
    fitted(container.clone(), MAX_CONTENT.saturating_sub(used))
}

/// The container, without its longest fields if it is too large for a message. While no plugin is connected, a user can
/// create such a container. Such a container must not prevent plugins from joining or from receiving events.
fn fitted(mut container: Container, room: usize) -> Container {
    let steps: [fn(&mut Container); 3] = [
        |container| (container.env, container.args) = (Vec::new(), Vec::new()),
        |container| container.mounts = Vec::new(),
        |container| {
            container.annotations.clear();
            container.labels.clear();
        },
    ];
    for shorten in steps {
        if framed(container.encoded_len()) <= room {
            break;
        }
        warn!(container = container.id, "described a large container incompletely to an NRI plugin");
        shorten(&mut container);
    }
    container
}

/// Splits a synchronization into messages of at most `room` bytes. Returns at least one message.
fn parts(pods: Vec<PodSandbox>, containers: Vec<Container>, room: usize) -> Vec<SynchronizeRequest> {
    let mut parts = vec![SynchronizeRequest::default()];
    let mut left = room;
    let mut reserve = |length: usize, parts: &mut Vec<SynchronizeRequest>| {
        if length > left && left < room {
            parts.push(SynchronizeRequest::default());
            left = room;
        }
        left = left.saturating_sub(length);
    };
    for pod in pods {
        reserve(framed(pod.encoded_len()), &mut parts);
        if let Some(last) = parts.last_mut() {
            last.pods.push(pod);
        }
    }
    for container in containers.into_iter().map(|container| fitted(container, room)) {
        reserve(framed(container.encoded_len()), &mut parts);
        if let Some(last) = parts.last_mut() {
            last.containers.push(container);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_checked() {
        assert_eq!(Identity::new("05", "a.b-c").expect("good").full(), "05-a.b-c");
        for (index, name) in [("5", "a"), ("a1", "a"), ("123", "a"), ("01", ""), ("01", "a/b"), ("01", "a b")]
        {
            assert!(Identity::new(index, name).is_err(), "{index} {name}");
        }
    }

    #[test]
    fn a_container_that_is_too_large_for_a_message_does_not_keep_plugins_from_joining() {
        let large = || Container {
            id: "a".into(),
            name: "n".into(),
            env: vec!["x".repeat(2000)],
            labels: [("l".to_owned(), "v".to_owned())].into(),
            ..Default::default()
        };
        let cut = parts(Vec::new(), vec![large(), Container::default()], 1000);
        assert!(cut.iter().all(|part| part.encoded_len() <= 1000));
        let sent: Vec<&Container> = cut.iter().flat_map(|part| &part.containers).collect();
        assert_eq!(sent.len(), 2);
        assert_eq!((sent[0].name.as_str(), sent[0].env.len(), sent[0].labels.len()), ("n", 0, 1));
        assert_eq!(fitted(large(), 3000), large());
    }

    #[test]
    fn a_large_synchronization_is_split_without_loss() {
        let pod = |at: usize| PodSandbox { id: format!("{at:0100}"), ..Default::default() };
        let container = |at: usize| Container { id: format!("{at:0200}"), ..Default::default() };
        let (pods, containers): (Vec<_>, Vec<_>) =
            ((0..50).map(pod).collect(), (0..50).map(container).collect());
        let cut = parts(pods.clone(), containers.clone(), 1000);
        assert!(cut.len() > 10);
        assert!(cut.iter().all(|part| part.encoded_len() <= 1000));
        let joined: Vec<PodSandbox> = cut.iter().flat_map(|part| part.pods.clone()).collect();
        assert_eq!(joined, pods);
        let joined: Vec<Container> = cut.iter().flat_map(|part| part.containers.clone()).collect();
        assert_eq!(joined, containers);
        assert_eq!(parts(Vec::new(), Vec::new(), 1000), [SynchronizeRequest::default()]);
        assert_eq!(parts(pods, containers, MAX_CONTENT).len(), 1);
    }
}
