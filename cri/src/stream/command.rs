//! Exec and attach, whatever the transport: bytes and sizes come in, bytes and one last status go
//! out.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use coracle_proto::cri;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::Descriptor;
use super::descriptor::set_window;
use crate::container::Container;
use crate::error::Error;
use crate::runtime::Runtime;
use crate::server::{Exec, exit_code};
use crate::shim_client::{AttachTo, Attached, ExecStdio, Shim};

const READ_SIZE: usize = 32 << 10;
/// How long outputs may stay open after the command ended, by processes that it left behind. What the command itself
/// wrote is in its pipes by then, and delivered however long the client takes to read it.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// The most that a pipe has room for (that of one who is attached: the shim's).
const PIPE_ROOM: usize = 1 << 20;
/// As much of what a client says is kept until its command begins.
const EARLY: usize = 16;

/// What a client sends. When no more can come, the client is gone.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    Stdin(Bytes),
    StdinClosed,
    Resize { width: u16, height: u16 },
}

/// What a client gets; the status is the last.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Output {
    Stdout(Bytes),
    Stderr(Bytes),
    Status(Bytes),
}

/// A client, as a transport presents it.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) input: mpsc::Receiver<Input>,
    pub(super) output: mpsc::Sender<Output>,
}

/// The ends of a command's streams.
type Reader = Box<dyn AsyncRead + Send + Unpin>;
type Sink = Box<dyn AsyncWrite + Send + Unpin>;
struct Streams {
    stdin: Option<Sink>,
    stdout: Option<Reader>,
    stderr: Option<Reader>,
}

/// A command that has not begun. Dropped before it has, it is killed when it does: who drops it is gone.
struct Beginning {
    runtime: Runtime,
    container: Arc<Container>,
    begun: Option<JoinHandle<Result<Exec, Error>>>,
}

/// Where sizes go and what happens at the end of the input.
struct Target<'a> {
    runtime: &'a Runtime,
    container_id: &'a str,
    /// An exec's own. There is no other: a terminal is hung up when nobody has its master.
    terminal: Option<OwnedFd>,
    /// The container's own input closes with the first client's.
    stdin_once: bool,
}

/// Runs a command for a client. A client that goes away closes the command's streams, and hangs its terminal up; the
/// command itself is not killed, as with every runtime. One that has not begun by then never serves anybody, and is.
pub(super) async fn exec(runtime: &Runtime, request: cri::ExecRequest, client: Client) {
    let output = client.output.clone();
    let status = match exec_status(runtime, request, client).await {
        Ok(Some(code)) => ended(code),
        Ok(None) => return,
        Err(error) => failed(&error.chain()),
    };
    let _gone = output.send(Output::Status(status)).await;
}

/// The exit code; none when the client went away.
async fn exec_status(
    runtime: &Runtime,
    request: cri::ExecRequest,
    client: Client,
) -> Result<Option<i32>, Error> {
    let mut client = client;
    let container = runtime.running(&request.container_id)?;
    let (stdio, ours) = stdio(&request)?;
    let begin = Beginning::of(runtime, &container, request.cmd, stdio);
    let (begun, early) = begin.unless_gone(&mut client.input).await;
    let exec = match begun {
        None => return Ok(None),
        Some(Ok(exec)) => exec,
        Some(Err(Error::Shim { source, .. })) if exit_code(source.kind).is_some() => {
            let text = Bytes::from(format!("{}\n", source.message));
            let output = if request.tty { Output::Stdout(text) } else { Output::Stderr(text) };
            let _gone = client.output.send(output).await;
            return Ok(exit_code(source.kind));
        }
        Some(Err(error)) => return Err(error),
    };
    let (terminal, streams) = match our_ends(exec.started.terminal.as_ref(), ours) {
        Ok(ends) => ends,
        Err(error) => {
            runtime.kill_begun(&container, &exec).await;
            return Err(error);
        }
    };
    let Exec { id, started, exit } = exec;
    drop(started.terminal);
    let target = Target { runtime, container_id: &container.id, terminal, stdin_once: false };
    let exited = async { exit.await.ok().map(|exit| exit.code) };
    // Its pipes are its own: nobody cuts them.
    let result = pump(&target, streams, (early, client), exited, async { false }).await;
    match result {
        End::ClientGone | End::Outrun => {
            runtime.forget_exec(&container, &id);
            Ok(None)
        }
        End::Command(None) => Err(runtime.lost(&container)),
        End::Command(code) => Ok(code),
    }
}

/// Attaches a client to a container's first process, until that ends.
pub(super) async fn attach(runtime: &Runtime, request: cri::AttachRequest, client: Client) {
    let output = client.output.clone();
    let status = match attach_ended(runtime, &request, client).await {
        Ok(true) => ended(0),
        Ok(false) => return,
        Err(error) => failed(&error.chain()),
    };
    let _gone = output.send(Output::Status(status)).await;
}

