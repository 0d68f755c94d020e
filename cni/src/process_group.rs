//! Process groups of started programs.

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::Child;

/// The process group of a running program. Dropping it kills the program and its descendants, which would otherwise
/// continue after the kill of the program.
///
/// It must be dropped before the [`Child`]: until the child is dropped, the number of the group cannot be reused.
#[derive(Debug)]
pub struct ProcessGroup(Option<Pid>);

// === impl ProcessGroup ===

impl ProcessGroup {
    /// The group of a child that was started as its leader, with `process_group(0)`.
    #[must_use]
    pub fn of(leader: &Child) -> Self {
        Self(leader.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw))
    }

    /// Leaves the group's other processes running. Must be called when the program has ended by itself.
    pub fn ended(mut self) {
        self.0 = None;
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            // An error means that no process of the group is left.
            let _ = killpg(leader, Signal::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;
    use std::time::Duration;

    use tokio::io::AsyncReadExt as _;
    use tokio::process::Command;

    use super::*;

    #[tokio::test]
    async fn children_of_a_program_are_killed_with_it() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & echo started; wait"]).stdout(Stdio::piped());
        let mut child = command.process_group(0).kill_on_drop(true).spawn().unwrap();
        let mut output = child.stdout.take().unwrap();
        let group = ProcessGroup::of(&child);
        let mut line = [0; 8];
        output.read_exact(&mut line).await.unwrap();
        drop(group);
        // The pipe reaches its end when the last process with an open write end exits.
        let mut rest = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(60), output.read_to_end(&mut rest)).await;
        ended.expect("no process is left").unwrap();
    }
}
