//! Freezing containers while they are dumped and their files are copied.

use std::sync::atomic::Ordering;

use super::build::build;
use super::subject::{Connections, Subject};
use crate::error::checkpoint::{CheckpointError, file};
use crate::records::RestoreRecord;

/// Freezes all containers, then dumps one after the other. The caller thaws them in every case.
pub(super) fn dump(
    subjects: &[Subject],
    connections: Connections,
) -> Result<Vec<RestoreRecord>, CheckpointError> {
    for subject in subjects {
        let id = subject.record.id.clone();
        let frozen = subject.freezer.freeze().map_err(|source| CheckpointError::Freeze { id, source });
        refuse_stopping(subjects).and(frozen)?;
        coracle_fault::point("checkpoint.frozen");
    }
    let mut dumped = Vec::new();
    for subject in subjects {
        let built = build(subject, connections).map_err(|source| CheckpointError::Container {
            id: subject.record.id.clone(),
            source: Box::new(source),
        });
        // CRIU has frozen the container again. If the container was killed meanwhile, CRIU's error is only a
        // consequence.
        refuse_stopping(subjects)?;
        dumped.push(built?);
    }
    Ok(dumped)
}

/// Refuses containers that are being killed. A kill sets `stopping` first, then thaws the container if killed processes
/// would stay frozen otherwise. `stopping` is checked after the freeze, so either the kill or this
/// check thaws the container.
fn refuse_stopping(subjects: &[Subject]) -> Result<(), CheckpointError> {
    match subjects.iter().find(|subject| subject.stopping.load(Ordering::SeqCst)) {
        Some(subject) => Err(CheckpointError::BeingStopped { id: subject.record.id.clone() }),
        None => Ok(()),
    }
}

/// Thaws all containers. A failure for one container does not prevent the thaw of the other containers.
pub(super) fn thaw(subjects: &[Subject]) -> Result<(), CheckpointError> {
    let mut result = Ok(());
    for Subject { freezer, .. } in subjects {
        result = result.and(freezer.thaw().map_err(file("thaw", freezer.dir())));
    }
    coracle_fault::point("checkpoint.thawed");
    result
}