/// Whether the container ended; false when the client went away.
async fn attach_ended(
    runtime: &Runtime,
    request: &cri::AttachRequest,
    client: Client,
) -> Result<bool, Error> {
    let container = runtime.running(&request.container_id)?;
    let to = AttachTo { stdin: request.stdin, stdout: request.stdout, stderr: request.stderr };
    let shim = runtime.shim_of(&container)?;
    let attached = shim.attach(&container.id, to).await.map_err(Error::shim("attach to the container"))?;
    let streams = match attached {
        Attached { terminal: Some(terminal), .. } => terminal_streams(terminal)?,
        Attached { stdin, stdout, stderr, .. } => pipe_streams([stdin, stdout, stderr])?,
    };
    let target = Target {
        runtime,
        container_id: &container.id,
        terminal: None,
        stdin_once: container.record.config.stdin_once,
    };
    let exited = async {
        container.wait_exited().await;
        Some(0)
    };
    let outrun = is_outrun(&shim, &container.id, to);
    match pump(&target, streams, (Vec::new(), client), exited, outrun).await {
        End::ClientGone => Ok(false),
        End::Command(_) => Ok(true),
        End::Outrun => Err(Error::Outrun),
    }
}

/// Whether a container whose outputs have ended for a client has them still: then the shim has cut that client off, for
/// whom no container waits. It gives others their ends of those that are open.
async fn is_outrun(shim: &Shim, container_id: &str, to: AttachTo) -> bool {
    let again = shim.attach(container_id, AttachTo { stdin: false, ..to }).await;
    // One that is about to end is not attached to any more.
    again.is_ok_and(|open| open.terminal.is_some() || open.stdout.is_some() || open.stderr.is_some())
}

/// Why a command's client is served no more.
enum End {
    /// It went away.
    ClientGone,
    /// The command ended, and its output is delivered.
    Command(Option<i32>),
    /// It read too slowly.
    Outrun,
}

/// Carries bytes both ways until the command ended and its output is delivered, or the client went away before. Where
/// outputs end first, it is asked whether the client was `outrun`.
async fn pump(
    target: &Target<'_>,
    streams: Streams,
    (early, client): (Vec<Input>, Client),
    exit: impl Future<Output = Option<i32>>,
    outrun: impl Future<Output = bool>,
) -> End {
    let Client { input, output } = client;
    let gone = feed(target, (early, input), streams.stdin);
    let drained = CancellationToken::new();
    let outputs = async {
        tokio::join!(
            copy(streams.stdout, &output, Output::Stdout, &drained),
            copy(streams.stderr, &output, Output::Stderr, &drained)
        )
    };
    let mut outputs = std::pin::pin!(outputs);
    let mut exit = std::pin::pin!(exit);
    let command = async {
        tokio::select! {
            // Neither loses anything: both futures live on outside of the select.
            _ = &mut outputs => {
                if outrun.await {
                    return End::Outrun;
                }
                End::Command(exit.await)
            }
            code = &mut exit => {
                if timeout(DRAIN_TIME, &mut outputs).await.is_err() {
                    // Held open, or not read yet.
                    drained.cancel();
                    outputs.await;
                }
                End::Command(code)
            }
        }
    };
    tokio::select! {
        () = gone => End::ClientGone,
        end = command => end,
    }
}

/// Carries the client's input until the client is gone.
async fn feed(
    target: &Target<'_>,
    (early, mut input): (Vec<Input>, mpsc::Receiver<Input>),
    mut stdin: Option<Sink>,
) {
    let mut early = early.into_iter();
    loop {
        let next = match early.next() {
            Some(early) => Some(early),
            None => input.recv().await,
        };
        let Some(input) = next else { break };
        match input {
            Input::Stdin(bytes) => {
                if let Some(open) = &mut stdin
                    && open.write_all(&bytes).await.is_err()
                {
                    // The command reads no more: what still comes is dropped.
                    stdin = None;
                }
            }
            Input::StdinClosed => {
                stdin = None;
                target.close_stdin().await;
            }
            Input::Resize { width, height } => target.resize(width, height).await,
        }
    }
    drop(stdin);
    target.close_stdin().await;
}

// === impl Beginning ===

impl Beginning {
    fn of(runtime: &Runtime, container: &Arc<Container>, command: Vec<String>, stdio: ExecStdio) -> Self {
        let begun = {
            let (runtime, container) = (runtime.clone(), Arc::clone(container));
            tokio::spawn(async move { runtime.exec(&container, command, stdio).await })
        };
        Self { runtime: runtime.clone(), container: Arc::clone(container), begun: Some(begun) }
    }

