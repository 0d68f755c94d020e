//! ExecSync: runs a command in a container, waits for its end, and returns its output.

use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use coracle_proto::{cri, shim};
use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::output_memory::Full;
use super::outputs::Outputs;
use super::{Exec, ExecService, StartTask, exit_code, shim_lost};
use crate::container::Container;
use crate::descriptor::Descriptor;
use crate::error::Error;
use crate::shim_client::ExecStdio;

/// Maximum time that the outputs stay open after the command has ended. Child processes can keep the outputs open.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// Maximum time that the outputs stay open after the command and its child processes were killed. Only the contents of
/// the pipes are left to read.
const DRAIN_TIME_KILLED: Duration = Duration::from_millis(500);
/// Maximum bytes of a command line in an error.
const COMMAND_SHOWN: usize = 256;

/// The end of an exec.
enum End {
    Exited(shim::Exit),
    /// The shim has exited.
    ShimLost,
    /// The call ended before the command, so the command was killed.
    Interrupted,
}

/// Resolves when the call must end: its timeout is over, its caller has disconnected, or the memory for its output is
/// full.
type CallEnd<'a> = Pin<&'a mut (dyn Future<Output = ()> + Send)>;

impl ExecService {
    /// Runs a command and returns its output and exit code. After the timeout, or when the caller has disconnected
    /// (`gone`), the command is killed with all processes that it started.
    ///
    /// A timeout is an error, as in containerd. By the error code the kubelet distinguishes a probe that took too long
    /// from a probe that could not run. An error has no field for outputs, so its text has the ends of the outputs. A
    /// command that exits in time is a success, even if child processes hold its outputs open.
    pub(crate) async fn exec_sync(
        &self,
        request: cri::ExecSyncRequest,
        gone: impl Future<Output = ()> + Send,
    ) -> Result<cri::ExecSyncResponse, Error> {
        let container = self.tables.running(&request.container_id)?;
        let (out, stdout) = pipe()?;
        let (err, stderr) = pipe()?;
        let full = CancellationToken::new();
        let mut over = pin!(call_end(request.timeout, gone, &full));
        let stdio = ExecStdio::Captured { stdout, stderr };
        let task = self.start(&container, request.cmd.clone(), stdio, ());
        let exec = match self.started(&container, task, over.as_mut()).await {
            Some(Ok(exec)) => exec,
            Some(Err(error)) => return not_executable(error),
            None => return Err(timed_out(&request, String::new())),
        };
        let share = self.output_memory.share(&container.record.sandbox_id);
        let mut outputs = Outputs::new(share);
        let reading = async {
            outputs.read(out, err).await;
            if outputs.full().is_some() {
                full.cancel();
            }
        };
        let end = self.wait(&container, exec, reading, over.as_mut()).await;
        if let Some(Full { scope, limit }) = outputs.full() {
            return Err(Error::OutputMemory {
                command: shortened(&request.cmd),
                scope,
                mebibytes: limit >> 20,
            });
        }
        match end {
            End::Exited(exit) => Ok(outputs.answer(exit.code)),
            End::ShimLost => Err(shim_lost(&container)),
            End::Interrupted => Err(timed_out(&request, outputs.output_tails())),
        }
    }

    /// Waits until the command has started. `None` if the call is over first: then the command is killed when it starts,
    /// because the shim may still start it.
    async fn started(
        &self,
        container: &Arc<Container>,
        mut task: StartTask,
        over: CallEnd<'_>,
    ) -> Option<Result<Exec, Error>> {
        let started = tokio::select! {
            biased;
            started = &mut task => started,
            () = over => {
                self.kill_when_started(Arc::clone(container), task);
                return None;
            }
        };
        Some(started.map_err(Error::panicked("run the command in the container")).flatten())
    }

    /// Reads the outputs until they end and the command has exited. Kills the command when the call is over.
    async fn wait(
        &self,
        container: &Container,
        exec: Exec,
        reading: impl Future<Output = ()>,
        mut over: CallEnd<'_>,
    ) -> End {
        let Exec { id, started, exit } = exec;
        let (mut reading, mut exit) = (pin!(reading), pin!(exit));
        let mut open = true;
        let end = loop {
            tokio::select! {
                biased;
                // Cancel safe: the futures live outside of the loop.
                exit = &mut exit => break exit.map_or(End::ShimLost, End::Exited),
                () = &mut over => break End::Interrupted,
                () = &mut reading, if open => open = false,
            }
        };
        let is_killed = matches!(end, End::Interrupted);
        if is_killed {
            self.killer.kill(container, &id, started.pid).await;
        }
        if open {
            tokio::select! {
                biased;
                // Reading has priority over the other arms: at this time the command's output is in the pipes.
                () = reading => {}
                () = sleep(if is_killed { DRAIN_TIME_KILLED } else { DRAIN_TIME }) => {}
                () = over, if !is_killed => {}
            }
        }
        end
    }
}

/// The response for a command that cannot be executed, as a shell gives it. Other errors are returned.
fn not_executable(error: Error) -> Result<cri::ExecSyncResponse, Error> {
    let Error::Shim { doing, source } = error else { return Err(error) };
    match exit_code(source.kind) {
        Some(exit_code) => {
            Ok(cri::ExecSyncResponse { stdout: Vec::new(), stderr: source.message.into_bytes(), exit_code })
        }
        None => Err(Error::Shim { doing, source }),
    }
}

fn timed_out(request: &cri::ExecSyncRequest, output_end: String) -> Error {
    Error::Timeout { command: shortened(&request.cmd), seconds: request.timeout, output_end }
}

/// A pipe: our read end, and the command's write end.
fn pipe() -> Result<(Descriptor, OwnedFd), Error> {
    let kernel = |source| Error::Kernel { doing: "create a pipe", source };
    let (ours, theirs) = pipe2(OFlag::O_CLOEXEC).map_err(|errno| kernel(errno.into()))?;
    Ok((Descriptor::new(ours).map_err(kernel)?, theirs))
}

/// Resolves when the timeout is over, the caller has disconnected, or the memory for outputs is full.
async fn call_end(timeout_seconds: i64, gone: impl Future<Output = ()>, full: &CancellationToken) {
    tokio::select! {
        // Cancel safe: all arms only wait.
        () = timeout(timeout_seconds) => {}
        () = gone => {}
        () = full.cancelled() => {}
    }
}

/// Resolves after the timeout. 0 and negative values disable it.
async fn timeout(seconds: i64) {
    match u64::try_from(seconds) {
        Ok(seconds) if seconds > 0 => sleep(Duration::from_secs(seconds)).await,
        _ => std::future::pending().await,
    }
}

/// A command line for an error. A long command line is truncated.
fn shortened(command: &[String]) -> String {
    let line = command.join(" ");
    match line.char_indices().find(|(at, _)| *at >= COMMAND_SHOWN) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_shows_the_beginning_of_a_long_command() {
        assert_eq!(shortened(&["echo".into(), "hi".into()]), "echo hi");
        let long = shortened(&["é".repeat(500)]);
        assert!(long.ends_with("é…") && long.len() < COMMAND_SHOWN + 6, "{}", long.len());
    }
}
