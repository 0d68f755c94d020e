//! Cancellation and undo of calls: a call continues in a task when its caller disconnects, and is then undone or finished.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tonic::{Response, Status};
use tracing::warn;

use crate::blocking::FileWork;
use crate::error::Error;
use crate::names::Claim;
use crate::sandbox::filter::selects_all;

/// The result of a gRPC method.
pub(crate) type Answer<T> = Result<Response<T>, Status>;

/// A created object, and the channel that confirms the delivery of its response.
type Created<T> = Result<(T, oneshot::Sender<()>), Error>;

/// Converts a result to a gRPC response.
pub(super) fn answer<T>(result: Result<T, Error>) -> Answer<T> {
    result.map(Response::new).map_err(|error| Status::from(&error))
}

/// Maximum concurrent calls for statistics, for each of the two kinds below.
const MEASURING_MAX: usize = 32;

/// Calls that measure the writable layers of some containers.
static MEASURING_CALLS: FileWork = FileWork::new(MEASURING_MAX);

/// Calls that read the statistics of all containers. They do not wait for measurements of layers, but they read very
/// many files of the kernel. They have their own permits, so they do not delay the checks of single pods.
static MEASURING_LISTS: FileWork = FileWork::new(MEASURING_MAX);

/// Runs a call that measures writable layers of some containers off the async executor. Containers can make the layers
/// very large.
pub(super) async fn measure<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Answer<T> {
    measured(MEASURING_CALLS.run(call).await)
}

/// Runs a call that reads the statistics of all containers off the async executor.
pub(super) async fn measure_all<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Answer<T> {
    measured(MEASURING_LISTS.run(call).await)
}

/// Runs a call for the containers that match a filter: [`measure_all`] without a filter, otherwise [`measure`].
pub(super) async fn measure_list<T: Send + 'static, F: Default + PartialEq>(
    filter: Option<&F>,
    call: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Answer<T> {
    if selects_all(filter) { measure_all(call).await } else { measure(call).await }
}

/// The response of a call, or an error if its thread has failed.
fn measured<T>(result: io::Result<Result<T, Error>>) -> Answer<T> {
    match result {
        Ok(result) => answer(result),
        Err(error) => Err(Status::internal(error.to_string())),
    }
}