    /// Waits until it has begun, and gives what the client said meanwhile. None when the client is gone by then.
    async fn unless_gone(
        mut self,
        input: &mut mpsc::Receiver<Input>,
    ) -> (Option<Result<Exec, Error>>, Vec<Input>) {
        let mut early = Vec::new();
        let begun = {
            let Some(begun) = &mut self.begun else { return (None, early) };
            tokio::select! {
                // It lives on outside of the select, and what was received is kept.
                begun = begun => begun,
                () = gone(input, &mut early) => return (None, early),
            }
        };
        // What it said last may still be there to be received.
        self.begun = None;
        if input.is_closed() {
            if let Ok(Ok(exec)) = begun {
                self.runtime.kill_begun(&self.container, &exec).await;
            }
            return (None, early);
        }
        let begun = begun.map_err(|panic| Error::Kernel {
            doing: "run the command in the container",
            source: std::io::Error::other(panic),
        });
        (Some(begun.flatten()), early)
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        if let Some(begun) = self.begun.take() {
            self.runtime.kill_when_begun(Arc::clone(&self.container), begun);
        }
    }
}

/// Returns when the client is gone. Keeps what it says until then, up to a limit.
async fn gone(input: &mut mpsc::Receiver<Input>, early: &mut Vec<Input>) {
    while early.len() < EARLY {
        match input.recv().await {
            Some(said) => early.push(said),
            None => return,
        }
    }
    std::future::pending().await
}

// === impl Target ===

impl Target<'_> {
    async fn resize(&self, width: u16, height: u16) {
        if let Some(terminal) = &self.terminal {
            if let Err(error) = set_window(terminal, width, height) {
                debug!(container = self.container_id, %error, "could not set a terminal's size");
            }
            return;
        }
        let Ok(container) = self.runtime.container(self.container_id) else { return };
        let Ok(shim) = self.runtime.shim_of(&container) else { return };
        if let Err(error) = shim.resize(self.container_id, width, height).await {
            debug!(container = self.container_id, %error, "could not set a terminal's size");
        }
    }

    async fn close_stdin(&self) {
        if !self.stdin_once {
            return;
        }
        let Ok(container) = self.runtime.container(self.container_id) else { return };
        let Ok(shim) = self.runtime.shim_of(&container) else { return };
        if let Err(error) = shim.close_stdin(self.container_id).await {
            debug!(container = self.container_id, %error, "could not close a container's input");
        }
    }
}

/// Carries an output to the client, until its end. Once it is `drained`, no more is waited for, and nothing delivered
/// but what its pipe may have held then.
async fn copy(
    from: Option<Reader>,
    to: &mpsc::Sender<Output>,
    wrap: impl Fn(Bytes) -> Output,
    drained: &CancellationToken,
) {
    let Some(mut from) = from else { return };
    let mut buffer = BytesMut::new();
    let mut left = PIPE_ROOM;
    while left > 0 {
        buffer.reserve(READ_SIZE);
        let read = tokio::select! {
            biased;
            // Reading loses nothing when it is not done.
            read = from.read_buf(&mut buffer) => read,
            () = drained.cancelled() => return,
        };
        match read {
            Ok(0) | Err(_) => return,
            Ok(count) if drained.is_cancelled() => left = left.saturating_sub(count),
            Ok(_) => {}
        }
        if to.send(wrap(buffer.split().freeze())).await.is_err() {
            return;
        }
    }
}

/// What the new process gets, and our ends of it: stdin, stdout, stderr.
fn stdio(request: &cri::ExecRequest) -> Result<(ExecStdio, [Option<OwnedFd>; 3]), Error> {
    if request.tty {
        return Ok((ExecStdio::Terminal, [None, None, None]));
    }
    let (stdin, our_stdin) = pipe(request.stdin)?;
    let (our_stdout, stdout) = pipe(request.stdout)?;
    let (our_stderr, stderr) = pipe(request.stderr)?;
    Ok((ExecStdio::Pipes { stdin, stdout, stderr }, [our_stdin, our_stdout, our_stderr]))
}

/// A pipe, when wanted: its read end and its write end.
fn pipe(wanted: bool) -> Result<(Option<OwnedFd>, Option<OwnedFd>), Error> {
    if !wanted {
        return Ok((None, None));
    }
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)
        .map_err(|errno| Error::Kernel { doing: "make a pipe", source: errno.into() })?;
    Ok((Some(read), Some(write)))
}

/// Our ends of a command's streams, and its terminal's master once more, for sizes.
fn our_ends(
    terminal: Option<&OwnedFd>,
    ours: [Option<OwnedFd>; 3],
) -> Result<(Option<OwnedFd>, Streams), Error> {
    let Some(terminal) = terminal else { return Ok((None, pipe_streams(ours)?)) };
    let copy = || {
        let copied = terminal.try_clone();
        copied.map_err(|source| Error::Kernel { doing: "keep the terminal", source })
    };
    Ok((Some(copy()?), terminal_streams(copy()?)?))
}

