//! Runs CPU-heavy work on untrusted bytes outside of the async workers, with bounded concurrency.
//!
//! | function | for | waits |
//! |---|---|---|
//! | [`run_body`], [`body_slot`] | parsing of bodies, patches: tenths of a second, and much memory | without a thread |
//! | [`run_long`] | functions that may take seconds | without a thread |
//! | [`run`] | work in linear time on an object or a response: tens of milliseconds for megabytes | on a thread |
//!
//! The functions of the first two rows have slots, and one user gets only one slot of each. If too many requests wait
//! for a slot, further ones are refused. Such a function never runs on an async worker: a few of them would stop all
//! other tasks.
//!
//! The node has few threads (`agent/src/role.rs`). If very many functions waited on a thread, no thread would be left
//! for other tasks. So the number of functions that wait on a thread is limited. Further functions of [`run`] run on
//! their async worker.

use std::cell::Cell;
use std::sync::{Condvar, LazyLock, Mutex, PoisonError};

use serde_json::Value;
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::{error::Result, large_requests::LargeRequestPermit, long_work::LongWork, request_owner};

/// Minimum bytes of a body, or of a stored object, that is offloaded.
pub(crate) const MIN_OFFLOADED_BYTES: usize = 32 << 10;
/// Maximum number of concurrent offloaded functions.
const CONCURRENCY: usize = 2;
/// Maximum number of functions that wait on a thread. With all running functions of this module they use three
/// quarters of the node's blocking threads. Further functions run on their async worker.
const MAX_WAITING: usize = 6;

thread_local!(static IS_OFFLOADED: Cell<bool> = const { Cell::new(false) });

static GATE: Gate = Gate::new();

/// The functions that may take seconds.
static LONG: LazyLock<LongWork> = LazyLock::new(LongWork::new);
/// The functions on bodies of requests.
static BODIES: LazyLock<LongWork> = LazyLock::new(LongWork::for_bodies);

struct Gate {
    jobs: Mutex<Jobs>,
    freed: Condvar,
}

/// Numbers of offloaded functions.
struct Jobs {
    running: usize,
    waiting: usize,
}

/// The permit of one offloaded function.
struct OffloadPermit;

/// Marks the thread of a long function.
struct Marked;

/// The slot of one function. A task must not wait for a second slot while it has one: the slots could then all belong
/// to tasks that wait.
pub(crate) struct Slot {
    _permit: LargeRequestPermit,
}

/// Runs a function that takes linear time. A heavy function waits for a permit, unless too many functions wait. A
/// nested call uses the permit of the outer call.
pub(crate) fn run<T>(is_heavy: bool, work: impl FnOnce() -> T) -> T {
    if !must_leave_worker(is_heavy) || !GATE.enter() {
        return work();
    }
    tokio::task::block_in_place(|| {
        let _permit = GATE.wait();
        work()
    })
}

/// Runs a function. A function that may take seconds waits for a slot. Each owner of requests has one long function at
/// a time, so one user does not delay the long functions of others. A request that waits for a slot for a long time
/// gives its seats back, because the slots are a limit, too.
///
/// # Errors
/// Too many requests of the owner, or of all owners, wait for a slot. The function did not run.
pub(crate) async fn run_long<T>(is_long: bool, work: impl FnOnce() -> T) -> Result<T> {
    run_in_slot(&LONG, is_long, work).await
}

/// Runs a function on the body of a request, such as its parsing or a patch. A slow function waits for a slot, as with
/// [`run_long`]. Bodies have slots of their own, so that they do not wait for functions that take seconds.
///
/// # Errors
/// Too many requests of the owner, or of all owners, wait for a slot. The function did not run.
pub(crate) async fn run_body<T>(is_slow: bool, work: impl FnOnce() -> T) -> Result<T> {
    run_in_slot(&BODIES, is_slow, work).await
}

/// Waits for the slot of a slow function on the body of a request. The caller then reads the input of the function, so
/// that the input is current, and takes no memory during the wait. `None` if the function may run on its async worker.
///
/// # Errors
/// Too many requests of the owner, or of all owners, wait for a slot.
pub(crate) async fn body_slot(is_slow: bool) -> Result<Option<Slot>> {
    slot(&BODIES, is_slow).await
}

async fn slot(slots: &LongWork, is_slow: bool) -> Result<Option<Slot>> {
    if !must_leave_worker(is_slow) {
        return Ok(None);
    }
    let permit = slots.enter(&request_owner::current()).await?;
    Ok(Some(Slot { _permit: permit }))
}

