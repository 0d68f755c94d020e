//! Why a call failed, in the words that the caller sees.

use std::path::PathBuf;

use crate::checkpoint::CheckpointError;
use crate::shim_client;

/// A failed call of the runtime.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such object.
    #[error("{what} {id:?} not found")]
    NotFound {
        /// The kind of object.
        what: &'static str,
        /// The id that was asked for.
        id: String,
    },
    /// The request lacks something or contradicts itself.
    #[error("{field}: {why}")]
    Invalid {
        /// The field of the request.
        field: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The object is not in a state that allows the call.
    #[error("{what} {id:?} is {state}")]
    WrongState {
        /// The kind of object.
        what: &'static str,
        /// Its id.
        id: String,
        /// The state that it is in.
        state: &'static str,
    },
    /// The name belongs to another object.
    #[error("name {name:?} is reserved for {id:?}")]
    NameTaken {
        /// The name that was asked for.
        name: String,
        /// Who has it.
        id: String,
    },
    /// Not there yet, or not on this machine.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// The command of an exec did not end in time.
    #[error("command {command:?} timed out after {seconds} s{last_words}")]
    Timeout {
        /// The command.
        command: String,
        /// The limit.
        seconds: i64,
        /// What it wrote last, with what separates it from the rest.
        last_words: String,
    },
    /// An attached client reads more slowly than the container writes.
    #[error(
        "this client reads the container's output too slowly and was disconnected; the container continues to run"
    )]
    TooSlow,
    /// The image store refused.
    #[error("image {reference:?}")]
    Image {
        /// The image that was asked for.
        reference: String,
        /// Why.
        #[source]
        source: coracle_images::Error,
    },
    /// The pod could not be connected.
    #[error("network of sandbox {id:?}")]
    Network {
        /// The sandbox.
        id: String,
        /// Why.
        #[source]
        source: coracle_cni::Error,
    },
    /// The shim refused or is gone.
    #[error("{doing}")]
    Shim {
        /// What was asked of it.
        doing: &'static str,
        /// Why.
        #[source]
        source: shim_client::Error,
    },
    /// There is no checkpoint of the container or pod.
    #[error("checkpoint of {what} {id:?}")]
    Checkpoint {
        /// The kind of object.
        what: &'static str,
        /// Its id.
        id: String,
        /// Why.
        #[source]
        source: CheckpointError,
    },
    /// A checkpoint is not what is asked for, or more than can be restored.
    #[error("the checkpoint cannot be restored so: {0}")]
    Unfit(String),
    /// NRI plugins did not let it happen.
    #[error("NRI")]
    Nri(#[from] coracle_nri::Error),
    /// systemd, which makes the cgroups, did not.
    #[error("cgroup")]
    Systemd(#[from] coracle_systemd::Error),
    /// A file could not be read or written.
    #[error("{doing} {}", path.display())]
    File {
        /// What was tried.
        doing: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file holds what it must not.
    #[error("{doing} {}", path.display())]
    Format {
        /// What was tried.
        doing: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// What a later version of this program left cannot be read. Whatever it is of is left as it is.
    #[error(
        "{} is of a later version of this program ({version}; {known} is the last that is known here): its pods run on, \
         for that version to start again", path.display()
    )]
    Later {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
        /// Ours.
        known: u32,
    },
    /// A pod's shim lives and cannot be understood. Nothing was done to it.
    #[error("the shim of pod sandbox {id:?} lives, and cannot be worked with: the pod runs on")]
    Foreign {
        /// The sandbox.
        id: String,
        /// Why.
        #[source]
        source: shim_client::Error,
    },
    /// The gRPC server ended.
    #[error("serve CRI")]
    Serve(#[source] tonic::transport::Error),
    /// The kernel refused something that has no path.
    #[error("{doing}")]
    Kernel {
        /// What was tried.
        doing: &'static str,
        /// Why.
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

    /// For `map_err` on a blocking task.
    pub(crate) fn panicked(doing: &'static str) -> impl FnOnce(tokio::task::JoinError) -> Self {
        move |panic| Self::Kernel { doing, source: std::io::Error::other(panic) }
    }

    /// For `map_err` on file operations.
    pub(crate) fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { doing, path, source }
    }

    /// For `map_err` on shim calls.
    pub(crate) fn shim(doing: &'static str) -> impl FnOnce(shim_client::Error) -> Self {
        move |source| Self::Shim { doing, source }
    }

    /// The whole chain of causes, outermost first.
    #[must_use]
    pub fn chain(&self) -> String {
        chain(self)
    }
}

/// An error and its causes, outermost first.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
