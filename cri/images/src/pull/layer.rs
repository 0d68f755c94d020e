//! One layer: from the registry through a channel to the thread that unpacks it.

use std::io::{self, BufRead, Read};

use bytes::{Buf, Bytes};
use tokio::sync::mpsc;

use super::{Pull, PullError};
use crate::config::Limits;
use crate::digest::{Algorithm, Digest};
use crate::error::{ErrorKind, report, unpack_kind};
use crate::layers::{LayerError, Layers, Lease, Saved, Spool, Workshop};
use crate::manifest::Descriptor;
use crate::registry::{Blob, RegistryError};
use crate::unpack::{UnpackError, Unpacked, unpack_with_recipe};

/// Pieces between the two sides; each is what one read from the network gave, some 8 to 64 KiB.
const CHANNEL: usize = 16;
/// Progress is told in steps of so many bytes: whoever listens does not want each packet.
const STEP: u64 = 1 << 20;
/// How much of an earlier try's bytes is read at once.
const SAVED_PIECE: usize = 256 << 10;

/// What goes through the channel. A channel that closes without an end is a download that broke off.
enum Piece {
    Data(Bytes),
    /// From an earlier try: on disk already.
    Saved(Bytes),
    End,
    /// All is here, and it is not what its digest says.
    Wrong,
}

/// The unpacking thread's side.
struct PieceReader {
    pieces: mpsc::Receiver<Piece>,
    current: Bytes,
    state: State,
    spool: Option<Spool>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    Ended,
    BrokeOff,
    Wrong,
}

