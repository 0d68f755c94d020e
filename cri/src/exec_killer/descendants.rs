//! Kills all processes that an exec started.
//!
//! An exec whose caller waits adopts the orphans among its descendants (`PR_SET_CHILD_SUBREAPER`), with any session and
//! process group. So while the exec runs, the chain of parents of each descendant leads to the exec, on cgroup v1 and
//! v2. The chain of the container's own processes never leads to the exec.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::blocking::FileWork;
use crate::cgroup::Cgroups;
use crate::pidfd;

/// Interval at which remaining descendants are searched.
const STEP: Duration = Duration::from_millis(3);
/// Timeout of the search: a process may be in uninterruptible sleep.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Passes through the processes of containers. A container can have tens of thousands of processes and many commands that
/// time out. The passes must neither take the blocking threads of the async runtime nor all processors.
static PASSES: FileWork = FileWork::new(4);

/// A process, from its `stat` (proc(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    pid: i32,
    parent: i32,
    session: i32,
    /// Start time in clock ticks since the boot. It distinguishes two processes with the same pid.
    started: u64,
    /// Whether the process is a zombie.
    dead: bool,
}

/// A stopped exec. The shim should kill it, because the shim then gets its exit. If the shim cannot, dropping this
/// value kills the exec.
#[must_use = "the drop kills the exec"]
pub(super) struct Stopped {
    leader: Option<OwnedFd>,
}

// === impl Stopped ===

impl Stopped {
    /// The shim has killed the exec, so the drop need not kill it.
    pub(super) fn was_killed(mut self) {
        self.leader = None;
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if let Some(leader) = &self.leader {
            let _ended = pidfd::send(leader, libc::SIGKILL);
        }
    }
}

/// The processes that a search has found so far.
#[derive(Debug, Default)]
struct Search {
    killed: HashSet<i32>,
    /// Pids of processes that had ended when they were read.
    ended: HashSet<i32>,
}

/// The result of one pass of a search.
#[derive(Debug, PartialEq, Eq)]
struct Pass {
    /// The live processes that the exec started.
    found: Vec<Process>,
    /// Whether the pass found a process that the earlier passes did not find: there may be more.
    has_new: bool,
}

/// Stops the exec `leader` in `group` and kills all processes that it started, but not the exec itself. `None` if the
/// exec has ended.
pub(super) async fn kill_descendants(cgroups: &Arc<Cgroups>, group: &str, leader: i32) -> Option<Stopped> {
    let begun = Instant::now();
    let process = pidfd::open(leader).ok()?;
    // The check comes after the open, so it holds for the opened process.
    let (own, path) = (Arc::clone(cgroups), group.to_owned());
    let checked = PASSES.run(move || is_session_leader(&own, &path, leader)).await;
    if !checked.is_ok_and(|is_leader| is_leader) {
        return None;
    }
    // A stopped process starts no child processes and does not end. If it ended, the container would adopt its orphans.
    let _ended = pidfd::send(&process, libc::SIGSTOP);
    let stopped = Stopped { leader: Some(process) };
    kill_until(begun + TIMEOUT, cgroups, group, leader).await;
    Some(stopped)
}

/// Kills the processes that the exec has started, until no such process is left or the time is over. At least one pass
/// is made, even if the passes for other commands took the time.
async fn kill_until(end: Instant, cgroups: &Arc<Cgroups>, group: &str, leader: i32) {
    let mut search = Search::default();
    loop {
        let (cgroups, group) = (Arc::clone(cgroups), group.to_owned());
        let passed = PASSES.run(move || {
            let pass = search.kill_found(&cgroups, &group, leader);
            (search, pass)
        });
        let Ok((continued, pass)) = passed.await else { return };
        search = continued;
        let is_done = !pass.has_new && pass.found.is_empty();
        if is_done || Instant::now() >= end {
            return;
        }
        // New processes must be killed at once. Killed processes need a moment to end.
        if !pass.has_new {
            tokio::time::sleep(STEP).await;
        }
    }
}

/// Whether a process of the group leads a session, as an exec does. Otherwise its pid was reused.
fn is_session_leader(cgroups: &Cgroups, group: &str, leader: i32) -> bool {
    cgroups.processes(group).contains(&leader)
        && Process::read(leader).is_some_and(|process| process.session == leader)
}

// === impl Search ===

