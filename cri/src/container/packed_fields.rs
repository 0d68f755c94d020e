//! Fields of a container's configuration that only its record needs once the container is created: environment, command,
//! devices, masked paths.
//!
//! The fields are kept encoded, which reduces their memory to a third. Containers of one workload mostly have equal
//! fields, so equal encodings are kept once.

use std::collections::VecDeque;
use std::mem::take;
use std::sync::{Arc, Mutex, Weak};

use coracle_proto::cri;
use prost::Message as _;

use crate::lock::locked;

/// Maximum number of encodings that a new container is compared with.
const RECENT_MAX: usize = 32;

/// The newest different encodings that containers have.
static RECENT: Mutex<VecDeque<Weak<[u8]>>> = Mutex::new(VecDeque::new());

/// Takes the fields out of a configuration, and returns them encoded.
pub(super) fn pack(config: &mut cri::ContainerConfig) -> Arc<[u8]> {
    let security = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    let security = security.map(|security| cri::LinuxContainerSecurityContext {
        masked_paths: take(&mut security.masked_paths),
        readonly_paths: take(&mut security.readonly_paths),
        ..Default::default()
    });
    let packed = cri::ContainerConfig {
        command: take(&mut config.command),
        args: take(&mut config.args),
        envs: take(&mut config.envs),
        devices: take(&mut config.devices),
        linux: security.map(|security| cri::LinuxContainerConfig {
            security_context: Some(security),
            ..Default::default()
        }),
        ..Default::default()
    };
    shared(packed.encode_to_vec())
}

/// Adds packed fields to the configuration that they were taken out of.
pub(super) fn unpack(config: &mut cri::ContainerConfig, packed: &[u8]) {
    if let Err(error) = config.merge(packed) {
        // Only `pack` writes these bytes, so this error is not expected.
        tracing::error!(%error, "cannot decode the packed fields of a container");
    }
}

fn shared(encoded: Vec<u8>) -> Arc<[u8]> {
    let mut recent = locked(&RECENT);
    recent.retain(|known| known.strong_count() > 0);
    if let Some(known) = recent.iter().filter_map(Weak::upgrade).find(|known| **known == *encoded) {
        return known;
    }
    let new: Arc<[u8]> = encoded.into();
    if recent.len() == RECENT_MAX {
        recent.pop_front();
    }
    recent.push_back(Arc::downgrade(&new));
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(value: &str) -> cri::ContainerConfig {
        let security = cri::LinuxContainerSecurityContext {
            masked_paths: vec!["/proc/kcore".into()],
            readonly_paths: vec!["/proc/sys".into()],
            run_as_username: "web".into(),
            ..Default::default()
        };
        cri::ContainerConfig {
            command: vec!["nginx".into()],
            args: vec!["-g".into(), String::new()],
            envs: vec![cri::KeyValue { key: "KEY".into(), value: value.into() }],
            devices: vec![cri::Device { host_path: "/dev/fuse".into(), ..Default::default() }],
            labels: [("app".to_owned(), "web".to_owned())].into(),
            working_dir: "/work".into(),
            linux: Some(cri::LinuxContainerConfig {
                resources: Some(cri::LinuxContainerResources { cpu_shares: 2, ..Default::default() }),
                security_context: Some(security),
            }),
            ..Default::default()
        }
    }

    #[test]
    fn an_unpacked_configuration_is_the_packed_one() {
        for whole in [config("value"), cri::ContainerConfig::default()] {
            let mut config = whole.clone();
            let packed = pack(&mut config);
            assert!(config.envs.is_empty() && config.command.is_empty() && config.devices.is_empty());
            unpack(&mut config, &packed);
            assert_eq!(config, whole);
        }
        // An absent message stays absent.
        let whole = cri::ContainerConfig { linux: Some(Default::default()), ..config("value") };
        let mut config = whole.clone();
        let packed = pack(&mut config);
        unpack(&mut config, &packed);
        assert_eq!(config, whole);
    }

    #[test]
    fn equal_fields_of_two_containers_are_kept_once() {
        let packed = |value: &str| pack(&mut config(value));
        let first = packed("of this test");
        assert!(Arc::ptr_eq(&first, &packed("of this test")));
        assert!(!Arc::ptr_eq(&first, &packed("other, of this test")));
    }
}
