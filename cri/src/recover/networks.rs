//! The networks of pods after a restart. Networks of dead pods are released, and networks of live pods are checked.

use std::path::PathBuf;
use std::sync::Arc;

use coracle_cni::Attachment;
use tracing::warn;

use super::{RecordedSandbox, Recovery, is_stop_incomplete};
use crate::namespaces;
use crate::records::SandboxRecord;
use crate::sandbox;

impl Recovery {
    /// Releases the addresses and interfaces of dead pods.
    pub(super) async fn reconcile_network(&self, sandboxes: &[RecordedSandbox]) {
        let live: Vec<Attachment> = sandboxes
            .iter()
            .filter(|RecordedSandbox { record, .. }| {
                namespaces::own_network(&record.config) && !is_stop_incomplete(record)
            })
            .filter_map(|RecordedSandbox { record, shim }| {
                let netns = format!("/proc/{}/ns/net", shim.shim()?.pid());
                Some(attachment(record, netns.into()))
            })
            .collect();
        if let Err(error) = self.network.reconcile(&live).await {
            warn!(error = error.chain(), "cannot reconcile the network");
        }
    }

    /// Logs the pods whose network differs from its configuration and could not be repaired, in a task: plugins can be
    /// slow executables.
    pub(super) fn check_networks(&self) {
        // Weak: the task ends with the runtime.
        let (tables, network) = (Arc::downgrade(&self.tables), self.network.clone());
        let sandboxes = self.tables.sandboxes.all();
        tokio::spawn(async move {
            for sandbox in sandboxes {
                // A sandbox that is being stopped is skipped afterwards.
                let _stays = sandbox.ending.lock().await;
                if tables.strong_count() == 0 {
                    return;
                }
                if sandbox.live().is_none() {
                    continue;
                }
                if let Err(error) = network.check(&sandbox.id).await {
                    warn!(
                        sandbox = sandbox.id,
                        error = error.chain(),
                        "the network of a pod differs from its configuration"
                    );
                }
            }
        });
    }
}

/// The network attachment of a live pod.
fn attachment(record: &SandboxRecord, netns: PathBuf) -> Attachment {
    sandbox::attachment::of(&record.id, netns.clone(), &record.config).unwrap_or_else(|error| {
        // The pod is live, although its configuration does not pass the current validation.
        warn!(sandbox = record.id, error = error.chain(), "the network options of a pod are invalid");
        let (id, ifname) = (record.id.clone(), sandbox::attachment::INTERFACE.to_owned());
        Attachment { id, netns, ifname, ..Attachment::default() }
    })
}
