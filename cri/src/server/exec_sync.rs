//! ExecSync: run a command in a container, wait, and return what it wrote.

use std::os::fd::OwnedFd;
use std::time::Duration;

use coracle_proto::{cri, shim};
use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use oci_spec::runtime::Process;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::container_create::PROCESS_FILE;
use crate::container::Container;
use crate::error::Error;
use crate::records::ContainerPhase;
use crate::runtime::Runtime;
use crate::shim_client::{ErrorKind, ExecStdio, Started};
use crate::stream::Descriptor;

/// What is kept of each of the two outputs, as containerd and the kubelet agree.
const OUTPUT_LIMIT: usize = 16 << 20;
/// How long outputs may stay open after the command ended, by processes that it left behind.
const DRAIN_TIME: Duration = Duration::from_secs(5);

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
    pub(crate) async fn exec_sync(
        &self,
        request: cri::ExecSyncRequest,
        gone: impl Future<Output = ()>,
    ) -> Result<cri::ExecSyncResponse, Error> {
        let container = self.running(&request.container_id)?;
        let (out, out_end) = pipe()?;
        let (err, err_end) = pipe()?;
        let stdio = ExecStdio::Pipes { stdin: None, stdout: Some(out_end), stderr: Some(err_end) };
        let exec = match self.exec(&container, request.cmd.clone(), stdio).await {
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
        let Exec { id, started, exit } = exec;
        let run = async {
            // Both are read while the command runs, or it would wait for us.
            let mut outputs = std::pin::pin!(async { tokio::join!(collect(out), collect(err)) });
            let mut exit = std::pin::pin!(exit);
            tokio::select! {
                // Neither loses anything: both futures live on outside of the select.
                outputs = &mut outputs => (exit.await, Some(outputs)),
                code = &mut exit => (code, timeout(DRAIN_TIME, outputs).await.ok()),
            }
        };
        let seconds = u64::try_from(request.timeout).ok().filter(|seconds| *seconds > 0);
        let too_long = async {
            match seconds {
                Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds)).await,
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            // What the others drop is of no use any more.
            ended = run => Some(ended),
            () = too_long => None,
            () = gone => None,
        };
        let Some((exit, outputs)) = ended else {
            self.kill_exec(&container, &id, started.pid).await;
            return Err(Error::Timeout { command: request.cmd.join(" "), seconds: request.timeout });
        };
        let exit = exit.map_err(|_gone| self.lost(&container))?;
        let (stdout, stderr) = outputs.unwrap_or_default();
        Ok(cri::ExecSyncResponse { stdout, stderr, exit_code: exit.code })
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
        let bytes = std::fs::read(&path).map_err(Error::file("read", &path))?;
        let mut process: Process = serde_json::from_slice(&bytes).map_err(|source| Error::Format {
            doing: "decode",
            path,
            source,
        })?;
        process.set_args(Some(command));
        process.set_terminal(Some(matches!(stdio, ExecStdio::Terminal)));
        let sandbox_id = &container.record.sandbox_id;
        let sandbox = self.inner.sandboxes.get(sandbox_id).ok_or_else(|| Error::no_sandbox(sandbox_id))?;
        let shim = sandbox.shim()?;
        let id = hex::encode(rand::random::<[u8; 8]>());
        let exit = sandbox.expect_exec(&id);
        match shim.exec(&container.id, &id, &process, stdio).await {
            Ok(started) => Ok(Exec { id, started, exit }),
            Err(source) => {
                sandbox.forget_exec(&id);
                Err(Error::Shim { doing: "run the command in the container", source })
            }
        }
    }

    /// Kills an exec with all of its session: it leads one of its own.
    pub(crate) async fn kill_exec(&self, container: &Container, exec_id: &str, pid: i32) {
        for member in self.inner.cgroups.processes(&container.record.cgroup) {
            if session(member) == Some(pid) {
                // Gone meanwhile is what we want.
                let _gone = nix::sys::signal::kill(
                    nix::unistd::Pid::from_raw(member),
                    nix::sys::signal::Signal::SIGKILL,
                );
            }
        }
        if let Ok(shim) = self.shim_of(container) {
            let kill = shim::Signal {
                container_id: container.id.clone(),
                exec_id: exec_id.to_owned(),
                signal: nix::sys::signal::Signal::SIGKILL as i32,
                all: false,
            };
            let _gone = shim.signal(kill).await;
        }
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

/// All that comes, up to the limit; the rest is read and dropped, so that the command can go on.
async fn collect(mut from: impl AsyncRead + Unpin) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut buffer = vec![0; 32 << 10];
    while let Ok(count) = from.read(&mut buffer).await {
        if count == 0 {
            break;
        }
        let room = OUTPUT_LIMIT - kept.len();
        kept.extend_from_slice(&buffer[..count.min(room)]);
    }
    kept
}

/// The session that a process belongs to: proc(5), field 6 of `stat`.
fn session(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    stat.rsplit_once(") ")?.1.split(' ').nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_session_is_known() {
        let own = nix::unistd::getsid(None).expect("session").as_raw();
        assert_eq!(session(nix::unistd::getpid().as_raw()), Some(own));
        assert_eq!(session(i32::MAX), None);
    }

    #[tokio::test]
    async fn output_beyond_the_limit_is_dropped() {
        let long = vec![b'x'; OUTPUT_LIMIT + 5];
        assert_eq!(collect(long.as_slice()).await.len(), OUTPUT_LIMIT);
    }
}
