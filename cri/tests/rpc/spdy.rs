//! A streaming client over SPDY/3.1, like kubectl. It uses the runtime's code for frames and headers.

#[path = "../../src/stream/spdy/dictionary.rs"]
#[allow(dead_code, unused_imports, reason = "it has its own tests")]
mod dictionary;
#[path = "../../src/stream/spdy/frame.rs"]
#[allow(dead_code, unused_imports, reason = "it has its own tests")]
mod frame;
#[path = "../../src/stream/spdy/headers.rs"]
#[allow(dead_code, unused_imports, reason = "it has its own tests, and the server's part is unused")]
mod headers;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use self::frame::{Decoder, Frame, encode};
use self::headers::Deflater;
use crate::client::Streams;

/// An upgraded connection.
pub(crate) struct Spdy {
    io: TcpStream,
    deflater: Deflater,
    buffer: BytesMut,
    decoder: Decoder,
}

impl Spdy {
    /// Connects to the stream of a URL that the runtime returned.
    pub(crate) async fn connect(streams: &Streams, url: &str, protocol: &str) -> Self {
        let path = url.splitn(4, '/').nth(3).expect("a path");
        let mut io = TcpStream::connect(&streams.address).await.expect("connect");
        let request = format!(
            "POST /{path} HTTP/1.1\r\nHost: node\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
             X-Stream-Protocol-Version: {protocol}\r\nContent-Length: 0\r\n\r\n"
        );
        io.write_all(request.as_bytes()).await.expect("write");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(io.read_u8().await.expect("an answer"));
        }
        let head = String::from_utf8_lossy(&head);
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        let deflater = Deflater::new().expect("dictionary");
        Self { io, deflater, buffer: BytesMut::new(), decoder: Decoder::default() }
    }

    /// Opens the two streams of a connection to a port. Stream `id` is for errors; the next one is for data and is
    /// returned.
    pub(crate) async fn open_port(&mut self, id: u32, port: u16) -> u32 {
        for (id, kind) in [(id, "error"), (id + 2, "data")] {
            let headers = [("streamtype", kind), ("port", &port.to_string()), ("requestid", &id_of(id))]
                .map(|(name, value)| (name.to_owned(), value.to_owned()));
            let block = self.deflater.block(&headers.into()).expect("packs").into();
            self.send(&Frame::SynStream { id, fin: false, block }).await;
        }
        id + 2
    }

    /// Writes to a stream, and ends it if `fin` is set.
    pub(crate) async fn write(&mut self, id: u32, bytes: &[u8], fin: bool) {
        self.send(&Frame::Data { id, fin, bytes: Bytes::copy_from_slice(bytes) }).await;
    }

    /// Reads `length` bytes of a stream, or fewer if it ends before.
    pub(crate) async fn read(&mut self, wanted: u32, length: usize) -> Vec<u8> {
        let mut read = Vec::new();
        while read.len() < length {
            match self.receive().await {
                Some(Frame::Data { id, fin, bytes }) if id == wanted => {
                    read.extend_from_slice(&bytes);
                    if fin {
                        break;
                    }
                }
                Some(_) => {}
                None => break,
            }
        }
        read
    }

    /// Reads a stream to its end, or to the end of the connection.
    pub(crate) async fn read_to_end(&mut self, wanted: u32) -> Vec<u8> {
        let mut read = Vec::new();
        while let Some(frame) = self.receive().await {
            if let Frame::Data { id, fin, bytes } = frame
                && id == wanted
            {
                read.extend_from_slice(&bytes);
                if fin {
                    break;
                }
            }
        }
        read
    }

    async fn send(&mut self, frame: &Frame) {
        let mut wire = BytesMut::new();
        encode(frame, &mut wire);
        self.io.write_all(&wire).await.expect("write");
    }

    async fn receive(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.decoder.next(&mut self.buffer).expect("a frame") {
                return Some(frame);
            }
            if self.io.read_buf(&mut self.buffer).await.unwrap_or_default() == 0 {
                return None;
            }
        }
    }
}

/// Both streams of a connection have the same request id.
fn id_of(id: u32) -> String {
    (id / 4).to_string()
}
