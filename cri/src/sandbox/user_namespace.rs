//! Validation and id mappings of a pod's user namespace. Pure.
//!
//! The rules are those of the CRI (`UserNamespace` in api.proto) and containerd. There is one mapping of users and one
//! of groups, and all containers of a pod have the same mappings.

use coracle_proto::{cri, shim};
use cri::{IdMapping, NamespaceMode, NamespaceOption};
use oci_spec::runtime::{LinuxIdMapping, LinuxIdMappingBuilder};

/// The id mappings of a pod with its own user namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    uids: IdMapping,
    gids: IdMapping,
}

/// A user and a group of the node that own files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Id mappings in the type of another interface.
#[derive(Default)]
pub(crate) struct Lists<T> {
    pub(crate) uids: Vec<T>,
    pub(crate) gids: Vec<T>,
}

// === impl Mapping ===

impl Mapping {
    /// The mapping that the options request. `None` for the node's user namespace.
    pub(crate) fn of(options: Option<&NamespaceOption>) -> Result<Option<Self>, String> {
        let Some(userns) = options.and_then(|options| options.userns_options.as_ref()) else {
            return Ok(None);
        };
        // prost would read an unknown value as POD.
        let mode = NamespaceMode::try_from(userns.mode);
        match mode.map_err(|_unknown| format!("mode {} is not known", userns.mode))? {
            NamespaceMode::Node if userns.uids.is_empty() && userns.gids.is_empty() => Ok(None),
            NamespaceMode::Node => Err("mode NODE must have no mappings".to_owned()),
            NamespaceMode::Pod => {
                Ok(Some(Self { uids: single("uids", &userns.uids)?, gids: single("gids", &userns.gids)? }))
            }
            mode => Err(format!("mode {} is not supported for a user namespace", mode.as_str_name())),
        }
    }

    /// Refuses the node's pid or ipc namespace together with a user namespace. Only the user namespace that owns a pid or
    /// ipc namespace can mount `/proc` or `/dev/mqueue` for it.
    pub(crate) fn check_pod(options: &NamespaceOption) -> Result<Option<Self>, String> {
        let mapping = Self::of(Some(options))?;
        let shared = [("pid", options.pid()), ("ipc", options.ipc())];
        match shared.into_iter().find(|(_, mode)| *mode == NamespaceMode::Node) {
            Some((name, _)) if mapping.is_some() => {
                Err(format!("a pod with a user namespace cannot have the node's {name} namespace"))
            }
            _ => Ok(mapping),
        }
    }

    /// The mapping of a container. It must be the mapping of its pod.
    pub(crate) fn of_container(
        pod: &NamespaceOption,
        container: Option<&NamespaceOption>,
    ) -> Result<Option<Self>, String> {
        let (pods, containers) = (Self::of(Some(pod))?, Self::of(container)?);
        if pods != containers {
            let text = |mapping: &Option<Self>| mapping.as_ref().map_or("the node's".to_owned(), Self::text);
            return Err(format!(
                "the container's user namespace differs from its pod's: {} instead of {}",
                text(&containers),
                text(&pods)
            ));
        }
        Ok(pods)
    }

    fn text(&self) -> String {
        let range = |m: &IdMapping| format!("{}:{}:{}", m.container_id, m.host_id, m.length);
        format!("uids {} gids {}", range(&self.uids), range(&self.gids))
    }

    /// User and group of the node that are root in the pod.
    pub(crate) fn root(&self) -> Owner {
        Owner { uid: self.uids.host_id, gid: self.gids.host_id }
    }

