//! Writes a plan to a container's cgroup. If a write is refused, all earlier writes are reverted.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use coracle_proto::cri::LinuxContainerResources;

use super::note::{ADJUSTMENT, Note, OldValue, Scores, set_adjustment};
use super::{CurrentLimits, Step, Write, plan};
use crate::cgroup::Cgroups;
use crate::cgroup::value::field;
use crate::error::Error;

/// A change of a container's limits.
#[derive(Debug)]
pub(crate) struct Resize<'a> {
    pub(crate) cgroups: &'a Cgroups,
    pub(crate) group: &'a str,
    /// The current and the new OOM score adjustment of its processes.
    pub(crate) oom_score: Option<ScoreChange>,
    /// Directory of the note. The note exists until the change is recorded.
    pub(crate) bundle: &'a Path,
}

/// A change of the OOM score adjustment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScoreChange {
    pub(crate) from: i32,
    pub(crate) to: i32,
}

impl Resize<'_> {
    /// Makes the change. Afterwards the caller records `after` and removes the note. Unchanged values are not written.
    ///
    /// # Errors
    /// The error of the first refused write. All values are then restored.
    pub(crate) fn apply(
        &self,
        request: &LinuxContainerResources,
        after: LinuxContainerResources,
    ) -> Result<(), Error> {
        let steps = plan(request, &self.current_limits())?;
        let note = self.note(&steps, after)?;
        if note.limits.is_empty() && note.scores.is_none() {
            return Ok(());
        }
        note.write(self.bundle)?;
        coracle_fault::point("update.noted");
        let applied = steps.iter().try_for_each(|step| self.apply_step(step));
        let applied = applied
            .and_then(|()| note.scores.as_ref().map_or(Ok(()), |scores| set_scores(scores, self.group)));
        let applied = applied.and_then(|()| self.cgroups.update_unit(self.group));
        if applied.is_err() {
            note.revert(self.cgroups, self.group);
            Note::remove(self.bundle);
        }
        applied
    }

    fn current_limits(&self) -> CurrentLimits {
        let cgroups = self.cgroups;
        let limit = |name| cgroups.limit("memory", self.group, name);
        let exists = |name| cgroups.file("memory", self.group, name).is_some_and(|path| path.exists());
        let stat = cgroups.text("memory", self.group, "memory.stat").unwrap_or_default();
        let quota = cgroups.text("cpu", self.group, "cpu.max").unwrap_or_default();
        CurrentLimits {
            unified: cgroups.unified(),
            hugetlb: cgroups.has("hugetlb"),
            swap: exists(cgroups.select("memory.memsw.limit_in_bytes", "memory.swap.max")),
            memory: limit(cgroups.select("memory.limit_in_bytes", "memory.max")),
            memory_and_swap: limit("memory.memsw.limit_in_bytes"),
            anonymous: field(&stat, "anon").unwrap_or(0),
            quota: quota.split_whitespace().next().unwrap_or("max").to_owned(),
        }
    }

    /// The values that the steps overwrite.
    fn note(&self, steps: &[Step], after: LinuxContainerResources) -> Result<Note, Error> {
        let mut limits = Vec::new();
        for step in steps {
            let writes = match step {
                Step::One(write) => vec![write],
                Step::Pair(first, second) => vec![first, second],
            };
            for write in writes {
                limits.extend(self.changed_by(write)?);
            }
        }
        let change = self.oom_score.filter(|change| change.from != change.to);
        let scores =
            change.map(|change| Scores::of(&self.cgroups.processes(self.group), change.from, change.to));
        Ok(Note { limits, scores, after })
    }

    /// The current contents of the file. `None` if it already has the value, or if an optional file is absent.
    fn changed_by(&self, write: &Write) -> Result<Option<OldValue>, Error> {
        let Some(path) = self.cgroups.file(write.controller, self.group, &write.file) else {
            return Err(Error::invalid("linux", format!("no controller has the file {}", write.file)));
        };
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound && write.optional => return Ok(None),
            other => other.map_err(Error::file("read limit", &path))?,
        };
        Ok((text.trim() != write.value).then_some(OldValue { path, text }))
    }

    fn apply_step(&self, step: &Step) -> Result<(), Error> {
        match step {
            Step::One(write) => self.write(write),
            Step::Pair(first, second) => match self.write(first) {
                Err(Error::File { source, .. }) if source.kind() == ErrorKind::InvalidInput => {
                    self.write(second)?;
                    self.write(first)
                }
                Err(error) => Err(error),
                Ok(()) => self.write(second),
            },
        }
    }

    fn write(&self, write: &Write) -> Result<(), Error> {
        if let Some(OldValue { path, .. }) = self.changed_by(write)? {
            std::fs::write(&path, &write.value).map_err(Error::file("write limit", &path))?;
            coracle_fault::point("update.limit-written");
        }
        Ok(())
    }
}

