//! Fetches one layer: from the registry through a channel to the thread that unpacks it.

use std::io::{self, BufRead, Read};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{Pull, PullError};
use crate::config::Limits;
use crate::digest::{Algorithm, Digest};
use crate::error::{ErrorKind, report};
use crate::fetch_slots::{FetchSlot, FetchSlots};
use crate::layers::{LayerError, Layers, Lease, Saved, Spool, UnpackDir};
use crate::manifest::Descriptor;
use crate::registry::{Blob, RegistryError};
use crate::unpack::{TooLarge, UnpackError, Unpacked, unpack_with_recipe};

/// Capacity of the channel, in network reads of about 8 to 64 KiB.
const CHANNEL: usize = 16;
/// Progress is reported in steps of this many bytes.
const STEP: u64 = 1 << 20;
/// Binary logarithm of the largest zstd window of layers that are unpacked at the same time. Eight of the largest windows
/// would take 1 GiB.
const SHARED_WINDOW_LOG: u32 = 25;
/// Bytes of one read from a spool.
const SAVED_PIECE: usize = 256 << 10;

/// A message in the channel. If the channel closes without `End`, the download was interrupted.
enum Piece {
    Data(Bytes),
    /// Bytes of a spool, which are on disk already.
    Saved(Bytes),
    End,
    /// The content is complete and its digest is wrong.
    Wrong,
}

/// A layer to fetch.
struct LayerContent<'a> {
    descriptor: &'a Descriptor,
    /// The diff id in the configuration.
    expected: Digest,
    limits: Limits,
    /// Whether the layer may have a large zstd window. Only one such layer is fetched at a time.
    may_have_large_window: bool,
}

/// The right to fetch one layer, for some time.
struct TimeSlice {
    slot: FetchSlot,
    /// The slot of the only layer that may have a large zstd window.
    large_window: Option<FetchSlot>,
    /// Earlier time slices of this layer.
    earlier: u32,
}

/// The time slice of an attempt, the spool of the layer, and its data of an earlier attempt.
struct Attempt<'a> {
    time_slice: &'a TimeSlice,
    spool: Option<Spool>,
    saved: Option<Saved>,
}

/// The sources of a layer's bytes: first an earlier attempt, then the registry.
struct LayerSource<'a, 'b> {
    blob: &'a mut Blob<'b>,
    saved: Option<Saved>,
}

/// The unpacking thread's end of the channel.
struct PieceReader {
    pieces: mpsc::Receiver<Piece>,
    current: Bytes,
    state: State,
    spool: Option<Spool>,
    may_have_large_window: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    Ended,
    Interrupted,
    Wrong,
}

/// Result of the unpacking thread.
type Outcome = Result<Result<(UnpackDir, Unpacked), UnpackError>, LayerError>;

impl Pull {
    /// A reference to a layer. Fetches the layer if it is missing.
    pub(super) async fn layer(&self, descriptor: &Descriptor, diff_id: Digest) -> Result<Lease, PullError> {
        let mut reported = 0;
        let lease = self
            .images
            .inner
            .layers
            .ensure(diff_id, &self.source, async || self.fetch(descriptor, diff_id, &mut reported).await)
            .await?;
        let left = descriptor.size.saturating_sub(reported);
        self.progress.send_modify(|progress| {
            progress.bytes_done += left;
            progress.layers_done += 1;
        });
        Ok(lease)
    }

    /// Fetches a layer. If the layer turns out to need a large zstd window, fetches it again with that window. Only one
    /// such layer is fetched at a time.
    async fn fetch(
        &self,
        descriptor: &Descriptor,
        expected: Digest,
        reported: &mut u64,
    ) -> Result<(UnpackDir, Unpacked), PullError> {
        let limits = self.images.inner.config.limits;
        let shared = Limits { zstd_window_log: limits.zstd_window_log.min(SHARED_WINDOW_LOG), ..limits };
        let layer = LayerContent { descriptor, expected, limits: shared, may_have_large_window: false };
        let fetched = self.fetch_layer(&layer, reported).await;
        let Err(PullError::Unpack { source: UnpackError::TooLarge(TooLarge::Window(_)), .. }) = fetched
        else {
            return fetched;
        };
        self.fetch_layer(&LayerContent { limits, may_have_large_window: true, ..layer }, reported).await
    }

    /// Fetches a layer in as many time slices as it needs. Each time slice resumes where the previous time slice ended.
    async fn fetch_layer(
        &self,
        layer: &LayerContent<'_>,
        reported: &mut u64,
    ) -> Result<(UnpackDir, Unpacked), PullError> {
        let mut blob = self.registry.blob(layer.descriptor);
        let (mut earlier, mut reached, mut idle) = (0, 0, Duration::ZERO);
        loop {
            let time_slice = self.time_slice(layer.may_have_large_window, earlier).await?;
            let begun = Instant::now();
            match self.fetch_in_time_slice(layer, &mut blob, &time_slice, reported).await {
                Err(PullError::TimeSliceOver) => {
                    // A time slice is shorter than the time limit for progress, so the idle times of several time
                    // slices are added.
                    match blob.progress_since(reached) {
                        Some(offset) => (reached, idle) = (offset, Duration::ZERO),
                        None => idle += begun.elapsed(),
                    }
                    blob.check_idle(idle)?;
                    blob.reset();
                }
                fetched => return fetched,
            }
            earlier += 1;
        }
    }

