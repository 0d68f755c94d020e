//! Polling until a condition holds, with a deadline.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// Factor on every deadline, for slow or busy machines.
const SLOWDOWN: u64 = 6;
/// The interval grows from the first to the last value, and is at least as long as the previous attempt. A condition
/// often runs kubectl, which takes a tenth of a second of processor time.
const FIRST_INTERVAL: Duration = Duration::from_millis(10);
const LAST_INTERVAL: Duration = Duration::from_millis(250);

/// Result of a condition: `true`, `Some` and `Ok` end the polling. The message of a timeout contains the last `Err`.
pub trait Outcome {
    /// The result that the caller of [`eventually`] receives.
    type Value;

    /// The value, if the condition holds. Otherwise a description of what was found, which may be empty.
    fn value(self) -> Result<Self::Value, String>;
}

impl Outcome for bool {
    type Value = ();

    fn value(self) -> Result<(), String> {
        if self { Ok(()) } else { Err(String::new()) }
    }
}

impl<T> Outcome for Option<T> {
    type Value = T;

    fn value(self) -> Result<T, String> {
        self.ok_or_else(String::new)
    }
}

impl<T, E: Display> Outcome for Result<T, E> {
    type Value = T;

    fn value(self) -> Result<T, String> {
        self.map_err(|found| found.to_string())
    }
}

/// Polls `condition` until it holds. `seconds` is the deadline on a fast machine.
///
/// # Panics
/// When the condition does not hold within six times `seconds`. The message contains `what`.
#[track_caller]
pub fn eventually<O: Outcome>(what: &str, seconds: u64, mut condition: impl FnMut() -> O) -> O::Value {
    let mut poll = Poll::until(seconds);
    loop {
        let found = match condition().value() {
            Ok(value) => return value,
            Err(found) => found,
        };
        std::thread::sleep(poll.next_interval(what, &found));
    }
}

/// Like [`eventually`], for asynchronous conditions.
///
/// # Panics
/// When the condition does not hold within six times `seconds`. The message contains `what`.
pub async fn eventually_async<O: Outcome>(
    what: &str,
    seconds: u64,
    mut condition: impl AsyncFnMut() -> O,
) -> O::Value {
    let mut poll = Poll::until(seconds);
    loop {
        let found = match condition().await.value() {
            Ok(value) => return value,
            Err(found) => found,
        };
        tokio::time::sleep(poll.next_interval(what, &found)).await;
    }
}

/// Like [`eventually_async`], for a synchronous condition.
///
/// # Panics
/// When the condition does not hold within six times `seconds`. The message contains `what`.
pub async fn until<O: Outcome>(what: &str, seconds: u64, mut condition: impl FnMut() -> O) -> O::Value {
    let mut poll = Poll::until(seconds);
    loop {
        let found = match condition().value() {
            Ok(value) => return value,
            Err(found) => found,
        };
        tokio::time::sleep(poll.next_interval(what, &found)).await;
    }
}

/// Like [`until`], but lets the other tasks run instead of sleeping. For states that last only a moment, and for tests
/// with a paused clock, which a sleep would advance.
///
/// # Panics
/// When the condition does not hold within six times `seconds`. The message contains `what`.
pub async fn until_yielding<O: Outcome>(
    what: &str,
    seconds: u64,
    mut condition: impl FnMut() -> O,
) -> O::Value {
    let mut poll = Poll::until(seconds);
    loop {
        let found = match condition().value() {
            Ok(value) => return value,
            Err(found) => found,
        };
        poll.next_interval(what, &found);
        tokio::task::yield_now().await;
    }
}

/// Like [`eventually`], but returns `None` if the condition does not hold within six times `seconds`.
pub fn within<O: Outcome>(seconds: u64, mut condition: impl FnMut() -> O) -> Option<O::Value> {
    let mut poll = Poll::until(seconds);
    loop {
        let value = condition().value().ok();
        if value.is_some() {
            return value;
        }
        std::thread::sleep(poll.remaining_interval()?);
    }
}

/// Like [`within`], for a synchronous condition in asynchronous code.
pub async fn within_async<O: Outcome>(seconds: u64, mut condition: impl FnMut() -> O) -> Option<O::Value> {
    let mut poll = Poll::until(seconds);
    loop {
        let value = condition().value().ok();
        if value.is_some() {
            return value;
        }
        tokio::time::sleep(poll.remaining_interval()?).await;
    }
}

