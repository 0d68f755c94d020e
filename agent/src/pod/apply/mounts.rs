//! A container's volume mounts.

use std::path::PathBuf;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Container, VolumeMount};

use super::Job;
use crate::pod::env::expand;
use crate::volume::sub_path::{self, SubPath};

/// Why a container cannot get one of its volumes.
#[derive(Debug, thiserror::Error)]
pub(super) enum MountError {
    #[error("volume {0:?} is not one of the pod's")]
    NoVolume(String),
    #[error("failed to prepare subPath for volumeMount \"{volume}\" of container \"{container}\": {reason}")]
    SubPath { volume: String, container: String, reason: String },
    #[error("missing value for {0:?} in subPathExpr")]
    Expression(String),
}

impl Job {
    pub(super) fn volume_mounts(
        &self,
        container: &Container,
        env: &[(String, String)],
    ) -> Result<Vec<cri::Mount>, MountError> {
        let mounts = container.volume_mounts.iter().flatten().enumerate();
        mounts.map(|mount| self.volume_mount(container, mount, env)).collect()
    }

    fn volume_mount(
        &self,
        container: &Container,
        (index, mount): (usize, &VolumeMount),
        env: &[(String, String)],
    ) -> Result<cri::Mount, MountError> {
        let no_volume = || MountError::NoVolume(mount.name.clone());
        let volumes = self.volumes.as_ref().ok_or_else(no_volume)?;
        let root = volumes.host_path(&mount.name).ok_or_else(no_volume)?;
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
                };
                sub_path::mount(&self.node.volumes, &part).map_err(|source| MountError::SubPath {
                    volume: mount.name.clone(),
                    container: container.name.clone(),
                    reason: crate::node::chain(&source),
                })?
            }
        };
        Ok(cri::Mount {
            container_path: absolute(&mount.mount_path),
            host_path: path.to_string_lossy().into_owned(),
            readonly: mount.read_only == Some(true) || volumes.read_only(&mount.name),
            propagation: match mount.mount_propagation.as_deref() {
                Some("HostToContainer") => cri::MountPropagation::PropagationHostToContainer.into(),
                Some("Bidirectional") => cri::MountPropagation::PropagationBidirectional.into(),
                _ => cri::MountPropagation::PropagationPrivate.into(),
            },
            ..cri::Mount::default()
        })
    }
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

fn sub_path_of(mount: &VolumeMount, env: &[(String, String)]) -> Result<Option<String>, MountError> {
    if let Some(expression) = mount.sub_path_expr.as_deref().filter(|e| !e.is_empty()) {
        let value = |name: &str| env.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
        let expanded = expand(expression, value);
        if expanded.contains("$(") {
            return Err(MountError::Expression(expression.to_owned()));
        }
        return Ok(Some(expanded));
    }
    Ok(mount.sub_path.clone().filter(|sub| !sub.is_empty()))
}
