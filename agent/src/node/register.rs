//! Registration of the Node object, and its updates.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use coracle_backoff::Backoff;
use coracle_error_chain::chain;
use coracle_watch::watch_object;
use futures::StreamExt;
use ipnetwork::IpNetwork;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeStatus};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};

use super::NodeAgent;
use super::devices::DeviceChanges;
use super::disk::DiskLevels;
use super::events::{self, NodeEvent};
use super::network::is_ready;
use super::overlay_changes::OverlayChanges;
use super::plan::{self, CurrentState};
use super::pressure::{MachineLevels, Pressure};
use crate::event_recorder::Level;
use crate::json_file;
use crate::node_object::pod_cidrs;

/// Back-off after a failed registration. It doubles with each failure, up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// Keeps the node registered and its status up to date until dropped.
pub(super) async fn keep(agent: &NodeAgent) {
    let api: Api<Node> = Api::all(agent.client.clone());
    // With the stored ranges, pods get their network even while the API server does not answer.
    if let Some(cidrs) = json_file::read::<Vec<IpNetwork>>(&cidr_record(agent)) {
        set_cidrs(agent, cidrs).await;
    }
    let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
    agent.startup.attempted(Instant::now());
    while let Err(error) = get_or_create(agent, &api).await {
        let delay = backoff.next_delay();
        if delay == FIRST_BACKOFF {
            tracing::info!(error = chain(&error), "cannot register the node, retrying");
        }
        tokio::time::sleep(delay).await;
    }
    // The event is recorded after the registration, because an event without its object is lost.
    agent.recorder.node(Level::Normal, "Starting", "Starting kubelet.");
    let mut changes = watch_object(api.clone(), &agent.config.name);
    let (mut images, mut ips) = (agent.images.subscribe(), agent.ips.subscribe());
    let mut overlay = OverlayChanges::new(agent.overlay_state.subscribe());
    let mut devices = DeviceChanges::new(agent.devices.subscribe());
    let (mut renewals, mut network) = (agent.renewals.subscribe(), agent.network_status.subscribe());
    let mut pressure = agent.pressure.subscribe();
    let mut is_shutting_down = false;
    loop {
        let result = tokio::select! {
            // Cancel-safe: the stream keeps its position, and the other arms only wake.
            change = changes.next() => match change {
                Some(Ok(Some(node))) => node_received(agent, &api, node).await,
                Some(Ok(None)) => get_or_create(agent, &api).await,
                Some(Err(error)) => Err(watch_error(&error)),
                None => return,
            },
            _ = renewals.changed() => update(agent, &api).await,
            _ = network.changed() => update(agent, &api).await,
            _ = pressure.changed() => update(agent, &api).await,
            _ = images.changed() => update(agent, &api).await,
            () = devices.changed() => update(agent, &api).await,
            _ = ips.changed() => update(agent, &api).await,
            () = overlay.changed() => update(agent, &api).await,
            () = agent.config.machine_shutdown.cancelled(), if !is_shutting_down => {
                is_shutting_down = true;
                update(agent, &api).await
            }
        };
        if let Err(error) = result {
            // The next renewal of the lease retries.
            tracing::debug!(error = chain(&error), "cannot update the node's status");
        }
    }
}

/// The error of a failed watch. The watch restarts by itself.
fn watch_error(error: &coracle_watch::Error) -> kube::Error {
    kube::Error::Service(chain(error).into())
}

/// Gets or creates the Node object.
async fn get_or_create(agent: &NodeAgent, api: &Api<Node>) -> Result<(), kube::Error> {
    let name = &agent.config.name;
    if let Some(node) = api.get_opt(name).await? {
        return node_received(agent, api, node).await;
    }
    if !agent.config.register {
        return Ok(());
    }
    let wanted = plan::node(&agent.config, &agent.properties, &current_state(agent));
    let node = match api.create(&PostParams::default(), &wanted).await {
        Err(kube::Error::Api(status)) if status.code == 409 => api.get(name).await?,
        made => {
            let made = made?;
            agent.startup.registered(Instant::now());
            made
        }
    };
    tracing::info!(node = name, "registered the node");
    record_status(agent, &Node::default(), &node);
    node_received(agent, api, node).await
}

/// Stores a received Node object, then updates it.
async fn node_received(agent: &NodeAgent, api: &Api<Node>, node: Node) -> Result<(), kube::Error> {
    let cidrs = pod_cidrs(&node);
    if !cidrs.is_empty() {
        set_cidrs(agent, cidrs).await;
    }
    let cordon = events::of_cordon(&agent.config.name, &agent.is_cordoned, &node);
    agent.node.send_replace(Some(Arc::new(node)));
    if let Some(NodeEvent { level, reason, message }) = cordon {
        agent.recorder.node(level, reason, message);
    }
    update(agent, api).await
}

