//! The shims of recorded sandboxes after a restart.

use std::collections::HashSet;

use coracle_proto::shim::State;
use tracing::warn;

use super::Recovery;
use crate::error::Error;
use crate::records::{self, SandboxPhase, SandboxRecord};
use crate::shim_client::{self, ErrorKind, Shim};

/// The shim of a sandbox.
pub(super) enum Found {
    /// A live shim, with the state of its containers.
    Answers(Shim, State),
    /// A live shim that does not answer.
    Silent(Shim),
    Gone,
}

// === impl Found ===

impl Found {
    pub(super) fn shim(&self) -> Option<&Shim> {
        match self {
            Self::Answers(shim, _) | Self::Silent(shim) => Some(shim),
            Self::Gone => None,
        }
    }

    pub(super) fn state(&self) -> Option<&State> {
        match self {
            Self::Answers(_, state) => Some(state),
            Self::Silent(_) | Self::Gone => None,
        }
    }
}

// === impl Recovery ===

impl Recovery {
    /// Kills the shims of sandboxes whose directories were removed, and removes the cgroups of shims that have ended. The
    /// pods are started again.
    pub(super) async fn end_strays(&self, found: &records::Found<SandboxRecord>) {
        let known = found.readable.iter().map(|record| record.id.clone()).chain(found.lost.iter().cloned());
        let known: HashSet<String> = known.collect();
        Shim::kill_strays(self.records.sandboxes_dir(), known.clone(), self.config.shim_timeouts).await;
        if let Some(parent) = self.layout.shims() {
            self.cgroups.remove_stray_shims(&parent, known).await;
        }
    }

    /// Connects to the shim of a sandbox that should have one.
    pub(super) async fn connect_shim(&self, record: &SandboxRecord) -> Result<Found, Error> {
        match record.phase {
            SandboxPhase::NotReady => Ok(Found::Gone),
            SandboxPhase::Creating | SandboxPhase::Ready => self.find_shim(&record.id).await,
        }
    }

    /// Connects to a shim. A live shim stays alive even if this runtime cannot talk to it: the shim may be of a later
    /// version, or this process may lack a resource. A shim that no client can ever reach again is killed.
    pub(super) async fn find_shim(&self, id: &str) -> Result<Found, Error> {
        let dir = self.records.sandbox_dir(id);
        let timeouts = self.config.shim_timeouts;
        match Shim::reach(&dir, timeouts).await {
            Ok(shim_client::ConnectResult::Answers(shim, state)) => Ok(Found::Answers(shim, state)),
            Ok(shim_client::ConnectResult::Silent(shim)) => {
                warn!(sandbox = id, "the shim of a sandbox does not answer");
                Ok(Found::Silent(shim))
            }
            // `WrongState`: the shim answers that it is shutting down.
            Err(error)
                if matches!(error.kind, ErrorKind::Gone | ErrorKind::Silent | ErrorKind::WrongState) =>
            {
                warn!(sandbox = id, %error, "the shim of a sandbox is gone");
                Shim::kill_unreachable(&dir, timeouts).await;
                Ok(Found::Gone)
            }
            Err(source) => Err(Error::Foreign { id: id.to_owned(), source }),
        }
    }

    /// Deletes a shim's containers without a readable record.
    pub(super) async fn delete_unknown(&self, found: &Found, known: &HashSet<String>) {
        // If the shim does not respond, the monitor deletes the container when the shim responds again.
        let Found::Answers(shim, state) = found else { return };
        let ids = state.containers.iter().map(|reported| &reported.container_id);
        for id in ids.filter(|id| !known.contains(*id)) {
            if let Err(error) = shim.delete(id).await {
                warn!(container = id, %error, "cannot delete a container without a record");
            }
        }
    }
}
