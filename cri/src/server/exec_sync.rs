//! ExecSync: run a command in a container, wait, and return what it wrote.

mod outputs;
mod tree;

use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use coracle_proto::{cri, shim};
use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use self::outputs::Outputs;
use super::container_create::{PROCESS_FILE, read_process};
use crate::container::{Container, args};
use crate::error::Error;
use crate::records::ContainerPhase;
use crate::runtime::Runtime;
use crate::shim_client::{self, Begun, ErrorKind, ExecStdio, Started};
use crate::stream::Descriptor;

/// How long outputs may stay open after the command ended, by processes that it left behind.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// The same when all of it was killed: what is in the pipes is read.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// As much of a command line is in an error.
const COMMAND_SHOWN: usize = 256;

/// A command that runs in a container.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) id: String,
    pub(crate) started: Started,
    pub(crate) exit: oneshot::Receiver<shim::Exit>,
}

impl Runtime {
    /// Runs a command and returns its output and exit code. After the time-out, or when the caller is `gone`, it
    /// is killed with all that it started.
    ///
    /// A command that is late is an error, as with containerd: by its code the kubelet tells a probe that took
    /// too long from one that could not be run. An error has no room for outputs, so their ends are in its text.
    /// A command that ended in time is none, whoever it left behind to hold its outputs open.
    pub(crate) async fn exec_sync(
        &self,
        request: cri::ExecSyncRequest,
        gone: impl Future<Output = ()>,
    ) -> Result<cri::ExecSyncResponse, Error> {
        let container = self.running(&request.container_id)?;
        let (out, stdout) = pipe()?;
        let (err, stderr) = pipe()?;
        let captured = ExecStdio::Captured { stdout, stderr };
        let mut over = pin!(async {
            tokio::select! {
                () = late(request.timeout) => {}
                () = gone => {}
            }
        });
        let begun = {
            let (runtime, container, command) = (self.clone(), Arc::clone(&container), request.cmd.clone());
            async move { runtime.exec(&container, command, captured).await }
        };
        let mut begun = tokio::spawn(begun);
        let begun = tokio::select! {
            biased;
            begun = &mut begun => begun,
            // A shim that does not answer may do it yet, when nobody waits any more.
            () = &mut over => {
                self.kill_when_begun(container, begun);
                return Err(Error::Timeout {
                    command: shown(&request.cmd),
                    seconds: request.timeout,
                    last_words: String::new(),
                });
            }
        };
        let begun = begun.map_err(|panic| Error::Kernel {
            doing: "run the command in the container",
            source: std::io::Error::other(panic),
        });
        let exec = match begun.flatten() {
            Ok(exec) => exec,
            Err(Error::Shim { source, .. }) if exit_code(source.kind).is_some() => {
                return Ok(cri::ExecSyncResponse {
                    stdout: Vec::new(),
                    stderr: source.message.into_bytes(),
                    exit_code: exit_code(source.kind).unwrap_or_default(),
                });
            }
            Err(error) => return Err(error),
        };
        let mut outputs = Outputs::default();
        match self.attend(&container, exec, outputs.read(out, err), over).await {
            Some(Ok(exit)) => Ok(outputs.answer(exit.code)),
            Some(Err(_gone)) => Err(self.lost(&container)),
            None => Err(Error::Timeout {
                command: shown(&request.cmd),
                seconds: request.timeout,
                last_words: outputs.last_words(),
            }),
        }
    }

    /// Reads until the command has ended, and its outputs. None when its time was over before: then it is killed.
    async fn attend(
        &self,
        container: &Container,
        exec: Exec,
        reading: impl Future<Output = ()>,
        over: impl Future<Output = ()>,
    ) -> Option<Result<shim::Exit, oneshot::error::RecvError>> {
        let Exec { id, started, exit } = exec;
        let (mut reading, mut exit, mut over) = (pin!(reading), pin!(exit), pin!(over));
        let mut open = true;
        let exit = loop {
            tokio::select! {
                biased;
                // None of them loses anything: all live on outside of the loop.
                exit = &mut exit => break Some(exit),
                () = &mut over => break None,
                () = &mut reading, if open => open = false,
            }
        };
        if exit.is_none() {
            self.kill_exec(container, &id, started.pid).await;
        }
        if open {
            tokio::select! {
                biased;
                () = reading => {}
                () = sleep(if exit.is_some() { DRAIN_TIME } else { LAST_WORDS }) => {}
                // What the command wrote is in the pipes by now, and so has been read: reading comes first.
                () = over, if exit.is_some() => {}
            }
        }
        exit
    }

    /// Nobody waits for it any more.
    pub(crate) fn kill_when_begun(&self, container: Arc<Container>, begun: JoinHandle<Result<Exec, Error>>) {
        let runtime = self.clone();
        tokio::spawn(async move {
            if let Ok(Ok(exec)) = begun.await {
                runtime.kill_exec(&container, &exec.id, exec.started.pid).await;
            }
        });
    }

    /// Its caller is told that the shim does not answer: nobody waits for it any more.
    fn kill_when_started(&self, container_id: &str, exec_id: String, late: shim_client::Late) {
        let Some(container) = self.inner.containers.get(container_id) else { return };
        let runtime = self.clone();
        tokio::spawn(async move {
            if let Ok(started) = late.started().await {
                runtime.kill_exec(&container, &exec_id, started.pid).await;
            }
        });
    }