async fn run_in_slot<T>(slots: &LongWork, is_slow: bool, work: impl FnOnce() -> T) -> Result<T> {
    Ok(match slot(slots, is_slow).await? {
        Some(slot) => slot.run(work),
        None => work(),
    })
}

/// Makes the server refuse the long functions of an owner, until the result is dropped.
#[cfg(test)]
pub(crate) async fn occupy(owner: &'static str) -> impl Sized {
    LONG.occupy(owner).await
}

/// Makes the server refuse the functions on bodies of an owner, until the result is dropped.
#[cfg(test)]
pub(crate) async fn occupy_bodies(owner: &'static str) -> impl Sized {
    BODIES.occupy(owner).await
}

/// Number of requests of an owner that wait for the slot of a function on a body.
#[cfg(test)]
pub(crate) fn waiting_bodies(owner: &str) -> usize {
    BODIES.count_waiting(owner)
}

/// Runs a function of a caller that may hold locks. The function does not wait for a permit, because functions with a
/// permit may wait for these locks.
pub(crate) fn run_with_locks<T>(is_heavy: bool, work: impl FnOnce() -> T) -> T {
    if must_leave_worker(is_heavy) { tokio::task::block_in_place(work) } else { work() }
}

/// Whether a function must not run on an async worker, and the caller is on one.
fn must_leave_worker(is_heavy: bool) -> bool {
    let threaded = || Handle::try_current().is_ok_and(|h| h.runtime_flavor() == RuntimeFlavor::MultiThread);
    is_heavy && !IS_OFFLOADED.get() && threaded()
}

/// Whether the JSON text of a tree has approximately `bytes` bytes or more. The traversal stops at that size.
pub(crate) fn is_longer(value: &Value, bytes: usize) -> bool {
    remaining_bytes(value, bytes).is_none()
}

/// Subtracts the length of a value's text from `bytes`. `None` if the text is longer.
fn remaining_bytes(value: &Value, bytes: usize) -> Option<usize> {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => bytes.checked_sub(4),
        Value::String(text) => bytes.checked_sub(text.len() + 3),
        Value::Array(list) => {
            list.iter().try_fold(bytes.checked_sub(2)?, |bytes, one| remaining_bytes(one, bytes))
        }
        Value::Object(fields) => fields.iter().try_fold(bytes.checked_sub(2)?, |bytes, (key, one)| {
            remaining_bytes(one, bytes.checked_sub(key.len() + 4)?)
        }),
    }
}

impl Gate {
    const fn new() -> Self {
        Self { jobs: Mutex::new(Jobs { running: 0, waiting: 0 }), freed: Condvar::new() }
    }

    /// Counts a function that is going to wait. Returns false if too many functions wait.
    fn enter(&self) -> bool {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let may_wait = jobs.waiting < MAX_WAITING;
        if may_wait {
            jobs.waiting += 1;
        }
        may_wait
    }

    /// Waits for a permit, after [`Gate::enter`].
    fn wait(&self) -> OffloadPermit {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut jobs = self
            .freed
            .wait_while(jobs, |jobs| jobs.running >= CONCURRENCY)
            .unwrap_or_else(PoisonError::into_inner);
        jobs.waiting -= 1;
        jobs.running += 1;
        IS_OFFLOADED.set(true);
        OffloadPermit
    }
}

// === impl Slot ===

impl Slot {
    /// Runs the function of the slot.
    pub(crate) fn run<T>(self, work: impl FnOnce() -> T) -> T {
        tokio::task::block_in_place(|| {
            IS_OFFLOADED.set(true);
            let _marked = Marked;
            work()
        })
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        IS_OFFLOADED.set(false);
    }
}

