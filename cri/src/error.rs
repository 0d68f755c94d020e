//! Errors of the runtime's calls.

pub(crate) mod checkpoint;

pub(crate) use coracle_error_chain::chain;
use std::path::PathBuf;

use self::checkpoint::CheckpointError;
use crate::shim_client;

/// A failed call of the runtime.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The object does not exist.
    #[error("{what} {id:?} not found")]
    NotFound {
        /// The kind of object.
        what: &'static str,
        /// The requested id.
        id: String,
    },
    /// A field of the request is missing or invalid.
    #[error("{field}: {why}")]
    Invalid {
        /// The field of the request.
        field: &'static str,
        /// The reason.
        why: String,
    },
    /// The object is not in a state that allows the call.
    #[error("{what} {id:?} is {state}")]
    WrongState {
        /// The kind of object.
        what: &'static str,
        /// Its id.
        id: String,
        /// The current state.
        state: &'static str,
    },
    /// The name belongs to another object.
    #[error("name {name:?} is reserved for {id:?}")]
    NameTaken {
        /// The requested name.
        name: String,
        /// The id of the object with this name.
        id: String,
    },
    /// Not supported by this runtime or this machine.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// The command of an exec did not exit within the timeout.
    #[error("command {command:?} timed out after {seconds} s{output_end}")]
    Timeout {
        /// The command.
        command: String,
        /// The timeout in seconds.
        seconds: i64,
        /// The end of its outputs, with a separator.
        output_end: String,
    },
    /// The outputs of running commands have reached their memory limit.
    #[error(
        "cannot keep the output of command {command:?}: outputs of commands in {scope} are limited to {mebibytes} MiB at \
         a time; write less, or run fewer commands at once"
    )]
    OutputMemory {
        /// The command.
        command: String,
        /// The scope of the limit: `this pod` or `all pods`.
        scope: &'static str,
        /// The limit.
        mebibytes: usize,
    },
    /// The pods of a namespace have too many forwarded connections.
    #[error(
        "cannot forward the connection: this namespace has as many forwarded connections as this node permits; close \
         some of them"
    )]
    ForwardLimit,
    /// The pods of a namespace have too many commands of clients.
    #[error(
        "cannot run the command or attach: this namespace has as many commands and attached clients as this node \
         permits; end some of them"
    )]
    CommandLimit,
    /// An attached client reads more slowly than the container writes.
    #[error(
        "this client reads the container's output too slowly and was disconnected; the container continues to run"
    )]
    TooSlow,
    /// The image store failed.
    #[error("cannot use image {reference:?}")]
    Image {
        /// The requested image.
        reference: String,
        /// The cause.
        #[source]
        source: coracle_images::Error,
    },
    /// A network operation of a pod failed.
    #[error(
        "cannot configure the network{}",
        if id.is_empty() { String::new() } else { format!(" of sandbox {id:?}") }
    )]
    Network {
        /// The sandbox's id; empty for an operation of the whole network.
        id: String,
        /// The cause.
        #[source]
        source: coracle_cni::Error,
    },
    /// A call to a shim failed.
    #[error("cannot {doing}")]
    Shim {
        /// The operation.
        doing: &'static str,
        /// The cause.
        #[source]
        source: shim_client::Error,
    },
    /// A checkpoint or restore failed.
    #[error("cannot checkpoint or restore {what} {id:?}")]
    Checkpoint {
        /// The kind of object.
        what: &'static str,
        /// Its id.
        id: String,
        /// The cause.
        #[source]
        source: CheckpointError,
    },
    /// A checkpoint does not match the request, or cannot be restored.
    #[error("the checkpoint cannot be restored with this request: {0}")]
    Unfit(String),
    /// An NRI plugin failed or refused.
    #[error(transparent)]
    Nri(#[from] coracle_nri::Error),
    /// systemd failed to manage a cgroup.
    #[error("cannot manage a cgroup with systemd")]
    Systemd(#[from] coracle_systemd::Error),
    /// A file operation failed.
    #[error("cannot {doing} {}", path.display())]
    File {
        /// The operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A file has invalid contents.
    #[error("cannot {doing} {}", path.display())]
    Format {
        /// The operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// A record was written by a later version of this program. The object is not changed.
    #[error(
        "{} was written by a later version of this program ({version}; this version supports up to {known}): its pods \
         continue to run; start the later version", path.display()
    )]
    Later {
        /// The file.
        path: PathBuf,
        /// Version of the file.
        version: u32,
        /// Highest supported version.
        known: u32,
    },
    /// A live shim is incompatible. Its pod is not changed.
    #[error("the shim of pod sandbox {id:?} is alive but incompatible; its pod continues to run")]
    Foreign {
        /// The sandbox's id.
        id: String,
        /// The cause.
        #[source]
        source: shim_client::Error,
    },
    /// The gRPC server failed.
    #[error("cannot serve the CRI")]
    Serve(#[source] tonic::transport::Error),
    /// A system call without a path failed.
    #[error("cannot {doing}")]
    Kernel {
        /// The operation.
        doing: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

// === impl Error ===

impl Error {
    pub(crate) fn invalid(field: &'static str, why: impl Into<String>) -> Self {
        Self::Invalid { field, why: why.into() }
    }

    pub(crate) fn no_sandbox(id: &str) -> Self {
        Self::NotFound { what: "pod sandbox", id: id.to_owned() }
    }

    pub(crate) fn no_container(id: &str) -> Self {
        Self::NotFound { what: "container", id: id.to_owned() }
    }

    /// The refusal of a request without a configuration.
    pub(crate) fn no_config() -> Self {
        Self::invalid("config", "is missing")
    }

    /// Converts a panic or cancellation of a task, for `map_err`.
    pub(crate) fn panicked(doing: &'static str) -> impl FnOnce(tokio::task::JoinError) -> Self {
        move |panic| Self::Kernel { doing, source: std::io::Error::other(panic) }
    }

    /// Converts an error of a file operation, for `map_err`.
    pub(crate) fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { doing, path, source }
    }

    /// Converts an error of a shim call, for `map_err`.
    pub(crate) fn shim(doing: &'static str) -> impl FnOnce(shim_client::Error) -> Self {
        move |source| Self::Shim { doing, source }
    }

    /// The error and its causes, outermost first.
    #[must_use]
    pub fn chain(&self) -> String {
        chain(self)
    }
}
