//! A container's volume mounts.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Container, Volume, VolumeMount};

use super::Job;
use crate::pod::env::{EnvError, expand};
use crate::volume::mount_options::TIMES;
use crate::volume::sub_path::{self, SubPath};

/// The reason why a container cannot mount a volume.
#[derive(Debug, thiserror::Error)]
pub(super) enum MountError {
    #[error("volume {0:?} is not a volume of the pod")]
    NoVolume(String),
    #[error("failed to prepare subPath for volumeMount \"{volume}\" of container \"{container}\": {reason}")]
    SubPath { volume: String, container: String, reason: String },
    #[error("missing value for {0:?} in subPathExpr")]
    Expression(String),
    #[error("subPathExpr is longer than {PATH_MAX} bytes")]
    TooLong,
    #[error("volume {volume:?} requested recursive read-only mode, but {why}")]
    Recursive { volume: String, why: &'static str },
    #[error("volume {0:?} has mount options, which the container runtime does not support")]
    Options(String),
}

/// Maximum bytes of a subPath, before and after the expansion of its references.
const PATH_MAX: usize = 4096;

/// A volume mount and its index in `volumeMounts`.
struct IndexedMount<'a> {
    index: usize,
    mount: &'a VolumeMount,
}

/// Properties of mounts that the runtime reports.
#[derive(Debug, Default)]
pub(super) struct RuntimeMounts {
    /// Ids of image volumes, by volume name.
    pub(super) images: BTreeMap<String, String>,
    /// Whether the runtime supports recursive read-only mounts.
    pub(super) recursive_read_only: bool,
    /// Whether the runtime applies mount options.
    pub(super) mount_options: bool,
}

impl Job {
    pub(super) async fn volume_mounts(
        &self,
        container: &Container,
        env: &[(String, String)],
        runtime: &RuntimeMounts,
    ) -> Result<Vec<cri::Mount>, MountError> {
        let mut mounts = Vec::new();
        for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
            mounts.push(match runtime.images.get(&mount.name) {
                Some(id) => self.image_mount(mount, id, env)?,
                None => {
                    let indexed = IndexedMount { index, mount };
                    self.volume_mount(container, indexed, env, runtime).await?
                }
            });
        }
        Ok(mounts)
    }

    /// An image volume: mounted by the runtime, always read-only.
    fn image_mount(
        &self,
        mount: &VolumeMount,
        id: &str,
        env: &[(String, String)],
    ) -> Result<cri::Mount, MountError> {
        let reference = self.volume_of(mount).and_then(|volume| volume.image.as_ref()?.reference.clone());
        Ok(cri::Mount {
            container_path: absolute(&mount.mount_path),
            readonly: true,
            image: Some(cri::ImageSpec {
                image: id.to_owned(),
                user_specified_image: reference.unwrap_or_default(),
                ..cri::ImageSpec::default()
            }),
            image_sub_path: sub_path_of(mount, env)?.unwrap_or_default(),
            mount_options: mount.bind_mount_options.clone().unwrap_or_default(),
            ..cri::Mount::default()
        })
    }

    fn volume_of(&self, mount: &VolumeMount) -> Option<&Volume> {
        let mut volumes = self.pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        volumes.find(|volume| volume.name == mount.name)
    }

    /// The options of a mount for the runtime, without `ro`.
    pub(super) fn mount_options(&self, mount: &VolumeMount) -> Vec<String> {
        let of_mount = mount.bind_mount_options.as_deref().unwrap_or_default();
        let of_volume = self.volumes.as_ref().map_or(&[][..], |volumes| volumes.mount_options(&mount.name));
        let host_users = self.pod.spec.as_ref().and_then(|spec| spec.host_users);
        combined(of_mount, of_volume, host_users == Some(false))
    }

    async fn volume_mount(
        &self,
        container: &Container,
        IndexedMount { index, mount }: IndexedMount<'_>,
        env: &[(String, String)],
        runtime: &RuntimeMounts,
    ) -> Result<cri::Mount, MountError> {
        let no_volume = || MountError::NoVolume(mount.name.clone());
        let volumes = self.volumes.as_ref().ok_or_else(no_volume)?;
        let root = volumes.host_path(&mount.name).ok_or_else(no_volume)?;
        let mount_options = self.mount_options(mount);
        if !mount_options.is_empty() && !runtime.mount_options {
            return Err(MountError::Options(mount.name.clone()));
        }
        let path: PathBuf = match sub_path_of(mount, env)? {
            None => root.to_path_buf(),
            Some(sub) => {
                let part = SubPath {
                    uid: &self.uid,
                    volume: &mount.name,
                    host_path: root,
                    container: &container.name,
                    index,
                    path: &sub,
                    missing: volumes.missing_part(&mount.name),
                    is_bidirectional: mount.mount_propagation.as_deref() == Some("Bidirectional"),
                };
                sub_path::mount(&self.node.volumes, &part).await.map_err(|source| MountError::SubPath {
                    volume: mount.name.clone(),
                    container: container.name.clone(),
                    reason: coracle_error_chain::chain(&source),
                })?
            }
        };
        Ok(cri::Mount {
            container_path: absolute(&mount.mount_path),
            host_path: path.to_string_lossy().into_owned(),
            readonly: mount.read_only == Some(true) || volumes.read_only(&mount.name),
            recursive_read_only: recursive_read_only(mount, runtime.recursive_read_only)?,
            mount_options,
            selinux_relabel: volumes.relabel(&mount.name),
            propagation: match mount.mount_propagation.as_deref() {
                Some("HostToContainer") => cri::MountPropagation::PropagationHostToContainer.into(),
                Some("Bidirectional") => cri::MountPropagation::PropagationBidirectional.into(),
                _ => cri::MountPropagation::PropagationPrivate.into(),
            },
            ..cri::Mount::default()
        })
    }
}

