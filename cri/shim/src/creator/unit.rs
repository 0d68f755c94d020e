//! A container's cgroup where systemd makes it: a scope, which it puts this process into.

use std::path::PathBuf;

use coracle_systemd::property::{self, Device};
use coracle_systemd::{Scope, Systemd};
use libcontainer::oci_spec::runtime::Spec;

use super::access::{self, Kind, Rule};
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
    pub(super) fn tell(&mut self, spec: &Spec) -> Result<(), UnitError> {
        let mut limits = property::held(&self.cgroup);
        let resources = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref());
        let drivers = std::fs::read_to_string("/proc/devices").unwrap_or_default();
        limits.extend(property::devices(devices(&access::rules(resources)).as_deref(), &drivers));
        Ok(self.systemd.set(&self.name, &limits)?)
    }
}

/// What systemd is to know of the rules. It has no word for an exception, and so is told nothing of rules with one:
/// the cgroup's program knows them.
fn devices(rules: &[Rule]) -> Option<Vec<Device>> {
    let (rest, rules) = access::split(rules);
    let told = |rule: &Rule| Device {
        block: rule.kind == Kind::Block,
        major: rule.major,
        minor: rule.minor,
        access: rule.access.to_string(),
    };
    let plain = |rule: &Rule| rule.allow && rule.kind != Kind::Any;
    (!rest && rules.iter().all(plain)).then(|| rules.iter().map(told).collect())
}

#[cfg(test)]
mod tests {
    use super::super::access::tests::of;
    use super::*;
    use serde_json::json;

    #[test]
    fn systemd_is_told_of_what_is_allowed_and_of_nothing_that_it_cannot_say() {
        let none = json!({ "allow": false, "access": "rwm" });
        let disk = json!({ "allow": true, "type": "b", "major": 8, "minor": 1, "access": "r" });
        let found = devices(&of(json!([none, disk]))).unwrap();
        assert_eq!(found[0], Device { block: true, major: Some(8), minor: Some(1), access: "r".into() });
        assert_eq!(found.len(), 13);
        assert_eq!(devices(&of(json!([{ "allow": true, "access": "rwm" }]))), None);
        assert_eq!(devices(&of(json!([none, disk, { "allow": false, "type": "b", "access": "w" }]))), None);
    }
}
