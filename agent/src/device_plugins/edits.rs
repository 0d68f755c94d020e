//! The answer of a plugin to Allocate: variables, annotations, mounts and device nodes for a container. Pure.
//!
//! A plugin is as trusted as root, because it chooses files and devices of the node. Its answer is limited
//! nevertheless, because it is stored in a record, and a faulty plugin must not exhaust the node's memory.

use std::collections::{BTreeMap, BTreeSet};

use coracle_proto::cri;
use coracle_proto::device_plugin as api;
use coracle_values::CollectMap;
use serde::{Deserialize, Serialize};

/// Maximum entries of each list in an answer.
const ENTRIES_MAX: usize = 1024;
/// Maximum bytes of a name or path.
const NAME_MAX: usize = 4096;

/// Changes of a container's configuration for its devices of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Edits {
    env: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    mounts: Vec<MountEdit>,
    devices: Vec<DeviceEdit>,
    cdi: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct MountEdit {
    container: String,
    host: String,
    read_only: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct DeviceEdit {
    container: String,
    host: String,
    permissions: String,
}

/// Changes of a container's configuration for all its devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DeviceOptions {
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) mounts: Vec<cri::Mount>,
    pub(crate) devices: Vec<cri::Device>,
    /// Names of CDI devices.
    pub(crate) cdi: BTreeSet<String>,
}

// === impl Edits ===

impl Edits {
    /// Checks an answer.
    ///
    /// # Errors
    /// When a part is invalid or too large. Then the answer is refused as a whole.
    pub(super) fn of(answer: api::ContainerAllocateResponse) -> Result<Self, &'static str> {
        let lists = [answer.envs.len(), answer.annotations.len(), answer.mounts.len(), answer.devices.len()];
        if lists.into_iter().chain([answer.cdi_devices.len()]).any(|len| len > ENTRIES_MAX) {
            return Err("a list has too many entries");
        }
        let is_name =
            |name: &String| !name.is_empty() && name.len() <= NAME_MAX && !name.contains(char::is_control);
        let names = answer.envs.keys().chain(answer.annotations.keys());
        if !names.chain(answer.cdi_devices.iter().map(|device| &device.name)).all(is_name) {
            return Err("a name is empty, too long or has control characters");
        }
        if answer.envs.keys().any(|name| name.contains('=')) || answer.envs.values().any(|v| v.contains('\0'))
        {
            return Err("an environment variable is invalid");
        }
        let mount_paths = answer.mounts.iter().flat_map(|mount| [&mount.container_path, &mount.host_path]);
        // Without a path in the container, a device gets its path on the host.
        let inside =
            answer.devices.iter().map(|device| &device.container_path).filter(|path| !path.is_empty());
        let devices = answer.devices.iter().map(|device| &device.host_path).chain(inside);
        if !mount_paths.chain(devices).all(|path| is_name(path) && path.starts_with('/')) {
            return Err("a path is not absolute, too long or has control characters");
        }
        if answer.devices.iter().any(|device| !is_permissions(&device.permissions)) {
            return Err("the permissions of a device are not a combination of r, w and m");
        }
        Ok(Self::checked(answer))
    }

    fn checked(answer: api::ContainerAllocateResponse) -> Self {
        let mount = |mount: api::Mount| MountEdit {
            container: mount.container_path,
            host: mount.host_path,
            read_only: mount.read_only,
        };
        let device = |device: api::DeviceSpec| DeviceEdit {
            container: Some(device.container_path)
                .filter(|path| !path.is_empty())
                .unwrap_or_else(|| device.host_path.clone()),
            host: device.host_path,
            permissions: device.permissions,
        };
        Self {
            env: answer.envs.into_iter().collect_map(),
            annotations: answer.annotations.into_iter().collect_map(),
            mounts: answer.mounts.into_iter().map(mount).collect(),
            devices: answer.devices.into_iter().map(device).collect(),
            cdi: answer.cdi_devices.into_iter().map(|device| device.name).collect(),
        }
    }
}

