//! Server side of one SPDY/3.1 connection: streams opened by the client, and their data in both directions. There is no
//! flow control, because all clients use the same Go library, which has no flow control.

mod dictionary;
mod frame;
mod headers;

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::debug;

use self::frame::{Decoder, Frame, encode};
use self::headers::{Deflater, Headers, Inflater};
use super::queue::{QueueMemory, QueueReceiver, QueueSender, Size, queue};

/// Maximum queued frames to the client.
const BACKLOG: usize = 2;
/// Memory in bytes of queued events of the client.
const EVENT_MEMORY: u32 = 64 << 10;
/// Time for the client to close the connection after the last frame.
const LINGER: Duration = Duration::from_secs(5);
const READ_SIZE: usize = 32 << 10;
/// RST_STREAM status: the stream is refused before any work for it.
const REFUSED: u32 = 3;
/// RST_STREAM status: the stream is cancelled.
const CANCEL: u32 = 5;

/// An event of the client.
#[derive(Debug)]
pub(crate) enum Event {
    /// The client opened a stream.
    Opened { id: u32, headers: Headers },
    /// Data of a stream. `fin` ends the client's side.
    Data { id: u32, bytes: Bytes, fin: bool },
    /// The client cancelled a stream.
    Reset { id: u32 },
}

/// A connection: the client's events, and a writer. Dropping both closes the connection after all data is sent.
#[derive(Debug)]
pub(crate) struct Session {
    pub(super) events: QueueReceiver<Event>,
    pub(crate) writer: Writer,
    /// Ends with the connection.
    pub(super) connection: JoinHandle<()>,
}

/// Sends frames to the client.
#[derive(Debug, Clone)]
pub(crate) struct Writer {
    frames: mpsc::Sender<Frame>,
}

// === impl Event ===

impl Size for Event {
    fn bytes(&self) -> usize {
        match self {
            Self::Opened { headers, .. } => headers
                .iter()
                .map(|(name, value)| name.len() + value.len() + size_of::<(String, String)>())
                .sum(),
            Self::Data { bytes, .. } => bytes.len(),
            Self::Reset { .. } => 0,
        }
    }
}

// === impl Writer ===

impl Writer {
    /// Sends data on a stream. False if the client is gone.
    pub(crate) async fn data(&self, id: u32, bytes: Bytes) -> bool {
        self.frames.send(Frame::Data { id, fin: false, bytes }).await.is_ok()
    }

    /// Ends the sending direction of a stream.
    pub(crate) async fn finish(&self, id: u32) -> bool {
        self.frames.send(Frame::Data { id, fin: true, bytes: Bytes::new() }).await.is_ok()
    }

    /// Refuses a stream.
    pub(crate) async fn refuse(&self, id: u32) -> bool {
        self.frames.send(Frame::RstStream { id, status: REFUSED }).await.is_ok()
    }

    /// Cancels a stream.
    pub(crate) async fn reset(&self, id: u32) -> bool {
        self.frames.send(Frame::RstStream { id, status: CANCEL }).await.is_ok()
    }
}

// === impl Session ===

impl Session {
    /// Serves the connection in a task.
    pub(crate) fn open<I>(io: I) -> Self
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (event_sender, events) = queue(&QueueMemory::new(EVENT_MEMORY));
        let (frames, frame_receiver) = mpsc::channel(BACKLOG);
        let reader = Reader {
            buffer: BytesMut::new(),
            decoder: Decoder::default(),
            inflater: Inflater::new(),
            events: event_sender,
            replies: frames.downgrade(),
        };
        let connection = coracle_threads::spawn(serve(io, reader, frame_receiver));
        Self { events, writer: Writer { frames }, connection }
    }
}

/// The value of a stream's header; empty if it is absent.
pub(crate) fn header<'a>(headers: &'a [(String, String)], name: &str) -> &'a str {
    headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str()).unwrap_or_default()
}

