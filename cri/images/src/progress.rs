//! Progress of imports and exports, whose layers are read one after the other.

use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};

use crate::image::{ProgressFn, PullProgress};

/// Bytes between two reports.
const STEP: u64 = 1 << 20;

/// Counts the bytes and layers of an import or export, and reports them.
pub(crate) struct Meter {
    state: Mutex<State>,
    report: Option<ProgressFn>,
}

#[derive(Default)]
struct State {
    progress: PullProgress,
    /// Bytes of the complete layers.
    complete: u64,
    /// Bytes at the last report.
    reported: u64,
}

/// A reader of the current layer.
pub(crate) struct Metered<R> {
    pub(crate) input: R,
    pub(crate) meter: Arc<Meter>,
}

// === impl Meter ===

impl Meter {
    /// A meter that reports to this function.
    pub(crate) fn new(report: Option<ProgressFn>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), report })
    }

    /// Sets the number of layers and their bytes.
    pub(crate) fn start(&self, sizes: impl Iterator<Item = u64>) {
        self.change(|state| {
            for size in sizes {
                state.progress.bytes_total = state.progress.bytes_total.saturating_add(size);
                state.progress.layers_total += 1;
            }
            true
        });
    }

    /// Counts bytes of the current layer.
    fn add(&self, bytes: u64) {
        self.change(|state| {
            state.set_done(state.progress.bytes_done.saturating_add(bytes));
            state.progress.bytes_done.saturating_sub(state.reported) >= STEP
        });
    }

    /// Counts the current layer of `size` bytes as complete. Its bytes are not read if the store has the layer.
    pub(crate) fn end_layer(&self, size: u64) {
        self.change(|state| {
            state.complete = state.complete.saturating_add(size);
            state.set_done(state.complete);
            state.progress.layers_done += 1;
            true
        });
    }

    /// Changes the state. Reports it if `change` returns true.
    fn change(&self, change: impl FnOnce(&mut State) -> bool) {
        let Some(report) = &self.report else { return };
        let progress = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if !change(&mut state) {
                return;
            }
            state.reported = state.progress.bytes_done;
            state.progress.clone()
        };
        report(&progress);
    }
}

// === impl State ===

impl State {
    fn set_done(&mut self, bytes: u64) {
        self.progress.bytes_done = bytes.min(self.progress.bytes_total);
    }
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.meter.add(read as u64);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_reported_in_steps_and_a_layer_that_was_not_read_counts_as_complete() {
        let reports = Arc::new(Mutex::new(Vec::new()));
        let into = reports.clone();
        let report: ProgressFn =
            Arc::new(move |at| into.lock().unwrap().push((at.bytes_done, at.layers_done)));
        let meter = Meter::new(Some(report));
        meter.start([3 * STEP, STEP].into_iter());
        let half = vec![0; usize::try_from(STEP / 2).unwrap()];
        let mut reader = Metered { input: io::repeat(0), meter: meter.clone() };
        for _ in 0..5 {
            reader.read_exact(&mut half.clone()).unwrap();
        }
        meter.end_layer(3 * STEP);
        meter.end_layer(STEP);
        let expected = [(0, 0), (STEP, 0), (2 * STEP, 0), (3 * STEP, 1), (4 * STEP, 2)];
        assert_eq!(*reports.lock().unwrap(), expected);
    }
}
