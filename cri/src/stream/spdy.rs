//! One SPDY/3.1 connection as a server: streams that the client opens, their bytes in both
//! directions. No flow control, as the clients (all built on one Go library) have none either.

mod dictionary;
mod frame;
mod headers;

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::debug;

use self::frame::{Frame, decode, encode};
use self::headers::{Deflater, Headers, Inflater};

/// Frames that may wait in either direction.
const BACKLOG: usize = 16;
/// How long a client may take to close after we are done.
const LINGER: Duration = Duration::from_secs(5);
const READ_SIZE: usize = 32 << 10;
/// RST_STREAM: the stream is not served, and nothing was done for it.
const REFUSED: u32 = 3;
/// RST_STREAM: the stream is not needed any more.
const CANCEL: u32 = 5;

/// What the client did.
#[derive(Debug)]
pub(crate) enum Event {
    /// It opened a stream.
    Opened { id: u32, headers: Headers },
    /// It wrote to a stream; `fin` is its last word there.
    Data { id: u32, bytes: Bytes, fin: bool },
    /// It gave a stream up.
    Reset { id: u32 },
}

/// A connection: what the client does, and where to write. Dropping both ends it when all is sent.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) events: mpsc::Receiver<Event>,
    pub(crate) writer: Writer,
}

/// The way to the client.
#[derive(Debug, Clone)]
pub(crate) struct Writer {
    frames: mpsc::Sender<Frame>,
}

// === impl Writer ===

impl Writer {
    /// Writes to a stream. False when the client is gone.
    pub(crate) async fn data(&self, id: u32, bytes: Bytes) -> bool {
        self.frames.send(Frame::Data { id, fin: false, bytes }).await.is_ok()
    }

    /// Says the last word on a stream.
    pub(crate) async fn finish(&self, id: u32) -> bool {
        self.frames.send(Frame::Data { id, fin: true, bytes: Bytes::new() }).await.is_ok()
    }

    /// Does not serve a stream.
    pub(crate) async fn refuse(&self, id: u32) -> bool {
        self.frames.send(Frame::RstStream { id, status: REFUSED }).await.is_ok()
    }

    /// Gives a stream up.
    pub(crate) async fn reset(&self, id: u32) -> bool {
        self.frames.send(Frame::RstStream { id, status: CANCEL }).await.is_ok()
    }
}

// === impl Session ===

impl Session {
    /// Serves the connection in a task of its own.
    pub(crate) fn open<I>(io: I) -> Self
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (event_sender, events) = mpsc::channel(BACKLOG);
        let (frames, frame_receiver) = mpsc::channel(BACKLOG);
        let reader = Reader {
            buffer: BytesMut::new(),
            inflater: Inflater::new(),
            events: event_sender,
            replies: frames.downgrade(),
        };
        tokio::spawn(serve(io, reader, frame_receiver));
        Self { events, writer: Writer { frames } }
    }
}

/// A stream's header.
pub(crate) fn header<'a>(headers: &'a [(String, String)], name: &str) -> &'a str {
    headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str()).unwrap_or_default()
}

async fn serve<I: AsyncRead + AsyncWrite>(io: I, reader: Reader, frames: mpsc::Receiver<Frame>) {
    let (input, output) = tokio::io::split(io);
    let mut reading = std::pin::pin!(reader.run(input));
    tokio::select! {
        // When the client is gone nobody reads what is left to write; when all is written, the client
        // still has to read it: closing before it does would cut it off.
        result = &mut reading => if let Err(error) = result { debug!(%error, "a SPDY connection ended badly") },
        result = write(output, frames) => match result {
            Ok(_output) => drop(timeout(LINGER, reading).await),
            Err(error) => debug!(%error, "a SPDY connection ended badly"),
        },
    }
}

async fn write<I: AsyncWrite>(
    mut output: WriteHalf<I>,
    mut frames: mpsc::Receiver<Frame>,
) -> io::Result<WriteHalf<I>> {
    let mut buffer = BytesMut::new();
    let mut deflater = Deflater::new().map_err(io::Error::other)?;
    while let Some(mut frame) = frames.recv().await {
        if let Frame::SynReply { block, .. } = &mut frame {
            *block = deflater.block(&Headers::new()).map_err(io::Error::other)?.into();
        }
        encode(&frame, &mut buffer);
        output.write_all(&buffer).await?;
        output.flush().await?;
        buffer.clear();
    }
    encode(&Frame::GoAway { last: 0 }, &mut buffer);
    output.write_all(&buffer).await?;
    output.flush().await?;
    Ok(output)
}

#[derive(Debug)]
struct Reader {
    buffer: BytesMut,
    inflater: Inflater,
    events: mpsc::Sender<Event>,
    replies: mpsc::WeakSender<Frame>,
}

// === impl Reader ===

