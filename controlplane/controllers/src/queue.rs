//! Work queue: a key is queued at most once and handled by one worker at a time. Failures are retried with back-off.
//! Namespaces take turns, so that a namespace with very many changed objects does not delay the other namespaces.

mod metrics;
mod turns;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

pub(crate) use self::metrics::QueueMeter;
pub use self::metrics::QueueMetrics;
use self::turns::Turns;
pub(crate) use self::turns::{QueueKey, key_of_creator};
use crate::error::Error;
use crate::object::Key;

/// First back-off after a failed reconcile. Each further failure doubles it, up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_millis(5);
const MAX_BACKOFF: Duration = Duration::from_secs(300);
/// Maximum delay of [`Next::After`]. A longer delay becomes several delays, each followed by a reconcile. Otherwise the
/// keys of deleted objects could stay in the queue for years: a user can create and delete very many objects with
/// distant times.
const MAX_DELAY: Duration = Duration::from_secs(3600);
/// Timeout of one reconcile, so that a request without a response does not block a worker forever. An interrupted
/// reconcile of many objects continues at the retry, because it starts from the observed state.
const RECONCILE_TIMEOUT: Duration = Duration::from_secs(600);

/// A work queue.
pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    wake: Notify,
    meter: Arc<QueueMeter>,
}

/// The queue of a controller whose reconciles queue other keys. Empty until the controller registers its handlers.
pub(crate) type OwnQueue = OnceLock<Arc<Queue<Key>>>;

struct State<T> {
    ready: Turns<T>,
    /// Number of keys of each namespace that workers handle now.
    running: HashMap<String, usize>,
    /// Maximum number of keys of one namespace that workers handle at the same time.
    each: usize,
    /// The time at which each key was added. The map contains the keys in `ready`, and the keys that were added again
    /// while a worker handles them.
    added: HashMap<T, Instant>,
    working: HashSet<T>,
    later: BTreeMap<(Instant, u64), T>,
    /// The entry of each key in `later`.
    planned: HashMap<T, (Instant, u64)>,
    /// Keys that stay in `working` until the given time.
    pausing: BTreeMap<(Instant, u64), T>,
    serial: u64,
    failures: HashMap<T, u32>,
    meter: Arc<QueueMeter>,
}

/// The time of the next reconcile of a key.
pub(crate) enum Next {
    /// The next reconcile is after the next change.
    Wait,
    /// The next reconcile is after this time, or after the next change if the change is earlier. A time longer than
    /// [`MAX_DELAY`] is shortened to it, so each reconcile must compare the time again.
    After(Duration),
    /// The next reconcile is after the next change, but not before this time. Changes until then share one reconcile.
    Pause(Duration),
    /// The next reconcile is after this time. A change before this time does not start a reconcile.
    NotBefore(Duration),
    /// Does the same as [`Next::After`] with the time `after`, and the same as [`Next::Pause`] with the time `pause`.
    AfterPause { after: Duration, pause: Duration },
}

/// The result of a reconcile whose cost grows with the number of items, for example endpoints. The delay limits the CPU
/// time if many items change one after another.
pub(crate) fn pause_after(items: usize) -> Next {
    /// Maximum number of items without a delay.
    const SMALL: usize = 100;
    const PER_ITEM: Duration = Duration::from_millis(1);
    const MAX_PAUSE: Duration = Duration::from_secs(1);
    if items < SMALL {
        return Next::Wait;
    }
    Next::Pause(PER_ITEM.saturating_mul(u32::try_from(items).unwrap_or(u32::MAX)).min(MAX_PAUSE))
}

/// Does the same as [`pause_after`] for the endpoints of a service. If the service has very many ports, the delay is
/// longer, because each endpoint object contains all ports.
pub(crate) fn pause_after_endpoints(endpoints: usize, ports: usize) -> Next {
    /// Maximum number of ports that do not lengthen the delay.
    const FEW_PORTS: usize = 1000;
    const PER_PORT: Duration = Duration::from_millis(1);
    const MAX_PAUSE: Duration = Duration::from_secs(5);
    if ports <= FEW_PORTS {
        return pause_after(endpoints);
    }
    Next::Pause(PER_PORT.saturating_mul(u32::try_from(ports).unwrap_or(u32::MAX)).min(MAX_PAUSE))
}

