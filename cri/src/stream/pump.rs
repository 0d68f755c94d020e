//! Copies bytes between a client and a command until the command has ended or the client has disconnected.

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::client::{Client, Input, Output};
use super::queue::QueueReceiver;
use crate::descriptor::{Descriptor, set_window};
use crate::error::Error;
use crate::tables::Tables;

/// Bytes that are read at once. One user can have hundreds of clients that do not read, each with several such buffers.
const READ_SIZE: usize = 16 << 10;
/// Maximum time that the outputs stay open after the command has ended. Child processes can keep the outputs open. The
/// command's own output is in the pipes by then, and is delivered even if the client takes longer to read it.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// Maximum capacity in bytes of the pipe of an output. The shim makes the pipes of attached clients.
const PIPE_CAPACITY: usize = 1 << 20;

type Reader = Box<dyn AsyncRead + Send + Unpin>;
type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// Our ends of a command's streams.
pub(super) struct Streams {
    stdin: Option<Writer>,
    stdout: Option<Reader>,
    stderr: Option<Reader>,
}

/// Our ends of a command's pipes.
#[derive(Debug, Default)]
pub(super) struct Pipes {
    pub(super) stdin: Option<OwnedFd>,
    pub(super) stdout: Option<OwnedFd>,
    pub(super) stderr: Option<OwnedFd>,
}

/// The command or container that a client is connected to.
pub(super) struct Target<'a> {
    pub(super) tables: &'a Tables,
    pub(super) container_id: &'a str,
    /// An exec's terminal. No other process of the runtime holds its master, so the terminal hangs up when this
    /// descriptor is closed.
    pub(super) terminal: Option<OwnedFd>,
    /// Whether the container's standard input closes when this client closes its input (`stdin_once` of the container).
    pub(super) stdin_once: bool,
    /// The session ends when the client closes its input, as with containerd: the container's standard input stays open
    /// for the next client.
    pub(super) detaches: bool,
}

/// A session of a client with a command.
pub(super) struct Session<'a> {
    pub(super) target: Target<'a>,
    pub(super) streams: Streams,
    pub(super) client: Client,
    /// Messages that the client sent before the command started.
    pub(super) early: Vec<Input>,
}

/// The end of a session.
#[derive(Debug)]
pub(super) enum End {
    /// The client disconnected.
    ClientGone,
    /// The client has closed its input, and the session with it.
    Detached,
    /// The command ended and its output is delivered. `None` without an exit code.
    Command(Option<i32>),
    /// The shim dropped the client because it read too slowly.
    TooSlow,
}

// === impl Session ===

impl Session<'_> {
    /// Copies in both directions until the command has ended and its output is delivered, or the client has
    /// disconnected. If the outputs end before the command, `is_too_slow` returns whether the shim dropped the client.
    pub(super) async fn pump(
        self,
        exit: impl Future<Output = Option<i32>>,
        is_too_slow: impl Future<Output = bool>,
    ) -> End {
        let Self { target, streams, client, early } = self;
        let Streams { stdin, stdout, stderr } = streams;
        let drained = CancellationToken::new();
        let outputs = async {
            tokio::join!(
                copy(stdout, &client.output, Output::Stdout, &drained),
                copy(stderr, &client.output, Output::Stderr, &drained)
            )
        };
        let (mut outputs, mut exit) = (pin!(outputs), pin!(exit));
        let command = async {
            tokio::select! {
                // Cancel safe: both futures live outside of the select.
                _ = &mut outputs => {
                    if is_too_slow.await {
                        return End::TooSlow;
                    }
                    End::Command(exit.await)
                }
                code = &mut exit => {
                    if timeout(DRAIN_TIME, &mut outputs).await.is_err() {
                        // Child processes hold the outputs open, or the client reads slowly.
                        drained.cancel();
                        outputs.await;
                    }
                    End::Command(code)
                }
            }
        };
        tokio::select! {
            // Both arms may be dropped: the session is over.
            end = target.feed(early, client.input, stdin) => end,
            end = command => end,
        }
    }
}

// === impl Target ===

