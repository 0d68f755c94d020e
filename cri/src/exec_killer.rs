//! Kills commands in containers (execs) with all processes that they started.

mod descendants;

use std::sync::Arc;

use coracle_proto::shim;
use nix::sys::signal::Signal;

use crate::cgroup::Cgroups;
use crate::container::Container;
use crate::tables::Tables;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use descendants::fuzz;

/// Kills execs.
#[derive(Clone)]
pub(crate) struct ExecKiller {
    pub(crate) tables: Arc<Tables>,
    pub(crate) cgroups: Arc<Cgroups>,
}

// === impl ExecKiller ===

impl ExecKiller {
    /// Kills execs of an earlier runtime whose callers waited for the end. Their callers can no longer get
    /// the result.
    pub(crate) fn kill_orphaned(&self, execs: Vec<shim::ExecState>) {
        for shim::ExecState { container_id, exec_id, pid } in execs {
            let Some(container) = self.tables.containers.get(&container_id) else { continue };
            let killer = self.clone();
            coracle_threads::spawn(async move { killer.kill(&container, &exec_id, pid).await });
        }
    }

    /// Kills an exec and all processes that it started.
    pub(crate) async fn kill(&self, container: &Container, exec_id: &str, pid: i32) {
        let stopped = descendants::kill_descendants(&self.cgroups, &container.record.cgroup, pid).await;
        if let Ok(shim) = self.tables.shim_of(container) {
            let kill = shim::Signal {
                container_id: container.id.clone(),
                exec_id: exec_id.to_owned(),
                signal: Signal::SIGKILL as i32,
                all: false,
            };
            match (shim.signal(kill).await, stopped) {
                (Ok(()), Some(stopped)) => stopped.was_killed(),
                // The guard's drop kills the stopped process if the shim could not.
                (_, stopped) => drop(stopped),
            }
        }
    }
}