impl Search {
    /// Kills the processes that the exec has started. Reads a file for each process of the group.
    fn kill_found(&mut self, cgroups: &Cgroups, group: &str, leader: i32) -> Pass {
        let listed = cgroups.processes(group);
        let processes: Vec<Process> = listed.iter().filter_map(|pid| Process::read(*pid)).collect();
        let pass = self.pass(&listed, &processes, leader);
        pass.found.iter().for_each(|process| process.kill());
        pass
    }

    fn pass(&mut self, listed: &[i32], processes: &[Process], leader: i32) -> Pass {
        let found = descendants(processes, leader);
        let mut has_new = false;
        // A process that ended after it was listed may have started a child that is not on the list.
        for pid in ended(listed, processes) {
            has_new |= self.ended.insert(pid);
        }
        for process in &found {
            has_new |= self.killed.insert(process.pid);
        }
        Pass { found, has_new }
    }
}

/// The listed pids without a live process.
fn ended(listed: &[i32], processes: &[Process]) -> impl Iterator<Item = i32> {
    let live: HashSet<i32> =
        processes.iter().filter(|process| !process.dead).map(|process| process.pid).collect();
    listed.iter().copied().filter(move |pid| !live.contains(pid))
}

/// The live processes that descend from `leader` or are in its session. Under a shim of an earlier version an exec does not
/// adopt orphans.
fn descendants(processes: &[Process], leader: i32) -> Vec<Process> {
    let mut family = HashSet::from([leader]);
    loop {
        let before = family.len();
        for process in processes {
            if process.session == leader || family.contains(&process.parent) {
                family.insert(process.pid);
            }
        }
        if family.len() == before {
            break;
        }
    }
    let found = processes.iter().filter(|process| family.contains(&process.pid));
    found.filter(|process| process.pid != leader && !process.dead).copied().collect()
}

// === impl Process ===

impl Process {
    fn read(pid: i32) -> Option<Self> {
        Self::parse(pid, &coracle_tree::read_lossy(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Kills the process, unless its pid was reused.
    fn kill(self) {
        let Ok(process) = pidfd::open(self.pid) else { return };
        if Self::read(self.pid).is_some_and(|now| now.started == self.started) {
            let _ended = pidfd::send(&process, libc::SIGKILL);
        }
    }

    fn parse(pid: i32, stat: &str) -> Option<Self> {
        // The name in parentheses can contain any character.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let number = |at: usize| fields.get(at)?.parse::<i32>().ok();
        // A process whose first thread has ended is not a zombie while another thread runs.
        let dead = matches!(*fields.first()?, "Z" | "X") && number(17)? <= 1;
        let started = fields.get(19)?.trim_end().parse().ok()?;
        Some(Self { pid, parent: number(1)?, session: number(3)?, started, dead })
    }
}

/// Fuzz target: the stat of a process.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(stat: &str) {
    let found: Vec<Process> = Process::parse(2, stat).into_iter().collect();
    assert!(descendants(&found, 2).is_empty(), "a process is not its own descendant");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32, session: i32) -> Process {
        Process { pid, parent, session, started: 0, dead: false }
    }

    #[test]
    fn descendants_are_found_in_every_session() {
        let processes = [
            // These processes are listed before their parents.
            process(9, 8, 9),
            process(8, 7, 8),
            process(7, 5, 5),
            process(5, 2, 5),
            process(6, 3, 5),
            // These are the container's own processes.
            process(3, 2, 3),
            process(4, 3, 3),
        ];
        let mut found: Vec<i32> = descendants(&processes, 5).iter().map(|process| process.pid).collect();
        found.sort_unstable();
        assert_eq!(found, [6, 7, 8, 9]);
        assert_eq!(descendants(&[process(5, 2, 5), process(3, 2, 3)], 5), []);
        assert_eq!(descendants(&[Process { dead: true, ..process(7, 5, 5) }], 5), []);
    }

    #[test]
    fn a_search_is_over_when_no_process_is_left() {
        let mut search = Search::default();
        let (leader, child) = (process(5, 2, 5), process(7, 5, 5));
        let pass = |found: &[Process], has_new| Pass { found: found.to_vec(), has_new };
        assert_eq!(search.pass(&[5, 7], &[leader, child], 5), pass(&[child], true));
        assert_eq!(search.pass(&[5, 7], &[leader, child], 5), pass(&[child], false), "the process is ending");
        assert_eq!(search.pass(&[5, 7], &[leader], 5), pass(&[], true), "it may have started a child");
        assert_eq!(search.pass(&[5], &[leader], 5), pass(&[], false));
    }

    #[test]
    fn absent_and_dead_processes_have_ended() {
        let processes = [process(5, 2, 5), Process { dead: true, ..process(7, 5, 5) }];
        assert_eq!(ended(&[5, 7, 8], &processes).collect::<Vec<_>>(), [7, 8]);
    }

    #[test]
    fn the_processes_of_a_group_are_listed_while_no_blocking_thread_of_the_runtime_is_free() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
        runtime.expect("runtime").block_on(async {
            let mount = tempfile::tempdir().expect("directory");
            let cgroups = Arc::new(Cgroups::unified_at(mount.path()));
            let (release, released) = std::sync::mpsc::channel::<()>();
            let blocks = tokio::task::spawn_blocking(move || released.recv().is_ok());
            let own = nix::unistd::getpid().as_raw();
            let search =
                tokio::time::timeout(Duration::from_secs(60), kill_descendants(&cgroups, "group", own));
            let stopped = search.await.expect("it waits for no other work");
            assert!(stopped.is_none(), "this process is not in the group");
            drop(release);
            assert!(!blocks.await.expect("the thread"));
        });
    }