impl Drop for OffloadPermit {
    fn drop(&mut self) {
        IS_OFFLOADED.set(false);
        let mut jobs = GATE.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.running -= 1;
        if jobs.waiting > 0 {
            GATE.freed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use coracle_testing::eventually;

    use super::*;
    use crate::waits;

    /// Time after which a test fails.
    const DEADLINE: Duration = Duration::from_secs(60);

    #[test]
    fn the_length_of_a_tree_equals_the_length_of_its_text() {
        let tree = serde_json::json!({"key": ["text", 1234, true, {}], "other": "x".repeat(100)});
        let length = tree.to_string().len();
        assert!(is_longer(&tree, length - 10));
        assert!(!is_longer(&tree, length + 10));
        assert!(is_longer(&vec![Value::Null; 1000].into(), 3000));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn nested_work_does_not_wait_for_itself() {
        let nested = |_| async { tokio::spawn(async { run(true, || run(true, || run(true, || 1))) }).await };
        // All tests share the places of waiting functions, and need some of them at the same time.
        let done = futures::future::join_all((0..=CONCURRENCY).map(nested)).await;
        assert_eq!(done.into_iter().map(|one| one.unwrap()).sum::<usize>(), CONCURRENCY + 1);
        assert!(!IS_OFFLOADED.get());
    }

    /// The runtime has one worker. If the job blocked this worker, the task that ends the job would never run.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_run_while_offloaded_work_blocks() {
        let (started, has_started) = mpsc::channel::<()>();
        let (release, released) = mpsc::channel::<()>();
        let job = tokio::spawn(async move {
            run(true, || {
                started.send(()).unwrap();
                released.recv_timeout(DEADLINE)
            })
        });
        has_started.recv_timeout(DEADLINE).unwrap();
        tokio::spawn(async move { release.send(()).unwrap() }).await.unwrap();
        job.await.unwrap().unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_run_while_work_with_locks_blocks() {
        let (release, released) = mpsc::channel::<()>();
        let (started, has_started) = mpsc::channel::<()>();
        let job = tokio::spawn(async move {
            run_with_locks(true, || {
                started.send(()).unwrap();
                released.recv_timeout(DEADLINE)
            })
        });
        has_started.recv_timeout(DEADLINE).unwrap();
        tokio::spawn(async move { release.send(()).unwrap() }).await.unwrap();
        job.await.unwrap().unwrap();
    }

    #[test]
    fn few_functions_wait_on_a_thread() {
        let gate = Gate::new();
        assert!((0..MAX_WAITING).all(|_| gate.enter()));
        assert!(!gate.enter());
    }

    /// The runtime has one worker, which would run no other task if the second long function of an owner waited on it.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_long_function_waits_for_another_one_of_its_owner_and_uses_no_thread() {
        let start = |owner: &str| {
            let (started, has_started) = mpsc::channel::<()>();
            let (release, released) = mpsc::channel::<()>();
            let work = run_long(true, move || {
                started.send(()).unwrap();
                assert!(run(true, || IS_OFFLOADED.get()), "a nested function needs no permit");
                released.recv_timeout(DEADLINE)
            });
            let job = tokio::spawn(request_owner::scope(owner.into(), work));
            (has_started, release, job)
        };
        let first = start("offload-eve");
        first.0.recv_timeout(DEADLINE).unwrap();
        let second = start("offload-eve");
        let other = start("offload-bob");
        other.0.recv_timeout(DEADLINE).unwrap();
        tokio::spawn(async {}).await.unwrap();
        assert!(second.0.try_recv().is_err(), "two long functions of one owner run");
        for (_started, release, job) in [first, other, second] {
            release.send(()).unwrap();
            job.await.unwrap().unwrap().unwrap();
        }
        assert!(!IS_OFFLOADED.get());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_request_that_waits_for_the_long_function_of_another_one_loses_its_seats() {
        let (started, has_started) = mpsc::channel::<()>();
        let (release, released) = mpsc::channel::<()>();
        let first = run_long(true, move || {
            started.send(()).unwrap();
            released.recv_timeout(DEADLINE)
        });
        let first = tokio::spawn(request_owner::scope("offload-ann".into(), first));
        has_started.recv_timeout(DEADLINE).unwrap();
        let seats = Arc::new(());
        let mut held = Some(seats.clone());
        let second = tokio::spawn(async move {
            let request = request_owner::scope("offload-ann".into(), run_long(true, || ()));
            waits::holding(&mut held, request).await.unwrap();
        });
        eventually("the seats to be given back", 30, || Arc::strong_count(&seats) == 1);
        assert!(!second.is_finished());
        release.send(()).unwrap();
        first.await.unwrap().unwrap().unwrap();
        second.await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_third_job_waits_until_another_one_ends() {
        let (started, has_started) = mpsc::channel::<()>();
        let start = || {
            let started = started.clone();
            let (release, released) = mpsc::channel::<()>();
            let job = tokio::spawn(async move {
                run(true, || {
                    started.send(()).unwrap();
                    released.recv_timeout(DEADLINE)
                })
            });
            (release, job)
        };
        let jobs = [start(), start(), start()];
        for _ in 0..CONCURRENCY {
            has_started.recv_timeout(DEADLINE).unwrap();
        }
        eventually("a job to wait", 30, || GATE.jobs.lock().unwrap().waiting > 0);
        assert!(has_started.try_recv().is_err(), "all three jobs run");
        // The third job has not begun. Its channel keeps the message.
        let released = jobs.map(|(release, job)| {
            release.send(()).unwrap();
            job
        });
        for job in released {
            job.await.unwrap().unwrap();
        }
        has_started.recv_timeout(DEADLINE).unwrap();
    }
}
