//! Labels of pods and containers. Pure.

use std::fmt;
use std::str::FromStr;

use coracle_proto::cri::SeLinuxOption;
use serde::{Deserialize, Serialize};

use super::level;

/// A security context: `user:role:type`, and a level if the policy has levels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Label {
    pub(super) user: String,
    pub(super) role: String,
    pub(super) kind: String,
    pub(super) level: Option<String>,
}

/// The labels of a pod or container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Labels {
    /// Label of processes. `None` leaves the transition at the exec to the policy.
    #[serde(default)]
    pub(crate) process: Option<Label>,
    /// Label of mounted files. `None` leaves the files unchanged.
    #[serde(default)]
    pub(crate) mount: Option<Label>,
}

/// The policy's default labels for containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Defaults {
    pub(super) process: Label,
    pub(super) file: Label,
    /// Label of files that containers may only read: image layers.
    pub(super) read_only: Label,
}

/// The requested parts of a label.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RequestedLabel {
    user: Option<String>,
    role: Option<String>,
    kind: Option<String>,
    pub(super) level: Option<String>,
}

/// The lack of isolation of a container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MissingIsolation {
    pub(super) privileged: bool,
    /// The container sees the node's processes or shared memory, which have other labels.
    pub(super) shares_with_node: bool,
}

// === impl Label ===

impl FromStr for Label {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(4, ':').map(str::to_owned);
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(user), Some(role), Some(kind), level) => Ok(Self { user, role, kind, level }),
            _ => Err(format!("{text:?} is not a label; it needs user, role and type")),
        }
    }
}

impl TryFrom<String> for Label {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Label> for String {
    fn from(label: Label) -> Self {
        label.to_string()
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.user, self.role, self.kind)?;
        self.level.as_ref().map_or(Ok(()), |level| write!(f, ":{level}"))
    }
}

// === impl Labels ===

impl Labels {
    /// The label of processes as the shim expects it. Empty without a label.
    pub(crate) fn process_text(&self) -> String {
        self.process.as_ref().map(Label::to_string).unwrap_or_default()
    }

    /// The label of mounted files as the shim expects it. Empty without a label.
    pub(crate) fn mount_text(&self) -> String {
        self.mount.as_ref().map(Label::to_string).unwrap_or_default()
    }

    /// The level, which both labels share.
    pub(super) fn level(&self) -> Option<&str> {
        self.mount.as_ref().or(self.process.as_ref())?.level.as_deref()
    }
}

// === impl RequestedLabel ===