impl Target<'_> {
    /// Handles the client's messages until the client detaches or disconnects.
    async fn feed(
        &self,
        early: Vec<Input>,
        mut later: QueueReceiver<Input>,
        mut stdin: Option<Writer>,
    ) -> End {
        for input in early {
            if self.handle(input, &mut stdin).await.is_break() {
                return End::Detached;
            }
        }
        while let Some(input) = later.recv().await {
            if self.handle(input, &mut stdin).await.is_break() {
                return End::Detached;
            }
        }
        drop(stdin);
        self.close_stdin().await;
        End::ClientGone
    }

    /// Handles a message. Breaks if the client detaches.
    async fn handle(&self, input: Input, stdin: &mut Option<Writer>) -> ControlFlow<()> {
        match input {
            Input::Stdin(bytes) => {
                if let Some(open) = stdin
                    && open.write_all(&bytes).await.is_err()
                {
                    // The command closed its standard input: further input is dropped.
                    *stdin = None;
                }
            }
            Input::StdinClosed if self.detaches => return ControlFlow::Break(()),
            Input::StdinClosed => {
                *stdin = None;
                self.close_stdin().await;
            }
            Input::Resize { width, height } => self.resize(width, height).await,
        }
        ControlFlow::Continue(())
    }

    async fn resize(&self, width: u16, height: u16) {
        if let Some(terminal) = &self.terminal {
            if let Err(error) = set_window(terminal, width, height) {
                debug!(container = self.container_id, %error, "cannot resize a terminal");
            }
            return;
        }
        let Ok(container) = self.tables.container(self.container_id) else { return };
        let Ok(shim) = self.tables.shim_of(&container) else { return };
        if let Err(error) = shim.resize(self.container_id, width, height).await {
            debug!(container = self.container_id, %error, "cannot resize a terminal");
        }
    }

    async fn close_stdin(&self) {
        if !self.stdin_once {
            return;
        }
        let Ok(container) = self.tables.container(self.container_id) else { return };
        let Ok(shim) = self.tables.shim_of(&container) else { return };
        if let Err(error) = shim.close_stdin(self.container_id).await {
            debug!(container = self.container_id, %error, "cannot close the standard input of a container");
        }
    }
}

/// Copies an output to the client until its end. After `drained`, only the bytes that its pipe can have contained at
/// that time are delivered, and the copy does not wait for further bytes.
async fn copy(
    from: Option<Reader>,
    to: &mpsc::Sender<Output>,
    wrap: impl Fn(Bytes) -> Output,
    drained: &CancellationToken,
) {
    let Some(mut from) = from else { return };
    let mut buffer = BytesMut::new();
    let mut left = PIPE_CAPACITY;
    while left > 0 {
        buffer.reserve(READ_SIZE);
        let read = tokio::select! {
            biased;
            // Cancel safe: a read that is dropped has taken no bytes.
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

// === impl Streams ===

impl Streams {
    pub(super) fn of_pipes(pipes: Pipes) -> Result<Self, Error> {
        let reader = |fd: Option<OwnedFd>| {
            fd.map(descriptor).transpose().map(|fd| fd.map(|fd| Box::new(fd) as Reader))
        };
        Ok(Self {
            stdin: pipes.stdin.map(descriptor).transpose()?.map(|fd| Box::new(fd) as Writer),
            stdout: reader(pipes.stdout)?,
            stderr: reader(pipes.stderr)?,
        })
    }

    /// The streams of a terminal, by its master. Without `has_stdin`, input of the client is dropped, because admission
    /// may have allowed the request only without input.
    pub(super) fn of_terminal(terminal: OwnedFd, has_stdin: bool) -> Result<Self, Error> {
        let (read, write) = tokio::io::split(descriptor(terminal)?);
        let stdin = has_stdin.then(|| Box::new(write) as Writer);
        Ok(Self { stdin, stdout: Some(Box::new(read)), stderr: None })
    }
}

fn descriptor(fd: OwnedFd) -> Result<Descriptor, Error> {
    Descriptor::new(fd).map_err(|source| Error::Kernel { doing: "register a descriptor", source })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An output that never ends.
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
    async fn an_endless_output_is_cut_after_the_end_of_the_command() {
        let (sender, mut receiver) = mpsc::channel(1);
        let drained = CancellationToken::new();
        drained.cancel();
        let received = async {
            let mut received = 0;
            while let Some(Output::Stdout(bytes)) = receiver.recv().await {
                received += bytes.len();
                // The client reads slowly.
                tokio::time::sleep(DRAIN_TIME).await;
            }
            received
        };
        let endless: Reader = Box::new(Endless);
        let copied = async {
            copy(Some(endless), &sender, Output::Stdout, &drained).await;
            drop(sender);
        };
        let (received, ()) = tokio::join!(received, copied);
        assert!((PIPE_CAPACITY..PIPE_CAPACITY + READ_SIZE).contains(&received), "{received}");
    }

    #[tokio::test]
    async fn a_terminal_gets_input_only_if_standard_input_was_requested() {
        for has_stdin in [false, true] {
            let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
            let streams = Streams::of_terminal(ours.into(), has_stdin).expect("registered");
            assert_eq!((streams.stdin.is_some(), streams.stdout.is_some()), (has_stdin, true));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_output_without_data_is_not_awaited_after_the_end() {
        let (ours, _open) = tokio::io::duplex(8);
        let (sender, _receiver) = mpsc::channel(1);
        let drained = CancellationToken::new();
        drained.cancel();
        let silent: Reader = Box::new(ours);
        let copied = copy(Some(silent), &sender, Output::Stdout, &drained);
        timeout(DRAIN_TIME, copied).await.expect("no wait for the open output");
    }
}