/// What the unpacking thread gives back.
type Outcome = Result<Result<(Workshop, Unpacked), UnpackError>, LayerError>;

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

    /// Fetches a layer; again from its beginning, when what came was not what its digest says and another host is left.
    async fn fetch(
        &self,
        descriptor: &Descriptor,
        expected: Digest,
        told: &mut u64,
    ) -> Result<(Workshop, Unpacked), PullError> {
        let _permit = self.images.inner.fetching.acquire().await.map_err(|_closed| PullError::Stopped)?;
        let mut blob = self.registry.blob(descriptor);
        let mut first = true;
        loop {
            let mut spool = self.spool(descriptor);
            let saved = match &mut spool {
                Some(spool) if first => spool.saved(descriptor.size),
                Some(spool) => {
                    spool.clear();
                    None
                }
                None => None,
            };
            let fetched = self.fetch_once((&mut blob, descriptor, expected), (spool, saved), told).await;
            let Err(error) = fetched else { return fetched };
            // What was told of this layer is not so.
            let back = std::mem::take(told);
            self.progress.send_modify(|progress| progress.bytes_done -= back.min(progress.bytes_done));
            match error {
                PullError::Registry(error) => blob.begin_again(error)?,
                error => return Err(error),
            }
            first = false;
        }
    }

    /// Where what arrives is kept, for layers that are large enough to be worth it.
    fn spool(&self, descriptor: &Descriptor) -> Option<Spool> {
        let inner = &self.images.inner;
        let spool = (descriptor.size >= inner.config.resume_from)
            .then(|| inner.layers.spools.take(descriptor.digest))
            .flatten();
        if spool.is_some() {
            self.images.schedule_sweep();
        }
        spool
    }

    async fn fetch_once(
        &self,
        (blob, descriptor, expected): (&mut Blob<'_>, &Descriptor, Digest),
        (spool, saved): (Option<Spool>, Option<Saved>),
        told: &mut u64,
    ) -> Result<(Workshop, Unpacked), PullError> {
        let inner = &self.images.inner;
        let (layers, limits) = (inner.layers.clone(), inner.config.limits);
        let (sender, pieces) = mpsc::channel(CHANNEL);
        let reader = PieceReader { pieces, current: Bytes::new(), state: State::Reading, spool };
        let algorithm = expected.algorithm();
        let unpacking = tokio::task::spawn_blocking(move || reader.unpack(&layers, &limits, algorithm));
        let sent = self.send(blob, saved, &sender, told).await;
        if matches!(sent, Err(PullError::Registry(RegistryError::Digest { .. }))) {
            let _given_up = sender.send(Piece::Wrong).await;
        }
        drop(sender);
        let unpacked = unpacking.await.map_err(|_stopped| PullError::Stopped)?;
        // A download that failed is why the other side could not go on.
        sent?;
        let (workshop, unpacked) = match unpacked? {
            Ok(unpacked) => unpacked,
            Err(error) => return Err(refused(blob, descriptor, error).await),
        };
        if unpacked.diff_id != expected {
            let (digest, actual) = (descriptor.digest.into(), unpacked.diff_id.into());
            return Err(PullError::DiffId { digest, expected: expected.into(), actual });
        }
        Ok((workshop, unpacked))
    }

    /// Sends a layer's bytes on. Ends early, without an error, when the other side has given up: it says why.
    async fn send(
        &self,
        blob: &mut Blob<'_>,
        saved: Option<Saved>,
        sender: &mpsc::Sender<Piece>,
        told: &mut u64,
    ) -> Result<(), PullError> {
        let mut arrived = 0;
        if let Some(saved) = saved {
            arrived = send_saved(saved, blob, sender).await?;
        }
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

/// Why a layer was not unpacked. What is wrong with it may be of whoever sent it, and not of the image.
async fn refused(blob: &mut Blob<'_>, descriptor: &Descriptor, error: UnpackError) -> PullError {
    if !matches!(unpack_kind(&error), ErrorKind::Corrupt | ErrorKind::Rejected) {
        return PullError::Unpack { digest: descriptor.digest.into(), source: error };
    }
    match blob.doubted(io::Error::other(report(&error))).await {
        Ok(()) => PullError::Unpack { digest: descriptor.digest.into(), source: error },
        Err(error) => error.into(),
    }
}

/// Sends on what an earlier try left; gives how much that was.
async fn send_saved(
    mut saved: Saved,
    blob: &mut Blob<'_>,
    sender: &mpsc::Sender<Piece>,
) -> Result<u64, PullError> {
    let mut sent = 0;
    loop {
        let read = tokio::task::spawn_blocking(move || (saved.next(SAVED_PIECE), saved));
        let (piece, rest) = read.await.map_err(|_stopped| PullError::Stopped)?;
        saved = rest;
        let piece = piece.map_err(|source| blob.damaged(source))?;
        if piece.is_empty() {
            return Ok(sent);
        }
        blob.known(&piece);
        sent += piece.len() as u64;
        if sender.send(Piece::Saved(piece.into())).await.is_err() {
            return Ok(sent);
        }
    }
}

// === impl PieceReader ===

impl PieceReader {
    fn unpack(mut self, layers: &Layers, limits: &Limits, algorithm: Algorithm) -> Outcome {
        let workshop = layers.workshop()?;
        let unpacked =
            unpack_with_recipe(&mut self, &workshop.files(), limits, (&workshop.recipe(), algorithm));
        let unpacked = unpacked.and_then(|unpacked| {
            // A decoder may stop before the end of what the digest is of.
            io::copy(&mut self, &mut io::sink()).map_err(UnpackError::Read)?;
            Ok(unpacked)
        });
        // Kept for the next try is what only broke off.
        if let Some(spool) = self.spool.take().filter(|_| self.state != State::BrokeOff) {
            spool.discard();
        }
        Ok(match unpacked {
            Ok(unpacked) => Ok((workshop, unpacked)),
            Err(error) => {
                workshop.discard();
                Err(error)
            }
        })
    }

    fn save(&mut self, data: &Bytes) {
        let Some(spool) = &mut self.spool else { return };
        if let Err(error) = spool.append(data) {
            // A pull that will not be taken up again is better than none.
            tracing::debug!(%error, "cannot keep what arrives of a layer");
            if let Some(spool) = self.spool.take() {
                spool.discard();
            }
        }
    }
}

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
        while self.current.is_empty() && self.state == State::Reading {
            match self.pieces.blocking_recv() {
                Some(Piece::Data(data)) => {
                    self.save(&data);
                    self.current = data;
                }
                Some(Piece::Saved(data)) => self.current = data,
                Some(Piece::End) => self.state = State::Ended,
                Some(Piece::Wrong) => self.state = State::Wrong,
                None => self.state = State::BrokeOff,
            }
        }
        let failed = |kind, what| Err(io::Error::new(kind, what));
        match self.state {
            State::BrokeOff => failed(io::ErrorKind::UnexpectedEof, "the download broke off"),
            State::Wrong => failed(io::ErrorKind::InvalidData, "the content is not what its digest says"),
            State::Reading | State::Ended => Ok(&self.current),
        }
    }

    fn consume(&mut self, count: usize) {
        self.current.advance(count);
    }
}
