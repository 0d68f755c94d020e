//! The only map from our errors to gRPC codes, and the shapes of answers.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use coracle_images::ErrorKind as ImageErrorKind;
use futures::Stream;
use tokio::sync::oneshot;
use tonic::{Code, Response, Status};
use tracing::warn;

use crate::error::Error;
use crate::names::Claim;
use crate::runtime::Runtime;
use crate::shim_client::ErrorKind;

/// What a service method returns.
pub(crate) type Answer<T> = Result<Response<T>, Status>;

/// What a streaming method's answer streams.
pub(crate) type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Wraps a result for the wire.
pub(crate) fn answer<T>(result: Result<T, Error>) -> Answer<T> {
    result.map(Response::new).map_err(|error| Status::from(&error))
}

/// Runs a call that reads files off the async executor.
pub(crate) async fn blocking<T: Send + 'static>(
    runtime: &Runtime,
    call: impl FnOnce(&Runtime) -> Result<T, Error> + Send + 'static,
) -> Answer<T> {
    let runtime = runtime.clone();
    match tokio::task::spawn_blocking(move || call(&runtime)).await {
        Ok(result) => answer(result),
        Err(panic) => Err(Status::internal(panic.to_string())),
    }
}

/// Runs a call to its end even when its caller goes away in the middle: one that cannot be taken back.
pub(crate) async fn finish<T, F>(runtime: Runtime, call: impl FnOnce(Runtime) -> F + Send) -> Answer<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
{
    match tokio::spawn(Box::pin(call(runtime))).await {
        Ok(result) => answer(result),
        Err(panic) => Err(Status::internal(panic.to_string())),
    }
}

/// Runs a creation to its end, in a task of its own. When the caller went away meanwhile, by its deadline too,
/// what was made is unmade: nobody was told that it is there. Who goes when the answer is on its way to him was not told.
pub(crate) async fn create<T, F, U>(
    runtime: Runtime,
    call: impl FnOnce(Runtime) -> F + Send,
    unmake: impl FnOnce(Runtime, T) -> U + Send + 'static,
) -> Answer<T>
where
    T: Clone + Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
    U: Future<Output = Result<(), Error>> + Send + 'static,
{
    let (sender, receiver) = oneshot::channel();
    let made = call(runtime.clone());
    tokio::spawn(async move {
        let made = match made.await {
            Ok(made) => made,
            Err(error) => return drop(sender.send(Err(error))),
        };
        let (tell, told) = oneshot::channel();
        drop(sender.send(Ok((made.clone(), tell))));
        if told.await.is_ok() {
            return;
        }
        if let Err(error) = unmake(runtime, made).await {
            warn!(error = error.chain(), "could not take back what a cancelled call made");
        }
    });
    let Ok(made) = receiver.await else {
        return Err(Status::internal("the call ended without an answer"));
    };
    answer(made.map(|(made, tell): (T, oneshot::Sender<()>)| {
        // The other half waits for it.
        let _heard = tell.send(());
        made
    }))
}

/// The same for what has a name and an id. Its name is under way until it is told or unmade.
pub(crate) async fn create_named<T, F, U>(
    (runtime, claim): (Runtime, Result<Claim, Error>),
    call: impl FnOnce(Runtime, String) -> F + Send,
    unmake: impl FnOnce(Runtime, T) -> U + Send + 'static,
) -> Answer<T>
where
    T: Clone + Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
    U: Future<Output = Result<(), Error>> + Send + 'static,
{
    let mut claim = claim.map_err(|error| Status::from(&error))?;
    let call = |runtime| {
        // Kilobytes, which are moved with whatever has them in it.
        let made = Box::pin(call(runtime, claim.id().to_owned()));
        async move {
            let made = made.await?;
            claim.keep();
            Ok((made, Arc::new(claim)))
        }
    };
    let unmake = |runtime, (made, claim)| {
        let unmade = unmake(runtime, made);
        async move {
            let unmade = unmade.await;
            drop::<Arc<Claim>>(claim);
            unmade
        }
    };
    let told = create(runtime, call, unmake).await?;
    Ok(told.map(|(made, _claim)| made))
}