impl RequestedLabel {
    /// # Errors
    /// If a part is invalid for every policy.
    pub(super) fn of(options: Option<&SeLinuxOption>) -> Result<Self, String> {
        let Some(options) = options else { return Ok(Self::default()) };
        let part = |text: &str| {
            if text.contains([':', '\0', '\n']) {
                Err(format!("{text:?} is not a part of a label"))
            } else {
                given(text)
            }
        };
        if !options.level.is_empty() {
            level::check(&options.level)?;
        }
        Ok(Self {
            user: part(&options.user)?,
            role: part(&options.role)?,
            kind: part(&options.r#type)?,
            level: given(&options.level)?,
        })
    }
}

fn given(text: &str) -> Result<Option<String>, String> {
    Ok(Some(text.to_owned()).filter(|text| !text.is_empty()))
}

/// The labels of a pod. `own` is the level of a pod that requests no level. It is ignored if the policy has no levels.
pub(super) fn of_pod(defaults: &Defaults, requested: &RequestedLabel, own: Option<String>) -> Labels {
    let has_levels = defaults.process.level.is_some();
    let base = Labels { process: Some(defaults.process.clone()), mount: Some(defaults.file.clone()) };
    apply_request(
        &base,
        &RequestedLabel {
            level: requested.level.clone().or(own.filter(|_| has_levels)),
            ..requested.clone()
        },
    )
}

/// The labels of a container: the labels of its pod, changed by its own request.
pub(super) fn of_container(
    pod: &Labels,
    requested: &RequestedLabel,
    missing_isolation: MissingIsolation,
) -> Labels {
    let labels = apply_request(pod, requested);
    match missing_isolation {
        MissingIsolation { shares_with_node: true, .. } => Labels::default(),
        // The policy determines the label of a privileged container: spc_t, if the runtime itself has the expected type.
        MissingIsolation { privileged: true, .. } => Labels { process: None, ..labels },
        MissingIsolation { .. } => labels,
    }
}

/// Applies a request. Role and type apply to the process label only; user and level apply to both labels.
fn apply_request(base: &Labels, requested: &RequestedLabel) -> Labels {
    let mut labels = base.clone();
    if let Some(process) = &mut labels.process {
        set(&mut process.role, &requested.role);
        set(&mut process.kind, &requested.kind);
    }
    for label in [&mut labels.process, &mut labels.mount].into_iter().flatten() {
        set(&mut label.user, &requested.user);
        if requested.level.is_some() {
            label.level.clone_from(&requested.level);
        }
    }
    labels
}

fn set(part: &mut String, requested: &Option<String>) {
    if let Some(requested) = requested {
        part.clone_from(requested);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults() -> Defaults {
        Defaults {
            process: "system_u:system_r:container_t:s0".parse().expect("label"),
            file: "system_u:object_r:container_file_t:s0".parse().expect("label"),
            read_only: "system_u:object_r:container_ro_file_t:s0".parse().expect("label"),
        }
    }

    fn requested(user: &str, kind: &str, level: &str) -> RequestedLabel {
        let options = SeLinuxOption {
            user: user.into(),
            r#type: kind.into(),
            level: level.into(),
            ..SeLinuxOption::default()
        };
        RequestedLabel::of(Some(&options)).expect("options")
    }

    fn texts(labels: &Labels) -> (String, String) {
        (labels.process_text(), labels.mount_text())
    }

    fn pod(requested: &RequestedLabel) -> Labels {
        of_pod(&defaults(), requested, Some("s0:c1,c2".into()))
    }

    #[test]
    fn a_pod_has_the_default_labels_with_its_own_level() {
        let (process, mount) = texts(&pod(&RequestedLabel::default()));
        assert_eq!(process, "system_u:system_r:container_t:s0:c1,c2");
        assert_eq!(mount, "system_u:object_r:container_file_t:s0:c1,c2");
    }

    #[test]
    fn requested_user_and_level_apply_to_processes_and_files() {
        let (process, mount) = texts(&pod(&requested("other_u", "spc_t", "s0:c7,c9")));
        assert_eq!(process, "other_u:system_r:spc_t:s0:c7,c9");
        assert_eq!(mount, "other_u:object_r:container_file_t:s0:c7,c9");
    }

    #[test]
    fn a_policy_without_levels_gets_no_level() {
        let plain = |label: &Label| Label { level: None, ..label.clone() };
        let defaults =
            Defaults { process: plain(&defaults().process), file: plain(&defaults().file), ..defaults() };
        let labels = of_pod(&defaults, &RequestedLabel::default(), Some("s0:c1,c2".into()));
        assert_eq!(texts(&labels).0, "system_u:system_r:container_t");
    }

    #[test]
    fn a_containers_request_changes_its_pods_labels() {
        let pod = pod(&requested("", "pod_t", ""));
        let of =
            |requested: &RequestedLabel| texts(&of_container(&pod, requested, MissingIsolation::default())).0;
        assert_eq!(of(&RequestedLabel::default()), "system_u:system_r:pod_t:s0:c1,c2");
        assert_eq!(of(&requested("", "own_t", "")), "system_u:system_r:own_t:s0:c1,c2");
        assert_eq!(of(&requested("", "", "s0:c4,c5")), "system_u:system_r:pod_t:s0:c4,c5");
    }

    #[test]
    fn privileged_containers_have_no_process_label_and_containers_in_node_namespaces_no_labels() {
        let of = |privileged, shares_with_node| {
            let missing_isolation = MissingIsolation { privileged, shares_with_node };
            texts(&of_container(
                &pod(&RequestedLabel::default()),
                &requested("", "own_t", ""),
                missing_isolation,
            ))
        };
        assert_eq!(of(true, false), (String::new(), "system_u:object_r:container_file_t:s0:c1,c2".into()));
        assert_eq!(of(false, true), (String::new(), String::new()));
        assert_eq!(of(true, true), (String::new(), String::new()));
    }

    #[test]
    fn labels_are_parsed_and_parts_cannot_contain_separators() {
        for text in ["u:r:t", "u:r:t:s0-s0:c0.c1023"] {
            assert_eq!(text.parse::<Label>().expect("label").to_string(), text);
        }
        assert!("u:r".parse::<Label>().is_err());
        let sly = SeLinuxOption { r#type: "t:s0".into(), ..SeLinuxOption::default() };
        assert!(RequestedLabel::of(Some(&sly)).is_err());
        let json = serde_json::to_string(&pod(&RequestedLabel::default())).expect("json");
        assert_eq!(serde_json::from_str::<Labels>(&json).expect("labels"), pod(&RequestedLabel::default()));
    }
}
