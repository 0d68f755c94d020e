//! Walks of directory trees that count files for statistics, in the background.
//!
//! A request for statistics gets the last count and does not wait. All walks of this module together take at most 2 %
//! of a processor. Each of two threads does one walk at a time, and pauses after each walk. Trees of very many files
//! have their own queue and thread, so they do not delay the counts of other trees. Only requests begin walks. Without
//! requests there is no thread.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use coracle_threads::Threads;
use tracing::warn;

use crate::lock::locked;

/// Maximum duration of a short walk. A walk counts about 100,000 files in this time.
const SHORT: Duration = Duration::from_millis(200);

/// A thread pauses for this many times the duration of its walk. So each of the two threads takes at most 1 % of a
/// processor.
const PAUSE_FACTOR: u32 = 99;

static THREADS: Threads = Threads::new("walks");

static SHORT_WALKS: Queue = Queue::new(Some((SHORT, &LONG_WALKS)), pause);
static LONG_WALKS: Queue = Queue::new(None, pause);

/// A walk. Returns false if the time limit ended it.
type Walk = Box<dyn FnMut(TimeLimit) -> bool + Send>;

/// Time limit of a walk.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimit(Option<Instant>);

/// A queue of walks, and the thread that does them. The thread runs only while there are walks.
struct Queue {
    /// Maximum duration of a walk, and the queue for walks that take longer. `None` means no limit.
    limit: Option<(Duration, &'static Queue)>,
    /// Called after each walk with the duration of the walk. Blocks the thread for the pause.
    pause: fn(Duration),
    state: Mutex<State>,
}

struct State {
    waiting: VecDeque<Walk>,
    /// Whether a thread does the walks.
    is_running: bool,
}

/// Begins a walk in the background. `took` is the duration of the last walk of the same tree. The walk must end when
/// its time limit is over. Then it is repeated later, without a limit. The caller must not add a second walk of a tree
/// while the first one waits.
pub fn begin(took: Option<Duration>, walk: impl FnMut(TimeLimit) -> bool + Send + 'static) {
    let is_long = took.is_some_and(|took| took >= SHORT);
    let queue = if is_long { &LONG_WALKS } else { &SHORT_WALKS };
    queue.add(Box::new(walk));
}

#[expect(clippy::disallowed_methods, reason = "on a thread for walks")]
fn pause(took: Duration) {
    std::thread::sleep(pause_after(took));
}

fn pause_after(took: Duration) -> Duration {
    took.saturating_mul(PAUSE_FACTOR)
}

// === impl TimeLimit ===

impl TimeLimit {
    /// No limit.
    pub const NONE: Self = Self(None);

    /// A limit of this duration, from now on.
    pub(crate) fn of(most: Duration) -> Self {
        Self(Some(Instant::now() + most))
    }

    /// Whether the walk has to end.
    #[must_use]
    pub fn is_over(self) -> bool {
        self.0.is_some_and(|end| Instant::now() >= end)
    }
}

// === impl Queue ===

impl Queue {
    const fn new(limit: Option<(Duration, &'static Queue)>, pause: fn(Duration)) -> Self {
        let state = State { waiting: VecDeque::new(), is_running: false };
        Self { limit, pause, state: Mutex::new(state) }
    }

    fn add(&'static self, walk: Walk) {
        let mut state = locked(&self.state);
        state.waiting.push_back(walk);
        if std::mem::replace(&mut state.is_running, true) {
            return;
        }
        drop(state);
        let on_thread = move || {
            self.run();
            ControlFlow::Continue(())
        };
        if let Err(error) = THREADS.run(on_thread) {
            // The next walk that is added starts the thread.
            locked(&self.state).is_running = false;
            warn!(%error, "cannot start a thread that counts files");
        }
    }

    fn run(&self) {
        while let Some(mut walk) = self.next() {
            let begun = Instant::now();
            let is_complete = walk(self.limit.map_or(TimeLimit::NONE, |(most, _)| TimeLimit::of(most)));
            let took = begun.elapsed();
            if let (false, Some((_, longer))) = (is_complete, self.limit) {
                longer.add(walk);
            }
            (self.pause)(took);
        }
    }

    fn next(&self) -> Option<Walk> {
        let mut state = locked(&self.state);
        let next = state.waiting.pop_front();
        state.is_running = next.is_some();
        next
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    fn no_pause(_took: Duration) {}

    #[test]
    fn a_thread_takes_one_percent_of_a_processor() {
        let took = Duration::from_secs(1);
        assert_eq!(took + pause_after(took), 100 * took);
    }

    #[test]
    fn the_thread_rests_after_each_walk_and_ends_without_walks() {
        static RESTS: AtomicUsize = AtomicUsize::new(0);
        static QUEUE: Queue = Queue::new(None, |_took| _ = RESTS.fetch_add(1, Ordering::SeqCst));
        let (done, walks) = mpsc::channel();
        for walk in 0..3 {
            let done = done.clone();
            QUEUE.add(Box::new(move |_: TimeLimit| done.send((walk, RESTS.load(Ordering::SeqCst))).is_ok()));
        }
        let walks: Vec<_> = walks.iter().take(3).collect();
        assert_eq!(walks, [(0, 0), (1, 1), (2, 2)]);
        coracle_testing::eventually("the end of the thread", 20, || !locked(&QUEUE.state).is_running);
        assert_eq!(RESTS.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_walk_that_takes_long_does_not_delay_others() {
        static LONG: Queue = Queue::new(None, no_pause);
        static QUEUE: Queue = Queue::new(Some((Duration::ZERO, &LONG)), no_pause);
        let (begun, begin) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        QUEUE.add(Box::new(move |limit: TimeLimit| {
            if limit.is_over() {
                return false;
            }
            begun.send(()).is_ok() && released.recv().is_err()
        }));
        begin.recv().expect("the walk begins again without a limit");
        let (done, end) = mpsc::channel();
        QUEUE.add(Box::new(move |_: TimeLimit| done.send(7).is_ok()));
        assert_eq!(end.recv(), Ok(7));
        drop(release);
    }
}
