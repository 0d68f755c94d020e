//! Maps errors to gRPC codes. No other module maps errors.

use coracle_images::ErrorKind as ImageErrorKind;
use tonic::{Code, Status};

use crate::error::Error;
use crate::shim_client::ErrorKind;

impl From<&Error> for Status {
    fn from(error: &Error) -> Self {
        Status::new(code(error), message(error))
    }
}

/// The message of an error. The kubelet recognises an unavailable registry by the prefix `RegistryUnavailable`. A registry
/// that refuses access does not reveal whether the image exists.
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
        // A plugin's error is only a message, so its cause is not known.
        Error::Nri(_) => Code::Unknown,
        Error::Checkpoint { source, .. } if source.lacks_criu() => Code::Unimplemented,
        Error::Timeout { .. } => Code::DeadlineExceeded,
        Error::OutputMemory { .. } | Error::ForwardLimit | Error::CommandLimit => Code::ResourceExhausted,
        Error::Shim { source, .. } => shim_code(source.kind),
        Error::Image { source, .. } => image_code(source.kind()),
        Error::Network { .. }
        | Error::Systemd(_)
        | Error::Checkpoint { .. }
        | Error::File { .. }
        | Error::Format { .. }
        | Error::Later { .. }
        | Error::TooSlow
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
        // The kubelet parses the message for its own error names only if the code is Unknown.
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
