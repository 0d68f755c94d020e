//! Device access rules of a container, in order: the rules of its spec, then the rules that every container has. No
//! I/O.
//!
//! For each access the last rule that matches the device decides. An access that no rule matches is denied.

use std::fmt;

use libcontainer::oci_spec::runtime::{LinuxDeviceCgroup, LinuxDeviceType, LinuxResources};

/// A set of accesses to a device: mknod(2), read, write. The bits are the kernel's (`BPF_DEVCG_ACC_*` in
/// linux/bpf.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access(u8);

/// Device types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Any,
    Block,
    Character,
}

/// A device access rule. An absent number matches every number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) allow: bool,
    pub(super) kind: Kind,
    pub(super) major: Option<u32>,
    pub(super) minor: Option<u32>,
    pub(super) access: Access,
}

/// Rules that every container has in addition to its spec: mknod of any device, and use of the devices in its /dev.
/// They do not include the tun device (10:200), because it creates interfaces. Upstream allows access to this device
/// for every container. The numbers are from the kernel's `Documentation/admin-guide/devices.txt`.
const COMMON: [Rule; 11] = [
    Rule { access: Access::MAKE, ..all_of(Kind::Character) },
    Rule { access: Access::MAKE, ..all_of(Kind::Block) },
    character(1, Some(3)),
    character(1, Some(5)),
    character(1, Some(7)),
    character(1, Some(8)),
    character(1, Some(9)),
    character(5, Some(0)),
    character(5, Some(1)),
    character(5, Some(2)),
    character(136, None),
];

const fn all_of(kind: Kind) -> Rule {
    Rule { allow: true, kind, major: None, minor: None, access: Access::ALL }
}

const fn character(major: u32, minor: Option<u32>) -> Rule {
    Rule { major: Some(major), minor, ..all_of(Kind::Character) }
}

// === impl Access ===

impl Access {
    pub(super) const MAKE: Self = Self(1);
    pub(super) const READ: Self = Self(2);
    pub(super) const WRITE: Self = Self(4);
    pub(super) const ALL: Self = Self(7);

    pub(super) fn bits(self) -> u8 {
        self.0
    }

    /// Parses the letters `r`, `w` and `m`. Other letters are ignored.
    fn parse(letters: &str) -> Self {
        let bit = |letter| match letter {
            'm' => Self::MAKE.0,
            'r' => Self::READ.0,
            'w' => Self::WRITE.0,
            _ => 0,
        };
        Self(letters.chars().fold(0, |bits, letter| bits | bit(letter)))
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = [(Self::READ, "r"), (Self::WRITE, "w"), (Self::MAKE, "m")];
        letters.iter().filter(|(bit, _)| self.0 & bit.0 != 0).try_for_each(|(_, letter)| f.write_str(letter))
    }
}

// === impl Rule ===

impl Rule {
    /// Converts a rule of the spec. `None` for types and numbers that no device can have.
    fn of(rule: &LinuxDeviceCgroup) -> Option<Self> {
        let kind = match rule.typ().unwrap_or(LinuxDeviceType::A) {
            LinuxDeviceType::A => Kind::Any,
            LinuxDeviceType::B => Kind::Block,
            LinuxDeviceType::C | LinuxDeviceType::U => Kind::Character,
            LinuxDeviceType::P => return None,
        };
        // -1 also means every number in the OCI runtime specification.
        let number =
            |number: Option<i64>| number.filter(|number| *number != -1).map(u32::try_from).transpose();
        let (major, minor) = (number(rule.major()).ok()?, number(rule.minor()).ok()?);
        let access = rule.access().as_deref().map_or(Access::ALL, Access::parse);
        Some(Self { allow: rule.allow(), kind, major, minor, access })
    }

    /// Whether the rule matches every access to every device.
    fn is_whole(&self) -> bool {
        (self.kind, self.major, self.minor, self.access) == (Kind::Any, None, None, Access::ALL)
    }

    /// Whether some access to some device matches both rules.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let match_both =
            |one: Option<u32>, other: Option<u32>| one.is_none() || other.is_none() || one == other;
        let kinds = self.kind == Kind::Any || other.kind == Kind::Any || self.kind == other.kind;
        let numbers = match_both(self.major, other.major) && match_both(self.minor, other.minor);
        kinds && numbers && self.access.bits() & other.access.bits() != 0
    }
}

/// The format of the v1 files devices.allow and devices.deny.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Any => "a",
            Kind::Block => "b",
            Kind::Character => "c",
        };
        let number = |number: Option<u32>| number.map_or_else(|| "*".to_owned(), |number| number.to_string());
        write!(f, "{kind} {}:{} {}", number(self.major), number(self.minor), self.access)
    }
}

/// All rules of a container, in order.
pub(super) fn rules(resources: Option<&LinuxResources>) -> Vec<Rule> {
    let requested = resources.and_then(|resources| resources.devices().as_deref()).unwrap_or_default();
    requested.iter().filter_map(Rule::of).chain(COMMON).collect()
}

/// Splits the rules at the last rule that matches every access to every device. Returns the default decision, and the
/// rules after that rule. The rules before that rule have no effect.
pub(super) fn split(rules: &[Rule]) -> (bool, &[Rule]) {
    match rules.iter().rposition(Rule::is_whole) {
        Some(at) => (rules[at].allow, &rules[at + 1..]),
        None => (false, rules),
    }
}

/// Whether the rules deny no access.
pub(super) fn allow_everything(rules: &[Rule]) -> bool {
    let (rest, others) = split(rules);
    rest && others.iter().all(|rule| rule.allow)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::creator) fn of(devices: serde_json::Value) -> Vec<Rule> {
        let resources = serde_json::json!({ "devices": devices });
        rules(Some(&serde_json::from_value(resources).unwrap()))
    }

    #[test]
    fn rules_of_the_spec_come_before_the_common_rules() {
        let found = of(serde_json::json!([
            { "allow": false, "access": "rwm" },
            { "allow": true, "type": "b", "major": 8, "minor": 1, "access": "mr" },
            { "allow": true, "type": "u", "major": 4, "minor": -1, "access": "w" },
            { "allow": true, "type": "p", "access": "rwm" },
            { "allow": true, "type": "c", "major": -2, "access": "rwm" },
        ]));
        let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(lines[..4], ["a *:* rwm", "b 8:1 rm", "c 4:* w", "c *:* m"]);
        assert_eq!((lines.len(), lines[13].as_str()), (14, "c 136:* rwm"));
        assert_eq!(rules(None), COMMON);
    }

    #[test]
    fn rules_that_allow_everything_are_recognized() {
        let all = serde_json::json!({ "allow": true, "access": "rwm" });
        let none = serde_json::json!({ "allow": false, "access": "rwm" });
        let some = serde_json::json!({ "allow": false, "type": "b", "major": 8, "access": "w" });
        assert!(allow_everything(&of(serde_json::json!([all]))));
        assert!(allow_everything(&of(serde_json::json!([none, some, all]))));
        assert!(!allow_everything(&of(serde_json::json!([all, some]))));
        assert!(!allow_everything(&of(serde_json::json!([all, none]))));
        assert!(!allow_everything(&of(serde_json::json!([]))));
        assert_eq!(split(&of(serde_json::json!([some, all, some]))).1.len(), 12);
    }
}