impl Reader {
    async fn run<I: AsyncRead>(mut self, mut input: ReadHalf<I>) -> io::Result<()> {
        loop {
            while let Some(frame) = decode(&mut self.buffer).map_err(io::Error::other)? {
                if matches!(frame, Frame::GoAway { .. }) {
                    continue;
                }
                self.frame(frame).await?;
            }
            self.buffer.reserve(READ_SIZE);
            if input.read_buf(&mut self.buffer).await? == 0 {
                return Ok(());
            }
        }
    }

    async fn frame(&mut self, frame: Frame) -> io::Result<()> {
        match frame {
            Frame::SynStream { id, fin, block } => {
                let headers = self.inflater.headers(&block).map_err(io::Error::other)?;
                self.reply(Frame::SynReply { id, block: Bytes::new() }).await;
                self.event(Event::Opened { id, headers }).await;
                if fin {
                    self.event(Event::Data { id, bytes: Bytes::new(), fin }).await;
                }
            }
            Frame::Data { id, fin, bytes } => self.event(Event::Data { id, bytes, fin }).await,
            Frame::RstStream { id, .. } => self.event(Event::Reset { id }).await,
            // Odd ids are the client's own; even ones would be echoes of ours.
            Frame::Ping { id } if id % 2 == 1 => self.reply(Frame::Ping { id }).await,
            Frame::Ping { .. } | Frame::SynReply { .. } | Frame::GoAway { .. } | Frame::Other => {}
        }
        Ok(())
    }

    /// Nobody may be listening any more: then the rest is read and dropped until the client closes.
    async fn event(&self, event: Event) {
        let _unheard = self.events.send(event).await;
    }

    async fn reply(&self, frame: Frame) {
        if let Some(replies) = self.replies.upgrade() {
            let _closing = replies.send(frame).await;
        }
    }
}

/// Any bytes: what is a frame is the same frame again, and header blocks unpack within their limit or not at all.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let mut buffer = BytesMut::from(data);
    let mut inflater = Inflater::new();
    while let Ok(Some(frame)) = decode(&mut buffer) {
        match &frame {
            Frame::SynStream { block, .. } | Frame::SynReply { block, .. } => {
                let _no_headers = inflater.headers(block);
            }
            Frame::Other => continue,
            _ => {}
        }
        let mut again = BytesMut::new();
        encode(&frame, &mut again);
        assert_eq!(decode(&mut again), Ok(Some(frame)));
        assert!(again.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client, as small as it can be: it opens streams and reads frames.
    struct Peer<I> {
        io: I,
        deflater: Deflater,
        buffer: BytesMut,
    }

    impl<I: AsyncRead + AsyncWrite + Unpin> Peer<I> {
        async fn say(&mut self, frame: &Frame) {
            let mut wire = BytesMut::new();
            encode(frame, &mut wire);
            self.io.write_all(&wire).await.expect("write");
        }

        async fn open(&mut self, id: u32, kind: &str) {
            let headers = vec![("streamtype".to_owned(), kind.to_owned())];
            let block = self.deflater.block(&headers).expect("packs").into();
            self.say(&Frame::SynStream { id, fin: false, block }).await;
        }

        async fn hear(&mut self) -> Option<Frame> {
            loop {
                if let Some(frame) = decode(&mut self.buffer).expect("a frame") {
                    return Some(frame);
                }
                if self.io.read_buf(&mut self.buffer).await.expect("read") == 0 {
                    return None;
                }
            }
        }
    }

    #[tokio::test]
    async fn streams_are_accepted_carried_and_ended() {
        let (server, io) = tokio::io::duplex(4096);
        let mut session = Session::open(server);
        let deflater = Deflater::new().expect("dictionary");
        let mut peer = Peer { io, deflater, buffer: BytesMut::new() };
        peer.open(1, "error").await;
        peer.open(3, "stdin").await;
        peer.say(&Frame::Ping { id: 1 }).await;
        peer.say(&Frame::Data { id: 3, fin: true, bytes: Bytes::from_static(b"in") }).await;
        for (expected, kind) in [(1, "error"), (3, "stdin")] {
            let Some(Event::Opened { id, headers }) = session.events.recv().await else {
                panic!("no stream")
            };
            assert_eq!((id, header(&headers, "streamtype")), (expected, kind));
        }
        let data = session.events.recv().await;
        assert!(matches!(data, Some(Event::Data { id: 3, fin: true, bytes }) if bytes == "in"));
        session.writer.data(1, Bytes::from_static(b"out")).await;
        session.writer.finish(1).await;
        drop(session);
        assert!(matches!(peer.hear().await, Some(Frame::SynReply { id: 1, .. })));
        assert!(matches!(peer.hear().await, Some(Frame::SynReply { id: 3, .. })));
        assert_eq!(peer.hear().await, Some(Frame::Ping { id: 1 }));
        let out = Frame::Data { id: 1, fin: false, bytes: Bytes::from_static(b"out") };
        assert_eq!(peer.hear().await, Some(out));
        assert_eq!(peer.hear().await, Some(Frame::Data { id: 1, fin: true, bytes: Bytes::new() }));
        assert_eq!(peer.hear().await, Some(Frame::GoAway { last: 0 }));
    }
}
