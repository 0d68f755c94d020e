//! Containers that stand still while they are dumped and their files copied.

use std::sync::atomic::Ordering;

use super::{CheckpointError, Subject, file, make};
use crate::records::RestoreRecord;

/// What becomes of TCP connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connections {
    /// For whoever looks at it. Nothing passes on them during the dump.
    Kept,
    /// A pod is restored with another address: they end then, so there is no need to hold them up.
    Ended,
}

/// Freezes all, and dumps one after the other. They are to be thawed whatever comes of it.
pub(super) fn dump(
    subjects: &[Subject],
    connections: Connections,
) -> Result<Vec<RestoreRecord>, CheckpointError> {
    for subject in subjects {
        let id = subject.record.id.clone();
        let frozen = subject.freezer.freeze().map_err(|source| CheckpointError::Freeze { id, source });
        not_doomed(subjects).and(frozen)?;
        coracle_fault::point("checkpoint.frozen");
    }
    let mut dumped = Vec::new();
    for subject in subjects {
        let made = make(subject, connections).map_err(|source| CheckpointError::Container {
            id: subject.record.id.clone(),
            source: Box::new(source),
        });
        // CRIU has frozen it again. What it says of processes that went away meanwhile is no news.
        not_doomed(subjects)?;
        dumped.push(made?);
    }
    Ok(dumped)
}

/// Whoever kills a container says so first, and thaws it where the killed need that: looked at after a freezing, one
/// of the two lets it go.
fn not_doomed(subjects: &[Subject]) -> Result<(), CheckpointError> {
    match subjects.iter().find(|subject| subject.doomed.load(Ordering::SeqCst)) {
        Some(subject) => Err(CheckpointError::Doomed { id: subject.record.id.clone() }),
        None => Ok(()),
    }
}

/// Lets all go on, whatever fails.
pub(super) fn thaw(subjects: &[Subject]) -> Result<(), CheckpointError> {
    let mut result = Ok(());
    for Subject { freezer, .. } in subjects {
        result = result.and(freezer.thaw().map_err(file("thaw", freezer.dir())));
    }
    coracle_fault::point("checkpoint.thawed");
    result
}
