//! The outcome of one probe attempt. An error of this machine is not a result about the container.

use std::error::Error;
use std::io;

use nix::errno::Errno;

/// The result of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Success,
    /// A success with a message.
    Warning(String),
    Failure(String),
    /// No result: the probe could not run.
    Unknown(String),
}

/// Errors of exhausted resources of this machine: descriptors, memory, processes, ephemeral ports (`connect(2)`,
/// `socket(2)`, `clone(2)`).
const LOCAL: [Errno; 6] =
    [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::ENOBUFS, Errno::EAGAIN, Errno::EADDRNOTAVAIL];

// === impl Outcome ===

impl Outcome {
    /// A failure, or no result if the error is an error of this machine.
    pub(crate) fn of(error: &(dyn Error + 'static), text: impl Into<String>) -> Self {
        if is_local(error) { Self::Unknown(text.into()) } else { Self::Failure(text.into()) }
    }

    /// Whether the container passed. None without a result.
    pub(crate) fn passed(&self) -> Option<bool> {
        match self {
            Self::Success | Self::Warning(_) => Some(true),
            Self::Failure(_) => Some(false),
            Self::Unknown(_) => None,
        }
    }
}

/// Whether an error or one of its sources is an exhausted resource of this machine.
fn is_local(error: &(dyn Error + 'static)) -> bool {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        let number = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if number.is_some_and(|number| LOCAL.contains(&Errno::from_raw(number))) {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(errno: Errno) -> Option<bool> {
        let error = crate::pod::probe::http::HttpError::Connect {
            host: "h".to_owned(),
            port: 1,
            source: io::Error::from_raw_os_error(errno as i32),
        };
        Outcome::of(&error, "x").passed()
    }

    #[test]
    fn a_shortage_of_the_machine_is_not_a_failure_of_the_container() {
        for errno in LOCAL {
            assert_eq!(outcome(errno), None, "{errno}");
        }
        for errno in [Errno::ECONNREFUSED, Errno::EHOSTUNREACH, Errno::ETIMEDOUT, Errno::ECONNRESET] {
            assert_eq!(outcome(errno), Some(false), "{errno}");
        }
    }
}
