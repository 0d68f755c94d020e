//! The plugins in the order of their indices, and one request through all of them.

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

use super::{Known, Runs, told};
use crate::adjust::{Change, Creation, Updates};
use crate::connection::CallError;
use crate::events;
use crate::owners::Owners;
use crate::plugin::{JoinError, Plugin};
use crate::states::{States, Told};
use crate::{Error, adjust};

/// All plugins and what they were told.
#[derive(Debug, Default)]
pub(super) struct Chain {
    plugins: Vec<Arc<Plugin>>,
    pub(super) states: States,
}

// === impl Chain ===

impl Chain {
    /// Synchronizes a plugin with what there is, and adds it. What it wants updated comes back with it.
    pub(super) async fn join(
        &mut self,
        plugin: Plugin,
        known: Known,
    ) -> Result<(Arc<Plugin>, Vec<ContainerUpdate>), JoinError> {
        for (pod, runs) in &known.pods {
            self.states.set(&pod.id, if *runs == Runs::Yes { Told::Alive } else { Told::Stopped });
        }
        for container in &known.containers {
            self.states.set(&container.id, told(container));
        }
        let pods = known.pods.into_iter().map(|(pod, _)| pod).collect();
        let there = |container: &Container| told(container) == Told::Alive;
        let containers = known.containers.into_iter().filter(there).collect();
        let updates = match plugin.synchronize(pods, containers).await {
            Ok(updates) => updates,
            Err(error) => {
                self.prune();
                return Err(error);
            }
        };
        info!(plugin = plugin.identity.full(), events = plugin.events, "an NRI plugin joined");
        let plugin = Arc::new(plugin);
        self.plugins.push(Arc::clone(&plugin));
        self.plugins.sort_by(|one, other| one.identity.index.cmp(&other.identity.index));
        Ok((plugin, updates))
    }

    /// All plugins, none of which is left.
    pub(super) fn take(&mut self) -> Vec<Arc<Plugin>> {
        self.states.clear();
        std::mem::take(&mut self.plugins)
    }

    /// Forgets plugins that are gone.
    pub(super) fn prune(&mut self) {
        self.plugins.retain(|plugin| !plugin.connection.is_closed());
        if self.plugins.is_empty() {
            self.states.clear();
        }
    }

    /// The events that any plugin wants.
    pub(super) fn wanted(&self) -> u32 {
        self.plugins.iter().fold(0, |wanted, plugin| wanted | plugin.events)
    }

    pub(super) fn wants_any(&self, events: &[Event]) -> bool {
        events.iter().any(|event| self.wanted() & events::bit(*event) != 0)
    }

    /// Those that want an event.
    fn of(&self, event: Event) -> impl Iterator<Item = &Arc<Plugin>> {
        self.plugins.iter().filter(move |plugin| plugin.wants(event))
    }

    /// Tells an event that has no answer.
    pub(super) async fn tell(
        &self,
        event: Event,
        pod: &PodSandbox,
        container: Option<&Container>,
    ) -> Result<(), Error> {
        for plugin in self.of(event) {
            survive(plugin, event, plugin.tell(event, pod, container).await)?;
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
        for plugin in self.of(Event::UpdatePodSandbox) {
            ask::<Empty>(plugin, Event::UpdatePodSandbox, &request).await?;
        }
        Ok(())
    }

    /// Asks for adjustments, merges them, and has them validated.
    pub(super) async fn create(&self, pod: &PodSandbox, container: Container) -> Result<Creation, Error> {
        let pristine = self.wants_any(&[Event::ValidateContainerAdjustment]).then(|| container.clone());
        let mut creation = Creation::new(container);
        for plugin in self.of(Event::CreateContainer) {
            let request = CreateContainerRequest {
                pod: Some(pod.clone()),
                container: Some(creation.container.clone()),
            };
            let answer = ask::<CreateContainerResponse>(plugin, Event::CreateContainer, &request).await?;
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
        let answers = join_all(self.of(event).map(|plugin| async move {
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
                // What could not be validated is not valid, also when the validator is gone.
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

    /// Asks what the update of a container should be.
    pub(super) async fn update(
        &self,
        pod: &PodSandbox,
        container: &Container,
        resources: LinuxResources,
    ) -> Result<Change, Error> {
        let mut change = Change::new(&container.id, resources);
        for plugin in self.of(Event::UpdateContainer) {
            let request = UpdateContainerRequest {
                pod: Some(pod.clone()),
                container: Some(container.clone()),
                linux_resources: Some(change.resources.clone()),
            };
            let answer = ask::<UpdateContainerResponse>(plugin, Event::UpdateContainer, &request).await?;
            if let Some(answer) = answer {
                let merged = change.merge(&plugin.identity.full(), &answer.update);
                merged.map_err(adjust::MergeError::Conflict)?;
                change.evictions.extend(answer.evict);
            }
        }
        Ok(change)
    }

    /// Tells that a container ended; the answers are updates of others. It has ended whatever a plugin
    /// says.
    pub(super) async fn stop(&self, pod: &PodSandbox, container: &Container) -> Vec<ContainerUpdate> {
        let (mut updates, mut owners) = (Updates::default(), Owners::default());
        let request = StopContainerRequest { pod: Some(pod.clone()), container: Some(container.clone()) };
        for plugin in self.of(Event::StopContainer) {
            let answer = ask::<StopContainerResponse>(plugin, Event::StopContainer, &request).await;
            let answer = match answer {
                Ok(answer) => answer.unwrap_or_default(),
                Err(error) => {
                    super::log(Event::StopContainer, Err(error));
                    continue;
                }
            };
            for update in &answer.update {
                if let Err(error) = updates.merge(&plugin.identity.full(), update, &mut owners) {
                    warn!(%error, "NRI plugins disagree on an update");
                }
            }
        }
        updates.list
    }
}

/// Asks one plugin. No answer means that it is gone, and the runtime goes on without it.
async fn ask<A: Message + Default>(
    plugin: &Arc<Plugin>,
    event: Event,
    request: &impl Message,
) -> Result<Option<A>, Error> {
    survive(plugin, event, plugin.call::<A>(events::name(event), request).await)
}

/// Drops a plugin that did not answer; an error that it answered with is the call's.
fn survive<A>(plugin: &Arc<Plugin>, event: Event, answer: Result<A, CallError>) -> Result<Option<A>, Error> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is_fatal() => {
            let name = plugin.identity.full();
            error!(plugin = name, event = events::name(event), %error, "an NRI plugin is dropped");
            plugin.connection.close();
            Ok(None)
        }
        Err(source) => {
            let plugin = plugin.identity.full();
            Err(Error::Refused { plugin, event: events::name(event), source })
        }
    }
}