/// A call that may take so many seconds, if more than none.
pub(crate) async fn within<T>(seconds: i64, call: impl Future<Output = Answer<T>> + Send) -> Answer<T> {
    let Some(seconds) = u64::try_from(seconds).ok().filter(|seconds| *seconds > 0) else {
        return call.await;
    };
    let answer = tokio::time::timeout(Duration::from_secs(seconds), call).await;
    answer.unwrap_or_else(|_late| Err(Status::deadline_exceeded(format!("not done within {seconds} s"))))
}

/// Runs a call in a task of its own, which learns by the future that it is given when the caller went away, and
/// then ends what it began.
pub(crate) async fn attended<T, F>(
    call: impl FnOnce(Pin<Box<dyn Future<Output = ()> + Send>>) -> F + Send,
) -> Answer<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
{
    let (_caller, gone) = oneshot::channel::<()>();
    // Nothing is ever sent: it ends when the other half goes, with this call.
    let gone = Box::pin(async move { drop(gone.await) });
    match tokio::spawn(call(gone)).await {
        Ok(result) => answer(result),
        Err(panic) => Err(Status::internal(panic.to_string())),
    }
}

impl From<&Error> for Status {
    fn from(error: &Error) -> Self {
        Status::new(code(error), message(error))
    }
}

/// The kubelet knows a registry that is down by this word before the message. One that refuses does not say whether
/// it has the image.
fn message(error: &Error) -> String {
    let kind = match error {
        Error::Image { source, .. } => Some(source.kind()),
        _ => None,
    };
    match kind {
        Some(ImageErrorKind::Unavailable) => format!("RegistryUnavailable: {}", error.chain()),
        Some(ImageErrorKind::Unauthorized) => format!(
            "pull access denied, the repository does not exist or needs other credentials: {}",
            error.chain()
        ),
        _ => error.chain(),
    }
}

fn code(error: &Error) -> Code {
    match error {
        Error::NotFound { .. } => Code::NotFound,
        Error::Invalid { .. } => Code::InvalidArgument,
        Error::WrongState { .. } | Error::Unfit(_) => Code::FailedPrecondition,
        Error::NameTaken { .. } => Code::AlreadyExists,
        Error::Unsupported(_) => Code::Unimplemented,
        // What a plugin says has no code of ours.
        Error::Nri(_) => Code::Unknown,
        Error::Checkpoint { source, .. } if source.lacks_criu() => Code::Unimplemented,
        Error::Timeout { .. } => Code::DeadlineExceeded,
        Error::Shim { source, .. } => shim_code(source.kind),
        Error::Image { source, .. } => image_code(source.kind()),
        Error::Network { .. }
        | Error::Systemd(_)
        | Error::Checkpoint { .. }
        | Error::File { .. }
        | Error::Format { .. }
        | Error::Later { .. }
        | Error::Outrun
        | Error::Foreign { .. }
        | Error::Serve(_)
        | Error::Kernel { .. } => Code::Unknown,
    }
}

fn image_code(kind: ImageErrorKind) -> Code {
    match kind {
        ImageErrorKind::NotFound => Code::NotFound,
        ImageErrorKind::Unauthorized => Code::PermissionDenied,
        ImageErrorKind::InvalidReference => Code::InvalidArgument,
        ImageErrorKind::Corrupt => Code::DataLoss,
        ImageErrorKind::Rejected => Code::FailedPrecondition,
        ImageErrorKind::Unsupported => Code::Unimplemented,
        ImageErrorKind::NoSpace => Code::ResourceExhausted,
        // The kubelet takes a status apart, to find its own words in the message, only when it is unknown.
        ImageErrorKind::Unavailable | ImageErrorKind::Locked | ImageErrorKind::Io => Code::Unknown,
    }
}

fn shim_code(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::AlreadyExists => Code::AlreadyExists,
        ErrorKind::Invalid => Code::InvalidArgument,
        ErrorKind::WrongState => Code::FailedPrecondition,
        ErrorKind::Unsupported => Code::Unimplemented,
        ErrorKind::Gone | ErrorKind::Silent => Code::Unavailable,
        ErrorKind::Internal
        | ErrorKind::CommandNotFound
        | ErrorKind::CommandNotExecutable
        | ErrorKind::ConnectionRefused
        | ErrorKind::Spawn
        | ErrorKind::Protocol => Code::Unknown,
    }
}
