//! Observed containers for the tests of decisions.

use super::{ContainerRun, Exit, ObservedContainer, Timestamp};

/// A time, in seconds after a fixed time.
pub(crate) fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + seconds).unwrap()
}

/// A container of the sandbox `s`.
pub(crate) fn container(name: &str, attempt: u32, run: ContainerRun) -> ObservedContainer {
    ObservedContainer {
        id: format!("{name}{attempt}"),
        sandbox: "s".into(),
        name: name.into(),
        attempt,
        requested_image: None,
        image: "i".into(),
        image_id: "sha".into(),
        user: None,
        created_with: None,
        limits: None,
        run,
    }
}

/// The state of a container that started at the fixed time.
pub(crate) fn running() -> ContainerRun {
    ContainerRun::Running { started: at(0) }
}

/// The state of a container that ended.
pub(crate) fn exited(code: i32, finished: i64) -> ContainerRun {
    ContainerRun::Exited(Exit { finished: at(finished), code, ..Exit::default() })
}
