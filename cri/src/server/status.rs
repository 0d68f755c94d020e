//! The only map from our errors to gRPC codes, and the shapes of answers.

use std::pin::Pin;

use coracle_images::ErrorKind as ImageErrorKind;
use futures::Stream;
use tonic::{Code, Response, Status};

use crate::error::Error;
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

/// Runs a call to its end even when its caller goes away in the middle: one that cannot be taken back.
pub(crate) async fn finish<T, F>(runtime: Runtime, call: impl FnOnce(Runtime) -> F + Send) -> Answer<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
{
    match tokio::spawn(call(runtime)).await {
        Ok(result) => answer(result),
        Err(panic) => Err(Status::internal(panic.to_string())),
    }
}

impl From<&Error> for Status {
    fn from(error: &Error) -> Self {
        Status::new(code(error), message(error))
    }
}

/// The kubelet knows a registry that is down by this word before the message.
fn message(error: &Error) -> String {
    match error {
        Error::Image { source, .. } if source.kind() == ImageErrorKind::Unavailable => {
            format!("RegistryUnavailable: {}", error.chain())
        }
        _ => error.chain(),
    }
}

fn code(error: &Error) -> Code {
    match error {
        Error::NotFound { .. } => Code::NotFound,
        Error::Invalid { .. } => Code::InvalidArgument,
        Error::WrongState { .. } => Code::FailedPrecondition,
        Error::NameTaken { .. } => Code::AlreadyExists,
        Error::Unsupported(_) => Code::Unimplemented,
        Error::Timeout { .. } => Code::DeadlineExceeded,
        Error::Shim { source, .. } => shim_code(source.kind),
        Error::Image { source, .. } => image_code(source.kind()),
        Error::Network { .. }
        | Error::File { .. }
        | Error::Format { .. }
        | Error::Serve(_)
        | Error::Kernel { .. } => Code::Unknown,
    }
}

fn image_code(kind: ImageErrorKind) -> Code {
    match kind {
        ImageErrorKind::NotFound => Code::NotFound,
        ImageErrorKind::Unauthorized => Code::PermissionDenied,
        ImageErrorKind::Unavailable => Code::Unavailable,
        ImageErrorKind::InvalidReference => Code::InvalidArgument,
        ImageErrorKind::Corrupt => Code::DataLoss,
        ImageErrorKind::Rejected => Code::FailedPrecondition,
        ImageErrorKind::Unsupported => Code::Unimplemented,
        ImageErrorKind::NoSpace => Code::ResourceExhausted,
        ImageErrorKind::Locked | ImageErrorKind::Io => Code::Unknown,
    }
}

fn shim_code(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::AlreadyExists => Code::AlreadyExists,
        ErrorKind::Invalid => Code::InvalidArgument,
        ErrorKind::WrongState => Code::FailedPrecondition,
        ErrorKind::Unsupported => Code::Unimplemented,
        ErrorKind::Gone => Code::Unavailable,
        ErrorKind::Internal
        | ErrorKind::CommandNotFound
        | ErrorKind::CommandNotExecutable
        | ErrorKind::ConnectionRefused
        | ErrorKind::Spawn
        | ErrorKind::Protocol => Code::Unknown,
    }
}
