//! Writes a plan into a container's cgroup, all of it or, when something is refused, nothing.

use std::io::ErrorKind;
use std::path::PathBuf;

use coracle_proto::cri::LinuxContainerResources;
use tracing::warn;

use super::{Seen, Step, Write, plan};
use crate::cgroup::Cgroups;
use crate::cgroup::value::field;
use crate::error::Error;

/// A container's limits, to be changed.
#[derive(Debug)]
pub(crate) struct Resize<'a> {
    pub(crate) cgroups: &'a Cgroups,
    pub(crate) group: &'a str,
    /// From and to which OOM score adjustment its processes are moved.
    pub(crate) oom_score: Option<(i32, i32)>,
}

/// What was there before, to be put back in reverse order.
struct Old {
    path: PathBuf,
    text: String,
}

impl Resize<'_> {
    /// Makes the change. What is as asked for already is not written.
    ///
    /// # Errors
    /// The first refusal; everything is then as before.
    pub(crate) fn apply(&self, request: &LinuxContainerResources) -> Result<(), Error> {
        let steps = plan(request, &self.look())?;
        let mut done = Vec::new();
        let all = steps.iter().try_for_each(|step| self.take(step, &mut done));
        let all = all.and_then(|()| self.move_oom_score(&mut done));
        let all = all.and_then(|()| if done.is_empty() { Ok(()) } else { self.cgroups.tell(self.group) });
        if all.is_err() {
            for old in done.into_iter().rev() {
                put_back(&old);
            }
        }
        all
    }

    fn look(&self) -> Seen {
        let cgroups = self.cgroups;
        let limit = |name| cgroups.limit("memory", self.group, name);
        let there = |name| cgroups.file("memory", self.group, name).is_some_and(|path| path.exists());
        let stat = cgroups.text("memory", self.group, "memory.stat").unwrap_or_default();
        let quota = cgroups.text("cpu", self.group, "cpu.max").unwrap_or_default();
        Seen {
            unified: cgroups.unified(),
            hugetlb: cgroups.has("hugetlb"),
            swap: there(cgroups.either("memory.memsw.limit_in_bytes", "memory.swap.max")),
            memory: limit(cgroups.either("memory.limit_in_bytes", "memory.max")),
            memory_and_swap: limit("memory.memsw.limit_in_bytes"),
            anonymous: field(&stat, "anon").unwrap_or(0),
            quota: quota.split_whitespace().next().unwrap_or("max").to_owned(),
        }
    }

    fn take(&self, step: &Step, done: &mut Vec<Old>) -> Result<(), Error> {
        match step {
            Step::One(write) => self.write(write, done),
            Step::Pair(first, second) => match self.write(first, done) {
                Err(Error::File { source, .. }) if source.kind() == ErrorKind::InvalidInput => {
                    self.write(second, done)?;
                    self.write(first, done)
                }
                Err(error) => Err(error),
                Ok(()) => self.write(second, done),
            },
        }
    }

    fn write(&self, write: &Write, done: &mut Vec<Old>) -> Result<(), Error> {
        let Some(path) = self.cgroups.file(write.controller, self.group, &write.file) else {
            return Err(Error::invalid("linux", format!("there is no controller for {}", write.file)));
        };
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound && write.optional => return Ok(()),
            other => other.map_err(Error::file("read limit", &path))?,
        };
        if text.trim() == write.value {
            return Ok(());
        }
        std::fs::write(&path, &write.value).map_err(Error::file("write limit", &path))?;
        done.push(Old { path, text });
        Ok(())
    }

    /// Processes that set their own score keep it. One that is gone needs none.
    fn move_oom_score(&self, done: &mut Vec<Old>) -> Result<(), Error> {
        let Some((from, to)) = self.oom_score.filter(|(from, to)| from != to) else { return Ok(()) };
        for pid in self.cgroups.processes(self.group) {
            let path = PathBuf::from(format!("/proc/{pid}/oom_score_adj"));
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            if text.trim().parse() != Ok(from) {
                continue;
            }
            match std::fs::write(&path, to.to_string()) {
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    return Err(Error::file("write", &path)(error));
                }
                // Gone meanwhile.
                Err(_) => {}
                Ok(()) => done.push(Old { path, text }),
            }
        }
        Ok(())
    }
}

/// Some files hold a line for each device, and take one at a time.
fn put_back(old: &Old) {
    for line in old.text.lines().filter(|line| !line.is_empty()) {
        if let Err(error) = std::fs::write(&old.path, line) {
            warn!(path = %old.path.display(), %error, "could not put a limit back");
        }
    }
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
    fn a_refused_value_puts_all_others_back() {
        let dir = tempfile::tempdir().expect("directory");
        let cgroups = machine(dir.path());
        let file = |name: &str| dir.path().join("box").join(name);
        for (name, text) in [("memory.max", "max\n"), ("memory.swap.max", "max\n"), ("memory.current", "0\n")]
        {
            std::fs::write(file(name), text).expect("write");
        }
        let request = LinuxContainerResources {
            memory_limit_in_bytes: 4096,
            unified: [("memory.absent".to_owned(), "1".to_owned())].into(),
            ..Default::default()
        };
        let resize = Resize { cgroups: &cgroups, group: "/box", oom_score: None };
        let error = resize.apply(&request).expect_err("there is no such file");
        assert!(error.to_string().contains("memory.absent"), "{error}");
        assert_eq!(std::fs::read_to_string(file("memory.max")).expect("read"), "max");
        let request = LinuxContainerResources { memory_limit_in_bytes: 4096, ..Default::default() };
        resize.apply(&request).expect("apply");
        assert_eq!(std::fs::read_to_string(file("memory.max")).expect("read"), "4096");
        assert_eq!(std::fs::read_to_string(file("memory.swap.max")).expect("read"), "0");
    }

    #[test]
    fn what_is_so_already_is_not_written() {
        let dir = tempfile::tempdir().expect("directory");
        let cgroups = machine(dir.path());
        let resize = Resize { cgroups: &cgroups, group: "/box", oom_score: None };
        std::fs::write(dir.path().join("box/memory.max"), "7\n").expect("write");
        let mut done = Vec::new();
        resize.take(&Step::One(write("memory.max", "7")), &mut done).expect("nothing to do");
        assert!(done.is_empty());
        let optional = Write { optional: true, ..write("memory.absent", "7") };
        resize.take(&Step::One(optional), &mut done).expect("nothing to do");
        assert!(resize.take(&Step::One(write("memory.absent", "7")), &mut done).is_err());
    }
}