async fn serve<I: AsyncRead + AsyncWrite>(io: I, reader: Reader, frames: mpsc::Receiver<Frame>) {
    let (input, output) = tokio::io::split(io);
    let mut reading = std::pin::pin!(reader.run(input));
    tokio::select! {
        // If the client is gone, the remaining frames are dropped. After all frames are written, the client still has to
        // read them: closing earlier could discard them.
        result = &mut reading => if let Err(error) = result { debug!(%error, "a SPDY connection failed") },
        result = write(output, frames) => match result {
            Ok(_output) => drop(timeout(LINGER, reading).await),
            Err(error) => debug!(%error, "a SPDY connection failed"),
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
    decoder: Decoder,
    inflater: Inflater,
    events: QueueSender<Event>,
    replies: mpsc::WeakSender<Frame>,
}

// === impl Reader ===

impl Reader {
    async fn run<I: AsyncRead>(mut self, mut input: ReadHalf<I>) -> io::Result<()> {
        loop {
            while let Some(frame) = self.decoder.next(&mut self.buffer).map_err(io::Error::other)? {
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
            // Odd ids are the client's pings. Even ids would be replies to our own pings.
            Frame::Ping { id } if id % 2 == 1 => self.reply(Frame::Ping { id }).await,
            Frame::Ping { .. } | Frame::SynReply { .. } | Frame::GoAway { .. } | Frame::Other => {}
        }
        Ok(())
    }

    /// Queues an event. If the session is dropped, the rest is read and discarded until the client closes.
    async fn event(&self, event: Event) {
        let _dropped = self.events.send(event).await;
    }

    async fn reply(&self, frame: Frame) {
        if let Some(replies) = self.replies.upgrade() {
            let _closing = replies.send(frame).await;
        }
    }
}

/// Accepts any bytes: a decoded frame encodes to the same frame, and header blocks do not exceed their limit.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let mut buffer = BytesMut::from(data);
    let (mut decoder, mut inflater) = (Decoder::default(), Inflater::new());
    while let Ok(Some(frame)) = decoder.next(&mut buffer) {
        match &frame {
            Frame::SynStream { block, .. } | Frame::SynReply { block, .. } => {
                let _invalid = inflater.headers(block);
            }
            Frame::Other => continue,
            _ => {}
        }
        let mut again = BytesMut::new();
        encode(&frame, &mut again);
        assert_eq!(Decoder::default().next(&mut again), Ok(Some(frame)));
        assert!(again.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::super::client::{Client, Output};
    use super::super::spdy_command;
    use super::*;

    /// A minimal client: it opens streams and reads frames.
    struct Peer<I> {
        io: I,
        deflater: Deflater,
        buffer: BytesMut,
        decoder: Decoder,
    }

    impl<I: AsyncRead + AsyncWrite + Unpin> Peer<I> {
        async fn send(&mut self, frame: &Frame) {
            let mut wire = BytesMut::new();
            encode(frame, &mut wire);
            self.io.write_all(&wire).await.expect("write");
        }

        async fn open(&mut self, id: u32, kind: &str) {
            let headers = vec![("streamtype".to_owned(), kind.to_owned())];
            let block = self.deflater.block(&headers).expect("packs").into();
            self.send(&Frame::SynStream { id, fin: false, block }).await;
        }

        async fn receive(&mut self) -> Option<Frame> {
            loop {
                if let Some(frame) = self.decoder.next(&mut self.buffer).expect("a frame") {
                    return Some(frame);
                }
                if self.io.read_buf(&mut self.buffer).await.expect("read") == 0 {
                    return None;
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn unhandled_frames_take_bounded_memory() {
        let (server, io) = tokio::io::duplex(4096);
        let _session = Session::open(server);
        let deflater = Deflater::new().expect("dictionary");
        let mut peer = Peer { io, deflater, buffer: BytesMut::new(), decoder: Decoder::default() };
        let frame = Frame::Data { id: 3, fin: false, bytes: Bytes::from(vec![0; 16 << 10]) };
        let mut sent = 0;
        while sent < 100 && timeout(LINGER, peer.send(&frame)).await.is_ok() {
            sent += 1;
        }
        // One frame waits for room, and another frame is being written.
        let queued = EVENT_MEMORY / (16 << 10);
        assert!((queued..queued + 3).contains(&sent), "{sent}");
    }

    /// The idle limit and the eviction of a connection apply until its client has read the last frame.
    #[tokio::test(start_paused = true)]
    async fn a_command_is_served_until_its_client_has_read_the_last_frame() {
        let (server, io) = tokio::io::duplex(1 << 10);
        let session = Session::open(server);
        let deflater = Deflater::new().expect("dictionary");
        let mut peer = Peer { io, deflater, buffer: BytesMut::new(), decoder: Decoder::default() };
        peer.open(1, "error").await;
        let run = async |client: Client| {
            let status = Output::Status(Bytes::from(vec![b'x'; 4 << 10]));
            client.output.send(status).await.expect("the status is sent");
        };
        let mut command = std::pin::pin!(spdy_command::command(session, &[], run));
        let early = timeout(LINGER * 100, &mut command).await;
        assert!(early.is_err(), "the client has read nothing");
        let reading = async {
            while peer.receive().await.is_some_and(|frame| !matches!(frame, Frame::GoAway { .. })) {}
            drop(peer);
        };
        tokio::join!(command, reading);
    }

    #[tokio::test]
    async fn streams_are_accepted_and_ended() {
        let (server, io) = tokio::io::duplex(4096);
        let mut session = Session::open(server);
        let deflater = Deflater::new().expect("dictionary");
        let mut peer = Peer { io, deflater, buffer: BytesMut::new(), decoder: Decoder::default() };
        peer.open(1, "error").await;
        peer.open(3, "stdin").await;
        peer.send(&Frame::Ping { id: 1 }).await;
        peer.send(&Frame::Data { id: 3, fin: true, bytes: Bytes::from_static(b"in") }).await;
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
        assert!(matches!(peer.receive().await, Some(Frame::SynReply { id: 1, .. })));
        assert!(matches!(peer.receive().await, Some(Frame::SynReply { id: 3, .. })));
        assert_eq!(peer.receive().await, Some(Frame::Ping { id: 1 }));
        let out = Frame::Data { id: 1, fin: false, bytes: Bytes::from_static(b"out") };
        assert_eq!(peer.receive().await, Some(out));
        assert_eq!(peer.receive().await, Some(Frame::Data { id: 1, fin: true, bytes: Bytes::new() }));
        assert_eq!(peer.receive().await, Some(Frame::GoAway { last: 0 }));
    }
}
