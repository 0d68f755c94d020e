//! Checkpoints of pods: the containers are frozen together, dumped one after the other, and continue to run.
//!
//! The output directory gets one archive per container and, last, the manifest. The files get their names when all are
//! complete. Before that, a file next to each build directory records the output directory, so that a restart can
//! remove an incomplete checkpoint.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use super::build::BUILD_DIR;
use super::cleanup::{OUTPUT, remove_incomplete, remove_output, remove_output_note};
use super::manifest::{self, ENGINE, Manifest, SavedContainer, VERSION, name_of};
use super::subject::{Connections, Subject};
use super::{archive, frozen};
use crate::error::checkpoint::{CheckpointError, file};
use crate::records::{RestoreRecord, SandboxRecord};

/// A pod with running containers to checkpoint.
#[derive(Debug)]
pub(crate) struct PodSubject {
    pub(crate) record: SandboxRecord,
    pub(crate) containers: Vec<Subject>,
    /// An empty directory of the caller.
    pub(crate) output: PathBuf,
}

/// Writes the checkpoint, completely or not at all. Blocks.
pub(crate) fn checkpoint_pod(pod: &PodSubject) -> Result<(), CheckpointError> {
    let made = prepare(pod).and_then(|()| {
        let dumped = frozen::dump(&pod.containers, Connections::Ended);
        // The containers are thawed in every case, and before slow operations.
        let thawed = frozen::thaw(&pod.containers);
        put(pod, &dumped?).and(thawed)
    });
    let ids: Vec<&str> = pod.containers.iter().map(|subject| subject.record.id.as_str()).collect();
    let removed = if made.is_ok() { Ok(()) } else { remove_output(&pod.output, &ids) };
    coracle_fault::point("checkpoint-pod.made");
    let forgotten = pod.containers.iter().try_for_each(|subject| {
        remove_output_note(&subject.layer)?;
        coracle_fault::point("checkpoint-pod.forgotten");
        remove_incomplete(&subject.layer)
    });
    made.and(removed).and(forgotten)
}

/// Notes the output directory, so that the next start finds an incomplete checkpoint.
fn prepare(pod: &PodSubject) -> Result<(), CheckpointError> {
    for subject in &pod.containers {
        remove_incomplete(&subject.layer)?;
        let note = subject.layer.join(OUTPUT);
        fs::write(&note, pod.output.as_os_str().as_bytes()).map_err(file("write", &note))?;
        coracle_fault::point("checkpoint-pod.noted");
    }
    Ok(())
}

/// Writes the archives and the manifest.
fn put(pod: &PodSubject, dumped: &[RestoreRecord]) -> Result<(), CheckpointError> {
    let output = &pod.output;
    let mut manifest = Manifest {
        version: VERSION,
        engine: ENGINE.to_owned(),
        runtime_handler: pod.record.runtime_handler.clone(),
        sandbox_id: pod.record.id.clone(),
        sandbox: pod.record.config.clone(),
        containers: Vec::new(),
    };
    let mut files = Vec::new();
    for (subject, restore) in pod.containers.iter().zip(dumped) {
        let written = archive::write(&subject.layer.join(BUILD_DIR), output);
        let (written, sha256) = written.map_err(file("write to", output))?;
        let saved = saved(subject, restore, sha256);
        files.push((written, output.join(&saved.archive)));
        manifest.containers.push(saved);
    }
    let text = serde_json::to_vec(&manifest).map_err(io::Error::from);
    let last = text.and_then(|text| {
        let mut last = archive::unnamed(output)?;
        last.write_all(&text)?;
        last.sync_all()?;
        Ok(last)
    });
    files.push((last.map_err(file("write to", output))?, output.join(manifest::FILE)));
    for (written, location) in &files {
        archive::name(written, location).map_err(file("name", location))?;
        coracle_fault::point("checkpoint-pod.named");
    }
    File::open(output).and_then(|directory| directory.sync_all()).map_err(file("write to", output))
}

fn saved(subject: &Subject, restore: &RestoreRecord, sha256: String) -> SavedContainer {
    let record = &subject.record;
    SavedContainer {
        name: name_of(&record.config).to_owned(),
        id: record.id.clone(),
        archive: manifest::archive(&record.id),
        sha256,
        image_id: record.image_id.clone(),
        config: record.config.clone(),
        restore: restore.clone(),
    }
}