/// Runs a call to its end, even if its caller disconnects: the call cannot be undone.
pub(super) async fn finish<T>(call: impl Future<Output = Result<T, Error>> + Send + 'static) -> Answer<T>
where
    T: Send + 'static,
{
    match tokio::spawn(Box::pin(call)).await {
        Ok(result) => answer(result),
        Err(panic) => Err(Status::internal(panic.to_string())),
    }
}

/// Runs a creation to its end in a task. If the caller disconnects or reaches its deadline before the response is
/// delivered, the created object is undone. The caller did not get its id.
pub(super) async fn create<T, U>(
    call: impl Future<Output = Result<T, Error>> + Send + 'static,
    undo: impl FnOnce(T) -> U + Send + 'static,
) -> Answer<T>
where
    T: Clone + Send + 'static,
    U: Future<Output = Result<(), Error>> + Send + 'static,
{
    let (sender, receiver) = oneshot::channel();
    coracle_threads::spawn(run_or_undo(Box::pin(call), undo, sender));
    let Ok(created) = receiver.await else {
        return Err(Status::internal("the call ended without an answer"));
    };
    answer(created.map(|(created, delivered)| {
        // The task waits for this confirmation.
        let _waiting = delivered.send(());
        created
    }))
}

/// Creates an object, delivers it, and undoes it if the delivery is not confirmed.
async fn run_or_undo<T, U>(
    call: impl Future<Output = Result<T, Error>>,
    undo: impl FnOnce(T) -> U,
    sender: oneshot::Sender<Created<T>>,
) where
    T: Clone,
    U: Future<Output = Result<(), Error>>,
{
    let created = match call.await {
        Ok(created) => created,
        Err(error) => return drop(sender.send(Err(error))),
    };
    let (confirm, confirmed) = oneshot::channel();
    drop(sender.send(Ok((created.clone(), confirm))));
    if confirmed.await.is_ok() {
        return;
    }
    // The future is boxed, because it has several kilobytes that each task would reserve, and most tasks undo nothing.
    if let Err(error) = Box::pin(undo(created)).await {
        warn!(error = error.chain(), "cannot undo a cancelled call");
    }
}

/// Creates an object with a claimed name. The name stays claimed until the response is delivered or the object is undone.
pub(super) async fn create_named<T, F, U>(
    claim: Claim,
    call: impl FnOnce(String) -> F,
    undo: impl FnOnce(T) -> U + Send + 'static,
) -> Answer<T>
where
    T: Clone + Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
    U: Future<Output = Result<(), Error>> + Send + 'static,
{
    let mut claim = claim;
    // The future is boxed, because it has several kilobytes and is moved with its callers.
    let creation = Box::pin(call(claim.id().to_owned()));
    let call = async move {
        let created = creation.await?;
        claim.keep();
        Ok((created, Arc::new(claim)))
    };
    let undo = |(created, claim): (T, Arc<Claim>)| {
        let undone = undo(created);
        async move {
            let undone = undone.await;
            drop(claim);
            undone
        }
    };
    let response = create(call, undo).await?;
    Ok(response.map(|(created, _claim)| created))
}

/// Limits a call to a timeout in seconds. 0 and negative values disable it.
pub(super) async fn within<T>(seconds: i64, call: impl Future<Output = Answer<T>> + Send) -> Answer<T> {
    let Some(seconds) = u64::try_from(seconds).ok().filter(|seconds| *seconds > 0) else {
        return call.await;
    };
    let answer = tokio::time::timeout(Duration::from_secs(seconds), call).await;
    answer.unwrap_or_else(|_late| Err(Status::deadline_exceeded(format!("not done within {seconds} s"))))
}

/// Runs a call in a task. The call gets a future that resolves when the caller disconnects; the call then ends itself.
pub(super) async fn run_cancellable<T, F>(
    call: impl FnOnce(Pin<Box<dyn Future<Output = ()> + Send>>) -> F + Send,
) -> Answer<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
{
    let (_caller, gone) = oneshot::channel::<()>();
    // Nothing is ever sent. The channel closes when this call is dropped.
    let gone = Box::pin(async move { drop(gone.await) });
    match tokio::spawn(call(gone)).await {
        Ok(result) => answer(result),
        Err(panic) => Err(Status::internal(panic.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use coracle_proto::cri::ContainerStatsFilter;

    use super::*;

    #[tokio::test]
    async fn measurements_of_all_containers_do_not_delay_those_of_one_pod() {
        let begun = Arc::new(AtomicUsize::new(0));
        let no_filter = ContainerStatsFilter::default();
        let lists: Vec<_> = (0..=MEASURING_MAX)
            .map(|_| {
                let (release, released) = mpsc::channel::<()>();
                let (begun, filter) = (Arc::clone(&begun), no_filter.clone());
                let list = tokio::spawn(async move {
                    let slow = move || {
                        begun.fetch_add(1, Ordering::SeqCst);
                        Ok(released.recv().is_err())
                    };
                    measure_list(Some(&filter), slow).await
                });
                (release, list)
            })
            .collect();
        let all_begun = || begun.load(Ordering::SeqCst) == MEASURING_MAX;
        coracle_testing::until_yielding("all permits of lists are held", 10, all_begun).await;
        let of_one = ContainerStatsFilter { pod_sandbox_id: "p".to_owned(), ..no_filter };
        let measured = measure_list(Some(&of_one), || Ok(7));
        let measured = tokio::time::timeout(Duration::from_secs(30), measured).await;
        assert_eq!(measured.expect("another permit").expect("measured").into_inner(), 7);
        for (release, list) in lists {
            drop(release);
            assert!(list.await.expect("task").expect("measured").into_inner());
        }
    }
}
