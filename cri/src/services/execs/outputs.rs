//! Outputs of an exec: read as they arrive, kept up to a limit.

use coracle_proto::cri;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::output_memory::{Full, Share};

/// Maximum bytes of both outputs together. Clients such as the kubelet refuse messages of more than 16 MiB; the rest is for
/// other fields.
const LIMIT: usize = (16 << 20) - (1 << 10);
/// Bytes that are reserved for each output, independent of the size of the other output.
const RESERVE: usize = 64 << 10;
/// Maximum bytes of each output in an error. Headers of gRPC must be small.
const TAIL: usize = 1 << 10;
const READ_SIZE: usize = 32 << 10;

/// The outputs that were read so far.
#[derive(Debug)]
pub(super) struct Outputs {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// The memory that both outputs use.
    share: Share,
    full: Option<Full>,
}

// === impl Outputs ===

impl Outputs {
    /// Creates empty outputs. They grow within the memory of this share.
    pub(super) fn new(share: Share) -> Self {
        Self { stdout: Vec::new(), stderr: Vec::new(), share, full: None }
    }

    /// Reads both outputs to their ends, or until the shared memory is [full](Self::full). Bytes above the limit of one
    /// call are read and dropped, so that the command can continue. If this future is dropped, the bytes that were read
    /// stay.
    pub(super) async fn read(
        &mut self,
        mut stdout: impl AsyncRead + Unpin,
        mut stderr: impl AsyncRead + Unpin,
    ) {
        let (mut out, mut err) = (vec![0; READ_SIZE], vec![0; READ_SIZE]);
        let (mut out_open, mut err_open) = (true, true);
        while out_open || err_open {
            tokio::select! {
                // Both arms are cancel safe: a read that is dropped has taken no bytes.
                read = stdout.read(&mut out), if out_open => {
                    let count = read.unwrap_or_default();
                    out_open = count > 0;
                    self.full = keep(&mut self.stdout, &self.stderr, &mut self.share, &out[..count]).err();
                }
                read = stderr.read(&mut err), if err_open => {
                    let count = read.unwrap_or_default();
                    err_open = count > 0;
                    self.full = keep(&mut self.stderr, &self.stdout, &mut self.share, &err[..count]).err();
                }
            }
            if self.full.is_some() {
                // The memory is released before the command is killed, so that other calls get it earlier.
                (self.stdout, self.stderr) = (Vec::new(), Vec::new());
                self.share.clear();
                return;
            }
        }
    }

    /// The limit that the outputs would exceed, if reading ended because of it.
    pub(super) fn full(&self) -> Option<Full> {
        self.full
    }

    /// The answer to a call whose command ended.
    pub(super) fn answer(self, exit_code: i32) -> cri::ExecSyncResponse {
        cri::ExecSyncResponse { stdout: self.stdout, stderr: self.stderr, exit_code }
    }

    /// The ends of the outputs for an error; empty without output.
    pub(super) fn output_tails(&self) -> String {
        let mut words = String::new();
        for (name, bytes) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            if !bytes.is_empty() {
                words.push_str(&format!("; last on {name}: \"{}\"", tail(bytes)));
            }
        }
        words
    }
}

fn keep(into: &mut Vec<u8>, other: &Vec<u8>, share: &mut Share, bytes: &[u8]) -> Result<(), Full> {
    let room = (LIMIT - other.len().max(RESERVE)).saturating_sub(into.len());
    let bytes = &bytes[..bytes.len().min(room)];
    let length = into.len() + bytes.len();
    if length > into.capacity() {
        // The memory is counted before it is allocated. The capacity doubles, as in `Vec`.
        let capacity = length.max(2 * into.capacity()).min(LIMIT);
        share.grow(capacity + other.capacity())?;
        into.reserve_exact(capacity - into.len());
    }
    into.extend_from_slice(bytes);
    Ok(())
}

/// The end of an output in one line. The limit applies to the escaped text, which can be longer.
fn tail(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(TAIL)..]);
    let mut room = TAIL;
    let fitting = text.char_indices().rev().take_while(|(_, character)| {
        let size: usize = character.escape_debug().map(char::len_utf8).sum();
        let fits = size <= room;
        room = room.saturating_sub(size);
        fits
    });
    let start = fitting.last().map_or(text.len(), |(at, _)| at);
    text[start..].trim_end().escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::super::output_memory::OutputMemory;
    use super::*;

    fn outputs() -> Outputs {
        Outputs::new(OutputMemory::default().share("sandbox"))
    }

    async fn written(stdout: &[u8], stderr: &[u8]) -> Outputs {
        let mut outputs = outputs();
        outputs.read(stdout, stderr).await;
        outputs
    }

    #[tokio::test]
    async fn both_outputs_fit_into_a_message() {
        let long = vec![b'x'; 20 << 20];
        let both = written(&long, &long).await;
        assert_eq!(both.stdout.len() + both.stderr.len(), LIMIT);
        assert!(both.stdout.len() >= RESERVE && both.stderr.len() >= RESERVE);
        let loud = written(&long, b"why").await;
        assert_eq!((loud.stdout.len(), loud.stderr.as_slice()), (LIMIT - RESERVE, &b"why"[..]));
        let answer = prost::Message::encoded_len(&both.answer(i32::MIN));
        assert!(answer <= 16 << 20, "{answer}");
    }

    #[tokio::test]
    async fn reading_ends_when_the_shared_memory_is_full() {
        let (memory, long) = (OutputMemory::default(), vec![b'x'; 20 << 20]);
        let mut all = Vec::new();
        for _ in 0..3 {
            let mut outputs = Outputs::new(memory.share("sandbox"));
            outputs.read(&long[..], tokio::io::empty()).await;
            all.push(outputs);
        }
        let full: Vec<bool> = all.iter().map(|outputs| outputs.full().is_some()).collect();
        assert_eq!(full, [false, false, true]);
        let kept: usize = all.iter().map(|outputs| outputs.stdout.capacity()).sum();
        assert!(kept <= 33 << 20, "{kept}");
        let mut other = Outputs::new(memory.share("other"));
        other.read(&b"well"[..], tokio::io::empty()).await;
        assert_eq!((other.full(), other.stdout.as_slice()), (None, &b"well"[..]));
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_are_kept_when_the_read_is_cancelled() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        tokio::io::AsyncWriteExt::write_all(&mut theirs, b"so far").await.expect("write");
        let mut outputs = outputs();
        let reading = outputs.read(ours, tokio::io::empty());
        let cut_off = tokio::time::timeout(std::time::Duration::from_millis(50), reading).await;
        assert!(cut_off.is_err(), "the output is still open");
        assert_eq!(outputs.answer(0).stdout, b"so far");
    }

    #[tokio::test]
    async fn the_ends_in_an_error_are_short_and_on_one_line() {
        assert_eq!(written(b"", b"").await.output_tails(), "");
        let both = written(b"one\ntwo\n", b"why").await;
        assert_eq!(both.output_tails(), r#"; last on stdout: "one\ntwo"; last on stderr: "why""#);
        for long in [&[0xff; 5000][..], &[1; 5000], "é".repeat(3000).as_bytes()] {
            let words = written(long, b"").await.output_tails();
            assert!(words.len() > TAIL / 2 && words.len() < TAIL + 40, "{}", words.len());
        }
    }
}
