//! One layer: from the registry through a channel to the thread that unpacks it.

use std::io::{self, BufRead, Read};

use bytes::{Buf, Bytes};
use tokio::sync::mpsc;

use super::{Pull, PullError};
use crate::digest::Digest;
use crate::layers::{LayerError, Lease, Workshop};
use crate::manifest::Descriptor;
use crate::unpack::{Unpacked, unpack};

/// Pieces between the two sides; each is what one read from the network gave, some 8 to 64 KiB.
const CHANNEL: usize = 16;
/// Progress is told in steps of so many bytes: whoever listens does not want each packet.
const STEP: u64 = 1 << 20;

/// What goes through the channel. A channel that closes without `End` is a download that failed.
enum Piece {
    Data(Bytes),
    End,
}

/// The unpacking thread's side.
struct PieceReader {
    pieces: mpsc::Receiver<Piece>,
    current: Bytes,
    ended: bool,
}

impl Pull {
    /// A reference to a layer, fetched if it is not here.
    pub(super) async fn layer(&self, descriptor: &Descriptor, diff_id: Digest) -> Result<Lease, PullError> {
        let mut told = 0;
        let lease = self
            .images
            .inner
            .layers
            .ensure(diff_id, async || self.fetch(descriptor, diff_id, &mut told).await)
            .await?;
        let left = descriptor.size.saturating_sub(told);
        self.progress.send_modify(|progress| {
            progress.bytes_done += left;
            progress.layers_done += 1;
        });
        Ok(lease)
    }

    async fn fetch(
        &self,
        descriptor: &Descriptor,
        expected: Digest,
        told: &mut u64,
    ) -> Result<(Workshop, Unpacked), PullError> {
        let fetched = self.fetch_once(descriptor, expected, told).await;
        if fetched.is_err() {
            // What was told of this layer is not so.
            let back = std::mem::take(told);
            self.progress.send_modify(|progress| progress.bytes_done -= back.min(progress.bytes_done));
        }
        fetched
    }

    async fn fetch_once(
        &self,
        descriptor: &Descriptor,
        expected: Digest,
        told: &mut u64,
    ) -> Result<(Workshop, Unpacked), PullError> {
        let inner = &self.images.inner;
        let _permit = inner.fetching.acquire().await.map_err(|_closed| PullError::Stopped)?;
        let (layers, limits) = (inner.layers.clone(), inner.config.limits);
        let (sender, pieces) = mpsc::channel(CHANNEL);
        let unpacking = tokio::task::spawn_blocking(move || {
            let workshop = layers.workshop()?;
            let reader = PieceReader { pieces, current: Bytes::new(), ended: false };
            Ok::<_, LayerError>(match unpack(reader, &workshop.files(), &limits) {
                Ok(unpacked) => Ok((workshop, unpacked)),
                Err(error) => {
                    workshop.discard();
                    Err(error)
                }
            })
        });
        let sent = self.send(descriptor, sender, told).await;
        let unpacked = unpacking.await.map_err(|_stopped| PullError::Stopped)?;
        // A download that failed is why the other side could not go on.
        sent?;
        let (workshop, unpacked) =
            unpacked?.map_err(|source| PullError::Unpack { digest: descriptor.digest, source })?;
        if unpacked.diff_id != expected {
            let (digest, actual) = (descriptor.digest, unpacked.diff_id);
            return Err(PullError::DiffId { digest, expected, actual });
        }
        Ok((workshop, unpacked))
    }

    /// Sends a layer's bytes on. Ends early, without an error, when the other side has given up: it says why.
    async fn send(
        &self,
        descriptor: &Descriptor,
        sender: mpsc::Sender<Piece>,
        told: &mut u64,
    ) -> Result<(), PullError> {
        let mut blob = self.registry.blob(descriptor);
        let mut arrived = 0;
        while let Some(data) = blob.next().await? {
            arrived += data.len() as u64;
            if sender.send(Piece::Data(data)).await.is_err() {
                return Ok(());
            }
            if arrived - *told >= STEP {
                let step = arrived - *told;
                *told = arrived;
                self.progress.send_modify(|progress| progress.bytes_done += step);
            }
        }
        let _given_up = sender.send(Piece::End).await;
        Ok(())
    }
}

// === impl PieceReader ===

impl Read for PieceReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let available = self.fill_buf()?;
        let n = available.len().min(buffer.len());
        buffer[..n].copy_from_slice(&available[..n]);
        self.consume(n);
        Ok(n)
    }
}

impl BufRead for PieceReader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.current.is_empty() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(Piece::Data(data)) => self.current = data,
                Some(Piece::End) => self.ended = true,
                None => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the download broke off")),
            }
        }
        Ok(&self.current)
    }

    fn consume(&mut self, count: usize) {
        self.current.advance(count);
    }
}
