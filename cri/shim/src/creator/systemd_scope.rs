//! The systemd scope of a container: systemd makes the cgroup and moves the creator into it.

use coracle_systemd::property::{self, Device, Property, v1};
use coracle_systemd::{Scope, Systemd};
use libcontainer::oci_spec::runtime::Spec;

use super::access::{self, Kind, Rule};
use crate::cgroup::{self, Hierarchy};

/// The scope, and the connection over which its limits are set.
pub(super) struct Unit<'a> {
    systemd: Systemd,
    name: String,
    path: String,
    hierarchies: &'a [Hierarchy],
}

// === impl Unit ===

impl<'a> Unit<'a> {
    /// Makes the scope with this process in it, because a scope exists only while it has processes. The devices are
    /// passed now, because on v1 systemd denies all devices before it allows some devices. At a later time this would
    /// affect running programs.
    pub(super) fn start(
        scope: &Scope,
        hierarchies: &'a [Hierarchy],
        spec: &Spec,
    ) -> Result<Self, coracle_systemd::Error> {
        let mut systemd = Systemd::connect()?;
        let name = scope.unit();
        let resources = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref());
        let properties = initial_properties(&access::rules(resources), cgroup::is_v1(hierarchies));
        systemd.start_scope(&name, &scope.slice, &[std::process::id()], &properties)?;
        Ok(Self { systemd, name, path: scope.path(), hierarchies })
    }

    /// Passes the current limits to systemd, which would otherwise reset them at its next daemon-reload.
    pub(super) fn set_limits(&mut self) -> Result<(), coracle_systemd::Error> {
        let limits = if cgroup::is_v1(self.hierarchies) {
            v1::limits(|controller, file| self.read(controller, file))
        } else {
            let unified = self.hierarchies.iter().find(|hierarchy| hierarchy.is_unified());
            unified.map(|unified| property::current_limits(&unified.at(&self.path))).unwrap_or_default()
        };
        self.systemd.set(&self.name, &limits)
    }

    fn read(&self, controller: &str, file: &str) -> Option<String> {
        let hierarchy = self.hierarchies.iter().find(|hierarchy| hierarchy.has(controller))?;
        std::fs::read_to_string(hierarchy.at(&self.path).join(file)).ok()
    }
}

/// The properties that the scope starts with.
fn initial_properties(rules: &[Rule], v1: bool) -> Vec<Property> {
    if v1 {
        return [v1::accounting(), v1::devices(&allowed_without_exception(rules))].concat();
    }
    let drivers = std::fs::read_to_string("/proc/devices").unwrap_or_default();
    property::devices(devices(rules).as_deref(), &drivers)
}

/// The devices to pass to systemd on v2. systemd cannot express exceptions. If the rules have an exception, systemd
/// gets no restriction. The cgroup's BPF program enforces the rules.
fn devices(rules: &[Rule]) -> Option<Vec<Device>> {
    let (rest, rules) = access::split(rules);
    let plain = |rule: &Rule| rule.allow && rule.kind != Kind::Any;
    (!rest && rules.iter().all(plain)).then(|| rules.iter().flat_map(systemd_devices).collect())
}

/// The devices to pass to systemd on v1: the devices that are allowed without exception. On v1 systemd writes them to
/// the kernel. The creator writes the complete rules afterwards. They are in effect until the next daemon-reload.
fn allowed_without_exception(rules: &[Rule]) -> Vec<Device> {
    if access::allow_everything(rules) {
        let all = |block| Device { block, major: None, minor: None, access: access::Access::ALL.to_string() };
        return vec![all(false), all(true)];
    }
    let (_, rules) = access::split(rules);
    let is_certain = |(at, rule): &(usize, &Rule)| {
        rule.allow && !rules.iter().skip(*at).any(|later| !later.allow && later.overlaps(rule))
    };
    rules.iter().enumerate().filter(is_certain).flat_map(|(_, rule)| systemd_devices(rule)).collect()
}

/// The systemd devices of a rule. A rule that matches both device types has two.
fn systemd_devices(rule: &Rule) -> Vec<Device> {
    let of = |block| Device { block, major: rule.major, minor: rule.minor, access: rule.access.to_string() };
    match rule.kind {
        Kind::Block => vec![of(true)],
        Kind::Character => vec![of(false)],
        Kind::Any => vec![of(false), of(true)],
    }
}

#[cfg(test)]
mod tests {
    use super::super::access::tests::of;
    use super::*;
    use serde_json::json;

    #[test]
    fn systemd_gets_rules_that_it_can_express_and_no_others() {
        let none = json!({ "allow": false, "access": "rwm" });
        let disk = json!({ "allow": true, "type": "b", "major": 8, "minor": 1, "access": "r" });
        let found = devices(&of(json!([none, disk]))).unwrap();
        assert_eq!(found[0], Device { block: true, major: Some(8), minor: Some(1), access: "r".into() });
        assert_eq!(found.len(), 12);
        assert_eq!(devices(&of(json!([{ "allow": true, "access": "rwm" }]))), None);
        assert_eq!(devices(&of(json!([none, disk, { "allow": false, "type": "b", "access": "w" }]))), None);
    }

    #[test]
    fn on_v1_systemd_gets_no_device_that_a_rule_denies() {
        let none = json!({ "allow": false, "access": "rwm" });
        let all = json!({ "allow": true, "access": "rwm" });
        let disks = json!({ "allow": true, "type": "b", "major": 8, "access": "rw" });
        let read_only = json!({ "allow": false, "type": "b", "major": 8, "minor": 1, "access": "w" });
        let block = |rules| {
            allowed_without_exception(&of(rules))
                .into_iter()
                .filter(|device| device.block)
                .collect::<Vec<_>>()
        };
        let make = Device { block: true, major: None, minor: None, access: "m".into() };
        let eight = Device { major: Some(8), access: "rw".into(), ..make.clone() };
        assert_eq!(block(json!([none, disks])), [eight.clone(), make.clone()]);
        assert_eq!(block(json!([none, disks, read_only])), std::slice::from_ref(&make));
        assert_eq!(block(json!([none, read_only, disks])), [eight, make.clone()]);
        assert_eq!(block(json!([all, read_only])), std::slice::from_ref(&make));
        assert_eq!(block(json!([all])), [Device { access: "rwm".into(), ..make }]);
    }
}
