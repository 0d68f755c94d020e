//! The networks of pods after a restart. Networks of dead pods are released, and networks of live pods are checked.

use std::path::PathBuf;
use std::sync::Arc;

use coracle_cni::{Attachment, NamespaceProcess};
use tracing::warn;

use super::undo::is_stop_incomplete;
use super::{RecordedSandbox, Recovery};
use crate::namespaces;
use crate::pidfd;
use crate::records::SandboxRecord;
use crate::sandbox;
use crate::shim_client::Shim;

impl Recovery {
    /// Releases the addresses and interfaces of dead pods.
    pub(super) async fn reconcile_network(&self, sandboxes: &[RecordedSandbox]) {
        let live: Vec<Attachment> = sandboxes
            .iter()
            .filter(|RecordedSandbox { record, .. }| {
                namespaces::own_network(&record.config) && !is_stop_incomplete(record)
            })
            .filter_map(|RecordedSandbox { record, shim }| Some(attachment(record, shim.shim()?)))
            .collect();
        if let Err(error) = self.network.reconcile(&live).await {
            warn!(error = error.chain(), "cannot reconcile the network");
        }
    }

    /// Checks the networks of live pods in a task, because plugins can be slow executables. Logs each network that
    /// differs from its configuration and cannot be repaired.
    pub(super) fn check_networks(&self) {
        // Weak references: the task ends with the runtime.
        let (tables, network) = (Arc::downgrade(&self.tables), self.network.clone());
        let sandboxes = self.tables.sandboxes.all();
        coracle_threads::spawn(async move {
            for sandbox in sandboxes {
                // This waits for a stop in progress. The stopped sandbox is then skipped.
                let _guard = sandbox.ending.lock().await;
                if tables.strong_count() == 0 {
                    return;
                }
                if sandbox.live().is_none() || sandbox.is_stopping() {
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

/// The network attachment of a live pod. The attachment has the shim's pidfd, because another process can get the pid
/// when the shim ends.
fn attachment(record: &SandboxRecord, shim: &Shim) -> Attachment {
    let (netns, process) = (PathBuf::from(format!("/proc/{}/ns/net", shim.pid())), shim.pidfd());
    let process = Some(NamespaceProcess::new(move || pidfd::is_alive(&process)));
    let attachment = sandbox::attachment::of(&record.id, netns.clone(), &record.config);
    let attachment = attachment.unwrap_or_else(|error| {
        // The pod is live, although its configuration does not pass the current validation.
        warn!(sandbox = record.id, error = error.chain(), "the network options of a pod are invalid");
        let (id, ifname) = (record.id.clone(), sandbox::attachment::INTERFACE.to_owned());
        Attachment { id, netns, ifname, ..Attachment::default() }
    });
    Attachment { process, ..attachment }
}
