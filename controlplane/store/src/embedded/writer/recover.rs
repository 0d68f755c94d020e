//! Recovery from a disk failure: waits until the disk accepts writes, then reopens the database.

use std::time::Instant;

use coracle_error_chain::chain;

use super::{RETRY, Writer};
use crate::{
    Error,
    embedded::{
        engine::{Engine, Undo, WriteError},
        space,
    },
};

/// A failure of the database, until the recovery.
pub(super) struct Failure {
    /// The error, for clients.
    pub(super) detail: String,
    pub(super) retry_at: Instant,
    /// The entries that the failed batch may have replaced on disk.
    undo: Undo,
}

impl Writer<'_> {
    /// Refuses durable writes until the disk accepts them again.
    pub(super) fn fail(&mut self, detail: String, undo: Undo) {
        tracing::error!(error = detail, path = %self.shared.path.display(), "the store refuses durable writes until the disk accepts them");
        // The engine may have had no space for a table. It needs the released reserve to reopen.
        if !matches!(space::health(&self.shared.path), crate::Health::Good) {
            self.space.release();
        }
        self.shared.set_failure(Some(detail.clone()));
        // Keep the entries of the first failure. A second failure before the recovery is a failed reservation of
        // revisions, which has no entries to restore.
        let undo = self.failure.take().map_or(undo, |earlier| earlier.undo);
        // The next write tries to recover at once, because the cause of the failure may be gone.
        self.failure = Some(Failure { detail, retry_at: Instant::now(), undo });
    }

    /// Reopens a failed database if the next attempt is due.
    pub(super) fn recover_if_due(&mut self) {
        let Some(failure) = self.failure.take_if(|failure| failure.retry_at <= Instant::now()) else {
            return;
        };
        match self.recover(&failure) {
            Ok(()) => {
                tracing::info!(path = %self.shared.path.display(), "the store accepts durable writes again");
                self.shared.set_failure(None);
            }
            Err(error) => {
                let detail = match error {
                    Error::Disk { detail } => detail,
                    other => chain(&other),
                };
                tracing::debug!(error = detail, "the store cannot recover yet");
                self.shared.set_failure(Some(detail.clone()));
                self.failure = Some(Failure { detail, retry_at: Instant::now() + RETRY, undo: failure.undo });
            }
        }
    }

    fn recover(&mut self, failure: &Failure) -> Result<(), Error> {
        let path = &self.shared.path;
        let disk = |source: std::io::Error| Error::Disk { detail: source.to_string() };
        // The failed engine still serves reads until the disk accepts writes.
        space::probe(path).map_err(disk)?;
        self.shared.replace_engine(None);
        space::rewrite_journals(path).map_err(disk)?;
        let engine = Engine::open(path, self.shared.codec.clone())?;
        let state = self.shared.lock();
        let failed = |error| Error::Disk { detail: WriteError::Engine(error).to_string() };
        engine.restore(&failure.undo).map_err(failed)?;
        engine.reserve(state.reserved).map_err(failed)?;
        drop(state);
        self.shared.replace_engine(Some(engine));
        self.space = space::SpaceReserves::new(path);
        Ok(())
    }
}
