//! The plugins in the order of their indices, and requests to all of them.

use std::sync::Arc;

use coracle_proto::nri::{
    Container, ContainerUpdate, CreateContainerRequest, CreateContainerResponse, Empty, Event,
    LinuxResources, PluginInstance, PodSandbox, StopContainerRequest, StopContainerResponse,
    UpdateContainerRequest, UpdateContainerResponse, UpdatePodSandboxRequest,
    ValidateContainerAdjustmentRequest, ValidateContainerAdjustmentResponse,
};
use futures::future::join_all;
use prost::Message;
use tracing::{error, info, warn};

use super::failure::log;
use crate::adjust::{Change, Creation, Updates};
use crate::connection::CallError;
use crate::events;
use crate::owners::Owners;
use crate::plugin::{JoinError, Plugin, fitted_beside};
use crate::snapshot::{PodState, Snapshot};
use crate::states::{SentState, States, sent_state};
use crate::{Error, adjust};

/// All plugins, and the events already sent for each pod and container.
#[derive(Debug, Default)]
pub(super) struct Chain {
    plugins: Vec<Arc<Plugin>>,
    pub(super) states: States,
}

// === impl Chain ===

impl Chain {
    /// Synchronizes a plugin with the existing pods and containers, and adds the plugin. Returns the plugin with the
    /// updates that it requests.
    pub(super) async fn join(
        &mut self,
        plugin: Plugin,
        known: Snapshot,
    ) -> Result<(Arc<Plugin>, Vec<ContainerUpdate>), JoinError> {
        for (pod, runs) in &known.pods {
            self.states
                .set(&pod.id, if *runs == PodState::Running { SentState::Alive } else { SentState::Stopped });
        }
        for container in &known.containers {
            self.states.set(&container.id, sent_state(container));
        }
        let pods = known.pods.into_iter().map(|(pod, _)| pod).collect();
        let is_alive = |container: &Container| sent_state(container) == SentState::Alive;
        let containers = known.containers.into_iter().filter(is_alive).collect();
        let updates = match plugin.synchronize(pods, containers).await {
            Ok(updates) => updates,
            Err(error) => {
                self.prune();
                return Err(error);
            }
        };
        info!(plugin = plugin.identity.full(), events = plugin.events, "NRI plugin joined");
        let plugin = Arc::new(plugin);
        self.plugins.push(Arc::clone(&plugin));
        self.plugins.sort_by(|one, other| one.identity.index.cmp(&other.identity.index));
        Ok((plugin, updates))
    }

    /// Removes and returns all plugins.
    pub(super) fn take(&mut self) -> Vec<Arc<Plugin>> {
        self.states.clear();
        std::mem::take(&mut self.plugins)
    }

    /// Removes disconnected plugins.
    pub(super) fn prune(&mut self) {
        self.plugins.retain(|plugin| !plugin.connection.is_closed());
        if self.plugins.is_empty() {
            self.states.clear();
        }
    }

    /// Mask of the events with a subscriber.
    pub(super) fn subscribed_events(&self) -> u32 {
        self.plugins.iter().fold(0, |wanted, plugin| wanted | plugin.events)
    }

    pub(super) fn wants_any(&self, events: &[Event]) -> bool {
        events.iter().any(|event| self.subscribed_events() & events::bit(*event) != 0)
    }

    /// The subscribers of an event.
    fn subscribers(&self, event: Event) -> impl Iterator<Item = &Arc<Plugin>> {
        self.plugins.iter().filter(move |plugin| plugin.is_subscribed(event))
    }

    /// Sends an event without a response.
    pub(super) async fn send(
        &self,
        event: Event,
        pod: &PodSandbox,
        container: Option<&Container>,
    ) -> Result<(), Error> {
        for plugin in self.subscribers(event) {
            drop_unresponsive(plugin, event, plugin.send(event, pod, container).await)?;
        }
        Ok(())
    }

    pub(super) async fn update_pod(
        &self,
        pod: PodSandbox,
        overhead: Option<LinuxResources>,
        resources: Option<LinuxResources>,
    ) -> Result<(), Error> {
        let request = UpdatePodSandboxRequest {
            pod: Some(pod),
            overhead_linux_resources: overhead,
            linux_resources: resources,
        };
        for plugin in self.subscribers(Event::UpdatePodSandbox) {
            call_plugin::<Empty>(plugin, Event::UpdatePodSandbox, &request).await?;
        }
        Ok(())
    }

