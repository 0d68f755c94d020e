//! NRI's multiplexer: logical connections over one socket. A frame consists of the connection's number and
//! the payload's length, both 32 bits big-endian, and the payload.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

/// The logical connection for calls of the runtime to the plugin.
pub const PLUGIN: u32 = 1;
/// The logical connection for calls of the plugin to the runtime.
pub const RUNTIME: u32 = 2;

const HEADER: usize = 8;
/// Maximum payload of a frame: one ttrpc message with its header.
const MAX_LENGTH: usize = crate::ttrpc::HEADER + crate::ttrpc::MAX_LENGTH;
/// Maximum payload of the first frame of a message. The Go library of NRI needs each frame in one read. It reads the
/// first frame into a buffer of this size, and the second frame directly into the memory of the message. So the first
/// frame must fit the buffer, and a second frame has the rest. More frames could overflow the library's queue of 256
/// frames.
const MAX_FIRST_PAYLOAD: usize = 4096;

/// The frames of one message.
pub fn frames(connection: u32, message: &[u8]) -> Vec<u8> {
    let (first, rest) = message.split_at(message.len().min(MAX_FIRST_PAYLOAD));
    let mut bytes = Vec::with_capacity(message.len() + 2 * HEADER);
    for payload in [first, rest] {
        if !payload.is_empty() {
            bytes.extend_from_slice(&connection.to_be_bytes());
            // A message has at most `MAX_LENGTH` bytes, so the length fits.
            bytes.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(payload);
        }
    }
    bytes
}

/// Reads the next frame. `None` if the stream ends before the header is complete.
///
/// # Errors
/// If the stream fails or ends inside a payload, or a frame is longer than any message.
pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<(u32, Vec<u8>)>> {
    let mut header = [0; HEADER];
    match stream.read_exact(&mut header).await {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let [a, b, c, d, e, f, g, h] = header;
    let length = u32::from_be_bytes([e, f, g, h]);
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > MAX_LENGTH {
        let why = format!("invalid frame length {length}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    let mut payload = vec![0; length];
    stream.read_exact(&mut payload).await?;
    Ok(Some((u32::from_be_bytes([a, b, c, d]), payload)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_message_has_at_most_two_frames() {
        for length in [1, MAX_FIRST_PAYLOAD - 1, MAX_FIRST_PAYLOAD, MAX_FIRST_PAYLOAD + 1, 100_000] {
            let message: Vec<u8> = (0..length).map(|at| u8::try_from(at % 251).expect("small")).collect();
            let bytes = frames(7, &message);
            let mut stream = bytes.as_slice();
            let mut joined = Vec::new();
            let mut sizes = Vec::new();
            while let Some((connection, payload)) = read(&mut stream).await.expect("frame") {
                assert_eq!(connection, 7);
                sizes.push(payload.len());
                joined.extend(payload);
            }
            assert_eq!(joined, message);
            assert!(sizes.len() <= 2 && sizes[0] <= MAX_FIRST_PAYLOAD, "{sizes:?}");
        }
    }

    #[tokio::test]
    async fn a_frame_that_is_cut_or_too_long_is_an_error() {
        let bytes = frames(1, b"hello");
        assert!(read(&mut &bytes[..10]).await.is_err());
        assert!(read(&mut [0, 0, 0, 1, 0xff, 0, 0, 0].as_slice()).await.is_err());
        assert_eq!(read(&mut [].as_slice()).await.expect("end"), None);
    }
}