struct Poll {
    interval: Duration,
    /// Start of the current attempt.
    attempt: Instant,
    deadline: Instant,
    seconds: u64,
}

impl Poll {
    fn until(seconds: u64) -> Self {
        let seconds = seconds * SLOWDOWN;
        let now = Instant::now();
        Self { interval: FIRST_INTERVAL, attempt: now, deadline: now + Duration::from_secs(seconds), seconds }
    }

    /// Delay before the next attempt. Panics after the deadline, with the result of the last attempt.
    #[track_caller]
    fn next_interval(&mut self, what: &str, found: &str) -> Duration {
        let Some(interval) = self.remaining_interval() else {
            let separator = if found.is_empty() { "" } else { ": " };
            panic!("timed out after {} s: {what}{separator}{found}", self.seconds)
        };
        interval
    }

    /// Delay before the next attempt. `None` after the deadline.
    fn remaining_interval(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let interval = now.saturating_duration_since(self.attempt).clamp(self.interval, LAST_INTERVAL);
        self.interval = (self.interval * 5 / 4).min(LAST_INTERVAL);
        self.attempt = now + interval;
        (now < self.deadline).then_some(interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_is_polled_until_it_holds() {
        let mut left = 3;
        let value = eventually("three attempts", 10, || {
            left -= 1;
            (left == 0).then_some("done")
        });
        assert_eq!((value, left), ("done", 0));
    }

    #[tokio::test]
    async fn other_tasks_run_while_a_condition_is_polled() {
        let value = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let other = value.clone();
        let running = tokio::spawn(async move { other.store(7, std::sync::atomic::Ordering::Relaxed) });
        let read = || Some(value.load(std::sync::atomic::Ordering::Relaxed)).filter(|value| *value > 0);
        assert_eq!(until("the other task has run", 10, read).await, 7);
        running.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_condition_is_polled_without_a_change_of_the_paused_clock() {
        let (start, mut left) = (tokio::time::Instant::now(), 3);
        let attempt = || {
            left -= 1;
            left == 0
        };
        until_yielding("three attempts", 10, attempt).await;
        assert_eq!((left, start.elapsed()), (0, Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "timed out after 0 s: never")]
    async fn a_condition_that_never_holds_panics_also_with_a_paused_clock() {
        until_yielding("never", 0, || false).await;
    }

    #[test]
    #[should_panic(expected = "timed out after 0 s: never")]
    fn a_condition_that_never_holds_panics_with_its_description() {
        eventually("never", 0, || false);
    }

    #[test]
    #[should_panic(expected = "timed out after 0 s: an empty list: 3 entries")]
    fn the_message_of_a_timeout_contains_the_last_error() {
        eventually("an empty list", 0, || Err::<(), _>("3 entries"));
    }

    #[tokio::test]
    async fn a_condition_that_may_fail_is_polled_until_the_deadline() {
        assert_eq!(within(10, || Some("done")), Some("done"));
        assert_eq!(within(0, || false), None);
        assert_eq!(within_async(10, || true).await, Some(()));
        assert_eq!(within_async(0, || None::<u8>).await, None);
        assert_eq!((within(0, || Err::<u8, _>("why")), within(10, || Ok::<_, String>(1))), (None, Some(1)));
    }

    #[test]
    fn a_slow_attempt_is_followed_by_a_longer_interval() {
        let mut poll = Poll::until(10);
        let first = poll.next_interval("", "");
        poll.attempt -= Duration::from_millis(100) + first;
        assert!((Duration::from_millis(100)..=LAST_INTERVAL).contains(&poll.next_interval("", "")));
        poll.attempt -= Duration::from_secs(1);
        assert_eq!(poll.next_interval("", ""), LAST_INTERVAL);
    }

    #[test]
    fn the_interval_grows_to_its_maximum() {
        let mut poll = Poll::until(10);
        // The test may be interrupted here.
        poll.attempt += Duration::from_secs(10);
        let intervals: Vec<_> = (0..30).map(|_| poll.next_interval("", "")).collect();
        assert_eq!((intervals[0], intervals[29]), (FIRST_INTERVAL, LAST_INTERVAL));
    }
}