    /// Waits for the slots of a layer.
    async fn time_slice(&self, may_have_large_window: bool, earlier: u32) -> Result<TimeSlice, PullError> {
        let inner = &self.images.inner;
        if !may_have_large_window {
            return Ok(TimeSlice { slot: self.slot(&inner.fetch_slots).await?, large_window: None, earlier });
        }
        loop {
            let large_window = self.slot(&inner.large_window).await?;
            // Cancel-safe: a cancelled wait takes no slot.
            tokio::select! {
                slot = self.slot(&inner.fetch_slots) => {
                    return Ok(TimeSlice { slot: slot?, large_window: Some(large_window), earlier });
                }
                () = large_window.time_slice_over() => {}
            }
        }
    }

    async fn slot(&self, slots: &FetchSlots) -> Result<FetchSlot, PullError> {
        slots.acquire(&self.owner).await.map_err(|_gone| PullError::Stopped)
    }

    /// Fetches a layer within its limits. If the digest is wrong and another host is left, starts again from the
    /// beginning.
    async fn fetch_in_time_slice(
        &self,
        layer: &LayerContent<'_>,
        blob: &mut Blob<'_>,
        time_slice: &TimeSlice,
        reported: &mut u64,
    ) -> Result<(UnpackDir, Unpacked), PullError> {
        let descriptor = layer.descriptor;
        let mut first = true;
        loop {
            let mut spool = self.spool(descriptor, time_slice);
            let saved = match &mut spool {
                Some(spool) if first => spool.saved(descriptor.size),
                Some(spool) => {
                    spool.clear();
                    None
                }
                None => None,
            };
            let fetched = self.fetch_once(layer, blob, Attempt { time_slice, spool, saved }, reported).await;
            let Err(error) = fetched else { return fetched };
            // The next attempt reports the progress of this layer again.
            let back = std::mem::take(reported);
            self.progress.send_modify(|progress| progress.bytes_done -= back.min(progress.bytes_done));
            match error {
                PullError::Registry(error) => blob.start_again(error)?,
                error => return Err(error),
            }
            first = false;
        }
    }

    /// The spool for a layer that is large enough, or that needs several time slices. Each owner has its own spools, so
    /// that no owner can occupy or change the spools of another owner.
    fn spool(&self, descriptor: &Descriptor, time_slice: &TimeSlice) -> Option<Spool> {
        let inner = &self.images.inner;
        let spool = (descriptor.size >= inner.config.resume_from || time_slice.earlier > 0)
            .then(|| {
                let name = format!("{}\n{}", self.owner, descriptor.digest);
                inner.layers.spools.take(Digest::of(name.as_bytes()))
            })
            .flatten();
        if spool.is_some() {
            self.images.schedule_sweep();
        }
        spool
    }

    async fn fetch_once(
        &self,
        layer: &LayerContent<'_>,
        blob: &mut Blob<'_>,
        attempt: Attempt<'_>,
        reported: &mut u64,
    ) -> Result<(UnpackDir, Unpacked), PullError> {
        let LayerContent { descriptor, expected, limits, may_have_large_window } = *layer;
        let Attempt { time_slice, spool, saved } = attempt;
        let inner = &self.images.inner;
        let layers = inner.layers.clone();
        let (sender, pieces) = mpsc::channel(CHANNEL);
        let reader = PieceReader {
            pieces,
            current: Bytes::new(),
            state: State::Reading,
            spool,
            may_have_large_window,
        };
        let algorithm = expected.algorithm();
        let unpacking = tokio::task::spawn_blocking(move || reader.unpack(&layers, &limits, algorithm));
        let source = LayerSource { blob: &mut *blob, saved };
        let sent = self.send(source, time_slice, &sender, reported).await;
        if matches!(sent, Err(PullError::Registry(RegistryError::Digest { .. }))) {
            let _receiver_gone = sender.send(Piece::Wrong).await;
        }
        drop(sender);
        let unpacked = unpacking.await.map_err(|_stopped| PullError::Stopped)?;
        // If the download failed, its error is returned, because it caused the unpacking error.
        sent?;
        let (unpack_dir, unpacked) = match unpacked? {
            Ok(unpacked) => unpacked,
            Err(error) => return Err(refused(blob, time_slice, descriptor, error).await),
        };
        if unpacked.diff_id != expected {
            let (digest, actual) = (descriptor.digest.into(), unpacked.diff_id.into());
            return Err(PullError::DiffId { digest, expected: expected.into(), actual });
        }
        Ok((unpack_dir, unpacked))
    }