/// Sets the scores. A process that has ended is skipped.
fn set_scores(scores: &Scores, group: &str) -> Result<(), Error> {
    for pid in &scores.pids {
        let path = PathBuf::from(format!("/proc/{pid}/{ADJUSTMENT}"));
        match set_adjustment(*pid, group, scores.to) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(Error::file("write", &path)(error));
            }
            // The process has ended.
            Err(_) => {}
            Ok(()) => coracle_fault::point("update.score-written"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(file: &str, value: &str) -> Write {
        Write { controller: "memory", file: file.into(), value: value.into(), optional: false }
    }

    fn machine(dir: &std::path::Path) -> Cgroups {
        std::fs::create_dir(dir.join("box")).expect("directory");
        Cgroups::unified_at(dir)
    }

    #[test]
    fn a_refused_value_reverts_all_others() {
        let dir = tempfile::tempdir().expect("directory");
        let cgroups = machine(dir.path());
        let file = |name: &str| dir.path().join("box").join(name);
        for (name, text) in [("memory.max", "max\n"), ("memory.swap.max", "max\n"), ("memory.current", "0\n")]
        {
            std::fs::write(file(name), text).expect("write");
        }
        // A file that can be read but not written.
        std::os::unix::fs::symlink("/proc/version", file("memory.refused")).expect("link");
        let request = |name: &str| LinuxContainerResources {
            memory_limit_in_bytes: 4096,
            unified: [(name.to_owned(), "1".to_owned())].into(),
            ..Default::default()
        };
        let resize = Resize { cgroups: &cgroups, group: "/box", oom_score: None, bundle: dir.path() };
        let apply =
            |request: &LinuxContainerResources| resize.apply(request, LinuxContainerResources::default());
        for (name, left) in [("memory.absent", "max\n"), ("memory.refused", "max")] {
            let error = apply(&request(name)).expect_err("refused");
            assert!(error.to_string().contains(name), "{error}");
            assert_eq!(std::fs::read_to_string(file("memory.max")).expect("read"), left);
            assert!(Note::read(dir.path()).is_none());
        }
        let request = LinuxContainerResources { memory_limit_in_bytes: 4096, ..Default::default() };
        apply(&request).expect("apply");
        assert_eq!(std::fs::read_to_string(file("memory.max")).expect("read"), "4096");
        assert_eq!(std::fs::read_to_string(file("memory.swap.max")).expect("read"), "0");
        // Until the change is recorded, the next start can revert it.
        let note = Note::read(dir.path()).expect("a note");
        note.revert(&cgroups, "/box");
        assert_eq!(std::fs::read_to_string(file("memory.max")).expect("read"), "max");
        assert_eq!(std::fs::read_to_string(file("memory.swap.max")).expect("read"), "max");
        Note::try_remove(dir.path()).expect("forget");
        assert!(Note::read(dir.path()).is_none());
    }

    #[test]
    fn an_unchanged_value_is_not_written() {
        let dir = tempfile::tempdir().expect("directory");
        let cgroups = machine(dir.path());
        let resize = Resize { cgroups: &cgroups, group: "/box", oom_score: None, bundle: dir.path() };
        std::fs::write(dir.path().join("box/memory.max"), "7\n").expect("write");
        assert!(resize.changed_by(&write("memory.max", "7")).expect("an existing file").is_none());
        let optional = Write { optional: true, ..write("memory.absent", "7") };
        resize.apply_step(&Step::One(optional)).expect("nothing to do");
        assert!(resize.apply_step(&Step::One(write("memory.absent", "7"))).is_err());
    }
}