/// Records events for a written change of the status. `held` is the node before the change.
fn record_status(agent: &NodeAgent, held: &Node, written: &Node) {
    let Some(now) = &written.status else { return };
    if now.conditions.iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True") {
        agent.startup.ready(Instant::now());
    }
    let recorded = agent.recorded_revision.swap(revision(written).unwrap_or(0), Ordering::Relaxed);
    if is_outdated(held, recorded) {
        return;
    }
    let unset = NodeStatus::default();
    let held = held.status.as_ref().unwrap_or(&unset);
    for NodeEvent { level, reason, message } in events::of_status(&agent.config.name, held, now) {
        agent.recorder.node(level, reason, message);
    }
}

/// Whether a node is older than the last recorded change. The watch may deliver such a version after the response to a
/// write. The events of the change were already recorded.
fn is_outdated(held: &Node, recorded: u64) -> bool {
    revision(held).is_some_and(|held| held < recorded)
}

fn revision(node: &Node) -> Option<u64> {
    node.metadata.resource_version.as_ref()?.parse().ok()
}

/// Patches metadata and status, if they changed.
async fn update(agent: &NodeAgent, api: &Api<Node>) -> Result<(), kube::Error> {
    let Some(mut node) = agent.node.borrow().clone() else { return Ok(()) };
    let announced = agent.overlay_state.borrow().announced.clone();
    if let Some(patch) = plan::metadata_patch(&agent.config, &agent.properties, announced.as_ref(), &node) {
        let patched = api.patch(&agent.config.name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        node = Arc::new(patched);
        agent.node.send_replace(Some(node.clone()));
    }
    let Some(patch) = plan::status_patch(&agent.config, &agent.properties, &current_state(agent), &node)
    else {
        return Ok(());
    };
    match api.patch_status(&agent.config.name, &PatchParams::default(), &Patch::Strategic(&patch)).await {
        Ok(mut written) => {
            plan::keep_declared_features(&mut written);
            record_status(agent, &node, &written);
            agent.node.send_replace(Some(Arc::new(written)));
            Ok(())
        }
        // The node was deleted in the meantime. The watch reports that, and the node is created again.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error),
    }
}

async fn set_cidrs(agent: &NodeAgent, cidrs: Vec<IpNetwork>) {
    if *agent.ranges.borrow() == cidrs && agent.network.ready().is_ok() {
        return;
    }
    match agent.network.set_pod_cidrs(cidrs.clone()).await {
        Ok(()) => {
            if let Err(error) = json_file::write(&cidr_record(agent), &cidrs) {
                tracing::warn!(%error, "cannot store the pod address ranges");
            }
            agent.ranges.send_replace(cidrs);
        }
        Err(error) => tracing::warn!(error, ?cidrs, "cannot set up the pod network"),
    }
}

fn cidr_record(agent: &NodeAgent) -> std::path::PathBuf {
    agent.config.state_dir.join("agent").join("pod-cidrs.json")
}

fn current_state(agent: &NodeAgent) -> CurrentState {
    let node = agent.node.borrow().clone();
    CurrentState {
        ips: agent.ips.borrow().clone(),
        network: agent
            .network
            .ready()
            .and_then(|()| is_ready(&agent.network_status.borrow(), node.as_deref())),
        overlay: agent.overlay_state.borrow().clone(),
        pressure: pressure(agent),
        images: agent.images.borrow().clone(),
        devices: agent.devices.borrow().clone(),
        is_shutting_down: agent.config.machine_shutdown.is_cancelled(),
        now: Timestamp::now(),
    }
}

/// Measures the resources of the node, and returns the conditions of pressure. This function never ends a condition.
/// Only the eviction task does, because it knows whether the minimum is reclaimed.
fn pressure(agent: &NodeAgent) -> Pressure {
    let thresholds = &agent.config.eviction;
    let disk = DiskLevels::read(&agent.config.state_dir, thresholds).shortage(thresholds).is_some();
    let short = MachineLevels::read().pressure(thresholds, disk);
    if short == Pressure::default() {
        return agent.pressure.current();
    }
    agent.pressure.observe(short, Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_version_of_the_node_causes_no_second_event() {
        let node = |revision: Option<&str>| {
            let mut node = Node::default();
            node.metadata.resource_version = revision.map(str::to_owned);
            node
        };
        assert!(is_outdated(&node(Some("9")), 10));
        assert!(!is_outdated(&node(Some("10")), 10) && !is_outdated(&node(Some("11")), 10));
        assert!(!is_outdated(&node(None), 10), "a node that did not exist");
        assert!(!is_outdated(&node(Some("9")), 0), "no event was recorded");
    }
}