/// The options of a mount and of its volume, each once. In a user namespace the kernel refuses to change the mode of
/// access time updates, so such options of the volume are left out.
fn combined(of_mount: &[String], of_volume: &[String], has_user_namespace: bool) -> Vec<String> {
    let is_possible = |option: &&String| !has_user_namespace || !TIMES.contains(&option.as_str());
    let all: BTreeSet<&String> = of_mount.iter().chain(of_volume.iter().filter(is_possible)).collect();
    all.into_iter().cloned().collect()
}

/// Whether submounts of the volume are read-only, too, by the rules of `VolumeMount.recursiveReadOnly`.
fn recursive_read_only(mount: &VolumeMount, supported: bool) -> Result<bool, MountError> {
    let refuse = |why| Err(MountError::Recursive { volume: mount.name.clone(), why });
    let mode = mount.recursive_read_only.as_deref().unwrap_or("Disabled");
    if mode == "Disabled" {
        return Ok(false);
    }
    if mount.read_only != Some(true) {
        return refuse("it is not read-only");
    }
    if mount.mount_propagation.as_deref().is_some_and(|propagation| propagation != "None") {
        return refuse("its mount propagation is not None");
    }
    match mode {
        "Enabled" if !supported => refuse("the container runtime does not support it"),
        "Enabled" => Ok(true),
        "IfPossible" => Ok(supported),
        _ => refuse("this node does not know the mode"),
    }
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

fn sub_path_of(mount: &VolumeMount, env: &[(String, String)]) -> Result<Option<String>, MountError> {
    if let Some(expression) = mount.sub_path_expr.as_deref().filter(|e| !e.is_empty()) {
        if expression.len() > PATH_MAX {
            return Err(MountError::TooLong);
        }
        // As upstream: an empty value counts as missing. Otherwise the container would get the whole volume.
        let is_missing = Cell::new(false);
        let value = |name: &str| {
            let found = env.iter().find(|(n, v)| n == name && !v.is_empty()).map(|(_, v)| v.as_str());
            is_missing.set(is_missing.get() || found.is_none());
            found
        };
        let expanded = expand(expression, PATH_MAX, value).map_err(|_long: EnvError| MountError::TooLong)?;
        if is_missing.get() {
            return Err(MountError::Expression(expression.to_owned()));
        }
        return Ok(Some(expanded));
    }
    Ok(mount.sub_path.clone().filter(|sub| !sub.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_empty_variable_refuses_the_sub_path_and_an_escaped_reference_is_literal() {
        let env = [("POD", "p"), ("EMPTY", "")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        let expanded = |expression: &str| {
            let mount = VolumeMount { sub_path_expr: Some(expression.to_owned()), ..VolumeMount::default() };
            sub_path_of(&mount, &env).ok().flatten()
        };
        assert_eq!(expanded("logs/$(POD)").as_deref(), Some("logs/p"));
        assert_eq!(expanded("$$(POD)").as_deref(), Some("$(POD)"));
        for expression in ["$(EMPTY)", "logs/$(EMPTY)", "$(OTHER)", "$(POD)/$(OTHER)"] {
            assert_eq!(expanded(expression), None, "{expression}");
        }
    }

    #[test]
    fn a_sub_path_has_a_limited_length() {
        let env = [("NAME".to_owned(), "x".repeat(1000))];
        let expanded = |expression: String| {
            let mount = VolumeMount { sub_path_expr: Some(expression), ..VolumeMount::default() };
            sub_path_of(&mount, &env)
        };
        assert!(expanded("$(NAME)/".repeat(4)).is_ok());
        for expression in ["$(NAME)/".repeat(5), "x".repeat(PATH_MAX + 1)] {
            assert!(matches!(expanded(expression), Err(MountError::TooLong)));
        }
    }

    #[test]
    fn the_options_of_a_volume_and_of_its_mount_are_combined() {
        let texts = |options: &[&str]| options.iter().map(|&option| option.to_owned()).collect::<Vec<_>>();
        let (mount, volume) = (texts(&["noexec", "nodev"]), texts(&["nodev", "nosuid", "noatime"]));
        assert_eq!(combined(&mount, &volume, false), ["noatime", "nodev", "noexec", "nosuid"]);
        assert_eq!(combined(&mount, &volume, true), ["nodev", "noexec", "nosuid"]);
        assert_eq!(combined(&[], &[], true), Vec::<String>::new());
    }

    #[test]
    fn recursive_read_only_is_enabled_if_possible_and_refused_in_contradictions() {
        let mount = |mode: &str, read_only: bool, propagation: Option<&str>| VolumeMount {
            recursive_read_only: Some(mode.to_owned()),
            read_only: Some(read_only),
            mount_propagation: propagation.map(str::to_owned),
            ..VolumeMount::default()
        };
        let mode = |mount: &VolumeMount, supported| recursive_read_only(mount, supported).ok();
        assert_eq!(mode(&VolumeMount::default(), true), Some(false));
        assert_eq!(mode(&mount("Disabled", false, None), true), Some(false));
        assert_eq!(mode(&mount("Enabled", true, Some("None")), true), Some(true));
        assert_eq!(mode(&mount("IfPossible", true, None), true), Some(true));
        assert_eq!(mode(&mount("IfPossible", true, None), false), Some(false));
        assert_eq!(mode(&mount("Enabled", true, None), false), None);
        assert_eq!(mode(&mount("Enabled", false, None), true), None);
        assert_eq!(mode(&mount("IfPossible", true, Some("HostToContainer")), true), None);
    }
}
