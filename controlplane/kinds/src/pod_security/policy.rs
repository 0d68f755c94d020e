//! The policy of a namespace, from its labels and the cluster's defaults.

use serde_json::Value;

use super::{Level, LevelVersion, Version};
use crate::cause::{Cause, Causes, Path};

/// Prefix of the labels and of the audit annotations.
pub const PREFIX: &str = "pod-security.kubernetes.io/";

/// The level of each mode: a pod that violates the level is rejected, recorded or reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Violations are rejected.
    pub enforce: LevelVersion,
    /// Violations are recorded.
    pub audit: LevelVersion,
    /// Violations are reported to the client.
    pub warn: LevelVersion,
}

impl Default for Policy {
    fn default() -> Self {
        let privileged = LevelVersion::PRIVILEGED;
        Self { enforce: privileged, audit: privileged, warn: privileged }
    }
}

// === impl Policy ===

impl Policy {
    /// The policy of a namespace with these labels, and a cause for each invalid label. An invalid level of `enforce`
    /// means `restricted`, an invalid level of `audit` or `warn` means `privileged`.
    pub fn of_labels(labels: &Value, defaults: Self) -> (Self, Vec<Cause>) {
        let mut read = Reader { labels, causes: Causes::default() };
        let mut policy = defaults;
        let enforce = read.level("enforce");
        if let Some(level) = enforce {
            policy.enforce.level = level.unwrap_or(Level::Restricted);
        }
        read.version("enforce-version", &mut policy.enforce);
        if let Some(level) = read.level("audit") {
            policy.audit.level = level.unwrap_or(Level::Privileged);
        }
        read.version("audit-version", &mut policy.audit);
        let warn = read.level("warn");
        if let Some(level) = warn {
            policy.warn.level = level.unwrap_or(Level::Privileged);
        }
        let has_version = read.version("warn-version", &mut policy.warn);
        // Without the label `warn`, a namespace warns at least at the level of its label `enforce`. Enforcement rejects
        // only pods. The warning also informs the author of a workload that creates the pods.
        if let (None, Some(Some(level))) = (warn, enforce)
            && level > policy.warn.level
        {
            policy.warn.level = level;
            if !has_version {
                policy.warn.version = policy.enforce.version;
            }
        }
        (policy, read.causes.into_list())
    }

    /// Whether no check applies.
    pub fn is_privileged(&self) -> bool {
        [self.enforce, self.audit, self.warn].iter().all(|mode| mode.level == Level::Privileged)
    }

    /// Whether both policies have the same effect.
    pub fn is_equivalent(&self, other: &Self) -> bool {
        self.enforce.is_equivalent(&other.enforce)
            && self.audit.is_equivalent(&other.audit)
            && self.warn.is_equivalent(&other.warn)
    }

    /// The modes that labels set to a level with checks, as text: `enforce=baseline:latest, warn=…`.
    pub fn labelled(&self, labels: &Value) -> String {
        let modes = [("enforce", self.enforce), ("audit", self.audit), ("warn", self.warn)];
        let is_set = |name: &str| {
            let label = |suffix: &str| labels.get(format!("{PREFIX}{name}{suffix}")).is_some();
            label("") || label("-version")
        };
        let set = modes.iter().filter(|(name, mode)| mode.level != Level::Privileged && is_set(name));
        set.map(|(name, mode)| format!("{name}={mode}")).collect::<Vec<_>>().join(", ")
    }
}

struct Reader<'a> {
    labels: &'a Value,
    causes: Causes,
}

impl Reader<'_> {
    /// The level of a label. `None` without the label, `Some(None)` if the value of the label is invalid.
    fn level(&mut self, name: &str) -> Option<Option<Level>> {
        let value = self.labels.get(format!("{PREFIX}{name}"))?;
        Some(
            Level::parse(value.as_str().unwrap_or_default())
                .map_err(|rule| self.refuse(name, value, rule))
                .ok(),
        )
    }

    /// Sets the version of a mode from its label. An invalid version means the newest version. Returns whether the
    /// label exists.
    fn version(&mut self, name: &str, mode: &mut LevelVersion) -> bool {
        let Some(value) = self.labels.get(format!("{PREFIX}{name}")) else { return false };
        let version = Version::parse(value.as_str().unwrap_or_default());
        mode.version = version.map_err(|rule| self.refuse(name, value, rule)).unwrap_or(Version::Latest);
        true
    }

    fn refuse(&mut self, name: &str, value: &Value, rule: &str) {
        let path = Path::root("metadata").field("labels").key(&format!("{PREFIX}{name}"));
        self.causes.invalid(&path, value, rule);
    }
}