    /// Requests adjustments, merges them, and then calls all validating plugins at the same time.
    pub(super) async fn create(&self, pod: &PodSandbox, container: Container) -> Result<Creation, Error> {
        let pristine = self.wants_any(&[Event::ValidateContainerAdjustment]).then(|| container.clone());
        let mut creation = Creation::new(container);
        for plugin in self.subscribers(Event::CreateContainer) {
            let request = CreateContainerRequest {
                pod: Some(pod.clone()),
                container: Some(creation.container.clone()),
            };
            let answer =
                call_plugin::<CreateContainerResponse>(plugin, Event::CreateContainer, &request).await?;
            creation.merge(&plugin.identity.full(), answer.unwrap_or_default())?;
        }
        if let Some(container) = pristine {
            self.validate(pod, container, &creation).await?;
        }
        Ok(creation)
    }

    async fn validate(
        &self,
        pod: &PodSandbox,
        container: Container,
        creation: &Creation,
    ) -> Result<(), Error> {
        let instance = |plugin: &Arc<Plugin>| PluginInstance {
            name: plugin.identity.name.clone(),
            index: plugin.identity.index.clone(),
        };
        let request = ValidateContainerAdjustmentRequest {
            pod: Some(pod.clone()),
            container: Some(container),
            adjust: Some(creation.adjustment.clone()),
            update: creation.updates.list.clone(),
            owners: Some(creation.owners.plugins.clone()),
            plugins: self.plugins.iter().map(instance).collect(),
        };
        let event = Event::ValidateContainerAdjustment;
        let request = &request;
        let answers = join_all(self.subscribers(event).map(|plugin| async move {
            let answer = plugin.call::<ValidateContainerAdjustmentResponse>(events::name(event), request);
            (plugin, answer.await)
        }));
        for (plugin, answer) in answers.await {
            let name = plugin.identity.full();
            match answer {
                Ok(ValidateContainerAdjustmentResponse { reject: false, .. }) => {}
                Ok(ValidateContainerAdjustmentResponse { reason, .. }) => {
                    return Err(Error::Rejected { plugin: name, reason });
                }
                // Without a response from a validating plugin the adjustment counts as invalid, even if the plugin
                // has disconnected.
                Err(source) => {
                    if source.is_fatal() {
                        plugin.connection.close();
                    }
                    return Err(Error::Refused { plugin: name, event: events::name(event), source });
                }
            }
        }
        Ok(())
    }

    /// Requests changes to the update of a container. Plugins get a large container without its longest fields.
    pub(super) async fn update(
        &self,
        pod: &PodSandbox,
        container: &Container,
        resources: LinuxResources,
    ) -> Result<Change, Error> {
        let mut change = Change::new(&container.id, resources);
        for plugin in self.subscribers(Event::UpdateContainer) {
            let others = [pod.encoded_len(), change.resources.encoded_len()];
            let request = UpdateContainerRequest {
                pod: Some(pod.clone()),
                container: Some(fitted_beside(container, &others)),
                linux_resources: Some(change.resources.clone()),
            };
            let answer =
                call_plugin::<UpdateContainerResponse>(plugin, Event::UpdateContainer, &request).await?;
            if let Some(answer) = answer {
                let merged = change.merge(&plugin.identity.full(), &answer.update);
                merged.map_err(adjust::MergeError::Conflict)?;
                change.evictions.extend(answer.evict);
            }
        }
        Ok(change)
    }

    /// Sends the stop of a container, which cannot be refused. Returns the updates of other containers that
    /// plugins request. Plugins get a large container without its longest fields.
    pub(super) async fn stop(&self, pod: &PodSandbox, container: &Container) -> Vec<ContainerUpdate> {
        let (mut updates, mut owners) = (Updates::default(), Owners::default());
        let container = fitted_beside(container, &[pod.encoded_len()]);
        let request = StopContainerRequest { pod: Some(pod.clone()), container: Some(container) };
        for plugin in self.subscribers(Event::StopContainer) {
            let answer = call_plugin::<StopContainerResponse>(plugin, Event::StopContainer, &request).await;
            let answer = match answer {
                Ok(answer) => answer.unwrap_or_default(),
                Err(error) => {
                    log(Event::StopContainer, Err(error));
                    continue;
                }
            };
            for update in &answer.update {
                if let Err(error) = updates.merge(&plugin.identity.full(), update, &mut owners) {
                    warn!(%error, "conflicting updates of NRI plugins");
                }
            }
        }
        updates.list
    }
}

/// Sends a request to one plugin. `None` if the plugin is dropped because it does not respond.
async fn call_plugin<A: Message + Default>(
    plugin: &Arc<Plugin>,
    event: Event,
    request: &impl Message,
) -> Result<Option<A>, Error> {
    drop_unresponsive(plugin, event, plugin.call::<A>(events::name(event), request).await)
}