    /// Sends a layer's bytes to the unpacking thread until the time slice is over. The data of an earlier attempt is sent
    /// even then, so that each time slice makes progress.
    async fn send(
        &self,
        source: LayerSource<'_, '_>,
        time_slice: &TimeSlice,
        sender: &mpsc::Sender<Piece>,
        reported: &mut u64,
    ) -> Result<(), PullError> {
        let LayerSource { blob, saved } = source;
        let arrived = match saved {
            Some(saved) => send_saved(saved, blob, sender).await?,
            None => 0,
        };
        if sender.is_closed() {
            // The unpacking thread failed. The result of the thread has the error.
            return Ok(());
        }
        // Not cancel-safe: after the time slice the blob is reset, and the channel closes without [`Piece::End`].
        tokio::select! {
            sent = self.send_rest(blob, arrived, sender, reported) => sent,
            () = time_slice.over() => Err(PullError::TimeSliceOver),
        }
    }

    /// Sends a layer's bytes from the registry. Returns early without an error if the unpacking thread failed: the
    /// result of the thread has the error.
    async fn send_rest(
        &self,
        blob: &mut Blob<'_>,
        mut arrived: u64,
        sender: &mpsc::Sender<Piece>,
        reported: &mut u64,
    ) -> Result<(), PullError> {
        while let Some(data) = blob.next().await? {
            arrived += data.len() as u64;
            if sender.send(Piece::Data(data)).await.is_err() {
                return Ok(());
            }
            if arrived - *reported >= STEP {
                let step = arrived - *reported;
                *reported = arrived;
                self.progress.send_modify(|progress| progress.bytes_done += step);
            }
        }
        let _receiver_gone = sender.send(Piece::End).await;
        Ok(())
    }
}

// === impl TimeSlice ===

impl TimeSlice {
    /// Completes when the time slice is over.
    async fn over(&self) {
        let Some(large_window) = &self.large_window else { return self.slot.time_slice_over().await };
        // Cancel-safe: both arms only wait.
        tokio::select! {
            () = self.slot.time_slice_over() => {}
            () = large_window.time_slice_over() => {}
        }
    }
}

/// The error of a layer that could not be unpacked. Reads the rest of the blob to find out whether only this host has
/// wrong content. Stops reading when the time slice is over.
async fn refused(
    blob: &mut Blob<'_>,
    time_slice: &TimeSlice,
    descriptor: &Descriptor,
    error: UnpackError,
) -> PullError {
    let is_window = matches!(error, UnpackError::TooLarge(TooLarge::Window(_)));
    if is_window || !matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Rejected) {
        return PullError::Unpack { digest: descriptor.digest.into(), source: error };
    }
    // Not cancel-safe: the blob is not used any more after the time slice.
    let rest = tokio::select! {
        rest = blob.check_rest(io::Error::other(report(&error))) => rest,
        () = time_slice.over() => Ok(()),
    };
    match rest {
        Ok(()) => PullError::Unpack { digest: descriptor.digest.into(), source: error },
        Err(error) => error.into(),
    }
}

/// Sends the data of a spool. Returns its length.
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
        blob.resume_with(&piece);
        sent += piece.len() as u64;
        if sender.send(Piece::Saved(piece.into())).await.is_err() {
            return Ok(sent);
        }
    }
}

// === impl PieceReader ===

impl PieceReader {
    fn unpack(mut self, layers: &Layers, limits: &Limits, algorithm: Algorithm) -> Outcome {
        let unpack_dir = layers.unpack_dir()?;
        let unpacked =
            unpack_with_recipe(&mut self, &unpack_dir.files(), limits, &unpack_dir.recipe(), algorithm);
        let unpacked = unpacked.and_then(|unpacked| {
            // The decoder may stop before the end of the input. The digest is over all bytes.
            io::copy(&mut self, &mut io::sink()).map_err(UnpackError::Read)?;
            Ok(unpacked)
        });
        // The spool is kept only if the download was interrupted, or if the layer is fetched again with a larger
        // window.
        let is_fetched_again = !self.may_have_large_window
            && matches!(unpacked, Err(UnpackError::TooLarge(TooLarge::Window(_))));
        if let Some(spool) =
            self.spool.take().filter(|_| self.state != State::Interrupted && !is_fetched_again)
        {
            spool.discard();
        }
        Ok(match unpacked {
            Ok(unpacked) => Ok((unpack_dir, unpacked)),
            Err(error) => {
                unpack_dir.discard();
                Err(error)
            }
        })
    }

    fn save(&mut self, data: &Bytes) {
        let Some(spool) = &mut self.spool else { return };
        if let Err(error) = spool.append(data) {
            // The pull continues; only a later resume is impossible.
            tracing::debug!(%error, "cannot write to a spool");
            if let Some(spool) = self.spool.take() {
                spool.discard();
            }
        }
    }
}

impl Read for PieceReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.fill_buf()?.read(buffer)?;
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
                None => self.state = State::Interrupted,
            }
        }
        let failed = |kind, what| Err(io::Error::new(kind, what));
        match self.state {
            State::Interrupted => failed(io::ErrorKind::UnexpectedEof, "the download was interrupted"),
            State::Wrong => failed(io::ErrorKind::InvalidData, "the content does not match its digest"),
            State::Reading | State::Ended => Ok(&self.current),
        }
    }

    fn consume(&mut self, count: usize) {
        self.current.advance(count);
    }
}
