//! The exec service: commands in running containers.

mod output_memory;
mod outputs;
mod sync;

use std::sync::Arc;

use coracle_proto::shim;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::container::{Container, args};
use crate::error::Error;
use crate::exec_killer::ExecKiller;
use crate::records::Records;
use crate::services::process_file::{PROCESS_FILE, read_process};
use crate::shim_client::{self, ErrorKind, ExecStdio, StartResult, Started};
use crate::tables::Tables;

pub(crate) use output_memory::OutputMemory;

/// Runs commands in containers.
#[derive(Clone)]
pub(crate) struct ExecService {
    pub(crate) tables: Arc<Tables>,
    pub(crate) records: Arc<Records>,
    pub(crate) killer: ExecKiller,
    /// Memory for the outputs of all ExecSync calls.
    pub(crate) output_memory: OutputMemory,
}

/// A command that runs in a container.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) id: String,
    pub(crate) started: Started,
    pub(crate) exit: oneshot::Receiver<shim::Exit>,
}

/// A task that starts a command.
pub(crate) type StartTask = JoinHandle<Result<Exec, Error>>;

// === impl ExecService ===

impl ExecService {
    /// Starts a command in a container. The command has the settings of the container's own process: user, environment,
    /// limits.
    pub(crate) async fn exec(
        &self,
        container: &Container,
        command: Vec<String>,
        stdio: ExecStdio,
    ) -> Result<Exec, Error> {
        if command.is_empty() {
            return Err(Error::invalid("cmd", "is empty"));
        }
        let path = self.records.container_dir(&container.id).join(PROCESS_FILE);
        let mut process = read_process(&path)?;
        process.set_args(Some(command));
        if matches!(stdio, ExecStdio::Terminal) {
            process.set_terminal(Some(true));
            let env = process.env_mut().get_or_insert_default();
            args::name_terminal(env);
        } else {
            process.set_terminal(Some(false));
        }
        let sandbox = self.tables.sandbox(&container.record.sandbox_id)?;
        let shim = sandbox.shim()?;
        let id = hex::encode(rand::random::<[u8; 8]>());
        let exit = sandbox.expect_exec(&id);
        let source = match shim.exec(&container.id, &id, &process, stdio).await {
            Ok(StartResult::Started(started)) => {
                coracle_fault::point("exec.begun");
                return Ok(Exec { id, started, exit });
            }
            Ok(StartResult::PendingStart(late)) => {
                self.kill_late_exec(&container.id, id.clone(), late);
                shim_client::Error::silent()
            }
            Err(source) => source,
        };
        sandbox.forget_exec(&id);
        Err(Error::Shim { doing: "run the command in the container", source })
    }

    /// Starts a command in a task, which continues when its caller is cancelled. `held` is dropped at the end of the
    /// task, because the task has the descriptors of the command until then.
    pub(crate) fn start(
        &self,
        container: &Arc<Container>,
        command: Vec<String>,
        stdio: ExecStdio,
        held: impl Send + 'static,
    ) -> StartTask {
        let (service, container) = (self.clone(), Arc::clone(container));
        spawn_holding(held, async move { service.exec(&container, command, stdio).await })
    }

    /// Kills an exec and all processes that it started, as soon as the exec has started. The caller of the exec has
    /// disconnected.
    pub(crate) fn kill_when_started(&self, container: Arc<Container>, task: StartTask) {
        let service = self.clone();
        coracle_threads::spawn(async move {
            if let Ok(Ok(exec)) = task.await {
                service.kill(&container, &exec).await;
            }
        });
    }

    /// Kills an exec whose shim answers after the timeout: its caller already got an error.
    fn kill_late_exec(&self, container_id: &str, exec_id: String, late: shim_client::PendingStart) {
        let Some(container) = self.tables.containers.get(container_id) else { return };
        let killer = self.killer.clone();
        coracle_threads::spawn(async move {
            if let Ok(started) = late.started().await {
                killer.kill(&container, &exec_id, started.pid).await;
            }
        });
    }

    /// Kills an exec and all processes that it started.
    pub(crate) async fn kill(&self, container: &Container, exec: &Exec) {
        self.killer.kill(container, &exec.id, exec.started.pid).await;
    }

    /// Removes the entry of an exec without a waiting caller.
    pub(crate) fn remove(&self, container: &Container, exec_id: &str) {
        if let Some(sandbox) = self.tables.sandboxes.get(&container.record.sandbox_id) {
            sandbox.forget_exec(exec_id);
        }
    }
}

/// Spawns work that continues when its caller is cancelled, and drops `held` at its end.
fn spawn_holding<T: Send + 'static>(
    held: impl Send + 'static,
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    tokio::spawn(async move {
        let _held = held;
        work.await
    })
}

/// The error of an exec whose shim has exited.
pub(crate) fn shim_lost(container: &Container) -> Error {
    Error::WrongState { what: "container", id: container.id.clone(), state: "lost with its shim" }
}

/// The exit code that a shell gives for a command that cannot be executed.
pub(crate) fn exit_code(kind: ErrorKind) -> Option<i32> {
    match kind {
        ErrorKind::CommandNotFound => Some(127),
        ErrorKind::CommandNotExecutable => Some(126),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_start_holds_its_permit_after_the_client_has_disconnected() {
        let (permit, (begin, begun)) = (Arc::new(()), oneshot::channel::<()>());
        let task = spawn_holding(Arc::clone(&permit), begun);
        // A client that has disconnected waits for no result.
        tokio::task::yield_now().await;
        assert_eq!(Arc::strong_count(&permit), 2);
        begin.send(()).expect("the start continues");
        assert_eq!(task.await.expect("the task"), Ok(()));
        assert_eq!(Arc::strong_count(&permit), 1);
    }
}
