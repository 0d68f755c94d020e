//! Checkpoints of pods: the containers are frozen together, dumped one after the other, and continue to run.
//!
//! The output directory gets one archive per container and, last, the manifest. The files get their names when all are
//! complete. The output directory is noted beside each workshop first, so that a restart can remove an incomplete checkpoint.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::frozen::{self, Connections};
use super::manifest::{self, ENGINE, Manifest, Saved, VERSION, name_of};
use super::{CheckpointError, OUTPUT, Subject, WORKSHOP, archive, file, forget, restore};
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
        // In every case, and before slow operations.
        let thawed = frozen::thaw(&pod.containers);
        put(pod, &dumped?).and(thawed)
    });
    let ids: Vec<&str> = pod.containers.iter().map(|subject| subject.record.id.as_str()).collect();
    let taken_back = if made.is_ok() { Ok(()) } else { take_back(&pod.output, &ids) };
    coracle_fault::point("checkpoint-pod.made");
    let forgotten = pod.containers.iter().try_for_each(|subject| {
        forget_note(&subject.layer)?;
        coracle_fault::point("checkpoint-pod.forgotten");
        forget(&subject.layer)
    });
    made.and(taken_back).and(forgotten)
}

/// Notes the output directory, so that the next start finds an incomplete checkpoint.
fn prepare(pod: &PodSubject) -> Result<(), CheckpointError> {
    for subject in &pod.containers {
        forget(&subject.layer)?;
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
        let written = archive::write(&subject.layer.join(WORKSHOP), output);
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

fn saved(subject: &Subject, restore: &RestoreRecord, sha256: String) -> Saved {
    let record = &subject.record;
    Saved {
        name: name_of(&record.config).to_owned(),
        id: record.id.clone(),
        archive: manifest::archive(&record.id),
        sha256,
        image_id: record.image_id.clone(),
        config: record.config.clone(),
        restore: restore.clone(),
    }
}

/// Removes a checkpoint of these containers from an output directory.
pub(crate) fn take_back_pod(output: &Path, containers: &[String]) -> Result<(), CheckpointError> {
    let ids: Vec<&str> = containers.iter().map(String::as_str).collect();
    take_back(output, &ids)
}

fn take_back(output: &Path, ids: &[&str]) -> Result<(), CheckpointError> {
    let manifest = output.join(manifest::FILE);
    // A manifest of another checkpoint in the same directory stays.
    let text = coracle_tree::read(&manifest, manifest::MAX).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    if ids.iter().any(|id| !id.is_empty() && text.contains(id)) {
        // All archives of the manifest are removed, also of containers without a note: a partial checkpoint is useless.
        let named = restore::read(output).map(|manifest| manifest.containers).unwrap_or_default();
        named.iter().try_for_each(|saved| remove(&output.join(manifest::archive(&saved.id))))?;
        remove(&manifest)?;
    }
    ids.iter().try_for_each(|id| remove(&output.join(manifest::archive(id))))
}

/// Removes an incomplete checkpoint after a crash: its caller got no response.
pub(super) fn forget_output(layer: &Path) -> Result<(), CheckpointError> {
    let note = layer.join(OUTPUT);
    let output = match fs::read(&note) {
        Ok(output) => PathBuf::from(std::ffi::OsStr::from_bytes(&output)),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(file("read", &note)(error)),
    };
    let id = layer.file_name().map(|name| name.to_string_lossy().into_owned());
    take_back(&output, &[id.as_deref().unwrap_or_default()])?;
    forget_note(layer)
}

fn forget_note(layer: &Path) -> Result<(), CheckpointError> {
    remove(&layer.join(OUTPUT))
}

fn remove(path: &Path) -> Result<(), CheckpointError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(file("remove", path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_checkpoint_is_removed_and_other_files_stay() {
        let dir = tempfile::tempdir().expect("directory");
        let (layer, output) = (dir.path().join("c1"), dir.path().join("output"));
        for dir in [&layer, &output] {
            fs::create_dir(dir).expect("make");
        }
        fs::write(layer.join(OUTPUT), output.as_os_str().as_bytes()).expect("note");
        for name in ["c1.tar", "c2.tar", "foreign"] {
            fs::write(output.join(name), "").expect("write");
        }
        fs::write(output.join(manifest::FILE), r#"{"id":"c2"}"#).expect("of another");
        forget(&layer).expect("forget");
        let left = || -> std::collections::BTreeSet<String> {
            let entries = fs::read_dir(&output).expect("list").flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        assert_eq!(left(), ["c2.tar", manifest::FILE, "foreign"].map(str::to_owned).into());
        assert!(!layer.join(OUTPUT).exists());
        take_back_pod(&output, &["c2".to_owned()]).expect("take back");
        assert_eq!(left(), ["foreign".to_owned()].into());
        forget(&layer).expect("nothing is left to forget");
    }
}
