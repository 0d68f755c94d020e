//! The table of checks, by level and version.

mod baseline;
mod profile;
mod restricted;
mod volume;

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Level, LevelVersion, Version, Violation};

/// The parts of a pod that the checks read.
pub(super) struct Pod<'a> {
    pub(super) annotations: &'a Value,
    pub(super) spec: &'a Value,
}

/// A check. `None` if the pod passes.
pub(super) type Check = fn(&Pod<'_>) -> Option<Violation>;

/// A check with its revisions, each with the first minor version of Kubernetes that has it.
struct Row {
    id: &'static str,
    revisions: &'static [(u32, Check)],
    /// The baseline check that this restricted check replaces.
    replaces: &'static str,
}

const fn row(id: &'static str, revisions: &'static [(u32, Check)]) -> Row {
    Row { id, revisions, replaces: "" }
}

/// The checks of the level `baseline`, sorted by id. The messages have this order.
const BASELINE: &[Row] = &[
    row("appArmorProfile", &[(0, profile::app_armor)]),
    row("capabilities_baseline", &[(0, baseline::capabilities)]),
    row("hostNamespaces", &[(0, baseline::host_namespaces)]),
    row("hostPathVolumes", &[(0, volume::host_path)]),
    row("hostPorts", &[(0, baseline::host_ports)]),
    row("hostProbesAndHostLifecycle", &[(34, baseline::host_probes)]),
    row("privileged", &[(0, baseline::privileged)]),
    row("procMount", &[(0, baseline::proc_mount), (35, baseline::proc_mount_1_35)]),
    row("seLinuxOptions", &[(0, profile::se_linux), (31, profile::se_linux_1_31)]),
    row("seccompProfile_baseline", &[(0, profile::seccomp_annotations), (19, profile::seccomp)]),
    row(
        "sysctls",
        &[
            (0, baseline::sysctls),
            (27, baseline::sysctls_1_27),
            (29, baseline::sysctls_1_29),
            (32, baseline::sysctls_1_32),
        ],
    ),
    row("windowsHostProcess", &[(0, baseline::host_process)]),
];

/// The checks of the level `restricted`, sorted by id. They run after the baseline checks.
const RESTRICTED: &[Row] = &[
    row(
        "allowPrivilegeEscalation",
        &[(8, restricted::privilege_escalation), (25, restricted::privilege_escalation_1_25)],
    ),
    Row {
        id: "capabilities_restricted",
        revisions: &[(22, restricted::capabilities), (25, restricted::capabilities_1_25)],
        replaces: "capabilities_baseline",
    },
    Row { id: "procMount_restricted", revisions: &[(35, baseline::proc_mount)], replaces: "procMount" },
    Row { id: "restrictedVolumes", revisions: &[(0, volume::restricted)], replaces: "hostPathVolumes" },
    row("runAsNonRoot", &[(0, restricted::non_root), (35, restricted::non_root_1_35)]),
    row("runAsUser", &[(23, restricted::user), (35, restricted::user_1_35)]),
    Row {
        id: "seccompProfile_restricted",
        revisions: &[(19, profile::seccomp_required), (25, profile::seccomp_required_1_25)],
        replaces: "seccompProfile_baseline",
    },
];

/// The checks of a level and version. A version that is newer than all checks gets the newest revision of each check.
pub(super) fn selected(at: LevelVersion) -> Vec<Check> {
    let minor = match at.version {
        Version::Latest => u32::MAX,
        Version::Minor(minor) => minor,
    };
    let at_version = |rows: &'static [Row]| {
        rows.iter().filter_map(move |row| {
            let revision = row.revisions.iter().rev().find(|(first, _)| *first <= minor)?;
            Some((row, revision.1))
        })
    };
    match at.level {
        Level::Privileged => Vec::new(),
        Level::Baseline => at_version(BASELINE).map(|(_, check)| check).collect(),
        Level::Restricted => {
            let replaced: Vec<&str> = at_version(RESTRICTED).map(|(row, _)| row.replaces).collect();
            let baseline = at_version(BASELINE).filter(|(row, _)| !replaced.contains(&row.id));
            baseline.chain(at_version(RESTRICTED)).map(|(_, check)| check).collect()
        }
    }
}

// === impl Pod ===

impl<'a> Pod<'a> {
    /// All containers: init containers, containers, ephemeral containers.
    fn containers(&self) -> impl Iterator<Item = &'a Value> + use<'a> {
        let spec = self.spec;
        ["initContainers", "containers", "ephemeralContainers"]
            .into_iter()
            .flat_map(move |list| spec[list].as_array().into_iter().flatten())
    }

    /// The names of the containers that satisfy the predicate.
    fn named(&self, mut holds: impl FnMut(&Value) -> bool) -> Vec<String> {
        self.containers().filter(|container| holds(container)).map(name).collect()
    }

    /// Whether the pod has its own user namespace.
    fn has_user_namespace(&self) -> bool {
        self.spec["hostUsers"] == false
    }

    fn is_windows(&self) -> bool {
        self.spec["os"]["name"] == "windows"
    }
}

fn name(object: &Value) -> String {
    object["name"].as_str().unwrap_or_default().to_owned()
}

fn violation(reason: &'static str, detail: String) -> Option<Violation> {
    Some(Violation { reason, detail })
}

/// Texts in quotation marks, such as `"a", "b"`.
fn quoted<T: AsRef<str>>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| format!("\"{}\"", item.as_ref())).collect();
    items.join(", ")
}

fn plural(count: usize, one: &'static str, many: &'static str) -> &'static str {
    if count == 1 { one } else { many }
}

/// `container "a"` or `containers "a", "b"`.
fn listed(names: &[String]) -> String {
    format!("{} {}", plural(names.len(), "container", "containers"), quoted(names))
}

/// `pod and containers "a", "b"`; empty without pod and containers.
fn setters(pod: bool, containers: &[String]) -> String {
    let mut all = Vec::new();
    if pod {
        all.push("pod".to_owned());
    }
    if !containers.is_empty() {
        all.push(listed(containers));
    }
    all.join(" and ")
}

/// Texts without duplicates, sorted.
type SortedTexts = BTreeSet<String>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_its_references_exist() {
        for rows in [BASELINE, RESTRICTED] {
            assert!(rows.is_sorted_by_key(|row| row.id));
            for row in rows {
                assert!(row.revisions.is_sorted_by_key(|(first, _)| *first), "{}", row.id);
            }
        }
        for row in RESTRICTED.iter().filter(|row| !row.replaces.is_empty()) {
            assert!(BASELINE.iter().any(|other| other.id == row.replaces), "{}", row.id);
        }
    }
}
