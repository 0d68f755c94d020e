//! A stream that keeps its connection's permit, even after an HTTP upgrade to another protocol.

use std::io;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::ConnectionPermit;
use crate::abandoned::SocketOwner;

/// A byte stream and its [`ConnectionPermit`], or another permit that it keeps until its end.
#[derive(Debug)]
pub struct PermitStream<I, S = Arc<ConnectionPermit>> {
    /// Before the stream: it is dropped first.
    _socket: Option<SocketOwner>,
    io: I,
    _permit: S,
}

impl<I, S> PermitStream<I, S> {
    /// Ties a stream to its permit.
    pub fn new(io: I, permit: S) -> Self {
        Self { _socket: None, io, _permit: permit }
    }
}

impl<I: AsRawFd> PermitStream<I> {
    /// Ties a stream to its permit, which then knows the socket: see [`watch_reads`](crate::watch_reads).
    pub fn of_socket(io: I, permit: Arc<ConnectionPermit>) -> Self {
        let socket = SocketOwner::new(permit.clone(), io.as_raw_fd());
        Self { _socket: Some(socket), io, _permit: permit }
    }
}

impl<I: AsyncRead + Unpin, S: Unpin> AsyncRead for PermitStream<I, S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<I: AsyncWrite + Unpin, S: Unpin> AsyncWrite for PermitStream<I, S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