/// The duration until `then`, rounded up slightly, so that `then` has passed after the wait. `None` if `then` has
/// passed already.
pub(crate) fn until(then: jiff::Timestamp, now: jiff::Timestamp) -> Option<Duration> {
    let left = Duration::try_from(then.duration_since(now)).ok()?;
    (!left.is_zero()).then(|| left + Duration::from_millis(1))
}

impl<T: QueueKey> Queue<T> {
    /// An empty queue without metrics.
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        Self::measured(Arc::default())
    }

    /// An empty queue, whose workers may all handle keys of one namespace.
    pub(crate) fn measured(meter: Arc<QueueMeter>) -> Self {
        Self::limited(meter, usize::MAX)
    }

    /// An empty queue for a number of workers. If there are several workers, one worker is reserved for other
    /// namespaces. So a reconcile for another namespace does not wait for the end of long reconciles.
    pub(crate) fn shared(meter: Arc<QueueMeter>, workers: usize) -> Self {
        Self::limited(meter, workers.saturating_sub(1).max(1))
    }

    fn limited(meter: Arc<QueueMeter>, each: usize) -> Self {
        let state = State {
            ready: Turns::default(),
            running: HashMap::new(),
            each,
            added: HashMap::new(),
            working: HashSet::new(),
            later: BTreeMap::new(),
            planned: HashMap::new(),
            pausing: BTreeMap::new(),
            serial: 0,
            failures: HashMap::new(),
            meter: meter.clone(),
        };
        Self { state: Mutex::new(state), wake: Notify::new(), meter }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a key.
    pub(crate) fn add(&self, key: T) {
        if self.lock().add(key) {
            self.wake.notify_one();
        }
    }

    /// Adds a key after a delay, unless it is already due earlier.
    pub(crate) fn add_after(&self, key: T, delay: Duration) {
        self.meter.retried();
        let mut state = self.lock();
        state.serial += 1;
        let place = (Instant::now() + delay, state.serial);
        match state.planned.get(&key).copied() {
            Some(planned) if planned <= place => return,
            Some(planned) => drop(state.later.remove(&planned)),
            None => {}
        }
        state.planned.insert(key.clone(), place);
        state.later.insert(place, key);
        drop(state);
        self.wake.notify_one();
    }

    async fn next(&self) -> T {
        loop {
            let (key, due) = self.lock().take(Instant::now());
            if let Some(key) = key {
                // More keys may be ready: wake another worker.
                self.wake.notify_one();
                return key;
            }
            match due {
                Some(due) => {
                    // Cancel-safe: both futures only wait, and the loop reads the queue again.
                    tokio::select! {
                        () = self.wake.notified() => {}
                        () = tokio::time::sleep_until(due) => {}
                    }
                }
                None => self.wake.notified().await,
            }
        }
    }

    fn done(&self, key: &T) {
        let mut state = self.lock();
        state.end_run(key);
        if state.release(key) {
            self.wake.notify_one();
        }
    }

    /// Does the same as [`Queue::done`], but the key cannot become ready before the delay has passed.
    fn done_after(&self, key: T, delay: Duration) {
        let mut state = self.lock();
        state.end_run(&key);
        state.serial += 1;
        let place = (Instant::now() + delay, state.serial);
        state.pausing.insert(place, key);
        drop(state);
        self.wake.notify_one();
    }

    fn failed(&self, key: &T) -> Duration {
        let mut state = self.lock();
        let count = state.failures.entry(key.clone()).or_default();
        *count += 1;
        backoff(*count)
    }

    /// Reconciles keys one after another, forever. A failed key is retried with back-off.
    pub(crate) async fn work<F, R>(&self, controller: &'static str, reconcile: F)
    where
        F: Fn(T) -> R,
        R: Future<Output = Result<Next, Error>>,
    {
        loop {
            let key = self.next().await;
            let running = self.meter.begin();
            let reconciled = tokio::time::timeout(RECONCILE_TIMEOUT, reconcile(key.clone())).await;
            drop(running);
            // A reconcile without requests never yields. Thousands of such reconciles in sequence must not block a
            // thread of the runtime, which can have only two threads.
            tokio::task::yield_now().await;
            match reconciled.unwrap_or(Err(Error::TooLong { limit: RECONCILE_TIMEOUT })) {
                Ok(next) => {
                    self.lock().failures.remove(&key);
                    match next {
                        Next::Wait => {}
                        Next::After(delay) => self.add_after(key.clone(), delay.min(MAX_DELAY)),
                        Next::Pause(delay) => {
                            self.done_after(key, delay);
                            continue;
                        }
                        Next::NotBefore(delay) => {
                            self.add_after(key.clone(), delay);
                            self.done_after(key, delay);
                            continue;
                        }
                        Next::AfterPause { after, pause } => {
                            self.add_after(key.clone(), after.min(MAX_DELAY));
                            self.done_after(key, pause);
                            continue;
                        }
                    }
                }
                Err(error) => {
                    let delay = self.failed(&key);
                    error.log(controller, &key.object(), delay);
                    self.add_after(key.clone(), delay);
                }
            }
            self.done(&key);
        }
    }
}

fn backoff(failures: u32) -> Duration {
    FIRST_BACKOFF.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1))).min(MAX_BACKOFF)
}