/// Drops a plugin that does not respond. An error in its response is returned.
fn drop_unresponsive<A>(
    plugin: &Arc<Plugin>,
    event: Event,
    answer: Result<A, CallError>,
) -> Result<Option<A>, Error> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is_fatal() => {
            let name = plugin.identity.full();
            error!(plugin = name, event = events::name(event), %error, "dropping unresponsive NRI plugin");
            plugin.connection.close();
            Ok(None)
        }
        Err(source) => {
            let plugin = plugin.identity.full();
            Err(Error::Refused { plugin, event: events::name(event), source })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use coracle_proto::nri::{ConfigureResponse, ContainerEviction, RegisterPluginRequest};
    use coracle_proto::ttrpc::{Request, Status};
    use futures::future::BoxFuture;

    use super::*;
    use crate::Host;
    use crate::connection::{Connection, Service};
    use crate::mux;
    use crate::plugin::Candidate;
    use crate::settings::Settings;

    const LONG: Duration = Duration::from_secs(600);

    /// A runtime that the plugin does not call.
    struct NoHost;

    impl Host for NoHost {
        fn snapshot(&self) -> Snapshot {
            Snapshot::default()
        }

        fn update(self: Arc<Self>, _update: ContainerUpdate) -> BoxFuture<'static, Result<(), String>> {
            Box::pin(async { Ok(()) })
        }

        fn evict(self: Arc<Self>, _eviction: ContainerEviction) -> BoxFuture<'static, Result<(), String>> {
            Box::pin(async { Ok(()) })
        }
    }

    /// The plugin's side: subscribes to updates and stops, and records the requests with their containers.
    #[derive(Default)]
    struct Recorder {
        received: Mutex<Vec<(String, Container)>>,
    }

    impl Service for Recorder {
        fn serve(&self, request: Request) -> BoxFuture<'_, Result<Vec<u8>, Status>> {
            Box::pin(async move {
                if request.method == "Configure" {
                    let events = events::bit(Event::UpdateContainer) | events::bit(Event::StopContainer);
                    let events = i32::try_from(events).expect("a mask");
                    return Ok(ConfigureResponse { events }.encode_to_vec());
                }
                // `StopContainerRequest` has the same fields for the pod and the container.
                let sent = UpdateContainerRequest::decode(request.payload.as_slice()).expect("a request");
                let container = sent.container.unwrap_or_default();
                self.received.lock().expect("no panic").push((request.method, container));
                Ok(Vec::new())
            })
        }
    }

    /// A chain with one plugin, and the plugin's connection.
    async fn chain(recorder: Arc<Recorder>) -> (Chain, Arc<Connection>) {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let peer = Connection::open(theirs, mux::RUNTIME, recorder);
        let candidate = Candidate { stream: ours, identity: None, config: String::new(), child: None };
        let register = RegisterPluginRequest {
            plugin_name: "recorder".into(),
            plugin_idx: "00".into(),
            ..Default::default()
        };
        let settings = Settings::default();
        let host: Arc<dyn Host> = Arc::new(NoHost);
        let (plugin, registered) = tokio::join!(
            Plugin::join(candidate, &settings, Arc::downgrade(&host)),
            peer.call::<Empty>("nri.pkg.api.v1alpha1.Runtime", "RegisterPlugin", &register, LONG),
        );
        registered.expect("registered");
        let mut chain = Chain::default();
        chain.plugins.push(Arc::new(plugin.expect("joined")));
        (chain, peer)
    }

    #[tokio::test(start_paused = true)]
    async fn updates_and_stops_of_a_container_larger_than_a_message_are_sent() {
        let recorder = Arc::new(Recorder::default());
        let (chain, _peer) = chain(recorder.clone()).await;
        let large = Container { id: "large".into(), env: vec!["x".repeat(5 << 20)], ..Default::default() };
        let small = Container { id: "small".into(), env: vec!["x".into()], ..Default::default() };
        let pod = PodSandbox::default();
        for container in [&large, &small] {
            let update = chain.update(&pod, container, LinuxResources::default()).await;
            update.expect("the update is not refused");
            assert!(chain.stop(&pod, container).await.is_empty());
        }
        let received = recorder.received.lock().expect("no panic");
        let received: Vec<_> = received
            .iter()
            .map(|(method, container)| (method.as_str(), container.id.as_str(), container.env.len()))
            .collect();
        assert_eq!(
            received,
            [
                ("UpdateContainer", "large", 0),
                ("StopContainer", "large", 0),
                ("UpdateContainer", "small", 1),
                ("StopContainer", "small", 1)
            ]
        );
    }
}