    /// Refuses users and groups without a mapping.
    pub(crate) fn check_ids(&self, uid: u32, gids: &[u32]) -> Result<(), String> {
        let outside = |m: &IdMapping, id: u32| id < m.container_id || id - m.container_id >= m.length;
        if outside(&self.uids, uid) {
            return Err(format!("user {uid} is not mapped in the pod's user namespace ({})", self.text()));
        }
        match gids.iter().find(|gid| outside(&self.gids, **gid)) {
            Some(gid) => {
                Err(format!("group {gid} is not mapped in the pod's user namespace ({})", self.text()))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn to_oci(&self) -> Lists<LinuxIdMapping> {
        let [uids, gids] = [&self.uids, &self.gids].map(|one| to_oci(std::slice::from_ref(one)));
        Lists { uids, gids }
    }

    pub(crate) fn to_shim(&self) -> Lists<shim::IdMapping> {
        let [uids, gids] = [&self.uids, &self.gids].map(|m| {
            vec![shim::IdMapping { container_id: m.container_id, host_id: m.host_id, length: m.length }]
        });
        Lists { uids, gids }
    }
}

/// Converts mappings of a volume or pod to the OCI's type.
pub(crate) fn to_oci(mappings: &[IdMapping]) -> Vec<LinuxIdMapping> {
    let one = |m: &IdMapping| {
        let mapping = LinuxIdMappingBuilder::default();
        // The builder fails only for missing fields; all are set.
        mapping.container_id(m.container_id).host_id(m.host_id).size(m.length).build().ok()
    };
    mappings.iter().filter_map(one).collect()
}

fn single(name: &str, mappings: &[IdMapping]) -> Result<IdMapping, String> {
    let [mapping] = mappings else {
        return Err(format!("{name} needs exactly one mapping, not {}", mappings.len()));
    };
    if mapping.container_id != 0 {
        return Err(format!("{name} must begin at id 0 of the container, not at {}", mapping.container_id));
    }
    if mapping.length == 0 || mapping.host_id.checked_add(mapping.length).is_none() {
        return Err(format!("{name} maps an invalid range: {} ids from {}", mapping.length, mapping.host_id));
    }
    Ok(*mapping)
}

/// Refuses invalid mappings of a volume: users and groups are mapped both or not at all.
pub(crate) fn check_volume(mount: &cri::Mount) -> Result<(), String> {
    if mount.uid_mappings.is_empty() != mount.gid_mappings.is_empty() {
        return Err("users and groups must be mapped both or not at all".to_owned());
    }
    let empty = |m: &IdMapping| m.length == 0 || m.host_id.checked_add(m.length).is_none();
    if mount.uid_mappings.iter().chain(&mount.gid_mappings).any(empty) {
        return Err("a mapping is empty or too large".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cri::UserNamespace;

    use super::*;

    fn options(mode: NamespaceMode, mappings: &[(u32, u32, u32)]) -> NamespaceOption {
        let list: Vec<IdMapping> = mappings
            .iter()
            .map(|&(container_id, host_id, length)| IdMapping { host_id, container_id, length })
            .collect();
        let userns = UserNamespace { mode: mode.into(), uids: list.clone(), gids: list };
        NamespaceOption { userns_options: Some(userns), ..Default::default() }
    }

    #[test]
    fn only_one_mapping_from_root_is_accepted() {
        let of = |mode, mappings: &[(u32, u32, u32)]| Mapping::of(Some(&options(mode, mappings)));
        assert_eq!(Mapping::of(None), Ok(None));
        assert_eq!(of(NamespaceMode::Node, &[]), Ok(None));
        let right = of(NamespaceMode::Pod, &[(0, 65536, 65536)]).expect("right").expect("a mapping");
        let mut unknown = options(NamespaceMode::Pod, &[(0, 65536, 65536)]);
        unknown.userns_options.get_or_insert_default().mode = 9;
        assert!(Mapping::of(Some(&unknown)).is_err(), "unknown mode");
        assert_eq!(right.root(), Owner { uid: 65536, gid: 65536 });
        for (mode, mappings) in [
            (NamespaceMode::Node, &[(0, 1000, 10)][..]),
            (NamespaceMode::Pod, &[]),
            (NamespaceMode::Pod, &[(0, 1000, 10), (10, 2000, 10)]),
            (NamespaceMode::Pod, &[(1, 1000, 10)]),
            (NamespaceMode::Pod, &[(0, 1000, 0)]),
            (NamespaceMode::Pod, &[(0, u32::MAX, 2)]),
            (NamespaceMode::Container, &[]),
            (NamespaceMode::Target, &[]),
        ] {
            assert!(of(mode, mappings).is_err(), "{mode:?} {mappings:?}");
        }
    }

    #[test]
    fn a_container_has_its_pods_mapping_and_no_pid_namespace_of_the_node() {
        let pod = options(NamespaceMode::Pod, &[(0, 65536, 65536)]);
        assert!(Mapping::of_container(&pod, Some(&pod)).is_ok());
        let other = options(NamespaceMode::Pod, &[(0, 131_072, 65536)]);
        assert!(Mapping::of_container(&pod, Some(&other)).is_err());
        assert!(Mapping::of_container(&pod, None).is_err());
        let node = options(NamespaceMode::Node, &[]);
        assert_eq!(Mapping::of_container(&NamespaceOption::default(), Some(&node)), Ok(None));
        let mut shared = pod;
        shared.set_pid(NamespaceMode::Node);
        assert!(Mapping::check_pod(&shared).expect_err("pid").contains("pid"));
        shared.set_pid(NamespaceMode::Pod);
        shared.set_network(NamespaceMode::Node);
        assert!(Mapping::check_pod(&shared).is_ok(), "the node's network is possible");
    }

    #[test]
    fn users_outside_of_the_mapping_are_refused() {
        let mapping = Mapping::of(Some(&options(NamespaceMode::Pod, &[(0, 65536, 1000)])));
        let mapping = mapping.expect("right").expect("a mapping");
        assert!(mapping.check_ids(999, &[0, 999]).is_ok());
        assert!(mapping.check_ids(1000, &[0]).is_err());
        assert!(mapping.check_ids(0, &[0, 1000]).is_err());
    }
}
