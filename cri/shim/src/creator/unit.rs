//! A container's cgroup where systemd makes it: a scope, which it puts this process into.

use std::path::PathBuf;

use coracle_systemd::{Scope, Systemd, property};

use crate::cgroup::Hierarchy;

#[derive(Debug, thiserror::Error)]
pub(super) enum UnitError {
    #[error("{0}, a cgroup of systemd's, needs cgroup v2 alone")]
    Version(String),
    #[error(transparent)]
    Systemd(#[from] coracle_systemd::Error),
}

/// The scope, and the connection over which systemd is told of its limits.
pub(super) struct Unit {
    systemd: Systemd,
    name: String,
    cgroup: PathBuf,
}

// === impl Unit ===

impl Unit {
    /// Makes the scope, with this process in it: a scope ends with its last process, and begins with its first.
    pub(super) fn start(scope: &Scope, hierarchies: &[Hierarchy]) -> Result<Self, UnitError> {
        let [hierarchy] = hierarchies else { return Err(UnitError::Version(scope.unit())) };
        let mut systemd = Systemd::connect()?;
        let name = scope.unit();
        systemd.start_scope(&name, &scope.slice, &[std::process::id()])?;
        Ok(Self { systemd, name, cgroup: hierarchy.at(&scope.path()) })
    }

    /// Tells systemd what the limits are, which it would else undo when it reads its units again.
    pub(super) fn tell(&mut self) -> Result<(), UnitError> {
        Ok(self.systemd.set(&self.name, &property::held(&self.cgroup))?)
    }
}
