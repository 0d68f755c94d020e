//! All that an exec started, to be killed with it.
//!
//! An exec that is waited for adopts the orphans among its descendants (`PR_SET_CHILD_SUBREAPER`), whatever
//! sessions and groups they are in. So while it lives, parents lead from each of them to it, on cgroup v1 as on
//! v2, and never from a process of the container's own.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::time::Instant;

use crate::cgroup::Cgroups;
use crate::pidfd;

/// How long until killed processes are looked for again, and how long in all: a process may sleep in the kernel.
const STEP: Duration = Duration::from_millis(3);
const LIMIT: Duration = Duration::from_secs(10);

/// A process, as proc(5) has it in `stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    pid: i32,
    parent: i32,
    session: i32,
    /// Clock ticks from the machine's start to its own: of two processes with one number it tells which is meant.
    started: u64,
    /// It runs no more, and waits for its parent to notice.
    dead: bool,
}

/// An exec that stands still, to be killed by who knows its end then. It is killed without that when nobody could.
#[must_use = "it is killed when this goes"]
pub(super) struct Stopped {
    leader: Option<OwnedFd>,
}

// === impl Stopped ===

impl Stopped {
    /// It was killed.
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

/// Kills all that the exec `leader` in `group` started, but not itself: whoever does that next knows its end. None
/// when it has ended.
pub(super) async fn kill_descendants(cgroups: &Cgroups, group: &str, leader: i32) -> Option<Stopped> {
    let begun = Instant::now();
    let process = pidfd::open(leader).ok()?;
    // After it was opened: what leads is what is open.
    if !leads(cgroups, group, leader) {
        return None;
    }
    // Standing still it starts nothing, and does not end: its orphans would be the container's then.
    let _ended = pidfd::send(&process, libc::SIGSTOP);
    let stopped = Stopped { leader: Some(process) };
    let (mut killed, mut known) = (HashSet::new(), HashSet::new());
    while begun.elapsed() < LIMIT {
        let listed = cgroups.processes(group);
        let processes: Vec<Process> = listed.iter().filter_map(|pid| Process::look(*pid)).collect();
        let found = descendants(&processes, leader);
        // Whoever ended between the list and the look may have started somebody before, who is not on the list.
        let mut newcomers = false;
        for pid in ended(&listed, &processes) {
            newcomers |= known.insert(pid);
        }
        if found.is_empty() && !newcomers {
            break;
        }
        for process in found {
            newcomers |= killed.insert(process.pid);
            process.kill();
        }
        // Those who are killed take a moment; those who were started meanwhile must get none.
        if newcomers {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(STEP).await;
        }
    }
    Some(stopped)
}

/// Whether a process of the group is the leader of a session, as an exec is: its number may have become another's.
fn leads(cgroups: &Cgroups, group: &str, leader: i32) -> bool {
    look(cgroups, group).iter().any(|process| process.pid == leader && process.session == leader)
}

fn look(cgroups: &Cgroups, group: &str) -> Vec<Process> {
    cgroups.processes(group).into_iter().filter_map(Process::look).collect()
}

/// Those of a list who do not live any more.
fn ended(listed: &[i32], processes: &[Process]) -> impl Iterator<Item = i32> {
    let live: HashSet<i32> =
        processes.iter().filter(|process| !process.dead).map(|process| process.pid).collect();
    listed.iter().copied().filter(move |pid| !live.contains(pid))
}

/// Who lives and descends from `leader`, or is of its session: under a shim of an earlier version, orphans are not
/// adopted.
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
    fn look(pid: i32) -> Option<Self> {
        Self::parse(pid, &std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Kills it, and no process that has its number by now.
    fn kill(self) {
        let Ok(process) = pidfd::open(self.pid) else { return };
        if Self::look(self.pid).is_some_and(|now| now.started == self.started) {
            let _ended = pidfd::send(&process, libc::SIGKILL);
        }
    }

    fn parse(pid: i32, stat: &str) -> Option<Self> {
        // The name in parentheses may hold anything.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let number = |at: usize| fields.get(at)?.parse::<i32>().ok();
        // A process whose first thread ended is no zombie while another runs.
        let dead = matches!(*fields.first()?, "Z" | "X") && number(17)? <= 1;
        let started = fields.get(19)?.trim_end().parse().ok()?;
        Some(Self { pid, parent: number(1)?, session: number(3)?, started, dead })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32, session: i32) -> Process {
        Process { pid, parent, session, started: 0, dead: false }
    }

    #[test]
    fn descendants_are_found_whatever_their_session() {
        let processes = [
            // Listed before their parents.
            process(9, 8, 9),
            process(8, 7, 8),
            process(7, 5, 5),
            process(5, 2, 5),
            process(6, 3, 5),
            // The container's own.
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
    fn who_is_gone_when_looked_at_has_ended_and_who_is_dead() {
        let processes = [process(5, 2, 5), Process { dead: true, ..process(7, 5, 5) }];
        assert_eq!(ended(&[5, 7, 8], &processes).collect::<Vec<_>>(), [7, 8]);
    }

    #[test]
    fn a_process_is_read_as_proc_shows_it() {
        let rest = "0 0 0 0 0 0 0 0 0 0 0 20 0";
        let stat = |state: &str, threads: u32| format!("7 (a) b) {state} 5 6 4 {rest} {threads} 0 99\n");
        let expected = Process { pid: 7, parent: 5, session: 4, started: 99, dead: false };
        assert_eq!(Process::parse(7, &stat("S", 1)), Some(expected));
        assert_eq!(Process::parse(7, &stat("Z", 1)), Some(Process { dead: true, ..expected }));
        assert_eq!(Process::parse(7, &stat("Z", 2)), Some(expected));
        assert_eq!(Process::parse(7, "7 (a"), None);
        let own = Process::look(nix::unistd::getpid().as_raw()).expect("ourselves");
        assert_eq!(own.parent, nix::unistd::getppid().as_raw());
        assert_eq!(own.session, nix::unistd::getsid(None).expect("session").as_raw());
        assert_eq!(Process::look(i32::MAX), None);
    }
}