    /// Kills what an earlier runtime ran in a container and waited for: nobody can be told of its end any more.
    pub(crate) fn end_execs(&self, execs: Vec<shim::ExecState>) {
        for shim::ExecState { container_id, exec_id, pid } in execs {
            let Some(container) = self.inner.containers.get(&container_id) else { continue };
            let runtime = self.clone();
            tokio::spawn(async move { runtime.kill_exec(&container, &exec_id, pid).await });
        }
    }

    /// Kills a command that nobody can be told of, with all that it started.
    pub(crate) async fn kill_begun(&self, container: &Container, exec: &Exec) {
        self.kill_exec(container, &exec.id, exec.started.pid).await;
    }

    /// Kills an exec with all that it started.
    async fn kill_exec(&self, container: &Container, exec_id: &str, pid: i32) {
        let alone = tree::kill_descendants(&self.inner.cgroups, &container.record.cgroup, pid).await;
        if let Ok(shim) = self.shim_of(container) {
            let kill = shim::Signal {
                container_id: container.id.clone(),
                exec_id: exec_id.to_owned(),
                signal: nix::sys::signal::Signal::SIGKILL as i32,
                all: false,
            };
            match (shim.signal(kill).await, alone) {
                (Ok(()), Some(alone)) => alone.was_killed(),
                // It does not stay stopped when the shim cannot do it.
                (_, alone) => drop(alone),
            }
        }
    }

    /// Starts a command in a container, as its own process but for the command line.
    pub(crate) async fn exec(
        &self,
        container: &Container,
        command: Vec<String>,
        stdio: ExecStdio,
    ) -> Result<Exec, Error> {
        if command.is_empty() {
            return Err(Error::invalid("cmd", "is empty"));
        }
        let path = self.inner.records.container_dir(&container.id).join(PROCESS_FILE);
        let mut process = read_process(&path)?;
        process.set_args(Some(command));
        if matches!(stdio, ExecStdio::Terminal) {
            process.set_terminal(Some(true));
            let env = process.env_mut().get_or_insert_default();
            args::name_terminal(env);
        } else {
            process.set_terminal(Some(false));
        }
        let sandbox_id = &container.record.sandbox_id;
        let sandbox = self.inner.sandboxes.get(sandbox_id).ok_or_else(|| Error::no_sandbox(sandbox_id))?;
        let shim = sandbox.shim()?;
        let id = hex::encode(rand::random::<[u8; 8]>());
        let exit = sandbox.expect_exec(&id);
        let source = match shim.exec(&container.id, &id, &process, stdio).await {
            Ok(Begun::Started(started)) => {
                coracle_fault::point("exec.begun");
                return Ok(Exec { id, started, exit });
            }
            Ok(Begun::Late(late)) => {
                self.kill_when_started(&container.id, id.clone(), late);
                shim_client::Error::silent()
            }
            Err(source) => source,
        };
        sandbox.forget_exec(&id);
        Err(Error::Shim { doing: "run the command in the container", source })
    }

    /// A container that runs.
    pub(crate) fn running(&self, id: &str) -> Result<std::sync::Arc<Container>, Error> {
        let container = self.container(id)?;
        match container.phase() {
            ContainerPhase::Running { .. } => Ok(container),
            _ => Err(Error::WrongState { what: "container", id: container.id.clone(), state: "not running" }),
        }
    }

    /// Forgets an exec that nobody waits for any more.
    pub(crate) fn forget_exec(&self, container: &Container, exec_id: &str) {
        if let Some(sandbox) = self.inner.sandboxes.get(&container.record.sandbox_id) {
            sandbox.forget_exec(exec_id);
        }
    }

    /// For an exec whose shim died.
    pub(crate) fn lost(&self, container: &Container) -> Error {
        Error::WrongState { what: "container", id: container.id.clone(), state: "lost with its shim" }
    }
}

/// The exit code that a shell gives for a command that cannot be run.
pub(crate) fn exit_code(kind: ErrorKind) -> Option<i32> {
    match kind {
        ErrorKind::CommandNotFound => Some(127),
        ErrorKind::CommandNotExecutable => Some(126),
        _ => None,
    }
}

/// A pipe: the end that we read, and the one that the command writes.
fn pipe() -> Result<(Descriptor, OwnedFd), Error> {
    let kernel = |source| Error::Kernel { doing: "make a pipe", source };
    let (ours, theirs) = pipe2(OFlag::O_CLOEXEC).map_err(|errno| kernel(errno.into()))?;
    Ok((Descriptor::new(ours).map_err(kernel)?, theirs))
}

/// When a call's seconds are over; never, if it has none.
async fn late(seconds: i64) {
    match u64::try_from(seconds) {
        Ok(seconds) if seconds > 0 => sleep(Duration::from_secs(seconds)).await,
        _ => std::future::pending().await,
    }
}

/// A command line for an error: the beginning of a long one.
fn shown(command: &[String]) -> String {
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
        assert_eq!(shown(&["echo".into(), "hi".into()]), "echo hi");
        let long = shown(&["é".repeat(500)]);
        assert!(long.ends_with("é…") && long.len() < COMMAND_SHOWN + 6, "{}", long.len());
    }
}