fn pipe_streams([stdin, stdout, stderr]: [Option<OwnedFd>; 3]) -> Result<Streams, Error> {
    let reader =
        |fd: Option<OwnedFd>| fd.map(descriptor).transpose().map(|fd| fd.map(|fd| Box::new(fd) as Reader));
    Ok(Streams {
        stdin: stdin.map(descriptor).transpose()?.map(|fd| Box::new(fd) as Sink),
        stdout: reader(stdout)?,
        stderr: reader(stderr)?,
    })
}

fn terminal_streams(terminal: OwnedFd) -> Result<Streams, Error> {
    let (read, write) = tokio::io::split(descriptor(terminal)?);
    Ok(Streams { stdin: Some(Box::new(write)), stdout: Some(Box::new(read)), stderr: None })
}

fn descriptor(fd: OwnedFd) -> Result<Descriptor, Error> {
    Descriptor::new(fd).map_err(|source| Error::Kernel { doing: "watch a descriptor", source })
}

/// The status of a command that ended.
fn ended(code: i32) -> Bytes {
    let status = if code == 0 {
        json!({ "metadata": {}, "status": "Success" })
    } else {
        json!({
            "metadata": {},
            "status": "Failure",
            "message": format!("command terminated with non-zero exit code: {code}"),
            "reason": "NonZeroExitCode",
            "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
        })
    };
    Bytes::from(status.to_string())
}

/// The status of a command that could not be run.
pub(super) fn failed(message: &str) -> Bytes {
    let status = json!({
        "metadata": {},
        "status": "Failure",
        "message": format!("Internal error occurred: {message}"),
        "reason": "InternalError",
        "details": { "causes": [{ "message": message }] },
        "code": 500,
    });
    Bytes::from(status.to_string())
}

/// A terminal's size as clients write it, with capital letters.
pub(super) fn resize(text: &[u8]) -> Option<Input> {
    let size: serde_json::Value = serde_json::from_slice(text).ok()?;
    let side = |name: &str| size.get(name)?.as_u64().and_then(|side| u16::try_from(side).ok());
    Some(Input::Resize { width: side("Width")?, height: side("Height")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One who goes on writing to what the command has left open.
    struct Endless;

    impl AsyncRead for Endless {
        fn poll_read(
            self: std::pin::Pin<&mut Self>,
            _cx: &mut std::task::Context<'_>,
            buf: &mut tokio::io::ReadBuf<'_>,
        ) -> std::task::Poll<std::io::Result<()>> {
            buf.put_slice(&[b'x'; 1024]);
            std::task::Poll::Ready(Ok(()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_written_after_the_end_is_not_delivered_for_ever() {
        let (sender, mut receiver) = mpsc::channel(1);
        let drained = CancellationToken::new();
        drained.cancel();
        let heard = async {
            let mut heard = 0;
            while let Some(Output::Stdout(bytes)) = receiver.recv().await {
                heard += bytes.len();
                // A client that takes its time.
                tokio::time::sleep(DRAIN_TIME).await;
            }
            heard
        };
        let endless: Reader = Box::new(Endless);
        let copied = async {
            copy(Some(endless), &sender, Output::Stdout, &drained).await;
            drop(sender);
        };
        let (heard, ()) = tokio::join!(heard, copied);
        assert!((PIPE_ROOM..PIPE_ROOM + READ_SIZE).contains(&heard), "{heard}");
    }

    #[tokio::test(start_paused = true)]
    async fn who_holds_an_output_open_and_is_silent_is_not_waited_for() {
        let (ours, _open) = tokio::io::duplex(8);
        let (sender, _receiver) = mpsc::channel(1);
        let drained = CancellationToken::new();
        drained.cancel();
        let silent: Reader = Box::new(ours);
        copy(Some(silent), &sender, Output::Stdout, &drained).await;
    }

    #[test]
    fn an_exit_code_is_a_cause_of_the_status() {
        let status: serde_json::Value = serde_json::from_slice(&ended(7)).expect("json");
        assert_eq!(status["reason"], "NonZeroExitCode");
        assert_eq!(status["details"]["causes"][0], json!({"reason": "ExitCode", "message": "7"}));
        assert_eq!(ended(0), Bytes::from(r#"{"metadata":{},"status":"Success"}"#));
    }

    #[test]
    fn sizes_are_read_as_clients_write_them() {
        assert_eq!(resize(b"{\"Width\":80,\"Height\":24}\n"), Some(Input::Resize { width: 80, height: 24 }));
        assert_eq!(resize(b"{\"Width\":-1,\"Height\":24}"), None);
        assert_eq!(resize(b"?"), None);
    }
}
