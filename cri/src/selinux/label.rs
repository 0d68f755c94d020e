//! Which labels a pod and its containers get. Pure.

use std::fmt;
use std::str::FromStr;

use coracle_proto::cri::SeLinuxOption;
use serde::{Deserialize, Serialize};

use super::level;

/// A security context: `user:role:type`, and a level where the policy has levels.
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
    /// Of its processes. None leaves it to the policy what a program becomes that the runtime starts.
    #[serde(default)]
    pub(crate) process: Option<Label>,
    /// Of what is mounted for it. None leaves files as they are.
    #[serde(default)]
    pub(crate) mount: Option<Label>,
}

/// The labels that the policy has for containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Defaults {
    pub(super) process: Label,
    pub(super) file: Label,
    /// Of what containers may read and nobody writes: layers of images.
    pub(super) read_only: Label,
}

/// What is asked for: no more than parts of a label.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Wish {
    user: Option<String>,
    role: Option<String>,
    kind: Option<String>,
    pub(super) level: Option<String>,
}

/// What a container is not kept apart from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Separation {
    pub(super) privileged: bool,
    /// It sees the node's processes or their shared memory, which have labels of their own.
    pub(super) shares_with_node: bool,
}

// === impl Label ===

impl FromStr for Label {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(4, ':').map(str::to_owned);
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(user), Some(role), Some(kind), level) => Ok(Self { user, role, kind, level }),
            _ => Err(format!("{text:?} is no label: it needs user, role and type")),
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
    /// The label of processes, and that of files, as the shim takes them: empty for none.
    pub(crate) fn texts(&self) -> (String, String) {
        let text = |label: &Option<Label>| label.as_ref().map(Label::to_string).unwrap_or_default();
        (text(&self.process), text(&self.mount))
    }

    /// The level that they share.
    pub(super) fn level(&self) -> Option<&str> {
        self.mount.as_ref().or(self.process.as_ref())?.level.as_deref()
    }
}

// === impl Wish ===

impl Wish {
    /// # Errors
    /// A part could not be one, whatever the policy is.
    pub(super) fn of(options: Option<&SeLinuxOption>) -> Result<Self, String> {
        let Some(options) = options else { return Ok(Self::default()) };
        let part = |text: &str| {
            if text.contains([':', '\0', '\n']) {
                Err(format!("{text:?} is no part of a label"))
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

/// The labels of a pod. `own` is the level that it gets when it asks for none; a policy without levels has none.
pub(super) fn of_pod(defaults: &Defaults, wish: &Wish, own: Option<String>) -> Labels {
    let has_levels = defaults.process.level.is_some();
    let base = Labels { process: Some(defaults.process.clone()), mount: Some(defaults.file.clone()) };
    over(&base, &Wish { level: wish.level.clone().or(own.filter(|_| has_levels)), ..wish.clone() })
}

/// The labels of a container: its pod's, with what it asks for itself over them.
pub(super) fn of_container(pod: &Labels, wish: &Wish, separation: Separation) -> Labels {
    let labels = over(pod, wish);
    match separation {
        Separation { shares_with_node: true, .. } => Labels::default(),
        // What a privileged container is, the policy says: spc_t, if the runtime's own type is what it should be.
        Separation { privileged: true, .. } => Labels { process: None, ..labels },
        Separation { .. } => labels,
    }
}

/// Role and type are a process's; files share the user and the level.
fn over(base: &Labels, wish: &Wish) -> Labels {
    let mut labels = base.clone();
    if let Some(process) = &mut labels.process {
        set(&mut process.role, &wish.role);
        set(&mut process.kind, &wish.kind);
    }
    for label in [&mut labels.process, &mut labels.mount].into_iter().flatten() {
        set(&mut label.user, &wish.user);
        if wish.level.is_some() {
            label.level.clone_from(&wish.level);
        }
    }
    labels
}

fn set(part: &mut String, wish: &Option<String>) {
    if let Some(wish) = wish {
        part.clone_from(wish);
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

    fn wish(user: &str, kind: &str, level: &str) -> Wish {
        let options = SeLinuxOption {
            user: user.into(),
            r#type: kind.into(),
            level: level.into(),
            ..SeLinuxOption::default()
        };
        Wish::of(Some(&options)).expect("options")
    }

    fn texts(labels: &Labels) -> (String, String) {
        labels.texts()
    }

    fn pod(wish: &Wish) -> Labels {
        of_pod(&defaults(), wish, Some("s0:c1,c2".into()))
    }

    #[test]
    fn a_pod_has_the_policys_labels_at_a_level_of_its_own() {
        let (process, mount) = texts(&pod(&Wish::default()));
        assert_eq!(process, "system_u:system_r:container_t:s0:c1,c2");
        assert_eq!(mount, "system_u:object_r:container_file_t:s0:c1,c2");
    }

    #[test]
    fn what_a_pod_asks_for_counts_and_files_share_its_user_and_level() {
        let (process, mount) = texts(&pod(&wish("other_u", "spc_t", "s0:c7,c9")));
        assert_eq!(process, "other_u:system_r:spc_t:s0:c7,c9");
        assert_eq!(mount, "other_u:object_r:container_file_t:s0:c7,c9");
    }

    #[test]
    fn a_policy_without_levels_gets_none() {
        let plain = |label: &Label| Label { level: None, ..label.clone() };
        let defaults =
            Defaults { process: plain(&defaults().process), file: plain(&defaults().file), ..defaults() };
        let labels = of_pod(&defaults, &Wish::default(), Some("s0:c1,c2".into()));
        assert_eq!(texts(&labels).0, "system_u:system_r:container_t");
    }

    #[test]
    fn a_containers_own_parts_count_and_the_others_are_its_pods() {
        let pod = pod(&wish("", "pod_t", ""));
        let of = |wish: &Wish| texts(&of_container(&pod, wish, Separation::default())).0;
        assert_eq!(of(&Wish::default()), "system_u:system_r:pod_t:s0:c1,c2");
        assert_eq!(of(&wish("", "own_t", "")), "system_u:system_r:own_t:s0:c1,c2");
        assert_eq!(of(&wish("", "", "s0:c4,c5")), "system_u:system_r:pod_t:s0:c4,c5");
    }

    #[test]
    fn who_is_privileged_has_no_label_of_its_own_and_who_shares_with_the_node_no_files_either() {
        let of = |privileged, shares_with_node| {
            let separation = Separation { privileged, shares_with_node };
            texts(&of_container(&pod(&Wish::default()), &wish("", "own_t", ""), separation))
        };
        assert_eq!(of(true, false), (String::new(), "system_u:object_r:container_file_t:s0:c1,c2".into()));
        assert_eq!(of(false, true), (String::new(), String::new()));
        assert_eq!(of(true, true), (String::new(), String::new()));
    }

    #[test]
    fn a_label_is_its_text_and_parts_cannot_bring_others_along() {
        for text in ["u:r:t", "u:r:t:s0-s0:c0.c1023"] {
            assert_eq!(text.parse::<Label>().expect("label").to_string(), text);
        }
        assert!("u:r".parse::<Label>().is_err());
        let sly = SeLinuxOption { r#type: "t:s0".into(), ..SeLinuxOption::default() };
        assert!(Wish::of(Some(&sly)).is_err());
        let json = serde_json::to_string(&pod(&Wish::default())).expect("json");
        assert_eq!(serde_json::from_str::<Labels>(&json).expect("labels"), pod(&Wish::default()));
    }
}