    #[tokio::test]
    async fn a_search_whose_time_is_over_before_it_begins_still_kills() {
        use std::io::{BufRead as _, BufReader, Read as _};
        use std::process::{Command, Stdio};
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 60 & echo $!; wait $!; echo $?"]);
        let mut shell = shell.stdout(Stdio::piped()).spawn().expect("sh");
        let leader = i32::try_from(shell.id()).expect("pid");
        let mut output = BufReader::new(shell.stdout.take().expect("output"));
        let mut child = String::new();
        output.read_line(&mut child).expect("the child has started");
        let mount = tempfile::tempdir().expect("directory");
        std::fs::create_dir(mount.path().join("group")).expect("made");
        let list = format!("{leader}\n{child}");
        std::fs::write(mount.path().join("group/cgroup.procs"), list).expect("written");
        let cgroups = Arc::new(Cgroups::unified_at(mount.path()));
        kill_until(Instant::now(), &cgroups, "group", leader).await;
        let mut status = String::new();
        output.read_to_string(&mut status).expect("the end of the output");
        assert_eq!(status, "137\n", "the child was killed");
        shell.wait().expect("end");
    }

    #[test]
    fn a_process_is_parsed_from_its_stat() {
        let rest = "0 0 0 0 0 0 0 0 0 0 0 20 0";
        let stat = |state: &str, threads: u32| format!("7 (a) b) {state} 5 6 4 {rest} {threads} 0 99\n");
        let expected = Process { pid: 7, parent: 5, session: 4, started: 99, dead: false };
        assert_eq!(Process::parse(7, &stat("S", 1)), Some(expected));
        assert_eq!(Process::parse(7, &stat("Z", 1)), Some(Process { dead: true, ..expected }));
        assert_eq!(Process::parse(7, &stat("Z", 2)), Some(expected));
        assert_eq!(Process::parse(7, "7 (a"), None);
        let own = Process::read(nix::unistd::getpid().as_raw()).expect("ourselves");
        assert_eq!(own.parent, nix::unistd::getppid().as_raw());
        assert_eq!(own.session, nix::unistd::getsid(None).expect("session").as_raw());
        assert_eq!(Process::read(i32::MAX), None);
    }

    #[test]
    fn a_process_with_any_name_is_found() {
        use std::io::Read as _;
        use std::process::{Command, Stdio};
        let mut shell = Command::new("sh");
        shell.args(["-c", r"printf '\377' >/proc/$$/comm; echo; read line"]);
        let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh");
        shell.stdout.as_mut().expect("output").read_exact(&mut [0]).expect("the name is set");
        let pid = i32::try_from(shell.id()).expect("pid");
        let found = Process::read(pid);
        // The shell ends with its input.
        drop(shell.stdin.take());
        shell.wait().expect("end");
        assert_eq!(found.map(|found| found.parent), Some(nix::unistd::getpid().as_raw()));
    }
}