impl<T: QueueKey> State<T> {
    /// Adds a key, unless it has been added already. Returns whether this call makes the key ready.
    fn add(&mut self, key: T) -> bool {
        if self.added.contains_key(&key) {
            return false;
        }
        self.added.insert(key.clone(), Instant::now());
        self.meter.added();
        let is_ready = !self.working.contains(&key);
        if is_ready {
            self.ready.push(key);
        }
        is_ready
    }

    /// Ends the work on a key. Returns whether the key was added again meanwhile, and is ready.
    fn release(&mut self, key: &T) -> bool {
        self.working.remove(key);
        let is_ready = self.added.contains_key(key);
        if is_ready {
            self.ready.push(key.clone());
        }
        is_ready
    }

    /// Counts the end of a reconcile for the key's namespace.
    fn end_run(&mut self, key: &T) {
        let namespace = key.namespace();
        let Some(running) = self.running.get_mut(namespace) else { return };
        *running -= 1;
        if *running == 0 {
            self.running.remove(namespace);
        }
    }

    /// The next ready key. If no key is ready, the time at which the next key becomes ready.
    ///
    /// A key whose namespace has its maximum of workers is not returned. The worker that ends a reconcile for this
    /// namespace takes the next key, so no wake-up is lost.
    fn take(&mut self, now: Instant) -> (Option<T>, Option<Instant>) {
        while let Some(entry) = self.pausing.first_entry().filter(|entry| entry.key().0 <= now) {
            let key = entry.remove();
            self.release(&key);
        }
        while let Some(entry) = self.later.first_entry().filter(|entry| entry.key().0 <= now) {
            let key = entry.remove();
            self.planned.remove(&key);
            self.add(key);
        }
        let (running, each) = (&self.running, self.each);
        let may_run = |namespace: &str| {
            namespace.is_empty() || running.get(namespace).is_none_or(|running| *running < each)
        };
        let Some(key) = self.ready.pop(may_run) else {
            let due = [self.later.keys().next(), self.pausing.keys().next()];
            return (None, due.into_iter().flatten().min().map(|place| place.0));
        };
        if let Some(since) = self.added.remove(&key) {
            self.meter.taken(now.saturating_duration_since(since));
        }
        self.working.insert(key.clone());
        *self.running.entry(key.namespace().to_owned()).or_default() += 1;
        (Some(key), None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_key_is_queued_once_and_has_one_worker_at_a_time() {
        let queue = Queue::new();
        queue.add("a");
        queue.add("a");
        queue.add("b");
        assert_eq!(queue.next().await, "a");
        queue.add("a");
        assert_eq!(queue.next().await, "b");
        assert!(queue.lock().take(Instant::now()).0.is_none());
        queue.done(&"a");
        assert_eq!(queue.next().await, "a");
    }

    #[tokio::test]
    async fn reconciles_that_wait_for_nothing_give_way_to_other_tasks() {
        let (queue, count) = (Arc::new(Queue::new()), Arc::new(Mutex::new(0)));
        for number in 0..1000 {
            queue.add(Key::new("n", &number.to_string()));
        }
        let (worker, counted) = (queue.clone(), count.clone());
        tokio::spawn(async move {
            let reconcile = |_key: Key| {
                *counted.lock().unwrap() += 1;
                async { Ok(Next::Wait) }
            };
            worker.work("test", reconcile).await;
        });
        tokio::task::yield_now().await;
        let handled = *count.lock().unwrap();
        assert!((1..1000).contains(&handled), "{handled}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_namespace_with_long_reconciles_leaves_a_worker_and_a_turn_for_others() {
        const WORKERS: usize = 3;
        let queue = Queue::shared(Arc::default(), WORKERS);
        let (ends, start) = (&Mutex::new(Vec::new()), Instant::now());
        for number in 0..10 {
            queue.add(Key::new("many", &number.to_string()));
        }
        let work = |_worker: usize| {
            queue.work("test", move |key: Key| async move {
                tokio::time::sleep(Duration::from_secs(10)).await;
                ends.lock().unwrap().push((key.namespace, start.elapsed().as_secs()));
                Ok(Next::Wait)
            })
        };
        let others = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            queue.add(Key::new("one", "a"));
            queue.add(Key::new("two", "b"));
            tokio::time::sleep(Duration::from_secs(100)).await;
        };
        tokio::select! {
            _ended = futures::future::join_all((0..WORKERS).map(work)) => unreachable!("work has no end"),
            () = others => {}
        }
        let ends = ends.lock().unwrap();
        let of = |name: &str| -> Vec<u64> {
            ends.iter().filter(|(namespace, _)| namespace == name).map(|(_, at)| *at).collect()
        };
        assert_eq!(of("one"), [11], "a worker is left");
        assert_eq!(of("two"), [20], "its turn is after one more key of the first namespace");
        let many = of("many");
        assert_eq!((many.len(), many[2]), (10, 20), "two workers at a time: {many:?}");
        assert!(queue.lock().running.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_delayed_key_is_returned_when_it_is_due() {
        let queue = Queue::new();
        let start = Instant::now();
        queue.add_after("a", Duration::from_secs(60));
        queue.add_after("a", Duration::from_millis(20));
        queue.add_after("a", Duration::from_secs(60));
        assert_eq!(queue.next().await, "a");
        let due = Duration::from_millis(20)..Duration::from_secs(1);
        assert!(due.contains(&start.elapsed()), "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_of_a_deleted_object_leaves_the_queue_long_before_its_time() {
        let (queue, exists) = (Queue::new(), std::cell::Cell::new(true));
        queue.add("a");
        let work = queue.work("test", |_key| {
            let next =
                if exists.get() { Next::After(Duration::from_secs(u64::from(u32::MAX))) } else { Next::Wait };
            async move { Ok(next) }
        });
        let delete = async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            exists.set(false);
            assert_eq!(queue.lock().planned.len(), 1);
            tokio::time::sleep(MAX_DELAY).await;
        };
        tokio::select! {
            () = work => unreachable!("work has no end"),
            () = delete => {}
        }
        assert!(queue.lock().planned.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_reconcile_that_never_ends_is_cut_off_and_others_follow() {
        let queue = Queue::new();
        queue.add("stuck");
        queue.add("next");
        let (sender, mut done) = tokio::sync::mpsc::unbounded_channel();
        let work = queue.work("test", |key| {
            let sender = sender.clone();
            async move {
                if key == "stuck" {
                    std::future::pending::<()>().await;
                }
                sender.send(key).unwrap();
                Ok(Next::Wait)
            }
        });
        tokio::select! {
            () = work => unreachable!("work has no end"),
            key = done.recv() => assert_eq!(key, Some("next")),
            () = tokio::time::sleep(RECONCILE_TIMEOUT * 2) => panic!("the worker is stuck"),
        }
        assert_eq!(queue.lock().failures.get("stuck"), Some(&1));
    }

    #[tokio::test(start_paused = true)]
    async fn changes_during_a_pause_cost_one_reconcile() {
        let queue = Queue::new();
        let start = Instant::now();
        let times = Mutex::new(Vec::new());
        queue.add("large");
        let work = queue.work("test", |key| {
            times.lock().unwrap().push((key, start.elapsed().as_millis()));
            async { Ok(pause_after(300)) }
        });
        let changes = async {
            for _ in 0..40 {
                tokio::time::sleep(Duration::from_millis(10)).await;
                queue.add("large");
            }
            queue.add("other");
            tokio::time::sleep(Duration::from_secs(10)).await;
        };
        tokio::select! {
            () = work => unreachable!("work has no end"),
            () = changes => {}
        }
        let times = times.into_inner().unwrap();
        let of = |name| times.iter().filter(|(key, _)| *key == name).map(|(_, at)| *at).collect::<Vec<_>>();
        // The timer's resolution is a millisecond.
        let large = of("large");
        assert_eq!(large.len(), 3, "{large:?}");
        assert!(large[1] >= 300 && large[2] >= 600, "{large:?}");
        assert_eq!(of("other").len(), 1);
        let state = queue.lock();
        assert!(state.working.is_empty() && state.pausing.is_empty() && state.added.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_is_reconciled_again_at_its_time_and_not_before() {
        for has_changes in [false, true] {
            let queue = Queue::new();
            let start = Instant::now();
            let times = Mutex::new(Vec::new());
            queue.add("key");
            let work = queue.work("test", |_key| {
                let mut times = times.lock().unwrap();
                times.push(start.elapsed().as_millis());
                let is_last = times.len() > 2;
                let next = if is_last { Next::Wait } else { Next::NotBefore(Duration::from_secs(1)) };
                async move { Ok(next) }
            });
            let changes = async {
                for _ in 0..15 {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    if has_changes {
                        queue.add("key");
                    }
                }
                tokio::time::sleep(Duration::from_secs(10)).await;
            };
            tokio::select! {
                () = work => unreachable!("work has no end"),
                () = changes => {}
            }
            let times = times.into_inner().unwrap();
            // The timer's resolution is a millisecond.
            let expected = [0..=0, 1000..=1010, 2000..=2020];
            assert_eq!(times.len(), expected.len(), "{times:?}");
            assert!(expected.iter().zip(&times).all(|(range, time)| range.contains(time)), "{times:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_is_reconciled_again_at_its_time_or_after_a_change_and_a_pause() {
        for (has_changes, expected) in [(false, [0, 10_000, 20_000]), (true, [0, 1000, 2000])] {
            let (queue, start, times) = (Queue::new(), Instant::now(), Mutex::new(Vec::new()));
            queue.add("key");
            let work = queue.work("test", |_key| {
                times.lock().unwrap().push(start.elapsed().as_millis());
                let (after, pause) = (Duration::from_secs(10), Duration::from_secs(1));
                async move { Ok(Next::AfterPause { after, pause }) }
            });
            let changes = async {
                for _ in 0..250 {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    if has_changes {
                        queue.add("key");
                    }
                }
            };
            tokio::select! {
                () = work => unreachable!("work has no end"),
                () = changes => {}
            }
            let times = times.into_inner().unwrap();
            // The timer's resolution is a millisecond.
            let is_at = |(time, at): (&u128, u128)| (at..at + 10).contains(time);
            assert!(times.len() >= 3 && times.iter().zip(expected).all(is_at), "{times:?}");
        }
    }

    #[test]
    fn few_items_are_handled_at_once_and_many_at_most_every_second() {
        assert!(matches!(pause_after(99), Next::Wait));
        assert!(matches!(pause_after(100), Next::Pause(delay) if delay.as_millis() == 100));
        assert!(matches!(pause_after(50_000), Next::Pause(delay) if delay.as_secs() == 1));
        assert!(matches!(pause_after_endpoints(99, 1000), Next::Wait));
        assert!(matches!(pause_after_endpoints(99, 2000), Next::Pause(delay) if delay.as_secs() == 2));
        assert!(matches!(pause_after_endpoints(1, 20_000), Next::Pause(delay) if delay.as_secs() == 5));
    }

    #[test]
    fn delays_double_up_to_five_minutes() {
        let delays: Vec<u128> = [1, 2, 3, 40].into_iter().map(|n| backoff(n).as_millis()).collect();
        assert_eq!(delays, [5, 10, 20, 300_000]);
    }
}
