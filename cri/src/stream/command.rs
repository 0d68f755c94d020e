//! Exec: runs a command for a client.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use coracle_proto::cri;

use super::client::{Client, Input, Output, exited, failed};
use super::command_limit;
use super::pump::{End, Pipes, Session, Streams, Target};
use super::queue::{QueueReceiver, Size as _};
use crate::container::Container;
use crate::error::Error;
use crate::services::execs::{Exec, ExecService, StartTask, exit_code, shim_lost};
use crate::shim_client::ExecStdio;
use crate::tables::Tables;

/// Maximum messages of a client that are kept until its command starts.
const MAX_EARLY_MESSAGES: usize = 16;
/// When the kept messages have this number of bytes, no further messages are kept.
const MAX_EARLY_BYTES: usize = 64 << 10;

/// A command that has not started. If this value is dropped before the start, the command is killed when it starts: its
/// client has disconnected.
struct Starting {
    execs: ExecService,
    container: Arc<Container>,
    task: Option<StartTask>,
}

/// A started command, and the client's messages so far.
struct StartedCommand {
    exec: Result<Exec, Error>,
    early: Vec<Input>,
}

/// A pipe. Both ends are `None` if the client did not request the stream.
#[derive(Default)]
struct Pipe {
    read: Option<OwnedFd>,
    write: Option<OwnedFd>,
}

/// Runs a command for a client. When the client disconnects, the command's streams are closed and its terminal hangs up.
/// As in other runtimes, a started command is not killed then. A command that has not started is killed.
pub(super) async fn exec(tables: &Tables, execs: &ExecService, request: cri::ExecRequest, client: Client) {
    let output = client.output.clone();
    let status = match exec_until_end(tables, execs, request, client).await {
        Ok(Some(code)) => exited(code),
        Ok(None) => return,
        Err(error) => failed(&error.chain()),
    };
    let _gone = output.send(Output::Status(status)).await;
}

/// Runs the command until it ends. Returns its exit code, or `None` if the client disconnected.
async fn exec_until_end(
    tables: &Tables,
    execs: &ExecService,
    request: cri::ExecRequest,
    mut client: Client,
) -> Result<Option<i32>, Error> {
    let container = tables.running(&request.container_id)?;
    let permit = Arc::new(command_limit::take(tables, &container)?);
    let (stdio, ours) = stdio(&request)?;
    // If the client disconnects, the start continues and still has descriptors. So the task has the permit, too.
    let task = execs.start(&container, request.cmd, stdio, Arc::clone(&permit));
    let starting = Starting::new(execs, &container, task);
    let Some(StartedCommand { exec, early }) = starting.wait(&mut client.input).await else {
        return Ok(None);
    };
    let exec = match exec {
        Ok(exec) => exec,
        Err(Error::Shim { source, .. }) if exit_code(source.kind).is_some() => {
            let text = Bytes::from(format!("{}\n", source.message));
            let output = if request.tty { Output::Stdout(text) } else { Output::Stderr(text) };
            let _gone = client.output.send(output).await;
            return Ok(exit_code(source.kind));
        }
        Err(error) => return Err(error),
    };
    let (terminal, streams) = match host_ends(exec.started.terminal.as_ref(), ours, request.stdin) {
        Ok(ends) => ends,
        Err(error) => {
            execs.kill(&container, &exec).await;
            return Err(error);
        }
    };
    let Exec { id, started, exit } = exec;
    drop(started.terminal);
    let target = Target { tables, container_id: &container.id, terminal, stdin_once: false, detaches: false };
    let exit = async { exit.await.ok().map(|exit| exit.code) };
    let session = Session { target, streams, client, early };
    // The shim does not drop an exec's client: the pipes belong to this exec alone.
    match session.pump(exit, async { false }).await {
        End::ClientGone | End::Detached | End::TooSlow => {
            execs.remove(&container, &id);
            Ok(None)
        }
        End::Command(None) => Err(shim_lost(&container)),
        End::Command(code) => Ok(code),
    }
}

// === impl Starting ===

impl Starting {
    fn new(execs: &ExecService, container: &Arc<Container>, task: StartTask) -> Self {
        Self { execs: execs.clone(), container: Arc::clone(container), task: Some(task) }
    }

    /// Waits until the command has started. `None` if the client disconnects first.
    async fn wait(mut self, input: &mut QueueReceiver<Input>) -> Option<StartedCommand> {
        let mut early = Vec::new();
        let started = {
            let task = self.task.as_mut()?;
            tokio::select! {
                // Cancel safe: the task is outside of the select, and received messages are kept.
                started = task => started,
                () = client_gone(input, &mut early) => return None,
            }
        };
        // The task is complete, so the drop kills no command.
        self.task = None;
        // A closed channel, which may still contain messages, means that the client has disconnected.
        if input.is_closed() {
            if let Ok(Ok(exec)) = started {
                self.execs.kill(&self.container, &exec).await;
            }
            return None;
        }
        let exec = started.map_err(Error::panicked("run the command in the container")).flatten();
        Some(StartedCommand { exec, early })
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            self.execs.kill_when_started(Arc::clone(&self.container), task);
        }
    }
}

/// Returns when the client has disconnected. Keeps its messages until then, up to limits.
async fn client_gone(input: &mut QueueReceiver<Input>, early: &mut Vec<Input>) {
    let mut bytes = 0;
    while early.len() < MAX_EARLY_MESSAGES && bytes < MAX_EARLY_BYTES {
        match input.recv().await {
            Some(message) => {
                bytes += message.bytes();
                early.push(message);
            }
            None => return,
        }
    }
    std::future::pending().await
}

/// The standard streams of the new process, and our ends of its pipes.
fn stdio(request: &cri::ExecRequest) -> Result<(ExecStdio, Pipes), Error> {
    if request.tty {
        return Ok((ExecStdio::Terminal, Pipes::default()));
    }
    let (stdin, stdout, stderr) = (pipe(request.stdin)?, pipe(request.stdout)?, pipe(request.stderr)?);
    let theirs = ExecStdio::Pipes { stdin: stdin.read, stdout: stdout.write, stderr: stderr.write };
    Ok((theirs, Pipes { stdin: stdin.write, stdout: stdout.read, stderr: stderr.read }))
}

fn pipe(requested: bool) -> Result<Pipe, Error> {
    if !requested {
        return Ok(Pipe::default());
    }
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)
        .map_err(|errno| Error::Kernel { doing: "create a pipe", source: errno.into() })?;
    Ok(Pipe { read: Some(read), write: Some(write) })
}

/// Our ends of a command's streams. With a terminal, there is also a second descriptor of its master, to resize it.
fn host_ends(
    terminal: Option<&OwnedFd>,
    pipes: Pipes,
    has_stdin: bool,
) -> Result<(Option<OwnedFd>, Streams), Error> {
    let Some(terminal) = terminal else { return Ok((None, Streams::of_pipes(pipes)?)) };
    let copy = || {
        let copied = terminal.try_clone();
        copied.map_err(|source| Error::Kernel { doing: "duplicate the terminal's descriptor", source })
    };
    Ok((Some(copy()?), Streams::of_terminal(copy()?, has_stdin)?))
}
