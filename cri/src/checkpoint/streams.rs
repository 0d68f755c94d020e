//! Finds the pipes that are a container's standard streams: pipes whose other end the shim holds.
//!
//! The first process can have closed its streams while its children keep theirs. So all processes are examined, the first
//! process first.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::subject::Subject;

/// The standard streams of a frozen container, by the kernel's names of the pipes: `pipe:[NUMBER]`.
pub(super) fn find(subject: &Subject) -> BTreeMap<String, u32> {
    let shim = format!("/proc/{}/fd", subject.shim.pid());
    let held = fs::read_dir(shim).into_iter().flatten().flatten();
    let held: BTreeSet<String> = held.filter_map(|entry| link(&entry.path().to_string_lossy())).collect();
    if !subject.shim.is_alive() {
        return BTreeMap::new();
    }
    let processes = [subject.pid].into_iter().chain(subject.freezer.processes());
    let found = processes.flat_map(|pid| {
        (0..3).filter_map(move |standard| Some((link(&format!("/proc/{pid}/fd/{standard}"))?, standard)))
    });
    choose(found, &held)
}

fn link(path: &str) -> Option<String> {
    let target = fs::read_link(path).ok()?.to_string_lossy().into_owned();
    target.starts_with("pipe:").then_some(target)
}

/// The stream of each pipe. The first process that holds a pipe of the shim decides which stream the pipe is. Pure.
fn choose(found: impl Iterator<Item = (String, u32)>, held: &BTreeSet<String>) -> BTreeMap<String, u32> {
    let mut chosen = BTreeMap::new();
    for (pipe, standard) in found.filter(|(pipe, _)| held.contains(pipe)) {
        chosen.entry(pipe).or_insert(standard);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipes_of_the_shim_are_standard_streams() {
        let held = ["pipe:[1]", "pipe:[2]", "pipe:[9]"].map(str::to_owned).into();
        // `sh -c "(work 2>&1 | filter) 2>log"`: the first process has both pipes, a child has stderr in the pipe of stdout.
        let found = [("pipe:[1]", 1), ("pipe:[2]", 2), ("pipe:[7]", 1), ("pipe:[1]", 2)];
        let found = found.into_iter().map(|(pipe, standard)| (pipe.to_owned(), standard));
        let expected = [("pipe:[1]".to_owned(), 1), ("pipe:[2]".to_owned(), 2)];
        assert_eq!(choose(found, &held), expected.into());
    }
}