fn is_permissions(text: &str) -> bool {
    text.len() <= 3 && text.bytes().all(|byte| b"rwm".contains(&byte))
}

// === impl DeviceOptions ===

impl DeviceOptions {
    /// Adds the changes for devices of another resource. As upstream, if several resources set the same variable,
    /// annotation or path, the first resource decides.
    pub(super) fn add(&mut self, edits: &Edits) {
        for (name, value) in &edits.env {
            self.env.entry(name.clone()).or_insert_with(|| value.clone());
        }
        for (name, value) in &edits.annotations {
            self.annotations.entry(name.clone()).or_insert_with(|| value.clone());
        }
        for mount in &edits.mounts {
            if self.mounts.iter().all(|known| known.container_path != mount.container) {
                self.mounts.push(cri::Mount {
                    container_path: mount.container.clone(),
                    host_path: mount.host.clone(),
                    readonly: mount.read_only,
                    ..cri::Mount::default()
                });
            }
        }
        for device in &edits.devices {
            if self.devices.iter().all(|known| known.container_path != device.container) {
                self.devices.push(cri::Device {
                    container_path: device.container.clone(),
                    host_path: device.host.clone(),
                    permissions: device.permissions.clone(),
                });
            }
        }
        self.cdi.extend(edits.cdi.iter().cloned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(path: &str, value: &str) -> api::ContainerAllocateResponse {
        let pair = [("KEY".to_owned(), value.to_owned())];
        api::ContainerAllocateResponse {
            envs: pair.clone().into(),
            mounts: vec![api::Mount {
                container_path: path.to_owned(),
                host_path: format!("/host/{value}"),
                read_only: true,
            }],
            devices: vec![api::DeviceSpec {
                container_path: path.to_owned(),
                host_path: format!("/dev/{value}"),
                permissions: "rw".to_owned(),
            }],
            annotations: pair.into(),
            cdi_devices: vec![api::CdiDevice { name: format!("v/c={value}") }],
        }
    }

    #[test]
    fn the_first_resource_decides_about_a_name_or_path_that_several_set() {
        let mut options = DeviceOptions::default();
        for answer in [answer("/dev/a", "1"), answer("/dev/a", "2"), answer("/dev/b", "3")] {
            options.add(&Edits::of(answer).unwrap());
        }
        assert_eq!(options.env["KEY"], "1");
        assert_eq!(options.annotations["KEY"], "1");
        let mounts: Vec<_> = options.mounts.iter().map(|mount| mount.host_path.as_str()).collect();
        assert_eq!(mounts, ["/host/1", "/host/3"]);
        assert!(options.mounts.iter().all(|mount| mount.readonly));
        let devices: Vec<_> = options.devices.iter().map(|device| device.host_path.as_str()).collect();
        assert_eq!(devices, ["/dev/1", "/dev/3"]);
        assert_eq!(options.cdi.len(), 3);
        let mut same = answer("/dev/a", "4");
        same.devices[0].container_path.clear();
        options.add(&Edits::of(same).unwrap());
        assert_eq!(options.devices[2].container_path, "/dev/4", "the path on the host");
    }

    #[test]
    fn an_invalid_answer_is_refused() {
        assert!(Edits::of(answer("/dev/a", "1")).is_ok());
        assert!(Edits::of(answer("dev/a", "1")).is_err());
        assert!(Edits::of(answer("/dev/a\n", "1")).is_err());
        assert!(Edits::of(answer("/dev/a", "\0")).is_err());
        let mut many = answer("/dev/a", "1");
        many.mounts = vec![many.mounts[0].clone(); ENTRIES_MAX + 1];
        assert!(Edits::of(many).is_err());
        let mut permissions = answer("/dev/a", "1");
        permissions.devices[0].permissions = "rwx".to_owned();
        assert!(Edits::of(permissions).is_err());
        let mut variable = answer("/dev/a", "1");
        variable.envs.insert("A=B".to_owned(), String::new());
        assert!(Edits::of(variable).is_err());
    }
}
